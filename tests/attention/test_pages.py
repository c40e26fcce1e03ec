"""Keys and values in pages: correct on the emulator for every page size and for invalid tables, and on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from emitted_text import all_used, functions_fit, tidy
from flashgen import attention, reference
from flashgen.build import nvrtc
from flashgen.codegen.dispatch import render_forward_kernels
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.mma_sync.decode_plans import DecodePlan
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.targets import TARGETS
from flashgen.errors import ArgumentError, SpecError, UnsupportedError
from flashgen.runtime.schedule import Schedule
from flashgen.verify import variants
from flashgen.verify.check import judged
from flashgen.verify.problems import Inputs, Shape, poisoned_outputs, random_inputs
from flashgen.verify.variants import spec_of
from paged import SEED, WRONG, assert_right, call, with_pages

CAUSAL = fg.AttentionSpec(64, mask=fg.causal(), page_size=16)
VARIANTS = [variant for variant in variants() if not variant.equal]
DIMS = (64, 128, 40, 96, 32, 256, 80, 192, 8, 160)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@pytest.mark.parametrize(
    "size", [1, 16, 128, *(pytest.param(size, marks=pytest.mark.rotated(8)) for size in (2, 4, 8, 32, 64, 256))]
)
def test_page_sizes(size: int) -> None:
    """Pages smaller and larger than a step, lengths at and around borders; one split and several."""
    spec = with_pages(CAUSAL, size)
    for number, len_k in enumerate((size, 2 * size + 1, 300)):
        assert_right(spec, Shape(2, len_k, 3, 4, 2), (None, 1, 3)[number], seed=number)


@pytest.mark.slow
@pytest.mark.rotated(36)
@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=lambda number: VARIANTS[number].name)
def test_every_variant(number: int) -> None:
    """Includes masks without a closed form: there are no lists over pages."""
    variant = VARIANTS[number]
    spec = spec_of(variant, DIMS[number % 10], ("float16", "bfloat16")[number // 10 % 2], ("bhsd", "bshd")[number % 2])
    shape = (Shape(1, 301, 3, 4, 2), Shape(5, 280, 2, 6, 2), Shape(40, 90, 2, 3, 1))[number % 3]
    schedule = Schedule("random", "late", seed=number)
    assert_right(with_pages(spec, SIZES[number % 9]), shape, 1 + number % 3, variant.captures, schedule=schedule)


def test_wide_heads_with_dropout_on_turing() -> None:
    spec = fg.AttentionSpec(256, dropout=0.2, page_size=16)
    for splits in (None, 2):
        assert_right(spec, Shape(2, 90, 2, 4, 2), splits, target="sm_75")


def test_masks_over_pages_read_no_lists() -> None:
    for mask in (fg.document("ids"), fg.block_sparse(fg.Tensor("layout", "bool", 4), 16, 32)):
        compiled = attention.compile(fg.AttentionSpec(64, mask=mask, page_size=16), emulate=True)
        assert [kernel.role for kernel in compiled.kernels] == ["forward"]


def test_a_prompt_over_pages() -> None:
    """Queries fill several tiles of rows, with fewer and with more queries than keys."""
    for len_q in (70, 130):
        assert_right(CAUSAL, Shape(len_q, 100, 2, 4, 2))


@pytest.mark.rotated(3)
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("size", [4, 64])
def test_under_sanitizers(sanitize: Any, size: int) -> None:
    schedule = Schedule("random", "late", seed=5)
    for splits in (1, 3):
        assert_right(with_pages(CAUSAL, size), Shape(3, 150, 3, 4, 2), splits, sanitize=sanitize, schedule=schedule)


@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.parametrize("what", WRONG)
def test_invalid_tables_are_clamped(what: str, size: int) -> None:
    spec = with_pages(CAUSAL, size)
    inputs = random_inputs(spec, Shape(2, 150, 3, 4, 2))
    for array in (inputs.k, inputs.v):
        np.nan_to_num(array, copy=False)
    table, lengths = WRONG[what](inputs.captures["page_table"], inputs.captures["seqused_k"], len(inputs.k))
    wrong = {"page_table": table.astype(np.int32), "seqused_k": lengths.astype(np.int32)}
    compiled = attention.compile(spec, emulate=True, sanitize="address")
    out, lse = poisoned_outputs(spec, inputs.q)
    compiled(inputs.q, inputs.k, inputs.v, return_lse=True, out=(out, lse), num_splits=2, **wrong)
    assert judged(spec, inputs.q, inputs.k, inputs.v, out, lse, wrong).ok


def test_no_pages() -> None:
    pages = np.zeros((0, 16, 2, 64), np.float16)
    q, table = np.ones((2, 4, 1, 64), np.float16), np.zeros((2, 3), np.int32)
    compiled = attention.compile(CAUSAL, emulate=True, sanitize="address")
    lengths = np.array([5, 0], np.int32)
    out, lse = compiled(q, pages, pages, page_table=table, seqused_k=lengths, return_lse=True)
    assert not out.any() and np.isneginf(lse).all()
    none = np.zeros((2, 0), np.int32)
    out, lse = compiled(q, pages, pages, page_table=none, seqused_k=lengths, return_lse=True)
    assert not out.any() and np.isneginf(lse).all()


def test_pages_change_no_bit() -> None:
    """Compared with a call over contiguous keys with the same splits, for every page size."""
    plain = fg.AttentionSpec(64, mask=fg.causal())
    inputs = random_inputs(plain, Shape(2, 256, 2, 4, 2))
    expected = call(attention.compile(plain, emulate=True), inputs, num_splits=2)
    for size in (1, 16, 128):
        pages = [np.ascontiguousarray(array.swapaxes(1, 2)).reshape(-1, size, 2, 64) for array in (inputs.k, inputs.v)]
        where = {
            "page_table": np.arange(len(pages[0]), dtype=np.int32).reshape(2, -1),
            "seqused_k": np.full(2, 256, np.int32),
        }
        compiled = attention.compile(with_pages(plain, size), emulate=True)
        found = call(compiled, Inputs(inputs.q, *pages, where), num_splits=2)
        for array, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(array, wanted)


def test_strides_of_tables_and_pages() -> None:
    """A table that is a slice of a larger one, and pages that hold keys beside values."""
    inputs = random_inputs(CAUSAL, Shape(2, 100, 3, 4, 2))
    both = np.ascontiguousarray(np.stack([inputs.k, inputs.v], 1))
    table = np.full((3, 40), -1, np.int32)
    table[:, : inputs.captures["page_table"].shape[1]] = inputs.captures["page_table"]
    where = {
        "page_table": table[:, : inputs.captures["page_table"].shape[1]],
        "seqused_k": inputs.captures["seqused_k"],
    }
    compiled = attention.compile(CAUSAL, emulate=True, sanitize="address")
    views = Inputs(inputs.q, both[:, 0], both[:, 1], where)
    for array, wanted in zip(call(compiled, views), call(compiled, inputs), strict=True):
        np.testing.assert_array_equal(array, wanted)


def test_calls_follow_the_lengths_on_the_device() -> None:
    """The contents of arrays are not cached."""
    compiled = attention.compile(CAUSAL, emulate=True)
    first = random_inputs(CAUSAL, Shape(1, 100, 3, 4, 2))
    for lengths in ([100, 0, 3], [16, 17, 100], [0, 0, 0]):
        inputs = Inputs(first.q, np.nan_to_num(first.k), np.nan_to_num(first.v), dict(first.captures))
        inputs.captures["seqused_k"] = np.array(lengths, np.int32)
        inputs.captures["page_table"] = np.maximum(first.captures["page_table"], 0)
        assert judged(CAUSAL, inputs.q, inputs.k, inputs.v, *call(compiled, inputs), inputs.captures).ok


# ---- refusals


@pytest.mark.parametrize("size", [0, 3, 512, -16, 16.0, True, "16"])
def test_invalid_page_sizes(size: Any) -> None:
    with pytest.raises(SpecError, match=r"page_size=.* must be a power of 2 from 1 to 256"):
        fg.AttentionSpec(64, page_size=size)


def test_specs_and_json() -> None:
    assert fg.AttentionSpec.from_json(CAUSAL.to_json()) == CAUSAL and "pages16" in CAUSAL.name
    assert "page_size=16" in repr(CAUSAL) and '"page_size":16' in CAUSAL.to_json()
    assert "page_size" not in fg.AttentionSpec(64).to_json(), "the text of specs without pages does not change"
    for name in ("page_table", "seqused_k", "num_splits"):
        with pytest.raises(SpecError, match="already names an argument"):
            fg.Tensor(name, "int32", 1)


TABLE, LENGTHS = np.zeros((2, 3), np.int32), np.ones(2, np.int32)
Q, PAGES = np.zeros((2, 4, 1, 64), np.float16), np.zeros((5, 16, 2, 64), np.float16)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"page_table": None}, r"missing: the spec has page_size=16; give int32 \(batch, pages of a sequence\)"),
        ({"k": PAGES.swapaxes(1, 2)}, r"page_size=16: give \(pages, page_size, heads, dim\), of other orders a view"),
        ({"seqused_k": None}, "seqused_k is missing"),
        (
            {"page_table": TABLE.astype(np.int64)},
            r"page_table is int64 \(2, 3\); give int32 \(2, pages of a sequence\)",
        ),
        ({"page_table": TABLE[:1]}, r"page_table is int32 \(1, 3\)"),
        ({"page_table": np.zeros((2, 6), np.int32)[:, ::2]}, "page_table has strides .* must be contiguous"),
        ({"seqused_k": LENGTHS[:1]}, r"seqused_k is int32 \(1,\); give int32 \(2,\)"),
        ({"k": PAGES[:, :8], "v": PAGES[:, :8]}, "its second dimension must be page_size=16"),
        ({"v": PAGES[:4]}, "every key of a page needs one value"),
        ({"k": PAGES[..., :40]}, "its last dimension must be the spec's head_dim=64"),
        ({"k": PAGES[0]}, r"give 4 dimensions \(pages, page_size, heads, dim\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mismatched_arrays_are_refused(change: dict[str, Any], said: str) -> None:
    arrays = {"q": Q, "k": PAGES, "v": PAGES, "page_table": TABLE, "seqused_k": LENGTHS} | change
    with pytest.raises(ArgumentError, match=said):
        attention.compile(CAUSAL, emulate=True)(**arrays)


def test_tables_without_page_size_are_refused() -> None:
    plain = attention.compile(fg.AttentionSpec(64), emulate=True)
    with pytest.raises(ArgumentError, match="page_table: the spec has no pages; leave it out"):
        plain(Q, Q, Q, page_table=TABLE)
    with pytest.raises(ArgumentError, match="for specs with a page_size"):
        reference.attention(fg.AttentionSpec(64), Q, Q, Q, seqused_k=LENGTHS)


def test_unsupported_uses_of_pages() -> None:
    compiled = attention.compile(CAUSAL, emulate=True)
    said = "page_size=16: there is no backward of it; gather k and v, in float16"
    with pytest.raises(UnsupportedError, match=said):
        compiled.backward_kernels
    with pytest.raises(UnsupportedError, match=said):
        compiled.backward(Q, Q, PAGES, PAGES, Q, Q, page_table=TABLE, seqused_k=LENGTHS)
    with pytest.raises(UnsupportedError, match="page_size=16 is for the decode kernel: give a DecodePlan, or none"):
        attention.compile(CAUSAL, target="sm_80", emulate=True, plan=HopperPlan(2, 64))


# ---- prompts


@pytest.mark.parametrize(
    ("target", "size", "plan"), [("sm_80", 16, ForwardPlan), ("sm_90a", 4, ForwardPlan), ("sm_90a", 8, HopperPlan)]
)
def test_prompts_run_the_forward_kernel(target: str, size: int, plan: type[Any]) -> None:
    """The kernel of the target's family, or that of mma.sync where pages are too small for TMA."""
    compiled = attention.compile(with_pages(CAUSAL, size), target=target, emulate=True)
    assert isinstance(compiled.plan, plan)
    assert isinstance(compiled.plan_for(64, 100, 2, 4, 2), plan), "8 tiles on 3 multiprocessors"
    assert isinstance(compiled.plan_for(63, 100, 2, 4, 2), DecodePlan)
    assert isinstance(compiled.plan_for(64, 100, 1, 1, 1), DecodePlan), "a tile on 3 multiprocessors"


