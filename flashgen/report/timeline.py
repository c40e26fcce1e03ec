"""The timeline of a kernel: when each warp loads, multiplies, exponentiates and waits, by the model of `replay`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any

from flashgen.analysis.drawing import palette
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.report.replay import Span, replayed
from flashgen.runtime.timeline import Array, Did

_COLOURS = {
    "copy": palette.COPY,
    "product": palette.PRODUCT,
    "exponentials": palette.EXPONENTIALS,
    "wait": palette.WAIT,
    "store": palette.STORE,
}
_NAMES = {
    "copy": "copies",
    "product": "products",
    "exponentials": "exponentials",
    "wait": "waits",
    "store": "stores",
}
_WARPGROUP, _MAX_ROWS = 4, 8
_LEFT, _TOP, _OWN, _MEANWHILE, _ROW = 104, 34, 15, 8, 34  # pixels
_CLOSE = 0.5  # cycles; spans with a smaller gap are drawn as one


@dataclass(frozen=True)
class Row:
    """A warp that is drawn, for itself or for its warpgroup, and the label of its row."""

    warp: int
    name: str


@dataclass(frozen=True)
class Timeline:
    """The spans of the rows that are drawn, in cycles of the model, and the end of the last span of the launch."""

    rows: tuple[Row, ...]
    spans: tuple[Span, ...]
    cycles: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "cycles": self.cycles,
            "rows": [asdict(row) for row in self.rows],
            "spans": [span.to_dict() for span in self.spans],
        }

    def share(self, kind: str, warp: int, asynchronous: bool = False) -> float:
        """Returns the fraction of all cycles that a row spends on activities of a kind."""
        found = (each for each in self.spans if each.warp == warp and each.kind == kind)
        return sum(each.end - each.begin for each in found if each.asynchronous is asynchronous) / (self.cycles or 1)


def timeline_of(events: Array, kernel: RenderedKernel) -> Timeline:
    """Returns the timeline of a launch's events.

    It has a row for each warpgroup if the kernel uses wgmma, else for each warp.
    """
    spans = replayed(events, kernel.target, kernel.shared.barrier_offsets())
    rows = tuple(_rows(events, spans))
    drawn = {row.warp for row in rows}
    kept = tuple(_joined(span for span in spans if span.warp in drawn))
    return Timeline(rows, kept, max((span.end for span in spans), default=0.0))


def _rows(events: Array, spans: list[Span]) -> Iterator[Row]:
    busy = sorted({span.warp for span in spans if span.kind != "wait"})
    if not (events["did"] == Did.MULTIPLY_ASYNC).any():
        yield from (Row(warp, f"warp {warp}") for warp in busy[:_MAX_ROWS])
        return
    multiplying = {span.warp for span in spans if span.kind == "product"}
    seen: set[int] = set()
    for warp in busy:
        group = warp // _WARPGROUP
        if group not in seen:
            seen.add(group)
            yield Row(warp, f"warpgroup {group}" if warp in multiplying else f"warp {warp}, loads")


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Merges spans of the same row and kind that touch or overlap.

    Spans in which the warp itself is busy are merged only if they belong to the same source line.
    """
    last: dict[tuple[Any, ...], int] = {}
    kept: list[Span] = []
    for span in spans:
        lane = (span.warp, span.kind, span.asynchronous)
        index = last.get(lane)
        before = kept[index] if index is not None else None
        if before and span.begin <= before.end + _CLOSE and (span.asynchronous or span.line == before.line):
            kept[last[lane]] = replace(before, end=max(before.end, span.end))
            continue
        last[lane] = len(kept)
        kept.append(span)
    return kept


def to_svg(timeline: Timeline, title: str, width: int = 960, link: str = "") -> str:
    """Draws the timeline as SVG.

    link: prefix of the link target of a source line, to which the line number is appended; "" for no links.
    """
    bottom = _TOP + _ROW * len(timeline.rows)
    across = width - _LEFT - 16
    scale = across / (timeline.cycles or 1.0)
    described = f"Timeline of {title}: {', '.join(row.name for row in timeline.rows)}, {timeline.cycles:.0f} cycles"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 62}" width="{width}" '
        f'height="{bottom + 62}" role="img" aria-label="{escape(described)}" font-family="system-ui, sans-serif" '
        f'font-size="12" fill="var(--ink, {palette.INK})">',
        f'<rect width="100%" height="100%" fill="var(--paper, {palette.PAPER})"/>',
        f'<text x="8" y="19" font-weight="600">{escape(title)}</text>',
    ]
    for number, row in enumerate(timeline.rows):
        top = _TOP + number * _ROW
        lines.append(f'<text x="8" y="{top + 12}">{escape(row.name)}</text>')
        rule = f"M{_LEFT} {top + _OWN + _MEANWHILE + 2}h{across}"
        lines.append(f'<path d="{rule}" stroke="{palette.RULE}" opacity="0.4"/>')
        lines += [_bar(span, top, scale, link) for span in timeline.spans if span.warp == row.warp]
    lines += _axis(bottom, across, timeline.cycles)
    lines += _legend(bottom + 52)
    return "\n".join([*lines, "</svg>\n"])


def _bar(span: Span, top: float, scale: float, link: str) -> str:
    y, height = (top + _OWN + 1, _MEANWHILE) if span.asynchronous else (top, _OWN)
    x, width = _LEFT + span.begin * scale, max((span.end - span.begin) * scale, 0.6)
    at = f", line {span.line}" if span.line else ""
    words = f"{span.text}{at}: cycles {span.begin:.0f} to {span.end:.0f}"
    bar = (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{_COLOURS[span.kind]}">'
        f"<title>{escape(words)}</title></rect>"
    )
    return f'<a href="{link}{span.line}">{bar}</a>' if link and span.line else bar


def _axis(y: float, across: float, cycles: float) -> Iterator[str]:
    step = next(step for step in (10**n * m for n in range(12) for m in (1, 2, 5)) if step * 8 >= cycles)
    yield f'<path d="M{_LEFT} {y}h{across}" stroke="{palette.RULE}"/>'
    for tick in range(0, int(cycles) + 1, step):
        x = _LEFT + tick * across / (cycles or 1.0)
        yield f'<path d="M{x:.1f} {y}v4" stroke="{palette.RULE}"/>'
        yield f'<text x="{x:.1f}" y="{y + 16}" text-anchor="middle" font-size="10">{tick}</text>'
    yield f'<text x="{_LEFT + across}" y="{y + 29}" text-anchor="end" font-size="10">cycles of the model →</text>'


def _legend(y: float) -> Iterator[str]:
    x = _LEFT
    for kind, name in _NAMES.items():
        yield f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{_COLOURS[kind]}"/>'
        yield f'<text x="{x + 16}" y="{y}">{name}</text>'
        x += 104
    yield f'<text x="{x}" y="{y}" font-size="11">upper: the warp itself; lower: asynchronous operations</text>'
