"""The table of mutants fits the code. `python tests/mutants` runs the mutants; that is done by hand."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_fit_the_code(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.before) == 1, f"{mutant.before!r} does not stand once in {mutant.file}"
    changed = text.replace(mutant.before, mutant.after)
    assert changed != text
    if mutant.file.endswith(".py"):
        ast.parse(changed)


@pytest.mark.parametrize("test", sorted({test for mutant in MUTANTS for test in mutant.tests}))
def test_the_named_tests_exist(test: str) -> None:
    path, _, name = test.partition("::")
    assert (ROOT / path).exists()
    assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8")


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
