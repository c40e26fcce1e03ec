"""Prints the table of `flashgen verify`, with a row for each spec as soon as its last run has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from flashgen.cli.console import Rows

if TYPE_CHECKING:
    from flashgen.verify import Case, Result

HEADING = ("spec", "passed", "worst", "error", "bound", "LSE error", "verdict")
WIDEST_NAME = 48  # maximum width of the first column; a longer name moves the other cells of its row to the right
WIDTHS = {"passed": 8, "worst": 8, "error": 7, "bound": 7}


class Sweep:
    """Collects the results of cases in order, `runs_each` for each case, and prints their rows."""

    def __init__(self, cases: Sequence[Case], runs_each: int, shown: bool = True) -> None:
        self.results: list[Result] = []
        self._cases, self._runs_each, self._shown = cases, runs_each, shown
        self._printed = 0  # number of results that were printed in rows
        names = max((len(case.spec.name) for case in cases), default=0)
        self._rows = Rows(HEADING, WIDTHS | {"spec": min(names, WIDEST_NAME)})

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
            for cells in rows_of(results):
                self._rows.add(cells)

    def to_dict(self) -> dict[str, Any]:
        """Returns all results for JSON."""
        return {
            "ok": not self.failures and len(self.results) == self.planned,
            "planned": self.planned,
            "failures": self.failures,
            "results": [described(result) for result in self.results],
        }


def rows_of(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Returns a row for the runs of a spec, which shows the worst one, and a row for each kind of failure."""
    failed = [result for result in results if not result.ok]
    worst = max(results, key=_rank)
    passed = f"{len(results) - len(failed)} of {len(results)}"
    outcome = "[bold red]FAILED[/]" if failed else "[green]ok[/]"
    rows: list[tuple[str, ...]] = [(worst.case.spec.name, passed, *numbers(worst, _lse_error(results)), outcome)]
    by_reason: dict[str, list[Result]] = {}
    for result in failed:
        by_reason.setdefault(_reason(result), []).append(result)
    for reason, same in by_reason.items():
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        first = same[0]
        where = f"  {first.case.shape} {first.pass_}{more}"
        rows.append((where, "", *numbers(first, _lse_error([first])), f"{reason} ({escape(first.engine)})"))
    return rows


def numbers(result: Result, lse_error: float | None) -> tuple[str, str, str, str]:
    """Returns the worst output, its error and bound, and the error of the LSE; "" for missing values."""
    verdict = result.verdict
    compared = (f"{verdict.error:.1e}", f"{verdict.bound:.1e}") if verdict else ("", "")
    return (result.worst or "", *compared, "" if lse_error is None else f"{lse_error:.1e}")


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
