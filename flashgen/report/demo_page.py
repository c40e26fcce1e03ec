"""The first page of the demo: the variants that ran, with their masks, visited tiles and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def demo_page(engine: str, tokens: int, variants: Sequence[VariantEntry], looked_at: Sequence[str]) -> str:
    """Returns the page as self-contained HTML. Its links lead to files in the same folder."""
    return render_template("demo.html.jinja", engine=engine, tokens=tokens, variants=variants, looked_at=looked_at)
