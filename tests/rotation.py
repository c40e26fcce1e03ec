"""Which cases of the long sweeps a run takes: other ones at each commit, so that each case is met every few commits."""

from __future__ import annotations

import os
import subprocess
import zlib
from pathlib import Path

import pytest

VARIABLE = "FLASHGEN_TEST_ROTATION"
ALL = "all"


def seed_of_run(config: pytest.Config) -> str:
    """What decides the part of this run: ALL, what the environment says, or else the commit.

    Whoever names tests, by path or by -k, gets all of them, and so does --all, and a tree that is no repository.
    """
    if config.getoption("--all") or config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword:
        return ALL
    return os.environ.get(VARIABLE) or commit() or ALL


def commit() -> str:
    """The commit that is checked out; empty where none is."""
    command = ["git", "-c", "safe.directory=*", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git here
        return ""


def divided(items: list[pytest.Item], seed: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """(the items of this run, those that are left for other commits), by the marks `rotated`."""
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("rotated")
        if mark and seed != ALL:
            cases.setdefault((item.nodeid.partition("[")[0], mark.args[0]), []).append(item)
    left: set[pytest.Item] = set()
    for (function, parts), own in cases.items():
        left |= set(own) - part(own, function, parts, seed)
    return [item for item in items if item not in left], [item for item in items if item in left]


def part(cases: list[pytest.Item], function: str, parts: int, seed: str) -> set[pytest.Item]:
    """One of so many parts of a test's cases, which are dealt like cards that were mixed: a part has of everything.

    The seed says which; a number says it of all tests alike, so that 0, 1, ... are all parts.
    """
    first = int(seed) if seed.isdecimal() else zlib.crc32(f"{seed} {function}".encode())
    mixed = sorted(cases, key=lambda case: (zlib.crc32(case.nodeid.encode()), case.nodeid))
    return set(mixed[first % parts :: parts])
