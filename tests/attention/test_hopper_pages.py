"""Prompts over pages with Hopper's forward kernel: correct on the emulator for every size and mask, and on an H200."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import attention
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.mma_sync.decode_plans import DecodePlan
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.runtime.schedule import Schedule
from flashgen.verify import variants
from flashgen.verify.check import judged
from flashgen.verify.problems import Inputs, Shape, poisoned_outputs, random_inputs
from flashgen.verify.variants import spec_of
from paged import SEED, WRONG, assert_right, call, with_pages

SIZES = (8, 16, 32, 64, 128, 256)
CAUSAL = fg.AttentionSpec(64, mask=fg.causal(), page_size=16)
# By the number of column panels per copy: one of K and V, several of both, several of K only.
KINDS = {
    "single": CAUSAL,
    "joined": fg.AttentionSpec(128, value_dim=96, mask=fg.causal(), page_size=16),
    "both": fg.AttentionSpec(80, value_dim=64, mask=fg.causal(), page_size=16),
}
kinds = pytest.mark.parametrize("kind", KINDS)
PLAN = HopperPlan(2, 48, takes_turns=True)
VARIANTS = [variant for variant in variants() if not variant.equal]
DIMS = (64, 128, 40, 96, 32, 256, 80, 192, 8, 160)


@pytest.mark.rotated(36)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("plan", [PLAN, HopperPlan(1, 80, 3), HopperPlan(3, 128), HopperPlan(1, 256, 1)], ids=str)
def test_prompts_over_pages_of_every_size(size: int, plan: HopperPlan) -> None:
    """Tiles within a page, over several pages, and across page borders; sequences shorter than the queries."""
    spec = fg.AttentionSpec(64, value_dim=40, mask=fg.sliding_window(50, 20), score=fg.alibi("slopes"), page_size=size)
    assert_right(spec, Shape(130, 300, 2, 4, 2), plan=plan, schedule=Schedule("random", "late", seed=size))


@pytest.mark.rotated(3)
@pytest.mark.parametrize("len_k", [1, 15, 16, 17, 32, 47, 48, 49, 64, 95, 96, 97, 144])
def test_lengths_around_page_and_tile_borders(len_k: int) -> None:
    """Unused rows of the last page are NaN, in K and V."""
    for number, size in enumerate((8, 16, 32)):
        schedule = Schedule("random", "random", seed=len_k + number)
        for mask in (fg.full(), fg.causal()):
            spec = fg.AttentionSpec(32, "bfloat16", value_dim=80, mask=mask, page_size=size)
            assert_right(spec, Shape(70, len_k, 3, 2, 1), plan=PLAN, seed=number, schedule=schedule)


@pytest.mark.slow
@pytest.mark.rotated(36)
@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=lambda number: VARIANTS[number].name)
def test_every_variant(number: int) -> None:
    """With the default plan; masks without a closed form visit all tiles over pages."""
    variant = VARIANTS[number]
    spec = spec_of(variant, DIMS[number % 10], ("float16", "bfloat16")[number // 10 % 2], ("bhsd", "bshd")[number % 2])
    shape = (Shape(130, 301, 1, 4, 2), Shape(64, 280, 2, 6, 2), Shape(200, 90, 2, 3, 1))[number % 3]
    spec = with_pages(spec, SIZES[number % 6])
    schedule = Schedule("random", "late", seed=number)
    assert isinstance(attention.compile(spec, target="sm_90a", emulate=True).plan, HopperPlan)
    assert_right(spec, shape, None, variant.captures, target="sm_90a", schedule=schedule)


@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize(
    ("kind", "size", "plan"),
    [
        ("single", 8, HopperPlan(1, 32)),
        ("single", 64, replace(PLAN, consumers=3)),
        ("joined", 16, HopperPlan(1, 32)),
        ("both", 8, HopperPlan(1, 48)),
    ],
    ids=str,
)
@pytest.mark.covering(3)
def test_under_sanitizers(sanitize: Any, kind: str, size: int, plan: HopperPlan) -> None:
    spec = with_pages(KINDS[kind], size)
    for how in ("late", "early"):
        schedule = Schedule("random", how, seed=5)
        assert_right(spec, Shape(70, 150, 3, 2, 1), plan=plan, sanitize=sanitize, schedule=schedule)


@pytest.mark.parametrize(("kind", "size"), [("single", 8), ("single", 64), ("joined", 16)])
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.covering(4)
def test_invalid_tables_are_clamped(what: str, kind: str, size: int) -> None:
    spec = with_pages(KINDS[kind], size)
    inputs = random_inputs(spec, Shape(70, 150, 3, 2, 1))
    for array in (inputs.k, inputs.v):
        np.nan_to_num(array, copy=False)
    table, lengths = WRONG[what](inputs.captures["page_table"], inputs.captures["seqused_k"], len(inputs.k))
    wrong = {"page_table": table.astype(np.int32), "seqused_k": lengths.astype(np.int32)}
    compiled = attention.compile(spec, emulate=True, sanitize="address", plan=PLAN)
    found = call(compiled, Inputs(inputs.q, inputs.k, inputs.v, wrong))
    assert judged(spec, inputs.q, inputs.k, inputs.v, *found, wrong).ok


@kinds
def test_no_pages(kind: str) -> None:
    spec = KINDS[kind]
    k, v = (np.zeros((0, 16, 2, width), np.float16) for width in (spec.head_dim, spec.value_dim))
    q, lengths = np.ones((2, 4, 70, spec.head_dim), np.float16), np.array([5, 0], np.int32)
    compiled = attention.compile(spec, emulate=True, sanitize="address", plan=PLAN)
    for columns in (3, 0):
        table = np.zeros((2, columns), np.int32)
        out, lse = compiled(q, k, v, page_table=table, seqused_k=lengths, return_lse=True)
        assert not out.any() and np.isneginf(lse).all()


@pytest.mark.parametrize(("layout", "dim"), [("bhsd", 64), ("bshd", 64), ("bshd", 128), ("bhsd", 192)])
def test_pages_change_no_bit(layout: Any, dim: int) -> None:
    """Compared with a call over contiguous keys with the same plan, for every page size."""
    plain = fg.AttentionSpec(dim, mask=fg.causal(), score=fg.softcap(20), layout=layout)
    inputs = random_inputs(plain, Shape(130, 256, 2, 4, 2))
    expected = call(attention.compile(plain, emulate=True, plan=PLAN), inputs)
    for size in (8, 64):
        pages = [array.swapaxes(1, 2) if layout == "bhsd" else array for array in (inputs.k, inputs.v)]
        pages = [np.ascontiguousarray(array).reshape(-1, size, 2, dim) for array in pages]
        where = {
            "page_table": np.arange(len(pages[0]), dtype=np.int32).reshape(2, -1),
            "seqused_k": np.full(2, 256, np.int32),
        }
        found = call(
            attention.compile(with_pages(plain, size), emulate=True, plan=PLAN), Inputs(inputs.q, *pages, where)
        )
        for array, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize("dim", [64, 128])
def test_strides_of_tables_and_pages(dim: int) -> None:
    """A table that is a slice of a larger one, and pages that hold keys beside values."""
    spec = fg.AttentionSpec(dim, mask=fg.causal(), page_size=16)
    inputs = random_inputs(spec, Shape(70, 100, 3, 4, 2))
    both = np.ascontiguousarray(np.stack([inputs.k, inputs.v], 1))
    columns = inputs.captures["page_table"].shape[1]
    table = np.full((3, 40), -1, np.int32)
    table[:, :columns] = inputs.captures["page_table"]
    where = {"page_table": table[:, :columns], "seqused_k": inputs.captures["seqused_k"]}
    compiled = attention.compile(spec, emulate=True, sanitize="address", plan=PLAN)
    views = Inputs(inputs.q, both[:, 0], both[:, 1], where)
    for array, wanted in zip(call(compiled, views), call(compiled, inputs), strict=True):
        np.testing.assert_array_equal(array, wanted)


@kinds
def test_single_pages_and_heads_may_have_any_strides(kind: str) -> None:
    """Strides of a single head or page are never used and not passed to TMA."""
    inputs = random_inputs(KINDS[kind], Shape(70, 16, 1, 2, 1))
    page = inputs.captures["page_table"][0, 0]
    k, v = (
        np.lib.stride_tricks.as_strided(array[page], (1, *array.shape[1:]), (-6, array.strides[1], 10, 2))
        for array in (inputs.k, inputs.v)
    )
    where = {"page_table": np.zeros((1, 1), np.int32), "seqused_k": inputs.captures["seqused_k"]}
    compiled = attention.compile(KINDS[kind], emulate=True, plan=PLAN)
    for array, wanted in zip(call(compiled, Inputs(inputs.q, k, v, where)), call(compiled, inputs), strict=True):
        np.testing.assert_array_equal(array, wanted)


def test_pages_that_tma_does_not_support_are_refused() -> None:
    inputs = random_inputs(CAUSAL, Shape(70, 100, 2, 2, 1))
    compiled = attention.compile(CAUSAL, emulate=True, plan=PLAN)
    with pytest.raises(ArgumentError, match=r"k has strides .* TMA takes those from 0"):
        call(compiled, Inputs(inputs.q, inputs.k[::-1], inputs.v, inputs.captures))


def test_head_spacing_that_is_no_multiple_of_a_panel_is_refused() -> None:
    """If a copy has several panels, they are counted over all heads; k is a slice of a tensor with more columns."""
    spec = fg.AttentionSpec(128, page_size=16)
    inputs = random_inputs(spec, Shape(70, 100, 2, 4, 2))
    compiled = attention.compile(spec, emulate=True, plan=PLAN)
    for more, right in ((64, True), (8, False)):
        wide = np.zeros((*inputs.k.shape[:3], 128 + more), np.float16)
        wide[..., :128] = inputs.k
        views = Inputs(inputs.q, wide[..., :128], inputs.v, inputs.captures)
        if right:
            np.testing.assert_array_equal(call(compiled, views)[0], call(compiled, inputs)[0])
            continue
        with pytest.raises(ArgumentError, match=r"k has heads 136 elements apart.*multiples of 64.*target='sm_90'"):
            call(compiled, views)


@pytest.mark.parametrize("size", [8, 64])
def test_packed_heads(size: int) -> None:
    spec = with_pages(fg.AttentionSpec(64, "bfloat16", mask=fg.causal(), score=fg.alibi("slopes")), size)
    plan = replace(PLAN, tile_k=64, packed_heads=4)
    assert_right(spec, Shape(70, 150, 3, 8, 2), plan=plan, schedule=Schedule("random", "late", seed=size))


def test_dispatch_between_kernels() -> None:
    """Few queries split the keys; more queries run the forward, packed where that fills its tiles better."""
    compiled = attention.compile(CAUSAL, target="sm_90a", emulate=True)
    assert isinstance(compiled.plan_for(63, 1000, 2, 4, 2), DecodePlan)
    packed = compiled.plan_for(64, 1000, 4, 32, 8)
    assert isinstance(packed, HopperPlan) and packed.packed_heads == 4
    assert compiled.plan_for(64, 1000, 4, 8, 8) == compiled.plan and compiled.plan.packed_heads == 1
    small = attention.compile(with_pages(CAUSAL, 4), target="sm_90a", emulate=True)
    assert small.plan_for(64, 1000, 4, 32, 8) == small.plan, "mma.sync's kernel, which does not pack heads"


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"page_size": 4}, "page_size=4 is for the kernels of mma.sync; TMA copies 8 keys or more"),
        ({"page_size": 16, "layout": "thd"}, "page_size=16 is for the kernel of mixed batches: give a MixedPlan"),
    ],
)
def test_unsupported_pages_are_refused_by_name(how: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        attention.compile(fg.AttentionSpec(64, **how), target="sm_90a", emulate=True, plan=PLAN)


def test_calls_follow_the_lengths_on_the_device() -> None:
    """The contents of arrays are not cached, and counters are reset."""
    compiled = attention.compile(CAUSAL, emulate=True, plan=PLAN)
    first = random_inputs(CAUSAL, Shape(300, 100, 3, 4, 2))
    for lengths in ([100, 0, 3], [16, 17, 100], [0, 0, 0]):
        inputs = Inputs(first.q, np.nan_to_num(first.k), np.nan_to_num(first.v), dict(first.captures))
        inputs.captures["seqused_k"] = np.array(lengths, np.int32)
        inputs.captures["page_table"] = np.maximum(first.captures["page_table"], 0)
        assert judged(CAUSAL, inputs.q, inputs.k, inputs.v, *call(compiled, inputs), inputs.captures).ok


# ---- on a GPU


@pytest.fixture(scope="module")
def cupy() -> Any:
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("needs a GPU of compute capability 9.0")
    return cupy


def _right_on_a_gpu(
    cupy: Any, spec: fg.AttentionSpec, shape: Shape, captures: Any = None, plan: HopperPlan | None = None
) -> None:
    inputs = random_inputs(spec, shape, captures=captures)
    given = {name: cupy.asarray(value) if np.ndim(value) else value for name, value in inputs.captures.items()}
    dropout: dict[str, Any] = {"seed": SEED} if spec.dropout else {}
    out, lse = (cupy.asarray(array) for array in poisoned_outputs(spec, inputs.q))
    arrays = [cupy.asarray(array) for array in (inputs.q, inputs.k, inputs.v)]
    compiled = attention.compile(spec, target="sm_90a", plan=plan)
    compiled(*arrays, return_lse=True, out=(out, lse), **given, **dropout)
    found = (cupy.asnumpy(out), cupy.asnumpy(lse))
    verdict = judged(spec, inputs.q, inputs.k, inputs.v, *found, inputs.captures, **dropout)
    assert verdict.ok, f"{shape}: {verdict}"


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=lambda number: VARIANTS[number].name)
@pytest.mark.quick_every(8)
def test_every_variant_on_a_gpu(number: int, cupy: Any) -> None:
    variant = VARIANTS[number]
    plain = spec_of(variant, DIMS[number % 10], ("float16", "bfloat16")[number // 10 % 2], ("bhsd", "bshd")[number % 2])
    for size, shape in zip(SIZES, cycle((Shape(1000, 2000, 2, 8, 2), Shape(64, 1001, 16, 6, 2)))):
        _right_on_a_gpu(cupy, with_pages(plain, size), shape, variant.captures)


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("size", SIZES)
def test_every_size_on_a_gpu(size: int, cupy: Any) -> None:
    for number, len_k in enumerate((1, size, size + 1, 4000 - size, 4001)):
        plan = (None, PLAN, HopperPlan(3, 80), HopperPlan(2, 128), HopperPlan(1, 256, 1))[number]
        for dim in (64, 128):  # one column panel, and two that are copied together
            spec = fg.AttentionSpec(dim, "bfloat16", mask=(fg.causal(), fg.full())[number % 2], page_size=size)
            _right_on_a_gpu(cupy, spec, Shape(500, len_k, 9, 8, 2), plan=plan)


@pytest.mark.gpu
@pytest.mark.quick
def test_a_graph_replayed_with_other_lengths_and_pages(cupy: Any) -> None:
    compiled, inputs = attention.compile(CAUSAL, target="sm_90a"), random_inputs(CAUSAL, Shape(300, 3000, 8, 8, 2))
    q, k, v = (cupy.asarray(np.nan_to_num(array)) for array in (inputs.q, inputs.k, inputs.v))
    where = {name: cupy.asarray(array) for name, array in inputs.captures.items()}
    out = compiled(q, k, v, **where)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        compiled(q, k, v, out=out, **where)
        graph = stream.end_capture()
        for seed in range(10):
            random = np.random.default_rng(seed)
            where["page_table"].set(random.integers(-9, len(inputs.k) + 9, where["page_table"].shape).astype(np.int32))
            where["seqused_k"].set(random.integers(-5, 3100, 8).astype(np.int32))
            graph.launch(stream)
            stream.synchronize()
            expected = compiled(q, k, v, **where)
            stream.synchronize()
            assert (out == expected).all()
