"""The roofline model: a kernel's FLOPs per byte of HBM, and the maximum FLOP/s of a GPU at that intensity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from flashgen.analysis.drawing import palette
from flashgen.codegen.targets import ReferenceGpu

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 480, 300, 56, 30, 44


@dataclass(frozen=True)
class Point:
    """A kernel in a roofline.

    Attributes:
        intensity: FLOPs per byte of HBM.
        bound: the maximum TFLOP/s at this intensity.
        limit: the resource that sets the bound, "products" or "memory".
        measured: TFLOP/s of a timed call, or None.
    """

    name: str
    intensity: float
    bound: float
    limit: str
    measured: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def point(gpu: ReferenceGpu, name: str, flops: int, hbm_bytes: int, seconds: float | None = None) -> Point:
    """Returns the point of a kernel, given its FLOPs and the minimum number of HBM bytes that it moves."""
    intensity = flops / hbm_bytes
    bound = min(gpu.tflops, intensity * gpu.gb_per_second / 1e3)
    limit = "products" if intensity >= gpu.ridge else "memory"
    return Point(name, intensity, bound, limit, flops / seconds / 1e12 if seconds else None)


def to_svg(gpu: ReferenceGpu, points: Sequence[Point]) -> str:
    """Draws the roof and the kernels below it as SVG; both axes are logarithmic."""
    intensities = [each.intensity for each in points] + [gpu.ridge]
    low, high = 10 ** math.floor(math.log10(min(intensities) / 2)), 10 ** math.ceil(math.log10(max(intensities) * 2))
    rates = [each.measured for each in points if each.measured] + [low * gpu.gb_per_second / 1e3]
    low_rate, high_rate = 10 ** math.floor(math.log10(min(rates))), 10 ** math.ceil(math.log10(gpu.tflops * 1.2))

    def x(intensity: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 16) * math.log(intensity / low) / math.log(high / low)

    def y(rate: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * math.log(high_rate / rate) / math.log(high_rate / low_rate)

    words = f"Roofline of {gpu.name}: {'; '.join(f'{each.name}, {each.intensity:.0f} FLOP/byte' for each in points)}"
    begin, ridge = (x(low), y(low * gpu.gb_per_second / 1e3)), (x(gpu.ridge), y(gpu.tflops))
    roof = f"M{begin[0]:.1f} {begin[1]:.1f}L{ridge[0]:.1f} {ridge[1]:.1f}H{x(high):.1f}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{escape(words)}" font-family="system-ui, sans-serif" font-size="11" '
        f'fill="var(--ink, {palette.INK})">',
        f'<rect width="100%" height="100%" fill="var(--paper, {palette.PAPER})"/>',
        f'<text x="8" y="18" font-size="13" font-weight="600">{escape(gpu.name)}: {gpu.tflops:g} TFLOP/s, '
        f"{gpu.gb_per_second:g} GB/s</text>",
        *_grid(low, high, low_rate, high_rate, x, y),
        f'<path d="{roof}" fill="none" stroke="{palette.FULL}" stroke-width="2"/>',
    ]
    for number, each in enumerate(points):
        lines += _mark(each, x(each.intensity), y(each.bound), y(each.measured) if each.measured else None, number)
    return "\n".join([*lines, "</svg>\n"])


def _grid(low: float, high: float, low_rate: float, high_rate: float, x: Any, y: Any) -> Iterator[str]:
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        at = x(10**power)
        yield f'<path d="M{at:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="{palette.RULE}" opacity="0.35"/>'
        yield f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle">{10**power:g}</text>'
    for power in range(round(math.log10(low_rate)), round(math.log10(high_rate)) + 1):
        at = y(10**power)
        yield f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - 16}" stroke="{palette.RULE}" opacity="0.35"/>'
        yield f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{10**power:g}</text>'
    yield f'<text x="{_WIDTH - 16}" y="{_HEIGHT - 10}" text-anchor="end">FLOPs for each byte of HBM →</text>'
    yield f'<text x="8" y="{_HEIGHT - 10}">↑ TFLOP/s</text>'


def _mark(each: Point, x: float, bound: float, measured: float | None, number: int) -> Iterator[str]:
    yield f'<path d="M{x:.1f} {_HEIGHT - _BOTTOM}V{bound:.1f}" stroke="{palette.PARTIAL}" stroke-dasharray="3 3"/>'
    words = f"{each.name}: {each.intensity:.0f} FLOP/byte, at high_rate {each.bound:.0f} TFLOP/s by {each.limit}"
    dot = f'<circle cx="{x:.1f}" cy="{bound:.1f}" r="5" fill="{palette.PARTIAL}">'
    yield f"{dot}<title>{escape(words)}</title></circle>"
    if measured is not None:
        yield f'<circle cx="{x:.1f}" cy="{measured:.1f}" r="5" fill="{palette.COPY}"/>'
    yield f'<text x="{x - 8:.1f}" y="{bound + 18 + 14 * number:.1f}" text-anchor="end">{escape(each.name)}</text>'
