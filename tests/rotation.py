"""Selects the cases of the long sweeps that a run takes:

different ones at each commit, so that all run every few commits.
"""

from __future__ import annotations

import os
import subprocess
import zlib
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "FLASHGEN_TEST_ROTATION"
ALL = "all"


def seed_of_run(config: pytest.Config) -> str:
    """Returns what selects the part of this run: ALL, the environment variable, or else the commit.

    Naming tests by path or by -k selects all of them, as do --all and a tree that is no repository.
    """
    if config.getoption("--all") or config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword:
        return ALL
    return os.environ.get(VARIABLE) or commit() or ALL


def commit() -> str:
    """Returns the commit that is checked out, or "" if there is none."""
    command = ["git", "-c", "safe.directory=*", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git here
        return ""


def divided(items: list[pytest.Item], seed: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Returns (the items of this run, those that are left for other commits), by the marks `rotated` and `covering`."""
    cases: dict[tuple[str, str, int], list[pytest.Item]] = {}
    for item in items:
        for kind in ("rotated", "covering"):
            mark = item.get_closest_marker(kind)
            if mark and seed != ALL:
                cases.setdefault((kind, item.nodeid.partition("[")[0], mark.args[0]), []).append(item)
    left: set[pytest.Item] = set()
    for (kind, function, parts), own in cases.items():
        always = cover(own) if kind == "covering" else set()
        rest = [case for case in own if case not in always]
        left |= set(rest) - part(rest, function, parts, seed)
    return [item for item in items if item not in left], [item for item in items if item in left]


def cover(cases: list[pytest.Item]) -> set[pytest.Item]:
    """Returns few of a test's cases with every pair of values of two parameters that any case has.

    For a test with two parameters, they have every value. Parameters that vary together count as one.
    """
    indices: list[dict[str, int]] = [case.callspec.indices for case in cases]  # type: ignore[attr-defined]
    columns = list(dict.fromkeys(tuple(own[name] for own in indices) for name in indices[0]))
    chosen = list(combinations(range(len(columns)), min(2, len(columns) - 1)))
    has = {
        case: {(names, *(columns[name][number] for name in names)) for names in chosen}
        for number, case in enumerate(cases)
    }
    missing, taken = set[Any]().union(*has.values()), set()
    mixed = _mixed(cases)
    while missing:
        best = max(mixed, key=lambda case: len(has[case] & missing))
        taken.add(best)
        missing -= has[best]
    return taken


def part(cases: list[pytest.Item], function: str, parts: int, seed: str) -> set[pytest.Item]:
    """Returns one of so many parts of a test's cases, which are shuffled first, so that a part has every kind.

    The seed selects it; a number selects the same part for all tests, so that 0, 1, ... are all parts.
    """
    first = int(seed) if seed.isdecimal() else zlib.crc32(f"{seed} {function}".encode())
    return set(_mixed(cases)[first % parts :: parts])


def _mixed(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Returns the cases in a reproducible order that does not depend on their parameters."""
    return sorted(cases, key=lambda case: (zlib.crc32(case.nodeid.encode()), case.nodeid))
