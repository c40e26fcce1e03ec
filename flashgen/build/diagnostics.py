"""Shows the source lines that compiler errors refer to."""

from __future__ import annotations

import re

_ERROR_LINE = re.compile(r"\((?P<line>\d+)\): (?:catastrophic )?error", re.IGNORECASE)
_CONTEXT_LINES = 2
_MAX_ERRORS = 5


def numbered_errors(source: str, log: str) -> str:
    """Returns numbered source lines around each error in a log of NVRTC. Lines with errors are marked with `>`.

    At most five errors are shown, because the first ones usually cause the rest. The text is empty if the log names no
    line of the source.
    """
    lines = source.splitlines()
    failing: list[int] = []
    for match in _ERROR_LINE.finditer(log):
        number = int(match["line"])
        if 1 <= number <= len(lines) and number not in failing:
            failing.append(number)
    failing = sorted(failing[:_MAX_ERRORS])
    ranges = [range(max(1, at - _CONTEXT_LINES), min(len(lines), at + _CONTEXT_LINES) + 1) for at in failing]
    shown = sorted(set().union(*ranges))
    text: list[str] = []
    for previous, number in zip([0, *shown], shown, strict=False):
        if text and number != previous + 1:
            text.append("    ...")
        text.append(f"{'>' if number in failing else ' '}{number:5d} | {lines[number - 1]}")
    return "\n".join(text)
