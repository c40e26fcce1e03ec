"""Compiler errors, with the source lines that they name."""

from __future__ import annotations

import re

_ERROR_LINE = re.compile(r"\((?P<line>\d+)\): (?:catastrophic )?error", re.IGNORECASE)
_CONTEXT = 2
_MOST_PLACES = 5


def numbered_errors(source: str, log: str) -> str:
    """The source lines around each error that a log of NVRTC names, numbered, the failing ones marked with `>`.

    At most five places, since the first errors cause the rest. Empty when the log names no line of the source.
    """
    lines = source.splitlines()
    wrong: list[int] = []
    for match in _ERROR_LINE.finditer(log):
        number = int(match["line"])
        if 1 <= number <= len(lines) and number not in wrong:
            wrong.append(number)
    wrong = sorted(wrong[:_MOST_PLACES])
    shown = sorted({near for at in wrong for near in range(max(1, at - _CONTEXT), min(len(lines), at + _CONTEXT) + 1)})
    text: list[str] = []
    for previous, number in zip([0, *shown], shown, strict=False):
        if text and number != previous + 1:
            text.append("    ...")
        text.append(f"{'>' if number in wrong else ' '}{number:5d} | {lines[number - 1]}")
    return "\n".join(text)
