"""Compares the kernels of variants with the oracle on a GPU or the emulator, for `flashgen verify` and the tests."""

from flashgen.verify.check import Result, judged, verify
from flashgen.verify.gradients import gradients_by_name, judged_gradients, random_gradients
from flashgen.verify.problems import CaptureMaker, Inputs, Shape, random_inputs
from flashgen.verify.variants import (
    Case,
    Variant,
    all_cases,
    cases_of,
    learned,
    learned_variants,
    named_cases,
    ragged_cases,
    shard_cases,
    sink_cases,
    spec_of,
    stepping_cases,
    variants,
)

__all__ = [
    "CaptureMaker",
    "Case",
    "Inputs",
    "Result",
    "Shape",
    "Variant",
    "all_cases",
    "cases_of",
    "gradients_by_name",
    "judged",
    "judged_gradients",
    "learned",
    "learned_variants",
    "named_cases",
    "ragged_cases",
    "random_gradients",
    "random_inputs",
    "shard_cases",
    "sink_cases",
    "spec_of",
    "stepping_cases",
    "variants",
    "verify",
]
