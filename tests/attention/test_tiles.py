"""`attention.tiles` agrees with the kernels: lists contain its classes, and loops visit exactly its tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.analysis.tile_classes import EMPTY, FULL, PARTIAL
from flashgen.attention import Attention
from flashgen.attention import callable as callable_module
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.stages import Kernels, forward_kernels
from flashgen.codegen.targets import TARGETS
from flashgen.errors import ArgumentError
from flashgen.launch.engines import Emulator
from flashgen.verify import Shape, random_inputs

PLAN = ForwardPlan(32, 32, 2)
EQUAL, RAGGED = Shape(100, 100, 2, 4, 2), Shape(70, 150, 2, 2, 2)

LISTED = {
    "document": (fg.document("ids"), EQUAL),
    "document of each batch": (fg.document(fg.Tensor("ids", "int32", 2)) & fg.causal(), EQUAL),
    "block sparse": (fg.block_sparse("layout", 32, 32), RAGGED),
    "small blocks": (fg.block_sparse("layout", 16, 8), RAGGED),
    "blocks of each batch and head": (fg.block_sparse(fg.Tensor("layout", "bool", 4), 64, 16), RAGGED),
    "by head": (fg.trace_mask(lambda b, h, q, k: (q + k) % (h + 2) == 0), RAGGED),
    "by batch": (fg.trace_mask(lambda b, h, q, k: (q + k) % (b + 17) == 0), RAGGED),
    "two windows": (fg.trace_mask(lambda b, h, q, k: (abs(q - k) <= 8) | (abs(q - k + 90) < 8)), RAGGED),
    "nothing": (fg.document("ids") & fg.trace_mask(lambda b, h, q, k: k < 0), EQUAL),
}
RANGED = {
    "full": fg.full(),
    "causal": fg.causal(),
    "causal from the top": fg.causal(align="top_left"),
    "window": fg.sliding_window(40),
    "window of two sides": fg.sliding_window(30, 20),
    "window at the call": fg.sliding_window(fg.Scalar("window")),
    "dilated": fg.causal() & fg.dilated_window(64, 4),
    "prefix": fg.prefix_lm(50),
    "window of each sequence": fg.trace_mask(lambda b, h, q, k: abs(q - k) <= 20 * (b + 1)),
}


def compiled_with(mask: fg.Mask, plan: ForwardPlan = PLAN) -> Attention:
    return attention.compile(fg.AttentionSpec(16, mask=mask), emulate=True, plan=plan)


@pytest.mark.parametrize(
    "plan", [PLAN, ForwardPlan(64, 32, 4), ForwardPlan(32, 64, 2)], ids=["32x32", "64x32", "32x64"]
)
@pytest.mark.parametrize("name", LISTED)
@pytest.mark.covering(6)
def test_lists_equal_the_classes(name: str, plan: ForwardPlan) -> None:
    mask, shape = LISTED[name]
    compiled = compiled_with(mask, plan)
    inputs = random_inputs(compiled.spec, shape, seed=3)
    sizes = (shape.len_q, shape.len_k, shape.batch, shape.heads_q)
    tiles = compiled.tiles(*sizes, **inputs.captures)
    listed = compiled.tile_lists(*sizes, **inputs.captures).tile_map().classes
    assert tiles.tile == (plan.tile_q, plan.tile_k) and listed.shape == tiles.classes.shape
    np.testing.assert_array_equal(listed != EMPTY, tiles.classes != EMPTY)
    # A tile that extends beyond len_q or len_k may be called partial although each of its elements counts, never the
    # reverse.
    assert (tiles.classes[listed == FULL] == FULL).all()
    whole = np.s_[..., : shape.len_q // plan.tile_q, : shape.len_k // plan.tile_k]
    np.testing.assert_array_equal(listed[whole], tiles.classes[whole])


@pytest.mark.parametrize("name", LISTED)
def test_listed_masks_give_the_right_output(name: str, right: Any) -> None:
    mask, shape = LISTED[name]
    compiled = compiled_with(mask)
    inputs = random_inputs(compiled.spec, shape, seed=3)
    out, lse = compiled(inputs.q, inputs.k, inputs.v, return_lse=True, **inputs.captures)
    right(compiled.spec, inputs, out, lse)


def test_lists_are_built_for_each_call(right: Any) -> None:
    compiled = compiled_with(fg.document("ids"))
    inputs = random_inputs(compiled.spec, EQUAL)
    for documents in (1, 3, 100):
        ids = (np.arange(100) * documents // 100).astype(np.int32)
        out, lse = compiled(inputs.q, inputs.k, inputs.v, ids=ids, return_lse=True)
        right(compiled.spec, type(inputs)(inputs.q, inputs.k, inputs.v, {"ids": ids}), out, lse)


NOTES = fg.Tensor("notes", "float32", 1)


def visited_classes(
    mask: fg.Mask, inputs: Any, shape: tuple[int, ...], numbers: dict[str, Any]
) -> np.ndarray[Any, Any]:
    """Records the iterations of the forward kernel in a captured array, by a planted line."""
    spec = fg.AttentionSpec(16, mask=mask, score=lambda s, b, h, q, k: s + NOTES[0] * 0.0)
    _, heads, tiles_q, tiles_k = shape
    row = f"(work.batch * {heads} + work.head) * {tiles_q} + work.first_query / kTileQ"
    place = f"({row}) * {tiles_k} + first_key / kTileK"
    whole = "tiles.full(step)" if mask != fg.full() else "first_key + kTileK <= arguments.len_k"
    note = f"const_cast<float*>(arguments.notes)[{place}] += {whole} ? {FULL} : {PARTIAL};"
    mark = "const int first_key = tiles.first_key(step);\n"

    def render(*how: Any, plan: Any) -> Kernels:
        kernels = forward_kernels(*how, plan=plan)
        source = kernels["forward"].source
        assert source.count(mark) == 1
        noted = source.replace(mark, f"{mark}    if (threadIdx.x == 0) {note}\n")
        return {**kernels, "forward": replace(kernels["forward"], source=noted)}

    with mock.patch.object(callable_module, "forward_kernels", render):
        compiled = Attention(spec, TARGETS["sm_80"], Emulator(), PLAN)
    notes = np.zeros(np.prod(shape), np.float32)
    compiled(inputs.q, inputs.k, inputs.v, notes=notes, **numbers)
    return notes.reshape(shape)


@pytest.mark.rotated(9)
@pytest.mark.parametrize("lengths", [(70, 150), (150, 70), (128, 128), (1, 97), (97, 1)], ids=str)
@pytest.mark.parametrize("name", RANGED)
def test_loops_visit_exactly_the_tiles(name: str, lengths: tuple[int, int]) -> None:
    compiled = compiled_with(RANGED[name])
    inputs = random_inputs(compiled.spec, Shape(*lengths, 2, 2, 1))
    numbers = {"window": 33} if compiled.spec.captures else {}
    tiles = compiled.tiles(*lengths, batch=2, heads=2, **numbers)
    shape = (2, 2, *tiles.classes.shape[2:])
    visited = visited_classes(RANGED[name], inputs, shape, numbers)
    np.testing.assert_array_equal(visited, np.broadcast_to(tiles.classes, shape))


def test_tiles_need_exactly_the_captures_of_the_mask() -> None:
    spec = fg.AttentionSpec(16, mask=fg.sliding_window(fg.Scalar("window")), score=fg.alibi("slopes"))
    compiled = attention.compile(spec, emulate=True, plan=PLAN)
    assert compiled.tiles(100, window=10).classes.shape == (1, 1, 4, 4)
    with pytest.raises(Exception, match="window"):
        compiled.tiles(100)
    assert (
        compiled.tiles(100, window=10, slopes=np.ones(2)).classes == compiled.tiles(100, 100, window=10).classes
    ).all()


LENGTHS = np.array([10, 130, 190, 200], np.int32)


def test_the_map_has_as_many_sequences_as_the_captures() -> None:
    compiled = attention.compile(
        fg.AttentionSpec(64, mask=fg.prefix_lm(fg.Tensor("lengths", "int32", 1))), emulate=True
    )
    tiles = compiled.tiles(200, lengths=LENGTHS)
    assert tiles.classes.shape[:2] == (4, 1)
    for number, length in enumerate(LENGTHS):
        alone = compiled.tiles(200, lengths=np.array([length], np.int32))
        np.testing.assert_array_equal(tiles.of(number), alone.of())
    np.testing.assert_array_equal(compiled.tiles(200, batch=2, lengths=LENGTHS).classes, tiles.classes[:2])
    np.testing.assert_array_equal(tiles.at(2).classes, tiles.classes[2:3])
    with pytest.raises(ArgumentError, match="batch=4 is not in this map"):
        tiles.at(4)


def test_the_map_has_as_many_heads_as_the_captures() -> None:
    layout = np.random.default_rng(1).random((1, 3, 4, 4)) < 0.5
    mask = fg.block_sparse(fg.Tensor("layout", "bool", 4), 64, 64)
    compiled = attention.compile(fg.AttentionSpec(64, mask=mask), emulate=True)
    assert compiled.tiles(256, layout=layout).classes.shape[:2] == (1, 3)
    both = compiled.tiles(256, layout=np.repeat(layout, 2, axis=0))
    assert both.classes.shape[:2] == (2, 3) and both.at(head=1).classes.shape[:2] == (2, 1)
    assert compiled.tiles(256, heads=6, layout=layout[:, :1]).classes.shape[:2] == (1, 6)  # one layout for all


def test_captures_of_different_batches_are_refused() -> None:
    ids, lengths = fg.Tensor("ids", "int32", 2), fg.Tensor("lengths", "int32", 1)
    compiled = attention.compile(fg.AttentionSpec(64, mask=fg.document(ids) & fg.prefix_lm(lengths)), emulate=True)
    given = {"ids": np.zeros((3, 200), np.int32), "lengths": LENGTHS}
    with pytest.raises(ArgumentError, match="different numbers of batch: 'ids' 3, 'lengths' 4"):
        compiled.tiles(200, **given)
    assert compiled.tiles(200, batch=3, **given).classes.shape[0] == 3
