"""The source of a kernel for a page, with syntax colours, collapsible sections, and lines that links can refer to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

_HEADING = re.compile(r"^// ---- (.+?) -*$")
_LIGHT, _DARK = "default", "github-dark"


@dataclass(frozen=True)
class Section:
    """A section of a source: its title, the number of its first line, and its lines as HTML."""

    title: str
    first: int
    lines: tuple[str, ...]

    @property
    def last(self) -> int:
        return self.first + len(self.lines) - 1


def sections(source: str) -> list[Section]:
    """Splits a source at its headings. The lines before the first heading form the section "Header"."""
    plain = source.splitlines()
    coloured = _coloured(source)
    starts = [0, *(number for number, line in enumerate(plain) if _HEADING.match(line))]
    ends = [*starts[1:], len(plain)]
    return [
        Section(_title(plain[begin]), begin + 1, tuple(coloured[begin:end]))
        for begin, end in zip(starts, ends, strict=True)
        if end > begin
    ]


def styles() -> str:
    """Returns the CSS of the syntax colours for light and dark pages."""
    light = HtmlFormatter(style=_LIGHT).get_style_defs(".source")
    dark = HtmlFormatter(style=_DARK).get_style_defs(":root[data-theme=dark] .source")
    return "\n".join(line for line in _rules(f"{light}\n{dark}") if "background" not in line)


def _rules(css: str) -> Iterator[str]:
    for line in css.splitlines():
        if re.search(r"\.source \.\w+ \{", line):
            yield line.split(" /*")[0]


def _title(line: str) -> str:
    match = _HEADING.match(line)
    return match[1] if match else "Header"


def _coloured(source: str) -> list[str]:
    """Returns each line as HTML. Pygments closes every span at the end of its line, so lines can be separated."""
    text = highlight(source, get_lexer_by_name("cuda", stripnl=False), HtmlFormatter(nowrap=True))
    lines: list[str] = text.split("\n")
    return lines[: len(source.splitlines())]
