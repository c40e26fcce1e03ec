"""The suite's kernels by the numerics rule: on the emulator and its sanitizers, and at larger lengths on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from families import entries
from families.entry import Entry
from flashgen.verify import Case, Shape, spec_of, verify
from gym_shapes import DTYPES, EMULATED_SHAPES, LARGE_LENGTH, LARGE_SHAPES, LENGTH, named

SMALL, LARGE = entries(LENGTH), entries(LARGE_LENGTH)

# One of each kind of code: ranges, lists by head and batch, captures of every shape, rows without keys, bit operations.
COVERING = {
    *("bottom_right_causal", "dilated", "per_token_window", "document_window", "shared_prefix", "batchify_window"),
    *("block_diffusion", "tree_decoding", "neighbourhood_wide", "neighbourhood_morton_wide", "sliding_tile_3d"),
    *("temporal", "flamingo", "variable_blocks", "block_sparse_25", "relative_table", "bias_b11k", "low_rank_bias"),
    *("t5_log", "checkerboard", "document_causal+alibi"),
}


def assert_agrees(entry: Entry, shapes: tuple[Shape, ...], head_dim: int, dtype: str, **engine: Any) -> None:
    spec = spec_of(entry.variant, head_dim, dtype)
    for result in verify([Case(spec, shape, entry.captures) for shape in shapes], **engine):
        assert result.ok, f"{entry.name} {result.case} on {result.engine}: {result.problem or result.verdict}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", SMALL, ids=named)
@pytest.mark.rotated(9)
def test_on_the_emulator(entry: Entry, dtype: str) -> None:
    assert_agrees(entry, EMULATED_SHAPES, 16, dtype, emulate=True)


@pytest.mark.slow
@pytest.mark.parametrize("entry", [entry for entry in SMALL if entry.name in COVERING], ids=named)
@pytest.mark.rotated(36)
def test_address_and_undefined_behaviour_sanitizers_find_nothing(entry: Entry) -> None:
    assert_agrees(entry, EMULATED_SHAPES[1:], 40, "float16", emulate=True, sanitize="address")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", LARGE, ids=named)
@pytest.mark.quick_every(25)
def test_on_a_gpu(entry: Entry, dtype: str, head_dim: int) -> None:
    assert_agrees(entry, LARGE_SHAPES, head_dim, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "number", [n for n, entry in enumerate(LARGE) if entry.name in COVERING], ids=lambda n: LARGE[n].name
)
@pytest.mark.quick_every(5)
def test_the_other_family_on_a_gpu(number: int, other_target: str) -> None:
    assert_agrees(LARGE[number], LARGE_SHAPES, (64, 128)[number // 2 % 2], DTYPES[number % 2], target=other_target)


def test_the_covering_set_names_existing_variants() -> None:
    assert {entry.name for entry in SMALL} >= COVERING
