"""The first page of the demo: the variants that ran, with their masks, visited tiles and files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashgen.analysis.drawing import palette
from flashgen.report.page import render_template


@dataclass(frozen=True)
class VariantEntry:
    """A variant that ran, as the page shows it.

    mask, tiles: SVGs of the mask and of the tiles that the kernel visited. lines: (label, text) of each line. files:
    (label, link) of each file.
    """

    title: str
    ok: bool
    mask: str
    tiles: str
    lines: Sequence[tuple[str, str]]
    files: Sequence[tuple[str, str]]


LEGEND = (
    (palette.FULL, "full", "The mask keeps all scores of the tile. The kernel runs no mask code for it."),
    (
        palette.PARTIAL,
        "partial",
        "Some scores are masked or beyond the last key. The kernel evaluates the mask.",
    ),
    (palette.GROUND, "empty", "The mask keeps no score. The kernel skips the tile: it loads and computes nothing."),
)
"""The colour, the name and the meaning of each class of tiles."""


def demo_page(engine: str, tokens: int, copies: int, variants: Sequence[VariantEntry], looked_at: Sequence[str]) -> str:
    """Returns the page as self-contained HTML. Its links lead to files in the same folder."""
    return render_template(
        "demo.html.jinja",
        engine=engine,
        tokens=tokens,
        copies=copies,
        variants=[replace(each, mask=_scalable(each.mask), tiles=_scalable(each.tiles)) for each in variants],
        looked_at=looked_at,
        legend=LEGEND,
    )


def _scalable(svg: str) -> str:
    """Returns the SVG with a viewBox, so that a page may show it narrower than it is."""
    return re.sub(r'^<svg ([^>]*?)width="([\d.]+)" height="([\d.]+)"', r'<svg \1viewBox="0 0 \2 \3" width="\2"', svg)
