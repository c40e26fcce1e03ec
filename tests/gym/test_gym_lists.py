"""The lists that generated kernels write for the suite equal brute force, tile by tile."""

from __future__ import annotations

import numpy as np
import pytest

from families import entries
from families.entry import Entry
from flashgen import attention
from flashgen.analysis.closed_forms.tile_ranges import key_range
from flashgen.attention.tile_lists import TileLister
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.targets import target_named
from flashgen.codegen.tile_list_kernel import render_lists
from flashgen.launch.engines import Emulator
from flashgen.runtime.schedule import Schedule
from flashgen.verify import Shape, spec_of
from gym_shapes import LARGE_LENGTH, LARGE_SHAPES, LENGTH, SHAPES, named
from tile_proofs import truth_of, whole


def wants_lists(entry: Entry) -> bool:
    return entry.mask is not None and key_range(entry.mask.expression) is None and "+" not in entry.name


LISTED = [entry for entry in entries(LENGTH) if wants_lists(entry)]
TILE = (32, 32)
PLAN = ForwardPlan(*TILE, warps=2, stages=1)


@pytest.mark.rotated(4)
@pytest.mark.parametrize("entry", LISTED, ids=named)
def test_lists_of_keys_are_exact(entry: Entry) -> None:
    compiled = attention.compile(spec_of(entry.variant, 16, "float16"), emulate=True, plan=PLAN)
    for shape in SHAPES:
        captures = mask_captures(entry, shape)
        lists = compiled.tile_lists(shape.len_q, shape.len_k, shape.batch, shape.heads_q, **captures)
        assert_exact(lists.tile_map().classes, entry, shape)


@pytest.mark.rotated(4)
@pytest.mark.parametrize("entry", LISTED, ids=named)
def test_lists_of_queries_are_exact(entry: Entry) -> None:
    spec = spec_of(entry.variant, 16, "float16")
    lister = TileLister(
        spec, render_lists(spec, target_named("sm_80"), PLAN, "queries"), Emulator(None, Schedule()), ""
    )
    for shape in SHAPES[:2]:
        captures = mask_captures(entry, shape)
        lists = lister.make(shape.len_q, shape.len_k, shape.batch, shape.heads_q, captures)
        assert_exact(lists.tile_map().classes, entry, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("entry", [entry for entry in entries(LARGE_LENGTH) if wants_lists(entry)], ids=named)
@pytest.mark.quick_every(4)
def test_lists_on_a_gpu_are_exact(entry: Entry) -> None:
    compiled = attention.compile(spec_of(entry.variant, 128, "bfloat16"))
    for shape in LARGE_SHAPES:
        captures = mask_captures(entry, shape)
        lists = compiled.tile_lists(shape.len_q, shape.len_k, shape.batch, shape.heads_q, **captures)
        assert_exact(lists.tile_map().classes, entry, shape, lists.tile)


def mask_captures(entry: Entry, shape: Shape) -> dict[str, object]:
    assert entry.mask is not None
    captures = entry.captures_for(shape)
    return {capture.name: captures[capture.name] for capture in entry.mask.captures}


def assert_exact(classes: np.ndarray, entry: Entry, shape: Shape, tile: tuple[int, int] = TILE) -> None:
    truth = truth_of(whole(entry, shape, entry.captures_for(shape)), tile, (False, True))
    wrong = np.argwhere(np.broadcast_to(classes, truth.shape) != truth)
    assert not len(wrong), (
        f"{shape}: {len(wrong)} tiles of {truth.size} differ, first (b, h, tile_q, tile_k) {wrong[0]}"
    )
