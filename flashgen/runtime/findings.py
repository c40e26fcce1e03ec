"""Error messages of failed launches on the emulator, from its own findings or from a sanitizer's report."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from flashgen.build.host import SOURCE, HostKernel
from flashgen.runtime.schedule import Schedule

_SOURCE_LINE = re.compile(rf"{re.escape(SOURCE)}:(\d+)")
_KIND = re.compile(
    r"(?:ERROR|WARNING|FATAL): (?P<kind>\w+Sanitizer: .*?)(?: on (?:unknown )?address .*| \(pid=.*|:? *)$"
    r"|: (?P<undefined>runtime error: .*)$"
)
# The accesses of a report. Each line is followed by its stack, the innermost frame first.
_ACCESS = re.compile(r"(?:Previous )?(?:atomic )?(?:read|write) of size \d+", re.IGNORECASE)
_BY = re.compile(r" by (main thread|thread (T\d+))")
_NAME = re.compile(r"\s*Thread (T\d+) '([^'(]+?) *(?:\(|')")  # the runtime names its threads in launch.cpp
_FRAME = re.compile(r"\s*#\d+ ")
_MEMORY = re.compile(r"\s*(?:0x)?[0-9a-f]+ (is located .*)|\s*Location (is .*)")
# The first lines of the parts that describe how threads were created and what surrounds an address.
_REST = re.compile(r"\s*Thread T\d+ .*created|\s*Mutex |SUMMARY: |Shadow bytes around|\s*Shadow byte legend")
_MAX_LINES = 40  # of a report in a message


def failure_text(kernel: HostKernel, finding: str, schedule: Schedule) -> str:
    """Returns the message of a LaunchError: the finding, the source line, the schedule, and the path of the source."""
    first, *rest = finding.splitlines() or ["no reason given"]
    lines = [f"{kernel.name}: {first}", *_quoted_line(kernel, first), *rest]
    return "\n".join([*lines, f"  schedule: {schedule}; source: {kernel.source_path}"])


def _quoted_line(kernel: HostKernel, finding: str) -> Iterator[str]:
    number = first_line_number(finding)
    lines = kernel.source.splitlines() if number else []
    if number and number <= len(lines):
        yield f"  {number} | {lines[number - 1]}"


def first_line_number(text: str) -> int | None:
    """Returns the number of the first line of the emitted source that a text mentions."""
    match = _SOURCE_LINE.search(text)
    return int(match[1]) if match else None


def summarise(report: str) -> str | None:
    """Summarises a sanitizer's report: line of the emitted source, kind of error, accesses, and the report itself.

    Returns None if the text is not a sanitizer's report.
    """
    lines = report.splitlines()
    for start, line in enumerate(lines):
        if kind := _KIND.search(line):
            core = list(_core(lines[start:]))
            names = {match[1]: match[2] for match in map(_NAME.match, lines) if match}
            headline = _location(core) + (kind["kind"] or kind["undefined"])
            return "\n  ".join([headline, *_accesses(core, names), *core[:_MAX_LINES]])
    return None


def _core(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if _REST.match(line):
            return
        if line.strip():
            yield line


def _location(lines: Sequence[str]) -> str:
    number = first_line_number("\n".join(lines))
    return f"{SOURCE}:{number}: " if number else ""


def _accesses(lines: Sequence[str], names: Mapping[str, str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        if match := _ACCESS.search(line):
            thread = _BY.search(line)
            at = first_line_number("\n".join(_stack(lines[number + 1 :])))
            by = f" by {names.get(thread[2], thread[1])} {thread[2] or ''}".rstrip() if thread else ""
            yield match[0].lower() + by + (f" at {SOURCE}:{at}" if at else "")
        elif match := _MEMORY.match(line):
            yield f"{_owner(lines[number:])} {match[1] or match[2]}"


def _owner(lines: Sequence[str]) -> str:
    """Returns the kernel's name for a piece of memory, by the emulator's function that allocated it."""
    text = "\n".join(lines)
    if "allocate_shared" in text:
        return "shared memory:"
    return "an array:" if "read_buffer" in text else "the memory"


def _stack(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if not _FRAME.match(line):
            return
        yield line
