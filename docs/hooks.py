"""Hooks of MkDocs: formulas become MathML as a page is built, and links to the rest of the repository become its paths.

So no script draws a formula, and a built site asks no other host for anything.
"""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
_LINES = re.compile(r'^(```\w+ title="[^":]+): /.*"$', re.MULTILINE)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with the path of each file of the repository where a link would lead out of docs/.

    An excerpt that docs/refresh.py finds by its first and last line has its file's name alone above it.
    """
    return _LINES.sub(r'\1"', _OUTSIDE.sub(r"`\2`", markdown))


def on_page_content(html: str, **_: Any) -> str:
    """The page with each formula that pymdownx.arithmatex marked as MathML."""
    return _FORMULA.sub(_mathml, html)


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[2] == "[" else "inline"
    return convert(unescape(match[3]).strip(), display=display)
