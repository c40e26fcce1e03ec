"""Parts of the long sweeps: every case is in one part, and only the commit determines which part runs."""

from __future__ import annotations

from fnmatch import fnmatch
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rotation

CASES = 90


class Case:
    """The attributes of a collected test that the rotation reads."""

    def __init__(self, nodeid: str, parts: int | None, mark: str = "rotated", **indices: int) -> None:
        self.nodeid, self.parts, self.mark = nodeid, parts, mark
        self.callspec = SimpleNamespace(indices=indices)

    def get_closest_marker(self, name: str) -> Any:
        return SimpleNamespace(args=(self.parts,)) if name == self.mark and self.parts else None


CASES_OF_TESTS: Any = [
    *(Case(f"a.py::test_one[{number}-{number % 6}]", 3) for number in range(CASES)),
    *(Case(f"a.py::test_other[{number}]", 4) for number in range(CASES)),
    Case("a.py::test_always", None),
]


def taken(seed: str) -> set[str]:
    here, left = rotation.divided(CASES_OF_TESTS, seed)
    assert sorted(map(id, [*here, *left])) == sorted(map(id, CASES_OF_TESTS))
    return {case.nodeid for case in here}


def test_parts_are_equal_and_cover_everything() -> None:
    everything = taken(rotation.ALL)
    assert len(everything) == len(CASES_OF_TESTS)
    for name, parts in (("one", 3), ("other", 4)):
        own = [{case for case in taken(str(turn)) if f"test_{name}[" in case} for turn in range(parts)]
        assert set().union(*own) == {case for case in everything if f"test_{name}[" in case}
        assert sum(map(len, own)) == CASES and {len(part) for part in own} <= {CASES // parts, CASES // parts + 1}
    assert all("a.py::test_always" in taken(seed) for seed in ("0", "1", "abc"))


def test_a_part_has_every_value() -> None:
    """Also of a parameter whose values cycle along the cases."""
    for turn in range(3):
        assert {case[-2] for case in taken(str(turn)) if "test_one" in case} == set("012345")


def test_a_cover_has_every_pair_and_the_rest_rotates() -> None:
    every = list(product(range(5), range(3), range(2)))
    cases: Any = [Case(f"a.py::test_it[{a}-{b}-{c}]", 4, "covering", a=a, b=b, c=c) for a, b, c in every]

    def taken(seed: str) -> set[tuple[int, ...]]:
        return {tuple(case.callspec.indices.values()) for case in rotation.divided(cases, seed)[0]}

    always = set.intersection(*(taken(str(turn)) for turn in range(4)))
    for one, other in combinations(range(3), 2):
        assert {(case[one], case[other]) for case in always} == {(case[one], case[other]) for case in every}
    assert len(always) <= 16 and set().union(*(taken(str(turn)) for turn in range(4))) == set(every)
    assert {len(taken(str(turn)) - always) for turn in range(4)} <= {len(every) - len(always) >> 2, 4}


def test_a_cover_of_two_parameters_has_every_value() -> None:
    """A parameter that repeats another one, for example of the same decorator, adds no requirement."""
    every = list(product(range(4), range(3)))
    cases: Any = [Case(f"a.py::test_it[{a}-{b}]", 4, "covering", a=a, again=a, b=b) for a, b in every]
    always = [case.callspec.indices for case in rotation.cover(cases)]
    assert len(always) == 4
    assert {own["a"] for own in always} == {0, 1, 2, 3} and {own["b"] for own in always} == {0, 1, 2}


def test_commits_select_parts_and_every_case_runs_within_a_few() -> None:
    commits = [f"{number:040x}" for number in range(10**39, 10**39 + 24)]
    assert taken(commits[0]) == taken(commits[0])
    assert len({frozenset(taken(commit)) for commit in commits}) > 6
    assert set().union(*map(taken, commits)) == taken(rotation.ALL)


def config(*, everything: bool = False, named: bool = False, keyword: str = "") -> Any:
    sources = pytest.Config.ArgsSource
    return SimpleNamespace(
        getoption=lambda name: everything,
        args_source=sources.ARGS if named else sources.TESTPATHS,
        option=SimpleNamespace(keyword=keyword),
    )


def test_what_determines_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "commit", lambda: "f00")
    monkeypatch.delenv(rotation.VARIABLE)
    assert rotation.seed_of_run(config()) == "f00"
    for asked in (config(everything=True), config(named=True), config(keyword="lists")):
        assert rotation.seed_of_run(asked) == rotation.ALL
    monkeypatch.setenv(rotation.VARIABLE, "2")
    assert rotation.seed_of_run(config()) == "2" and rotation.seed_of_run(config(everything=True)) == rotation.ALL
    monkeypatch.delenv(rotation.VARIABLE)
    monkeypatch.setattr(rotation, "commit", lambda: "")
    assert rotation.seed_of_run(config()) == rotation.ALL


def test_the_commit_is_gits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rotation.commit()
    assert not found or (len(found) >= 40 and set(found) <= set("0123456789abcdef"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert rotation.commit() == ""


def test_no_folder_is_left_out_of_collection(pytestconfig: pytest.Config) -> None:
    """By default pytest does not look into folders with names such as "build"."""
    folders = {path.parent for path in Path(__file__).parent.rglob("test_*.py")}
    patterns = pytestconfig.getini("norecursedirs")
    left_out = [folder for folder in folders for pattern in patterns if fnmatch(folder.name, pattern)]
    assert len(folders) > 20 and not left_out
