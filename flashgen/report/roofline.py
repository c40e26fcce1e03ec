"""Where a kernel stands below the roof of a card: FLOPs for each byte of HBM, and FLOPs a second at most."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from flashgen.analysis.drawing import palette

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 480, 300, 56, 30, 44


@dataclass(frozen=True)
class Card:
    """A card by its vendor's data sheet: dense TFLOP/s of 16-bit products with sums in float32, GB/s of memory."""

    name: str
    tflops: float
    gb_per_second: float

    @property
    def ridge(self) -> float:
        """FLOPs for each byte from which on products, not memory, are the limit."""
        return self.tflops * 1e3 / self.gb_per_second

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ridge": self.ridge}


# One card for each target whose data sheet says both; others have no roof here.
_CARDS = {
    75: Card("T4", 65, 320),
    80: Card("A100 80GB SXM", 312, 2039),
    86: Card("A10", 125, 600),
    89: Card("L40S", 362, 864),
    90: Card("H200 SXM", 989, 4800),
    100: Card("B200", 2250, 8000),
}


@dataclass(frozen=True)
class Point:
    """A kernel: FLOPs for each byte, and the most TFLOP/s that the roof allows there. measured: TFLOP/s, if known."""

    name: str
    intensity: float
    bound: float
    limit: str
    measured: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def card_of(compute_capability: int) -> Card | None:
    """The card that stands for a target; None where no data sheet is known here."""
    return _CARDS.get(compute_capability)


def point(card: Card, name: str, flops: int, hbm_bytes: int, seconds: float | None = None) -> Point:
    """A kernel that computes so many FLOPs and must move so many bytes."""
    intensity = flops / hbm_bytes
    bound = min(card.tflops, intensity * card.gb_per_second / 1e3)
    limit = "products" if intensity >= card.ridge else "memory"
    return Point(name, intensity, bound, limit, flops / seconds / 1e12 if seconds else None)


def to_svg(card: Card, points: Sequence[Point]) -> str:
    """The roof and the kernels below it, both axes logarithmic."""
    intensities = [each.intensity for each in points] + [card.ridge]
    low, high = 10 ** math.floor(math.log10(min(intensities) / 2)), 10 ** math.ceil(math.log10(max(intensities) * 2))
    rates = [each.measured for each in points if each.measured] + [low * card.gb_per_second / 1e3]
    least, most = 10 ** math.floor(math.log10(min(rates))), 10 ** math.ceil(math.log10(card.tflops * 1.2))

    def x(intensity: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 16) * math.log(intensity / low) / math.log(high / low)

    def y(rate: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * math.log(most / rate) / math.log(most / least)

    words = f"Roofline of {card.name}: {'; '.join(f'{each.name}, {each.intensity:.0f} FLOP/byte' for each in points)}"
    begin, ridge = (x(low), y(low * card.gb_per_second / 1e3)), (x(card.ridge), y(card.tflops))
    roof = f"M{begin[0]:.1f} {begin[1]:.1f}L{ridge[0]:.1f} {ridge[1]:.1f}H{x(high):.1f}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{escape(words)}" font-family="system-ui, sans-serif" font-size="11" '
        f'fill="var(--ink, {palette.INK})">',
        f'<rect width="100%" height="100%" fill="var(--paper, {palette.PAPER})"/>',
        f'<text x="8" y="18" font-size="13" font-weight="600">{escape(card.name)}: {card.tflops:g} TFLOP/s, '
        f"{card.gb_per_second:g} GB/s</text>",
        *_grid(low, high, least, most, x, y),
        f'<path d="{roof}" fill="none" stroke="{palette.FULL}" stroke-width="2"/>',
    ]
    for number, each in enumerate(points):
        lines += _mark(each, x(each.intensity), y(each.bound), y(each.measured) if each.measured else None, number)
    return "\n".join([*lines, "</svg>\n"])


def _grid(low: float, high: float, least: float, most: float, x: Any, y: Any) -> Iterator[str]:
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        at = x(10**power)
        yield f'<path d="M{at:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="{palette.RULE}" opacity="0.35"/>'
        yield f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle">{10**power:g}</text>'
    for power in range(round(math.log10(least)), round(math.log10(most)) + 1):
        at = y(10**power)
        yield f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - 16}" stroke="{palette.RULE}" opacity="0.35"/>'
        yield f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{10**power:g}</text>'
    yield f'<text x="{_WIDTH - 16}" y="{_HEIGHT - 10}" text-anchor="end">FLOPs for each byte of HBM →</text>'
    yield f'<text x="8" y="{_HEIGHT - 10}">↑ TFLOP/s</text>'


def _mark(each: Point, x: float, bound: float, measured: float | None, number: int) -> Iterator[str]:
    yield f'<path d="M{x:.1f} {_HEIGHT - _BOTTOM}V{bound:.1f}" stroke="{palette.PARTIAL}" stroke-dasharray="3 3"/>'
    words = f"{each.name}: {each.intensity:.0f} FLOP/byte, at most {each.bound:.0f} TFLOP/s by {each.limit}"
    dot = f'<circle cx="{x:.1f}" cy="{bound:.1f}" r="5" fill="{palette.PARTIAL}">'
    yield f"{dot}<title>{escape(words)}</title></circle>"
    if measured is not None:
        yield f'<circle cx="{x:.1f}" cy="{measured:.1f}" r="5" fill="{palette.COPY}"/>'
    yield f'<text x="{x - 8:.1f}" y="{bound + 18 + 14 * number:.1f}" text-anchor="end">{escape(each.name)}</text>'
