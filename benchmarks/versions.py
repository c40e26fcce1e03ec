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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import start
from flashgen.errors import LaunchError

ROOT = Path(__file__).resolve().parent.parent
HOST = "host"
START = "start"
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
    other: Path, groups: Sequence[str] = GROUPS, rounds: int = 3, measure: Callable[[str, Path], Times] | None = None
) -> Iterator[VersionRow]:
    """Measures the groups, one after another.

    Each round measures a group in both checkouts, in processes of their own; the other checkout comes first in every
    other round. The first round fills the disk caches of compiled kernels. Cells that are not measured in all rounds of
    both are left out.

    Args:
        other: the root of a checkout of flashgen.
        groups: names of GROUPS.
        rounds: the number of rounds behind each median.
        measure: returns the times of the cells of a group in a checkout; `measured` by default.
    """
    times_of = measure or measured
    for group in groups:
        found: dict[Path, list[Times]] = {other: [], ROOT: []}
        for number in range(rounds):
            for checkout in (other, ROOT)[:: -1 if number % 2 else 1]:
                found[checkout].append(times_of(group, checkout))
        for cell in found[other][0]:
            if all(cell in times for times in (*found[other], *found[ROOT])):
                before, after = (statistics.median(times[cell] for times in found[side]) for side in (other, ROOT))
                yield VersionRow(group, cell, before, after)


def measured(group: str, checkout: Path) -> Times:
    """Measures a group in new processes that import flashgen from a checkout."""
    if group == HOST:
        rows = json.loads(_output([str(ROOT / "benchmarks/host.py")], checkout))["rows"]
        # Other processes of the machine add to host times, so the minimum of the groups of calls is more stable.
        return {f"{row['library']} {row['name']} {row['timed']} {row['sizes']}": row["minimum"] for row in rows}
    if group == START:
        return {row.name: row.median for row in start.start_rows(checkout=checkout)}
    arguments, key = _BENCHES[group]
    with tempfile.TemporaryDirectory(prefix="flashgen-bench-") as folder:
        saved = Path(folder) / "rows.json"
        _output(["-m", "flashgen", "bench", *arguments, "--peers", "", "--output", str(saved)], checkout)
        rows = json.loads(saved.read_text(encoding="utf-8"))["rows"]
    return {f"{row['spec']} {row.get('size', row.get('length'))}": row[key]["flashgen"] for row in rows}


def _output(arguments: Sequence[str], checkout: Path) -> str:
    """Returns what a Python process prints that imports flashgen from a checkout. Raises LaunchError if it fails."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, "-P", *arguments]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
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
