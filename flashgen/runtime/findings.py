"""What a sanitizer wrote, as a few lines that name the emitted source."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flashgen.build.host import SOURCE

_LINE = re.compile(rf"{re.escape(SOURCE)}:(\d+)")
_HEADLINE = re.compile(r"(ERROR: \w+Sanitizer: .*|WARNING: ThreadSanitizer: .*|.*: runtime error: .*|FATAL: ThreadSanitizer.*)")
# The paragraphs of a report that say who did what; each is followed by its stack, the innermost frame first.
_PARTY = re.compile(r"^\s*((?:Previous )?(?:atomic )?(?:read|write) of size \d+ .*|(?:READ|WRITE) of size \d+ .*)", re.IGNORECASE)
_PLACE = re.compile(r"^\s*((?:0x)?[0-9a-f]+ is located .*|Location is .*)")
_FRAME = re.compile(r"^\s*#\d+ ")


def first_line_number(text: str) -> int | None:
    """The number of the first line of the emitted source that a text names."""
    match = _LINE.search(text)
    return int(match[1]) if match else None


def summarise(report: str) -> str | None:
    """A sanitizer's report in short: the line of the emitted source, the kind, the parties; None if it is none."""
    lines = report.splitlines()
    start, headline = next(((i, m[1]) for i, line in enumerate(lines) if (m := _HEADLINE.search(line))), (0, None))
    if headline is None:
        return None
    headline = re.sub(r" \(pid=\d+\)| on (?:unknown )?address .*", "", headline)
    body = lines[start:]
    found = first_line_number("\n".join(body))
    place = f"{SOURCE}:{found}: " if found else ""
    return "\n  ".join([place + _LINE.sub(r"line \1", headline) if "runtime error" in headline else place + headline, *_parties(body)])


def _parties(lines: list[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        if match := _PARTY.match(line):
            found = first_line_number("\n".join(_stack_after(lines, number)))
            yield re.sub(r" at 0x[0-9a-f]+", "", match[1].rstrip(":")) + (f" at {SOURCE}:{found}" if found else "")
        elif match := _PLACE.match(line):
            yield re.sub(r"^(?:0x)?[0-9a-f]+ ", "it ", match[1])


def _stack_after(lines: list[str], number: int) -> Iterator[str]:
    for line in lines[number + 1 :]:
        if not _FRAME.match(line):
            return
        yield line
