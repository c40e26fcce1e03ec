"""MkDocs hooks that convert formulas to MathML, and links to files outside docs/ to their paths.

No script has to draw formulas, and a built site loads nothing from other hosts.
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
    """Replaces links that lead out of docs/ by the paths of their files.

    The title of an excerpt that docs/refresh.py finds by its first and last line is reduced to the name of the file.
    """
    return _LINES.sub(r'\1"', _OUTSIDE.sub(r"`\2`", markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Converts each formula that pymdownx.arithmatex marked to MathML."""
    return _FORMULA.sub(_mathml, html)


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[2] == "[" else "inline"
    return convert(unescape(match[3]).strip(), display=display)
