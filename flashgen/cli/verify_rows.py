"""Prints the table of `flashgen verify`, with a row for each spec as soon as its last run has ended.

On a terminal that is too narrow for it, a compact table shows the worst error as a share of its bound.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from flashgen.cli.console import Rows, stdout

if TYPE_CHECKING:
    from flashgen.verify import Case, Result

HEADING = ("spec", "passed", "worst", "error", "bound", "LSE error", "verdict")
WIDEST_NAME = 48  # maximum width of the first column; a longer name moves the other cells of its row to the right
WIDTHS = {"passed": 8, "worst": 8, "error": 7, "bound": 7}
TABLE_WIDTH = 106  # columns of a terminal that the table needs if names are not longer than WIDEST_NAME
COMPACT_HEADING = ("spec", "passed", "of its bound", "verdict")
COMPACT_WIDTHS = {"spec": 47, "passed": 8}  # 80 columns; a longer name has a line of its own


@dataclass(frozen=True)
class Line:
    """A row about the runs of a spec, or about some of its failed runs, with the numbers of one of them.

    Attributes:
        text: the name of the spec, or the shape and the pass of the failed run.
        passed: such as "6 of 6"; "" for failed runs.
        result: the run of the numbers: the worst run, or the first failed one.
        lse_error: the largest error of the LSE; None if there is none.
        outcome: the verdict, or the reason of the failure, as rich markup.
    """

    text: str
    passed: str
    result: Result
    lse_error: float | None
    outcome: str

    def cells(self) -> tuple[str, ...]:
        """Returns the cells of the table, as rich markup."""
        verdict = self.result.verdict
        compared = (f"{verdict.error:.1e}", f"{verdict.bound:.1e}") if verdict else ("", "")
        lse_error = "" if self.lse_error is None else f"{self.lse_error:.1e}"
        return (self.text, self.passed, self.result.worst or "", *compared, lse_error, self.outcome)

    def compact_cells(self) -> tuple[str, ...]:
        """Returns the cells of the compact table, as rich markup."""
        verdict = self.result.verdict
        share = f"{self.result.worst} {verdict.error / verdict.bound:.0%}" if verdict and verdict.bound else ""
        return (self.text, self.passed, share, self.outcome)


class Sweep:
    """Collects the results of cases in order, `runs_each` for each case, and prints their rows."""

    def __init__(self, cases: Sequence[Case], runs_each: int, shown: bool = True) -> None:
        self.results: list[Result] = []
        self._cases, self._runs_each, self._shown = cases, runs_each, shown
        self._printed = 0  # number of results that were printed in rows
        self._compact = sys.stdout.isatty() and stdout().width < TABLE_WIDTH
        names = max((len(case.spec.name) for case in cases), default=0)
        whole = WIDTHS | {"spec": min(names, WIDEST_NAME)}
        self._rows = Rows(COMPACT_HEADING, COMPACT_WIDTHS) if self._compact else Rows(HEADING, whole)

    @property
    def specs(self) -> int:
        """The number of specs."""
        return len({case.spec for case in self._cases})

    @property
    def planned(self) -> int:
        """The total number of runs."""
        return len(self._cases) * self._runs_each

    @property
    def running(self) -> str:
        """The name of the spec that runs now, or of the last spec at the end."""
        number = min(len(self.results) // self._runs_each, len(self._cases) - 1)
        return self._cases[number].spec.name if self._cases else "nothing to verify"

    @property
    def failures(self) -> int:
        return sum(not result.ok for result in self.results)

    @property
    def summary(self) -> str:
        """The summary, such as "130 of 198 passed, 68 failed", with the number of runs that were not done."""
        done = len(self.results)
        missing = f", {self.planned - done} not run" if done < self.planned else ""
        failed = f", {self.failures} failed" if self.failures else ""
        return f"{done - self.failures} of {self.planned} passed{failed}{missing}"

    def add(self, result: Result) -> None:
        self.results.append(result)
        if self.running != result.case.spec.name:
            self.end()

    def end(self) -> None:
        """Prints the results that were not printed yet."""
        results, self._printed = self.results[self._printed :], len(self.results)
        if results and self._shown:
            for line in lines_of(results):
                self._add(line)

    def _add(self, line: Line) -> None:
        if not self._compact:
            self._rows.add(line.cells())
            return
        name, *others = line.compact_cells()
        if not line.passed:
            text = f"{name.strip()}: {', '.join(filter(None, others))}"
            for part in wrap(text, stdout().width, initial_indent="  ", subsequent_indent="    "):
                stdout().print(part)
            return
        if len(name) > COMPACT_WIDTHS["spec"]:
            self._rows.add((name,))
            name = ""
        self._rows.add((name, *others))

    def to_dict(self) -> dict[str, Any]:
        """Returns all results for JSON."""
        return {
            "ok": not self.failures and len(self.results) == self.planned,
            "planned": self.planned,
            "failures": self.failures,
            "results": [described(result) for result in self.results],
        }


def lines_of(results: Sequence[Result]) -> list[Line]:
    """Returns a row for the runs of a spec, which shows the worst one, and a row for each kind of failure."""
    failed = [result for result in results if not result.ok]
    worst = max(results, key=_rank)
    passed = f"{len(results) - len(failed)} of {len(results)}"
    outcome = "[bold red]FAILED[/]" if failed else "[green]ok[/]"
    lines = [Line(worst.case.spec.name, passed, worst, _lse_error(results), outcome)]
    by_reason: dict[str, list[Result]] = {}
    for result in failed:
        by_reason.setdefault(_reason(result), []).append(result)
    for reason, same in by_reason.items():
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        first = same[0]
        where = f"  {first.case.shape} {first.pass_}{more}"
        lines.append(Line(where, "", first, _lse_error([first]), f"{reason} ({escape(first.engine)})"))
    return lines


def _rank(result: Result) -> tuple[bool, bool, float]:
    """Returns a sort key, greater for worse: failures, then runs with verdicts, then runs closer to their bound."""
    verdict = result.verdict
    return not result.ok, verdict is not None, verdict.error / verdict.bound if verdict and verdict.bound else 0.0


def _lse_error(results: Sequence[Result]) -> float | None:
    found = [result.verdict.lse_error for result in results if result.verdict]
    return max((error for error in found if error is not None), default=None)


def _reason(result: Result) -> str:
    """Returns the reason why a run failed, as rich markup."""
    failing = ", ".join(name for name, each in result.verdicts.items() if not each.ok)
    return escape(result.problem or f"{failing} beyond the bound")


def described(result: Result) -> dict[str, Any]:
    """Returns a run for JSON."""
    verdict = result.verdict
    return {
        "spec": result.case.spec.name,
        "shape": str(result.case.shape),
        "engine": result.engine,
        "pass": result.pass_,
        "ok": result.ok,
        "seconds": result.seconds,
        "worst": result.worst,
        "error": verdict and verdict.error,
        "bound": verdict and verdict.bound,
        "lse_error": verdict and verdict.lse_error,
        "outputs": {
            name: {"ok": each.ok, "error": each.error, "bound": each.bound} for name, each in result.verdicts.items()
        },
        "problem": result.problem,
    }
