"""The table of mutants fits the code, and CONTRIBUTING.md shows it; `python tests/mutants` plants them, by hand."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"


def rows() -> list[str]:
    """The lines of CONTRIBUTING.md's table."""
    return [f"| {m.name} | `{m.file}` | {', '.join(f'`{test}`' for test in m.tests)} |" for m in MUTANTS]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_code(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.before) == 1, f"{mutant.before!r} does not stand once in {mutant.file}"
    changed = text.replace(mutant.before, mutant.after)
    assert changed != text
    if mutant.file.endswith(".py"):
        ast.parse(changed)


@pytest.mark.parametrize("test", sorted({test for mutant in MUTANTS for test in mutant.tests}))
def test_the_tests_that_kill_exist(test: str) -> None:
    path, _, name = test.partition("::")
    assert (ROOT / path).exists()
    assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8")


def test_the_table_of_contributing_is_this_one() -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8")
    assert "\n".join(rows()) in text, "give CONTRIBUTING.md these lines:\n" + "\n".join(rows())


def test_names_are_different() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
