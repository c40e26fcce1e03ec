"""Measures another checkout beside this one, in turns on the same GPU: `python -m benchmarks versions`."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import host, start
from flashgen.errors import LaunchError

ROOT = Path(__file__).resolve().parent.parent
HOST = "host"
START = "start"
START_REPEATS = 2  # processes per round with an empty and with a filled disk cache
Times = Mapping[str, float]  # the time of each cell of a group

# The arguments of `flashgen bench` of each group, and the key of a row that holds the times by implementation.
_BENCHES: Mapping[str, tuple[Sequence[str], str]] = {
    "forward": (("speed", "--pass", "forward"), "milliseconds"),
    "backward": (("speed", "--pass", "backward"), "milliseconds"),
    "decode": (("decode", "--pages", ""), "microseconds"),
}
GROUPS = (*_BENCHES, HOST, START)


@dataclass(frozen=True)
class VersionRow:
    """The time of a cell in another checkout and in this one: medians over the rounds, in the unit of the group.

    The unit is milliseconds for the forward and the backward, and microseconds for the other groups.
    """

    group: str
    cell: str
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """The speed of this checkout relative to the other."""
        return self.before / self.after

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}


def version_rows(
    other: Path,
    groups: Sequence[str] = GROUPS,
    rounds: int = 3,
    measure: Callable[[str, Sequence[Path]], Sequence[Times]] | None = None,
) -> Iterator[VersionRow]:
    """Measures the groups, one after another.

    Each round measures a group in both checkouts, in processes of their own; the other checkout comes first in every
    other round. The first round fills the disk caches of compiled kernels. Cells that are not measured in all rounds of
    both are left out.

    Args:
        other: the root of a checkout of flashgen.
        groups: names of GROUPS.
        rounds: the number of rounds behind each median.
        measure: returns the times of the cells of a group in each of the checkouts; `measured` by default.
    """
    measure = measure or measured
    for group in groups:
        found: dict[Path, list[Times]] = {other: [], ROOT: []}
        for number in range(rounds):
            order = (other, ROOT)[:: -1 if number % 2 else 1]
            for checkout, times in zip(order, measure(group, order), strict=True):
                found[checkout].append(times)
        for cell in found[other][0]:
            if all(cell in times for times in (*found[other], *found[ROOT])):
                before, after = (statistics.median(times[cell] for times in found[side]) for side in (other, ROOT))
                yield VersionRow(group, cell, before, after)


def measured(group: str, checkouts: Sequence[Path]) -> list[Times]:
    """Measures a group in new processes that import flashgen from the checkouts."""
    if group == HOST:
        return _host_times(checkouts)
    if group == START:
        return [{row.name: row.median for row in start.start_rows(None, START_REPEATS, each)} for each in checkouts]
    return [_bench_times(group, checkout) for checkout in checkouts]


def _bench_times(group: str, checkout: Path) -> Times:
    arguments, key = _BENCHES[group]
    with tempfile.TemporaryDirectory(prefix="flashgen-bench-") as folder:
        saved = Path(folder) / "rows.json"
        _output(["-m", "flashgen", "bench", *arguments, "--peers", "", "--output", str(saved)], checkout)
        rows = json.loads(saved.read_text(encoding="utf-8"))["rows"]
    return {f"{row['spec']} {row.get('size', row.get('length'))}": row[key]["flashgen"] for row in rows}


def _host_times(checkouts: Sequence[Path]) -> list[Times]:
    """Measures host times with one process per checkout. The processes alternate after each group of calls.

    A change of the host's speed then affects all checkouts equally. On a shared machine, the host times of processes
    that run one after the other differ by up to a factor of two.
    """
    with ExitStack() as stack:
        processes = [stack.enter_context(_HostProcess(checkout)) for checkout in checkouts]
        times: list[dict[str, float]] = [{} for _ in processes]
        for cell in processes[0].cells:
            if all(cell in process.cells for process in processes):
                medians: list[list[float]] = [[] for _ in processes]
                for number in range(host.WARM_GROUPS + host.GROUPS):
                    for at in range(len(processes))[:: -1 if number % 2 else 1]:
                        medians[at].append(processes[at].group_median(cell))
                for of_checkout, values in zip(times, medians, strict=True):
                    of_checkout[cell] = statistics.median(values[host.WARM_GROUPS :])
    return list(times)


class _HostProcess:
    """A process that measures groups of calls of flashgen from a checkout. `cells` are the names of its cells."""

    def __init__(self, checkout: Path) -> None:
        self._checkout = checkout

    def __enter__(self) -> _HostProcess:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            _command([str(ROOT / "benchmarks/host.py"), "--turns"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            **_within(self._checkout),
        )
        self.cells: list[str] = json.loads(self._answer())
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._errors.close()

    def group_median(self, cell: str) -> float:
        """Returns the median time of a group of calls in microseconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self.cells.index(cell)}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        """Returns the next line of the process. Raises LaunchError if it has ended."""
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line
        self._errors.seek(0)
        raise LaunchError(f"benchmarks/host.py failed in {self._checkout}:\n{self._errors.read().strip()}")


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-P", *arguments]


def _within(checkout: Path) -> dict[str, Any]:
    """Returns the options of a process that imports flashgen from a checkout."""
    return {"cwd": checkout, "env": os.environ | {"PYTHONPATH": str(checkout)}}


def _output(arguments: Sequence[str], checkout: Path) -> str:
    """Returns what a Python process prints that imports flashgen from a checkout. Raises LaunchError if it fails."""
    command = _command(arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False, **_within(checkout))
    if done.returncode:
        raise LaunchError(f"{' '.join(command)} failed in {checkout}:\n{done.stderr.strip()}")
    return done.stdout


def version_summary(rows: Sequence[VersionRow]) -> list[str]:
    """Returns a line for each group: the geometric mean of the ratios, and the smallest."""
    lines = []
    for group in dict.fromkeys(row.group for row in rows):
        ratios = {row.cell: row.ratio for row in rows if row.group == group}
        mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
        slowest = min(ratios, key=ratios.__getitem__)
        lines.append(
            f"{group}: {mean:.3f} times the speed of the other checkout in the geometric mean of {len(ratios)} cells, "
            f"at least {ratios[slowest]:.3f} ({slowest})"
        )
    return lines
