"""Few queries over many keys: correct on the emulator, selected where intended, and run on a GPU."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import attention
from flashgen.attention import forward_dispatch
from flashgen.attention.callable import Attention
from flashgen.attention.forward_dispatch import ForwardKernels
from flashgen.codegen.mma_sync.decode_plans import DecodePlan
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.targets import target_named
from flashgen.errors import ArgumentError, BuildError, FlashgenWarning
from flashgen.launch.engines import Emulator
from flashgen.runtime.gpu import Card
from flashgen.runtime.schedule import Schedule
from flashgen.verify import variants
from flashgen.verify.check import judged
from flashgen.verify.problems import Inputs, Shape, poisoned_outputs, random_inputs
from flashgen.verify.variants import spec_of
from paged import call

CAUSAL = fg.AttentionSpec(64, mask=fg.causal())
PLAN = DecodePlan(16, 32, 2, 2)
VARIANTS = variants()
DIMS = (64, 128, 40, 96, 32, 256, 80, 192, 8, 160)
SEED = 7


def assert_right(
    spec: fg.AttentionSpec, shape: Shape, splits: int | None, captures: Any = None, target: str = "sm_80", **how: Any
) -> None:
    compiled = attention.compile(spec, target=target, emulate=True, **how)
    inputs, dropout = random_inputs(spec, shape, captures=captures), {"seed": SEED} if spec.dropout else {}
    out, lse = call(compiled, inputs, num_splits=splits, **dropout)
    verdict = judged(spec, inputs.q, inputs.k, inputs.v, out, lse, inputs.captures, **dropout)
    assert verdict.ok, f"{splits} splits of {shape}: {verdict}"


@pytest.mark.slow
@pytest.mark.rotated(36)
@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=lambda number: VARIANTS[number].name)
def test_every_variant(number: int) -> None:
    """With and without splits, with rows of several heads, partial tiles, and more rows than a tile has."""
    variant = VARIANTS[number]
    spec = spec_of(variant, DIMS[number % 10], ("float16", "bfloat16")[number // 10 % 2], ("bhsd", "bshd")[number % 2])
    shapes = (Shape(1, 301, 2, 4, 2), Shape(5, 280, 2, 6, 2), Shape(3, 300, 1, 3, 1), Shape(17, 270, 1, 4, 2))
    shape = Shape(290, 290, 1, 2, 1) if variant.equal else shapes[number % 4]
    for splits in (1, 3):
        assert_right(spec, shape, splits, variant.captures, schedule=Schedule("random", "late", seed=number))


@pytest.mark.parametrize("target", ["sm_75", "sm_86", "sm_90a"])
def test_targets(target: str) -> None:
    for dim in (64, 256):
        assert_right(fg.AttentionSpec(dim, mask=fg.causal()), Shape(3, 300, 1, 4, 2), 2, target=target)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("heads", [1, 3, 4])
def test_row_counts_around_tile_sizes(rows: int, heads: int) -> None:
    """Tiles begin and end within a query, the last rows are missing, and queries see different keys."""
    spec = fg.AttentionSpec(32, mask=fg.sliding_window(40), score=fg.alibi("slopes"))
    assert_right(spec, Shape(rows, 90, 2, 2 * heads, 2), 2, plan=PLAN)


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 16, 40])
@pytest.mark.parametrize(("order", "copies"), [("reverse", "early"), ("greedy_warp", "late"), ("random", "random")])
def test_numbers_of_splits_and_thread_orders(splits: int, order: Any, copies: Any) -> None:
    """As many tiles as splits, fewer, and more; a partial last tile."""
    assert_right(CAUSAL, Shape(2, 500, 1, 4, 2), splits, plan=PLAN, schedule=Schedule(order, copies, seed=splits))


@pytest.mark.parametrize("sanitize", [None, "address", "thread"])
def test_more_tiles_of_rows_than_resident_blocks(sanitize: Any) -> None:
    """Such calls use a kernel with other warps, without splits, whose number of warps is no power of two."""
    for number, keys in enumerate((301,) if sanitize else (256, 301, 700)):
        shape = Shape(3, keys, 5, 4, 2)
        compiled = attention.compile(CAUSAL, target="sm_90a", emulate=True)
        few, many = (compiled.plan_for(3, keys, batch, 4, 2) for batch in (4, 5))
        assert (few.part(CAUSAL), many.part(CAUSAL)) == ("decode", "decode_many")
        schedule = Schedule("random", "late", seed=number)
        assert_right(CAUSAL, shape, None, target="sm_90a", sanitize=sanitize, schedule=schedule)
        if sanitize is None:
            assert_right(CAUSAL, shape, 3, target="sm_90a", plan=many, schedule=schedule)


@pytest.mark.parametrize("sanitize", [None, "address", "thread"])
def test_few_tiles_of_many_keys(sanitize: Any) -> None:
    """Such calls use a kernel with larger tiles, for any number of splits; the last tile is partial."""
    compiled = attention.compile(CAUSAL, target="sm_90a", emulate=True)
    long = compiled.plan_for(1, 8201, 1, 6, 2)
    assert long.part(CAUSAL) == "decode_long"
    assert_right(CAUSAL, Shape(1, 8201, 1, 6, 2), None, target="sm_90a", sanitize=sanitize)
    for splits in (1, 3):
        schedule = Schedule("random", "late", seed=splits)
        assert_right(
            CAUSAL, Shape(3, 501, 1, 4, 2), splits, target="sm_90a", plan=long, sanitize=sanitize, schedule=schedule
        )


@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_under_sanitizers(sanitize: Any) -> None:
    schedule = Schedule("random", "late", seed=5)
    specs = (
        fg.AttentionSpec(64, mask=fg.causal(), score=fg.alibi("slopes")),
        fg.AttentionSpec(40, value_dim=72, mask=fg.document("ids"), dropout=0.2),
    )
    for spec in specs:
        for splits in (1, 3):
            assert_right(spec, Shape(3, 201, 2, 6, 2), splits, plan=PLAN, sanitize=sanitize, schedule=schedule)


@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_single_stage_plans_under_sanitizers(sanitize: Any) -> None:
    schedule = Schedule("random", "late", seed=6)
    for spec, plan in (
        (fg.AttentionSpec(64, mask=fg.causal()), DecodePlan(16, 32, 2, 1)),
        (fg.AttentionSpec(64, value_dim=96, dropout=0.2, kv_dtype="int8"), DecodePlan(16, 32, 3, 1)),
    ):
        for splits in (1, 3):
            assert_right(spec, Shape(3, 201, 2, 6, 2), splits, plan=plan, sanitize=sanitize, schedule=schedule)


def test_wide_heads_with_dropout_on_turing() -> None:
    """Two tiles of 32 keys, which dropout prefers, exceed the shared memory."""
    spec = fg.AttentionSpec(256, dropout=0.2)
    for splits in (1, 2):
        assert_right(spec, Shape(3, 90, 1, 4, 2), splits, target="sm_75")


def test_per_head_tile_lists() -> None:
    layout = fg.block_sparse(fg.Tensor("layout", "bool", 4), 16, 32)
    assert_right(fg.AttentionSpec(32, mask=layout), Shape(20, 300, 2, 4, 2), 3)


@pytest.mark.parametrize("lengths", [(0, 300), (3, 0)], ids=str)
def test_no_keys(lengths: tuple[int, int]) -> None:
    for splits in (None, 1, 4):
        assert_right(CAUSAL, Shape(*lengths, 2, 4, 2), splits)
        assert_right(CAUSAL, Shape(*lengths, 2, 4, 2), splits, plan=PLAN)


@pytest.mark.parametrize("splits", [1, 4])
def test_rows_without_keys_are_0_whatever_k_and_v_hold(splits: int) -> None:
    """Queries before the first key; splits whose keys are all masked; values that are NaN."""
    compiled = attention.compile(fg.AttentionSpec(32, mask=fg.padding("lengths")), emulate=True, plan=PLAN)
    inputs = random_inputs(compiled.spec, Shape(2, 300, 2, 2, 1))
    inputs.k[0, :, 70:], inputs.v[0, :, 96:] = np.nan, np.nan
    inputs.k[1], inputs.v[1] = np.nan, np.nan
    inputs.captures["lengths"] = np.array([70, 0], np.int32)
    out, lse = call(compiled, inputs, num_splits=splits)
    assert np.isfinite(out).all() and np.isfinite(lse[0]).all()
    assert not out[1].any() and np.isneginf(lse[1]).all()


def test_strides() -> None:
    """Views of a larger array, and queries that are broadcast over heads."""
    rows = np.random.default_rng(0).standard_normal((2, 4, 300, 3, 80)).astype(np.float16)[:, :, ::2]
    q, k, v = (rows[:, :, :, i, 8:72] for i in range(3))
    q, k, v = np.broadcast_to(q[:, :1, :3], (2, 4, 3, 64)), k[:, :1], v[:, :1]
    compiled = attention.compile(CAUSAL, emulate=True)
    contiguous = compiled(*map(np.ascontiguousarray, (q, k, v)), num_splits=2)
    np.testing.assert_array_equal(compiled(q, k, v, num_splits=2), contiguous)


# ---- bits


@pytest.mark.parametrize("splits", [1, 3])
def test_bits_do_not_depend_on_the_batch_or_the_thread_order(splits: int) -> None:
    inputs = random_inputs(CAUSAL, Shape(1, 300, 4, 4, 2))
    first = attention.compile(CAUSAL, emulate=True)
    out, lse = call(first, inputs, num_splits=splits)
    other = attention.compile(CAUSAL, emulate=True, schedule=Schedule("random", "random", seed=3))
    for number in range(4):
        alone = Inputs(*(array[number : number + 1] for array in (inputs.q, inputs.k, inputs.v)))
        own, own_lse = call(other, alone, num_splits=splits)
        np.testing.assert_array_equal(own[0], out[number])
        np.testing.assert_array_equal(own_lse[0], lse[number])


def test_counters_are_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[np.ndarray[Any, Any]] = []

    def counter(self: Emulator, place: Any, count: int) -> np.ndarray[Any, Any]:
        made.append(np.zeros(count, np.uint32))
        return made[-1]

    monkeypatch.setattr(Emulator, "counter", counter)
    compiled = attention.compile(CAUSAL, emulate=True)
    call(compiled, random_inputs(CAUSAL, Shape(9, 300, 2, 8, 2)), num_splits=5)
    (counters,) = made
    assert counters.shape == (2 * 2 * 2,) and not counters.any()
    call(compiled, random_inputs(CAUSAL, Shape(9, 300, 2, 8, 2)), num_splits=1)
    assert len(made) == 1, "one split needs no counters"


# ---- dispatch


def test_few_queries_over_many_keys_run_the_decode_kernel() -> None:
    compiled = attention.compile(CAUSAL, emulate=True)
    assert isinstance(compiled.plan, ForwardPlan)
    one, many = compiled.plan_for(1, 256, 2, 8, 2), compiled.plan_for(6, 256, 2, 8, 2)
    assert isinstance(one, DecodePlan) and isinstance(many, DecodePlan) and (one.tile_q, many.tile_q) == (16, 32)
    assert compiled.plan_for(1, 255, 2, 8, 2) == compiled.plan, "few keys"
    assert compiled.plan_for(33, 256, 2, 8, 8) == compiled.plan, "more queries than a tile has rows, on a busy card"
    assert compiled.plan_for(256, 256) == compiled.plan
    inputs = random_inputs(CAUSAL, Shape(1, 300, 2, 4, 2))
    np.testing.assert_allclose(call(compiled, inputs)[1], call(compiled, inputs, num_splits=3)[1], rtol=1e-5)


def test_an_idle_card_accepts_more_tiles_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Emulator, "card", lambda self, device: Card("large", multiprocessors=132))
    compiled = Attention(CAUSAL, target_named("sm_80"), Emulator())
    assert isinstance(compiled.plan_for(16, 8192, 1, 64, 8), DecodePlan)
    assert compiled.plan_for(16, 8192, 64, 64, 8) == compiled.plan


def test_a_plan_of_the_caller_is_used() -> None:
    forward = attention.compile(CAUSAL, emulate=True, plan=ForwardPlan(64, 32, 4))
    assert forward.plan_for(1, 300) == forward.plan
    decode = attention.compile(CAUSAL, emulate=True, plan=PLAN)
    assert decode.plan_for(500, 20) == PLAN == decode.plan
    assert_right(CAUSAL, Shape(70, 40, 1, 2, 1), None, plan=PLAN)
    with pytest.raises(ArgumentError, match=r"num_splits=2: fwd-sm80-.* does not split keys; compile without plan="):
        call(forward, random_inputs(CAUSAL, Shape(1, 300)), num_splits=2)


@pytest.mark.parametrize("splits", [0, -1, 1025, 1.5, True, "2"])
def test_invalid_numbers_of_splits(splits: Any) -> None:
    compiled = attention.compile(CAUSAL, emulate=True)
    with pytest.raises(ArgumentError, match=r"num_splits=.* must be an integer from 1 to 1024, or None"):
        call(compiled, random_inputs(CAUSAL, Shape(1, 300)), num_splits=splits)


def test_more_than_int32_rows_are_refused() -> None:
    compiled = attention.compile(CAUSAL, emulate=True, plan=PLAN)
    q = np.broadcast_to(np.zeros((1, 1, 1, 64), np.float16), (1, 8, 3 * 10**8, 64))
    k = np.zeros((1, 1, 3, 64), np.float16)
    with pytest.raises(ArgumentError, match=r"8 heads of 300000000 queries .* are too many for DecodePlan"):
        compiled(q, k, k)


def test_tile_lists_of_the_caller_fit_every_group_size() -> None:
    spec = fg.AttentionSpec(64, mask=fg.document("ids"))
    compiled = attention.compile(spec, emulate=True)
    inputs = random_inputs(spec, Shape(9, 300, 2, 8, 2))
    lists = compiled.tile_lists(9, 300, batch=2, heads=8, **inputs.captures)
    given = compiled(inputs.q, inputs.k, inputs.v, tile_lists=lists, **inputs.captures)
    np.testing.assert_array_equal(given, compiled(inputs.q, inputs.k, inputs.v, **inputs.captures))


def test_an_unavailable_decode_kernel_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Attention(CAUSAL, target_named("sm_90a"), Emulator())

    def refuse(*how: Any) -> None:
        raise BuildError(f"`{how[-1]}` would build it")

    monkeypatch.setattr(
        forward_dispatch, "ForwardKernels", type("Refused", (ForwardKernels,), {"build": staticmethod(refuse)})
    )
    said = r"^decode-.* would split the keys .*`flashgen show --pass decode --what resources --target sm_90a '"
    with pytest.warns(FlashgenWarning, match=said):
        assert compiled.plan_for(1, 300) == compiled.plan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled.plan_for(2, 300) == compiled.plan
    with pytest.raises(BuildError, match="show --pass decode"):
        call(compiled, random_inputs(CAUSAL, Shape(17, 300, 1, 2, 1)), num_splits=1)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=lambda number: VARIANTS[number].name)
@pytest.mark.quick_every(8)
def test_every_variant_on_a_gpu(number: int) -> None:
    cupy, variant = pytest.importorskip("cupy"), VARIANTS[number]
    spec = spec_of(variant, DIMS[number % 10], ("float16", "bfloat16")[number // 10 % 2], ("bhsd", "bshd")[number % 2])
    shapes = (Shape(1, 8191, 3, 8, 2), Shape(5, 4000, 2, 6, 2), Shape(3, 3000, 1, 3, 1), Shape(17, 2700, 1, 4, 2))
    shape = Shape(290, 290, 1, 2, 1) if variant.equal else shapes[number % 4]
    inputs = random_inputs(spec, shape, captures=variant.captures)
    arrays = [cupy.asarray(array) for array in (inputs.q, inputs.k, inputs.v)]
    captures = {name: cupy.asarray(value) if np.ndim(value) else value for name, value in inputs.captures.items()}
    dropout: dict[str, Any] = {"seed": SEED} if spec.dropout else {}
    compiled = attention.compile(spec)
    for splits in (None, 1, 2, 7, 64, 64):
        out, lse = (cupy.asarray(array) for array in poisoned_outputs(spec, inputs.q))
        compiled(*arrays, return_lse=True, out=(out, lse), num_splits=splits, **captures, **dropout)
        found = (cupy.asnumpy(out), cupy.asnumpy(lse))
        verdict = judged(spec, inputs.q, inputs.k, inputs.v, *found, inputs.captures, **dropout)
        assert verdict.ok, f"{splits} splits of {shape}: {verdict}"


@pytest.mark.gpu
@pytest.mark.quick
def test_split_counters_over_many_graph_replays() -> None:
    cupy = pytest.importorskip("cupy")
    inputs = random_inputs(CAUSAL, Shape(1, 5000, 4, 8, 2))
    q, k, v = (cupy.asarray(array) for array in (inputs.q, inputs.k, inputs.v))
    compiled, out = attention.compile(CAUSAL), cupy.empty_like(q)
    expected = compiled(q, k, v, num_splits=9)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        compiled(q, k, v, num_splits=9, out=out)
        graph = stream.end_capture()
        for _ in range(50):
            out.fill(float("nan"))
            graph.launch(stream)
            stream.synchronize()
            assert (out == expected).all()