@pytest.mark.rotated(36)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "plan", [ForwardPlan(64, 32, 4), ForwardPlan(32, 48, 2, 2), ForwardPlan(128, 64, 4, 2)], ids=str
)
def test_prompts_over_pages_of_every_size(size: int, plan: ForwardPlan) -> None:
    """Tiles within a page, over several pages, and across page borders; sequences shorter than the queries."""
    spec = fg.AttentionSpec(64, value_dim=40, mask=fg.sliding_window(50, 20), score=fg.alibi("slopes"), page_size=size)
    assert_right(spec, Shape(130, 150, 2, 4, 2), plan=plan, schedule=Schedule("random", "late", seed=size))


@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_prompts_under_sanitizers(sanitize: Any) -> None:
    for size, plan in ((4, ForwardPlan(32, 32, 2)), (64, ForwardPlan(32, 32, 2, 2))):
        assert_right(with_pages(CAUSAL, size), Shape(70, 150, 3, 2, 1), plan=plan, sanitize=sanitize)


def test_prompts_with_invalid_tables() -> None:
    inputs = random_inputs(CAUSAL, Shape(70, 150, 3, 2, 1))
    for array in (inputs.k, inputs.v):
        np.nan_to_num(array, copy=False)
    for change in WRONG.values():
        table, lengths = change(inputs.captures["page_table"], inputs.captures["seqused_k"], len(inputs.k))
        wrong = {"page_table": table.astype(np.int32), "seqused_k": lengths.astype(np.int32)}
        compiled = attention.compile(CAUSAL, emulate=True, sanitize="address", plan=ForwardPlan(32, 32, 2))
        out, lse = call(compiled, Inputs(inputs.q, inputs.k, inputs.v, wrong))
        assert judged(CAUSAL, inputs.q, inputs.k, inputs.v, out, lse, wrong).ok


