"""Variants against the oracle, on this machine's GPU or on the emulator: what `flashgen verify` and the tests run."""

from flashgen.verify.check import Result, judged, verify
from flashgen.verify.problems import Inputs, Shape, random_inputs
from flashgen.verify.variants import Case, all_cases, cases_of, named_cases, variants

__all__ = [
    "Case",
    "Inputs",
    "Result",
    "Shape",
    "all_cases",
    "cases_of",
    "judged",
    "named_cases",
    "random_inputs",
    "variants",
    "verify",
]
