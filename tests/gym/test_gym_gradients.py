"""The suite's backward by the numerics rule, with a gradient for every float array that a score function reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from families import entries
from families.entry import Entry
from flashgen.verify import Case, Shape, learned, spec_of, verify
from gym_shapes import DTYPES, EMULATED_SHAPES, LARGE_LENGTH, LARGE_SHAPES, LENGTH, named

SMALL, LARGE = entries(LENGTH), entries(LARGE_LENGTH)

# One of each kind of code: ranges and lists in both directions, gathers of every shape, rows without keys, derivatives.
COVERING = {
    *("bottom_right_causal", "dilated", "document_window", "block_diffusion", "tree_decoding", "neighbourhood_wide"),
    *("flamingo", "block_sparse_25", "relative_table", "bias_b11k", "low_rank_bias", "t5_log", "document_causal+alibi"),
}
COVERED = [number for number, entry in enumerate(SMALL) if entry.name in COVERING]


def assert_agrees(entry: Entry, shapes: tuple[Shape, ...], head_dim: int, dtype: str, **options: Any) -> None:
    variant = entry.variant
    if variant.score:
        variant = replace(variant, score=learned(variant.score))
    spec = spec_of(variant, head_dim, dtype)
    cases = [Case(spec, shape, entry.captures, lse_gradient=number % 2 == 0) for number, shape in enumerate(shapes)]
    for result in verify(cases, passes=("backward",), **options):
        assert result.ok, f"{entry.name} {result.case} on {result.engine}: {result.problem or result.verdicts}"


@pytest.mark.parametrize("number", range(len(SMALL)), ids=lambda number: SMALL[number].name)
@pytest.mark.rotated(9)
def test_on_the_emulator(number: int) -> None:
    assert_agrees(SMALL[number], EMULATED_SHAPES[1:], 16, DTYPES[number % 2], emulate=True)


@pytest.mark.parametrize("number", COVERED, ids=lambda number: SMALL[number].name)
@pytest.mark.rotated(36)
def test_the_deterministic_backward_on_the_emulator(number: int) -> None:
    options: dict[str, Any] = {"emulate": True, "deterministic": True, "schedule_count": 2}
    assert_agrees(SMALL[number], EMULATED_SHAPES[:1], 16, DTYPES[(number + 1) % 2], **options)


@pytest.mark.slow
@pytest.mark.parametrize("entry", [SMALL[number] for number in COVERED], ids=named)
@pytest.mark.rotated(36)
def test_address_and_undefined_behaviour_sanitizers_find_nothing(entry: Entry) -> None:
    """In both modes of the backward, at one shape each."""
    for deterministic, shape in enumerate(EMULATED_SHAPES[1:]):
        options: dict[str, Any] = {"emulate": True, "sanitize": "address", "deterministic": bool(deterministic)}
        assert_agrees(entry, (shape,), 40, "float16", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("number", range(len(LARGE)), ids=lambda number: LARGE[number].name)
@pytest.mark.quick_every(25)
def test_on_a_gpu(number: int, head_dim: int, deterministic: bool) -> None:
    assert_agrees(LARGE[number], LARGE_SHAPES, head_dim, DTYPES[number % 2], deterministic=deterministic)


def test_the_covering_set_names_existing_variants() -> None:
    assert {entry.name for entry in SMALL} >= COVERING