@pytest.mark.rotated(4)
@pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_86", "sm_120"])
def test_prompts_have_no_spills(target: str) -> None:
    dtype = "float16" if target == "sm_75" else "bfloat16"
    scores = (None, fg.softcap(20), fg.alibi("slopes"))
    for number, (dim, size) in enumerate(((128, 16), (64, 1), (96, 256))):
        mask = (fg.causal(), fg.sliding_window(1000, 0), fg.document("ids"))[number]
        spec = fg.AttentionSpec(dim, dtype, mask=mask, score=scores[number], page_size=size)
        (kernel,) = render_forward_kernels(spec, TARGETS[target])
        used = nvrtc.compile(kernel.source, kernel.target.architecture, kernel.name).resources
        assert used.spill_stores == used.spill_loads == used.stack_frame == 0, f"{kernel.name}: {used}"
        tidy(kernel.source)
        functions_fit(kernel)
        all_used(kernel)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=lambda number: VARIANTS[number].name)
@pytest.mark.quick_every(8)
def test_every_variant_on_a_gpu(number: int) -> None:
    cupy, variant = pytest.importorskip("cupy"), VARIANTS[number]
    plain = spec_of(variant, DIMS[number % 10], ("float16", "bfloat16")[number // 10 % 2], ("bhsd", "bshd")[number % 2])
    spec = with_pages(plain, SIZES[number % 9])
    shape = (Shape(1, 8191, 3, 8, 2), Shape(5, 4000, 2, 6, 2), Shape(200, 1000, 2, 3, 1))[number % 3]
    inputs = random_inputs(spec, shape, captures=variant.captures)
    arrays = [cupy.asarray(array) for array in (inputs.q, inputs.k, inputs.v)]
    captures = {name: cupy.asarray(value) if np.ndim(value) else value for name, value in inputs.captures.items()}
    dropout: dict[str, Any] = {"seed": SEED} if spec.dropout else {}
    compiled = attention.compile(spec)
    for splits in (None, 1, 7):
        out, lse = (cupy.asarray(array) for array in poisoned_outputs(spec, inputs.q))
        compiled(*arrays, return_lse=True, out=(out, lse), num_splits=splits, **captures, **dropout)
        found = (cupy.asnumpy(out), cupy.asnumpy(lse))
        verdict = judged(spec, inputs.q, inputs.k, inputs.v, *found, inputs.captures, **dropout)
        assert verdict.ok, f"{splits} splits of {shape}: {verdict}"


@pytest.mark.gpu
@pytest.mark.quick
def test_a_graph_replayed_with_other_lengths_and_pages() -> None:
    cupy = pytest.importorskip("cupy")
    compiled, inputs = attention.compile(CAUSAL), random_inputs(CAUSAL, Shape(1, 3000, 4, 8, 2))
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
            where["page_table"].set(random.integers(0, len(inputs.k), where["page_table"].shape).astype(np.int32))
            where["seqused_k"].set(random.integers(0, 3001, 4).astype(np.int32))
            graph.launch(stream)
            stream.synchronize()
            expected = compiled(q, k, v, **where)
            stream.synchronize()
            assert (out == expected).all()
