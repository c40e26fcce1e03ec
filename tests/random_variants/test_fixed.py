"""Random variants that are the same in each run."""

from __future__ import annotations

from hypothesis import given, settings

from random_variants.cases import Case, Options, cases
from random_variants.running import PLAIN, checked


@settings(PLAIN, max_examples=60, derandomize=True)
@given(cases(Options()))
def test_fixed_variants(case: Case) -> None:
    checked(case, "python -m pytest tests/random_variants/test_fixed.py")
