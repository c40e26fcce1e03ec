"""The page that the demo opens with: what ran, with its mask, its tiles and its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashgen.report.page import rendered


@dataclass(frozen=True)
class Shown:
    """A variant that ran: SVGs of its mask and of the tiles that its kernel visited, lines of words, and its files."""

    title: str
    ok: bool
    mask: str
    tiles: str
    lines: Sequence[tuple[str, str]]
    files: Sequence[tuple[str, str]]


def demo_page(engine: str, tokens: int, variants: Sequence[Shown], looked_at: Sequence[str]) -> str:
    """A page of HTML that needs nothing beside itself; its links lead to files beside it."""
    return rendered("demo.html.jinja", engine=engine, tokens=tokens, variants=variants, looked_at=looked_at)
