"""Planted faults: a change of a kernel's text, and how it must show when the kernel is launched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from flashgen.runtime.schedule import Schedule

REPORT = "REPORT"
"""Stands in a check's `report` for the regular expression that a row of the table gives."""
LINE = "LINE"
"""Stands in a report for the number of the first line that a fault changes."""


@dataclass(frozen=True)
class Result:
    """The outputs of a launch, which were full of NaN before, as judged by `flashgen verify`."""

    is_right: bool
    holds_nan: bool = False


class Subject(Protocol):
    """A call in whose kernels faults are planted."""

    def texts(self) -> Mapping[str, str]:
        """Returns the emitted kernels that a fault may change, by name."""

    def run(
        self, texts: Mapping[str, str] | None, *, sanitize: Any, schedule: Schedule, shared_bytes: int = 0
    ) -> Result:
        """Makes the call with these texts in place of the emitted ones.

        shared_bytes: added to the shared memory of the changed kernel's launch.
        """


@dataclass(frozen=True)
class Check:
    """The means that catch a fault, under the first of `schedules` that shows it.

    Attributes:
        name: the end of the test's id.
        sanitize: None, "thread" or "address".
        report: a regular expression that the launch's error matches; None if the launch must not fail.
        wrong: "number" if a wrong result counts as caught, "nan" if it must also hold NaN, None if only a report does.
        report_first: a wrong result without a report fails the test, even if a later schedule would bring the report.
    """

    name: str
    schedules: tuple[Schedule, ...] = (Schedule(),)
    sanitize: Any = None
    report: str | None = None
    wrong: str | None = None
    report_first: bool = False

    def catches(self, result: Result) -> bool:
        return self.wrong is not None and not result.is_right and (self.wrong == "number" or result.holds_nan)


@dataclass(frozen=True)
class Fault:
    """A change of a kernel's text, and the checks each of which must catch it.

    Attributes:
        kind, subject: the call, by the two keys of `subjects.SUBJECTS`.
        pattern: a regular expression that stands `count` times in each text that has it; the match of index `number`
            is replaced. An empty pattern leaves the texts as they are.
        replacement: a template of `re.Match.expand`.
        report: the part of the report that is this fault's own.
        rotated: each commit runs one in so many (the mark of the same name).
        shared_bytes: added to the shared memory of the launch.
    """

    kind: str
    subject: str
    name: str
    checks: tuple[Check, ...]
    pattern: str = ""
    replacement: str = ""
    report: str = ""
    rotated: int = 3
    number: int = 0
    count: int = 1
    shared_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.kind}, {self.subject}: {self.name}"

    def plant(self, texts: Mapping[str, str]) -> tuple[dict[str, str], int]:
        """Returns the changed texts, and the number of the first line that the fault changes."""
        if not self.pattern:
            return {}, 0
        planted: dict[str, str] = {}
        line = 0
        for name, text in texts.items():
            found = list(re.finditer(self.pattern, text, re.DOTALL))
            if not found:
                continue
            assert len(found) == self.count, f"{self}: {self.pattern!r} stands {len(found)} times in {name}"
            match = found[self.number]
            line = text.count("\n", 0, match.start()) + 1
            planted[name] = text[: match.start()] + match.expand(self.replacement) + text[match.end() :]
            assert planted[name] != text, f"{self}: {self.replacement!r} changes nothing in {name}"
        assert planted, f"{self}: {self.pattern!r} stands in none of {sorted(texts)}; the row fits no more"
        return planted, line

    def expected_report(self, check: Check, line: int) -> str | None:
        """Returns the regular expression that an error must match, or None if the check expects no error."""
        if check.report is None:
            return None
        assert REPORT not in check.report or self.report, f"{self}: the row gives no report"
        return check.report.replace(REPORT, self.report).replace(LINE, str(line))


_LATE, _EARLY = Schedule("in_order", "late"), Schedule("greedy_warp", "early")
_GREEDY, _RANDOM = Schedule("greedy_warp", "late"), Schedule("random", "random", 5)
_SIDE_BY_SIDE = tuple(Schedule("random", "random", seed, workers=4) for seed in range(50))
_ONE_BY_ONE = tuple(Schedule("random", "random", seed, workers=1) for seed in range(50))
_AT_LINE = r"kernel\.cu:\d+: "

# Wrong results.
WRONG = Check("wrong", (_LATE,), wrong="number")
WRONG_OR_REPORTED = Check("wrong or reported", (_LATE,), report="", wrong="number")
NAN = Check("NaN", wrong="nan")
LATE_COPIES = Check("late copies", (_LATE,), report="in flight", wrong="nan")
DRIFTING_WARPS = Check("drifting warps", (_GREEDY,), wrong="nan")
WRONG_SIDE_BY_SIDE = Check("wrong side by side", _SIDE_BY_SIDE, wrong="number")
# Reports of the emulator: on barriers, on reads and writes of the asynchronous proxy, on deadlocks.
LATE_ENGINES = Check("late engines", (_LATE,), report=rf"(?s){_AT_LINE}.*({REPORT})")
RANDOM_ENGINES = Check("random engines", (_RANDOM,), report=rf"(?s){_AT_LINE}.*({REPORT})")
EARLY_ENGINES = Check("early engines", (Schedule("in_order", "early"),), report=rf"{_AT_LINE}.*({REPORT})")
LATE_OR_RANDOM_ENGINES = Check(
    "late or random engines", (_LATE, _RANDOM), report=rf"(?s){_AT_LINE}.*({REPORT})", report_first=True
)
ANY_RANDOM_ENGINES = Check(
    "random engines", tuple(Schedule("random", "random", seed) for seed in range(8)), report=_AT_LINE
)
PROTOCOL = Check("protocol", (_LATE,), report=REPORT)
ANY_PROTOCOL = Check("protocol", (_LATE,), report=_AT_LINE)
PROTOCOL_SIDE_BY_SIDE = Check("protocol side by side", _SIDE_BY_SIDE, report=REPORT)
PROTOCOL_AT_RANDOM = Check("protocol at random", _ONE_BY_ONE, report=REPORT)
# Reports of the sanitizers.
DATA_RACE = Check("data race", (_GREEDY,), "thread", rf"{_AT_LINE}.*data race|in flight")
RACE_AT_LINE = Check("data race", (_GREEDY,), "thread", rf"{_AT_LINE}.*data race")
EARLY_DATA_RACE = Check("data race", (_EARLY,), "thread", "data race")
EARLY_RACE_AT_LINE = Check("data race", (_EARLY,), "thread", rf"{_AT_LINE}.*data race")
EARLY_RACE_OR_REPORT = Check("data race", (_EARLY,), "thread", rf"(?s){_AT_LINE}.*(data race|{REPORT})")
OVERFLOW = Check("overflow", (Schedule(),), "address", rf"{_AT_LINE}.*heap-buffer-overflow")
ANY_OVERFLOW = Check("overflow", (Schedule(),), "address", "AddressSanitizer|outside|overflow")
POISONED = Check("registers in use", (_EARLY,), "address", rf"{_AT_LINE}.*use-after-poison")
NO_SHARED_MEMORY = Check("shared memory", (Schedule(),), "address", _AT_LINE)
BEYOND_SHARED_MEMORY = Check(
    "shared memory",
    (Schedule(),),
    "address",
    rf"(?s)kernel\.cu:{LINE}: .*heap-buffer-overflow.*shared memory: is located 0 bytes",
)
