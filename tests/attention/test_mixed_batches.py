"""Packed queries over pages: prompts and single queries in one launch, on the emulator and on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import attention, reference
from flashgen.attention.callable import Attention
from flashgen.codegen.hopper.mixed_plans import HopperMixedPlan
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.mma_sync.decode_plans import DecodePlan
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.mma_sync.mixed_plans import MixedPlan
from flashgen.errors import ArgumentError, SpecError, UnsupportedError
from flashgen.launch.engines import Emulator
from flashgen.runtime import emulator
from flashgen.runtime.schedule import Schedule
from flashgen.verify import variants
from flashgen.verify.check import judged
from flashgen.verify.problems import Inputs, Shape, poisoned_outputs, random_inputs
from flashgen.verify.variants import spec_of

CAUSAL = fg.AttentionSpec(64, mask=fg.causal(), page_size=16, layout="thd")
PLAN = MixedPlan(DecodePlan(16, 16, 2, 2, scheduled=True), ForwardPlan(32, 32, 2))
HOPPER = HopperMixedPlan(HopperPlan(2, 48, takes_turns=True), PLAN.few)  # two kernels
PLANS = (PLAN, HOPPER)
VARIANTS = [variant for variant in variants() if not variant.equal]
DIMS = (64, 128, 40, 96, 32, 256, 80, 192, 8, 160)
SEED = 7
Lengths = tuple[tuple[int, int], ...]
MIXTURES: dict[str, Lengths] = {
    "a prompt among single queries": ((1, 300), (1, 17), (150, 300), (1, 1), (1, 160)),
    "prompts alone": ((64, 64), (200, 250), (65, 300)),
    "single queries alone": ((1, 300), (1, 16), (1, 15), (1, 0), (1, 32)),
    "few queries, up to one less than a prompt": ((63, 100), (7, 300), (2, 2), (15, 16)),
    "more queries than keys": ((100, 3), (9, 4), (64, 0), (1, 0)),
    "sequences without queries": ((0, 100), (1, 100), (0, 0), (0, 300), (70, 80), (0, 5)),
    "one of one": ((1, 1),),
    "none": (),
    "the last is long": ((1, 1), (1, 1), (1, 300)),
}


def inputs_of(spec: fg.AttentionSpec, lengths: Lengths, heads: tuple[int, int] = (4, 2), outside: int = 3) -> Inputs:
    """Sequences with (queries, keys) each, and rows of q before and after that belong to none; other keys are NaN."""
    random, size = np.random.default_rng(len(lengths)), spec.page_size or 1
    shape = Shape(1, max([keys for _, keys in lengths], default=0), len(lengths), *heads)
    paged = random_inputs(replace(spec, layout="bshd"), shape)
    inputs = Inputs(paged.q, paged.k, paged.v, dict(paged.captures))
    pages = random.permutation(sum(-(-keys // size) for _, keys in lengths) + 2).astype(np.int32)
    table = np.full((len(lengths), -(-shape.len_k // size) + 1), -7, np.int32)
    rows = {name: _rows(random, array, len(pages)) for name, array in (("k", paged.k), ("v", paged.v))}
    first = 0
    for number, (_, keys) in enumerate(lengths):
        count = -(-keys // size)
        table[number, :count] = pages[first : first + count]
        first += count
        if keys % size and not spec.kv_dtype:
            for array in rows.values():
                array[table[number, count - 1], keys % size :] = np.nan
    begins = outside + np.cumsum([0, *(queries for queries, _ in lengths)])
    q = random.standard_normal((begins[-1] + outside, heads[0], spec.head_dim), np.float32).astype(paged.q.dtype)
    where = {"page_table": table, "seqused_k": np.array([keys for _, keys in lengths], np.int32)}
    return Inputs(q, rows["k"], rows["v"], inputs.captures | where, {"cu_seqlens_q": begins.astype(np.int32)})


def _rows(random: np.random.Generator, like: Any, pages: int) -> Any:
    """Returns `count` pages of random rows with the shape of a given array of pages."""
    numbers = random.standard_normal((pages, *like.shape[1:]), np.float32)
    return (numbers * (40 if like.dtype.itemsize == 1 else 1)).astype(like.dtype)


def call(compiled: Attention, inputs: Inputs, **how: Any) -> tuple[Any, Any]:
    out, lse = poisoned_outputs(compiled.spec, inputs.q)
    given = {**inputs.captures, **inputs.ragged, **how}
    compiled(inputs.q, inputs.k, inputs.v, return_lse=True, out=(out, lse), **given)
    return out, lse


def assert_right(spec: fg.AttentionSpec, inputs: Inputs, **how: Any) -> None:
    dropout: dict[str, Any] = {"seed": SEED} if spec.dropout else {}
    found = call(attention.compile(spec, emulate=True, **how), inputs, **dropout)
    given = inputs.captures | inputs.ragged
    verdict = judged(spec, inputs.q, inputs.k, inputs.v, *found, given, **dropout)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("lengths", MIXTURES.values(), ids=list(MIXTURES))
@pytest.mark.parametrize(("order", "copies"), [("reverse", "early"), ("greedy_warp", "late"), ("random", "random")])
@pytest.mark.rotated(9)
def test_mixtures_and_thread_orders(lengths: Lengths, order: Any, copies: Any) -> None:
    """With the default plan, and with small tiles, so that there are many blocks of both kinds."""
    inputs, schedule = inputs_of(CAUSAL, lengths), Schedule(order, copies, seed=len(order))
    for plan in (None, *PLANS):
        assert_right(CAUSAL, inputs, plan=plan, schedule=schedule)


@pytest.mark.parametrize(
    "size", [1, 16, 128, *(pytest.param(size, marks=pytest.mark.rotated(8)) for size in (2, 4, 8, 32, 64, 256))]
)
def test_page_sizes(size: int) -> None:
    """Lengths at and around page borders."""
    lengths = ((1, size), (70, size + 1), (3, max(size - 1, 0)), (1, 2 * size), (66, 2 * size + 65))
    spec = replace(CAUSAL, page_size=size)
    for plan in (None, HOPPER)[: 2 if size >= 8 else 1]:
        assert_right(spec, inputs_of(spec, lengths), plan=plan)


@pytest.mark.parametrize(
    ("spec", "heads"),
    [
        (fg.AttentionSpec(64, page_size=1, layout="thd"), (3, 3)),
        (fg.AttentionSpec(64, mask=fg.sliding_window(70), score=fg.softcap(8.0), page_size=4, layout="thd"), (6, 2)),
        (fg.AttentionSpec(40, value_dim=72, mask=fg.causal(), page_size=256, layout="thd"), (4, 1)),
        (fg.AttentionSpec(128, "bfloat16", mask=fg.causal(), page_size=64, layout="thd"), (8, 1)),
        (fg.AttentionSpec(32, mask=fg.causal(align="top_left"), page_size=8, layout="thd"), (20, 1)),
        (fg.AttentionSpec(512, mask=fg.causal(), page_size=64, layout="thd"), (4, 2)),
        (fg.AttentionSpec(64, value_dim=264, score=fg.softcap(8.0), page_size=1, layout="thd"), (3, 1)),
        (fg.AttentionSpec(512, kv_dtype="int8", page_size=16, layout="thd"), (2, 1)),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
@pytest.mark.rotated(6)
def test_specs(spec: fg.AttentionSpec, heads: tuple[int, int]) -> None:
    """Tiles of rows of several queries and heads, and several such tiles with masks that need different keys."""
    for target in ("sm_75", "sm_80", "sm_90a" if spec.max_dim <= 256 else "sm_90"):
        if spec.dtype == "float16" or target != "sm_75":
            assert_right(spec, inputs_of(spec, ((1, 333), (9, 40), (70, 97), (1, 0), (33, 160)), heads), target=target)


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_8_bit_keys(kv_dtype: str) -> None:
    """Prompts also run the decode path, which is the only one with 8-bit keys."""
    spec = fg.AttentionSpec(64, mask=fg.causal(), page_size=16, kv_dtype=kv_dtype, layout="thd")
    compiled = attention.compile(spec, emulate=True)
    assert isinstance(compiled.plan, MixedPlan) and compiled.plan.prompt is None
    for name in ("a prompt among single queries", "more queries than keys", "sequences without queries"):
        assert_right(spec, inputs_of(spec, MIXTURES[name]), schedule=Schedule("random", "late", seed=1))


def test_sinks_and_rows_of_no_sequence() -> None:
    """A row without keys has the sink as LSE, and a row of no sequence -inf; both outputs are 0."""
    spec = replace(CAUSAL, sink=fg.Tensor("sinks", "float32", 1))
    inputs = inputs_of(spec, ((1, 0), (1, 100), (70, 80), (65, 0)), outside=70)
    inputs.captures["sinks"] = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    for plan in (None, HOPPER):
        assert_right(spec, inputs, plan=plan)
        out, lse = call(attention.compile(spec, emulate=True, plan=plan), inputs)
        assert np.isneginf(lse[:, :70]).all() and np.isneginf(lse[:, -70:]).all() and not out[:70].any()
        np.testing.assert_allclose(lse[:, 70], inputs.captures["sinks"], atol=1e-6)
        np.testing.assert_allclose(lse[:, 142], inputs.captures["sinks"], atol=1e-6)


def case_of(number: int, len_q: int, len_k: int) -> tuple[fg.AttentionSpec, Inputs]:
    """Returns a variant, cycling through dtypes and page sizes."""
    variant, heads = VARIANTS[number], ((4, 2), (6, 2), (3, 1))[number % 3]
    spec = spec_of(variant, DIMS[number % 10], ("float16", "bfloat16")[number // 10 % 2], "thd")
    spec = replace(spec, page_size=1 << number % 9)
    return spec, random_inputs(spec, Shape(len_q, len_k, 3, *heads), number, variant.captures)


@pytest.mark.slow
@pytest.mark.rotated(9)
@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=lambda number: VARIANTS[number].name)
def test_every_variant(number: int) -> None:
    """Rows that are no keys are NaN; includes dropout and masks without a closed form."""
    spec, inputs = case_of(number, (150, 5, 90)[number % 3], (280, 301, 90)[number % 3])
    for target in ("sm_80", "sm_90a"):
        assert_right(spec, inputs, target=target, schedule=Schedule("random", "late", seed=number))


@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("plan", [None, *PLANS], ids=["default", "small tiles", "two kernels"])
@pytest.mark.rotated(9)
def test_under_sanitizers(sanitize: Any, plan: MixedPlan | HopperMixedPlan | None) -> None:
    for number, name in enumerate(("a prompt among single queries", "sequences without queries")):
        schedule = Schedule("random", "late", seed=number)
        assert_right(CAUSAL, inputs_of(CAUSAL, MIXTURES[name]), plan=plan, sanitize=sanitize, schedule=schedule)


@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize(
    "options", [{"mask": fg.causal(), "page_size": 1}, {"kv_dtype": "int8", "page_size": 16}], ids=["causal", "int8"]
)
@pytest.mark.rotated(3)
def test_shared_tiles_under_sanitizers(options: Any, sanitize: Any) -> None:
    spec = fg.AttentionSpec(288, layout="thd", **options)
    inputs, schedule = inputs_of(spec, ((1, 60), (66, 70), (1, 0)), (2, 1)), Schedule("random", "late", seed=3)
    assert_right(spec, inputs, sanitize=sanitize, schedule=schedule)


def test_wide_heads_with_dropout_on_turing() -> None:
    """Sequences of few queries with a prompt among them, and one stage of keys."""
    spec = fg.AttentionSpec(256, dropout=0.2, page_size=16, layout="thd")
    assert_right(spec, inputs_of(spec, MIXTURES["a prompt among single queries"]), target="sm_75")


def test_more_sequences_than_threads_in_the_prefix_sum() -> None:
    random = np.random.default_rng(0)
    lengths = tuple((int(random.choice([0, 1, 1, 1, 3, 40])), int(random.integers(0, 40))) for _ in range(300))
    for plan in PLANS:
        assert_right(CAUSAL, inputs_of(CAUSAL, lengths, (1, 1)), plan=plan)


def test_prompts_among_more_sequences_than_a_warp_handles_at_once() -> None:
    random = np.random.default_rng(1)
    lengths = tuple((int(random.choice([0, 1, 65, 70, 100])), int(random.integers(0, 90))) for _ in range(90))
    assert_right(CAUSAL, inputs_of(CAUSAL, lengths, (1, 1)), plan=HOPPER)


def test_many_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """More work units than tiles; most units are empty, and one sequence spans dozens."""
    monkeypatch.setattr(Emulator, "multiprocessors", lambda self, device: 100)
    for lengths in (((1, 2400), (1, 5)), ((1, 1200), (300, 100))):
        for plan in PLANS:
            assert_right(CAUSAL, inputs_of(CAUSAL, lengths, (1, 1)), plan=plan)


@pytest.mark.parametrize("multiprocessors", [1, 2, 5])
def test_both_kinds_of_blocks_process_every_tile_once(multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing outputs stay NaN, whichever kind of block is in the majority."""
    monkeypatch.setattr(Emulator, "multiprocessors", lambda self, device: multiprocessors)
    for lengths in (((40, 40), (1, 300)), ((320, 320), (1, 20)), ((33, 40), (48, 64), (2, 100), (100, 100))):
        for plan in PLANS:
            assert_right(CAUSAL, inputs_of(CAUSAL, lengths), plan=plan)


@pytest.mark.parametrize("plan", PLANS, ids=["one kernel", "two"])
def test_a_prompt_has_the_same_bits_alone(plan: MixedPlan | HopperMixedPlan) -> None:
    """Its keys are not split; the paged forward with the same tiles gives the same bits."""
    inputs = inputs_of(CAUSAL, ((1, 100), (150, 300), (1, 17)), outside=0)
    found, lse = call(attention.compile(CAUSAL, emulate=True, plan=plan), inputs)
    alone = attention.compile(replace(CAUSAL, layout="bshd"), emulate=True, plan=plan.prompt)
    where = {name: array[1:2] for name, array in inputs.captures.items()}
    q = np.ascontiguousarray(inputs.q[None, 1:151])
    expected, expected_lse = alone(q, inputs.k, inputs.v, return_lse=True, **where)
    np.testing.assert_array_equal(found[1:151], expected[0])
    np.testing.assert_array_equal(lse[:, 1:151], expected_lse[0])


# ---- bounds of device values


@pytest.mark.rotated(3)
@pytest.mark.parametrize(
    "change",
    [
        lambda table, lengths, pages: (np.where(table >= 0, table + pages, table), lengths),
        lambda table, lengths, pages: (np.full_like(table, -(2**31)), lengths),
        lambda table, lengths, pages: (np.full_like(table, 2**31 - 1), lengths),
        lambda table, lengths, pages: (np.clip(table, 0, 0), lengths + 10**9),
        lambda table, lengths, pages: (table, lengths - 10**9),
    ],
    ids=["pages that are none", "negative pages", "the largest number", "lengths beyond", "negative lengths"],
)
def test_invalid_tables_are_clamped(change: Any) -> None:
    inputs = inputs_of(CAUSAL, MIXTURES["a prompt among single queries"])
    for array in (inputs.k, inputs.v):
        np.nan_to_num(array, copy=False)
    table, lengths = change(inputs.captures["page_table"], inputs.captures["seqused_k"], len(inputs.k))
    wrong = {"page_table": table.astype(np.int32), "seqused_k": lengths.astype(np.int32)}
    for plan in (None, *PLANS):
        changed = Inputs(inputs.q, inputs.k, inputs.v, wrong, inputs.ragged)
        assert_right(CAUSAL, changed, plan=plan, sanitize="address")


@pytest.mark.parametrize(
    "offsets",
    [(0, 100, 0, 100, 0, 154), (-5, 10**9, -(10**9), 3, 154, 200), (154, 0, 154, 0, 154, 0), (2**31 - 1,) * 6],
    ids=["fall", "leave", "turns", "largest"],
)
def test_invalid_offsets_access_nothing_outside(offsets: tuple[int, ...]) -> None:
    """Results are undefined, but the sanitizer checks accesses to q, the output, the LSE and the pages."""
    inputs = inputs_of(CAUSAL, MIXTURES["a prompt among single queries"], outside=0)
    inputs.ragged["cu_seqlens_q"] = np.array(offsets, np.int32)
    for plan in (None, *PLANS):
        call(attention.compile(CAUSAL, emulate=True, plan=plan, sanitize="address"), inputs)


@pytest.mark.parametrize("plan", PLANS, ids=["one kernel", "two"])
@pytest.mark.parametrize("most", [50, 66])
def test_bounds_of_lengths(plan: MixedPlan | HopperMixedPlan, most: int) -> None:
    """Queries beyond max_seqlen_q are not written, and keys beyond max_seqlen_k are not attended to."""
    inputs = inputs_of(CAUSAL, ((70, 100), (3, 90)), outside=0)
    compiled = attention.compile(CAUSAL, emulate=True, plan=plan)
    out, lse = call(compiled, inputs, max_seqlen_q=most, max_seqlen_k=80)
    shorter = Inputs(inputs.q[:most], inputs.k, inputs.v, dict(inputs.captures))
    shorter.captures["seqused_k"] = np.array([80, 80], np.int32)
    of_first = {"cu_seqlens_q": np.array([0, most, most], np.int32)}
    expected = reference.attention(CAUSAL, shorter.q, inputs.k, inputs.v, **shorter.captures, **of_first)
    assert np.abs(out[:most] - expected).max() < 2e-3
    assert np.isnan(out[most:70]).all() and np.isnan(lse[:, most:70]).all()


@pytest.mark.parametrize(("bound", "launches"), [(fg.MAX_DECODE_QUERIES, 1), (fg.MAX_DECODE_QUERIES + 1, 2)])
def test_bounds_that_leave_out_the_launch_of_prompts(
    bound: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(CAUSAL, ((3, 100), (40, 90), (30, 40)), outside=0)
    compiled = attention.compile(CAUSAL, emulate=True, target="sm_90a")
    seen = []
    launch = emulator.launch
    monkeypatch.setattr(emulator, "launch", lambda *given: (seen.append(given), launch(*given)))
    call(compiled, inputs, max_seqlen_q=bound)
    assert len(seen) == launches


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_empty_batches(target: str) -> None:
    compiled = attention.compile(CAUSAL, target=target, emulate=True, sanitize="address")
    pages, table = np.zeros((0, 16, 2, 64), np.float16), np.zeros((2, 3), np.int32)
    lengths, begins = np.array([5, 0], np.int32), np.array([0, 1, 70], np.int32)
    how = {"page_table": table, "seqused_k": lengths, "return_lse": True}
    q = np.ones((70, 4, 64), np.float16)
    out, lse = compiled(q, pages, pages, cu_seqlens_q=begins, **how)
    assert not out.any() and np.isneginf(lse).all()
    how["page_table"] = np.zeros((2, 0), np.int32)
    out, lse = compiled(q, pages, pages, cu_seqlens_q=begins, **how)
    assert not out.any() and np.isneginf(lse).all()
    out, lse = compiled(q[:0], pages, pages, cu_seqlens_q=np.zeros(3, np.int32), **how)
    assert out.shape == (0, 4, 64) and lse.shape == (4, 0)


@pytest.mark.parametrize("plan", PLANS, ids=["one kernel", "two"])
def test_calls_follow_the_lengths_on_the_device(plan: MixedPlan | HopperMixedPlan) -> None:
    """The contents of arrays are not cached."""
    compiled = attention.compile(CAUSAL, emulate=True, plan=plan)
    first = inputs_of(CAUSAL, ((40, 100), (20, 60), (10, 80)), outside=0)
    for array in (first.k, first.v):
        np.nan_to_num(array, copy=False)
    for begins, lengths in (((0, 70, 70, 70), (100, 0, 3)), ((0, 1, 2, 3), (16, 17, 100)), ((5, 6, 69, 70), (0, 9, 0))):
        first.captures["seqused_k"] = np.array(lengths, np.int32)
        first.ragged["cu_seqlens_q"] = np.array(begins, np.int32)
        first.captures["page_table"] = np.maximum(first.captures["page_table"], 0)
        given = first.captures | first.ragged
        assert judged(CAUSAL, first.q, first.k, first.v, *call(compiled, first), given).ok


# ---- refusals


def test_specs_and_json() -> None:
    assert fg.AttentionSpec.from_json(CAUSAL.to_json()) == CAUSAL and "thd-pages16" in CAUSAL.name
    with pytest.raises(SpecError, match="kv_dtype='int8' is not supported for layout='thd' without pages: declare"):
        fg.AttentionSpec(64, layout="thd", kv_dtype="int8")
    with pytest.raises(SpecError, match="that is an argument of each call"):
        fg.AttentionSpec(64, layout="thd", page_size=16, mask=fg.padding(fg.Tensor("cu_seqlens_q", "int32", 1)))


Q, PAGES = np.zeros((5, 4, 64), np.float16), np.zeros((5, 16, 2, 64), np.float16)
TABLE, LENGTHS, BEGINS = np.zeros((2, 3), np.int32), np.ones(2, np.int32), np.array([0, 1, 5], np.int32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"page_table": None}, "page_table is missing: the spec has page_size=16"),
        ({"seqused_k": None}, "seqused_k is missing"),
        ({"cu_seqlens_q": None}, r"cu_seqlens_q is missing: give int32 \(sequences \+ 1,\)"),
        ({"cu_seqlens_k": BEGINS}, "cu_seqlens_k: keys in pages have page_table and seqused_k; leave it out"),
        ({"page_table": TABLE[:1]}, r"page_table is int32 \(1, 3\); give int32 \(2, pages of a sequence\)"),
        ({"seqused_k": LENGTHS[:1]}, r"seqused_k is int32 \(1,\); give int32 \(2,\)"),
        ({"cu_seqlens_q": BEGINS.astype(np.int64)}, r"cu_seqlens_q is int64 \(3,\); give int32"),
        ({"q": Q[None]}, r"give 3 dimensions \(tokens, heads, dim\)"),
        ({"v": PAGES[:4]}, "every key of a page needs one value"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mismatched_arrays_are_refused(change: dict[str, Any], said: str) -> None:
    arrays = {"q": Q, "k": PAGES, "v": PAGES, "page_table": TABLE, "seqused_k": LENGTHS, "cu_seqlens_q": BEGINS}
    with pytest.raises(ArgumentError, match=said):
        attention.compile(CAUSAL, emulate=True)(**arrays | change)


def test_unsupported_options_are_refused() -> None:
    compiled = attention.compile(CAUSAL, emulate=True)
    arrays = {"page_table": TABLE, "seqused_k": LENGTHS, "cu_seqlens_q": BEGINS}
    with pytest.raises(UnsupportedError, match="num_splits is not supported for layout='thd'"):
        compiled(Q, PAGES, PAGES, num_splits=2, **arrays)
    with pytest.raises(UnsupportedError, match="decode_schedule is not supported for layout='thd'"):
        compiled.decode_schedule(page_table=TABLE, seqused_k=LENGTHS, heads=4)
    paged = attention.compile(replace(CAUSAL, layout="bshd"), emulate=True)
    schedule = paged.decode_schedule(page_table=TABLE, seqused_k=LENGTHS, heads=4, heads_kv=2)
    with pytest.raises(UnsupportedError, match="decode_schedule is not supported for layout='thd'"):
        compiled(Q, PAGES, PAGES, decode_schedule=schedule, **arrays)
    with pytest.raises(UnsupportedError, match="page_size=16: there is no backward of it"):
        compiled.backward_kernels
    for ask in (lambda: compiled.plan_for(64), lambda: compiled.tune(Q, PAGES, PAGES)):
        with pytest.raises(UnsupportedError, match="is not supported for layout='thd'"):
            ask()


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (ForwardPlan(64, 32, 4), "give a MixedPlan, or none"),
        (MixedPlan(DecodePlan(16, 16, 2, 2)), "few must be scheduled=True"),
        (MixedPlan(PLAN.few, ForwardPlan(64, 32, 4)), "few and prompt must have the same warps and blocks"),
        (MixedPlan(DecodePlan(16, 64, 16, 4, scheduled=True)), "bytes of shared memory"),
    ],
    ids=["kind", "schedule", "warps", "memory"],
)
def test_invalid_plans_are_refused(plan: Any, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        attention.compile(CAUSAL, target="sm_80", emulate=True, plan=plan)
    with pytest.raises(UnsupportedError, match=r"for varlen batches over pages|give a DecodePlan"):
        attention.compile(replace(CAUSAL, layout="bshd"), target="sm_80", emulate=True, plan=PLAN)


def test_hopper_launches_two_kernels() -> None:
    """One is for prompts and one for other sequences; only the latter is launched if there can be no prompts."""
    compiled = attention.compile(CAUSAL, target="sm_90a", emulate=True)
    assert isinstance(compiled.plan, HopperMixedPlan) and [each.role for each in compiled.kernels] == ["forward", "few"]
    for how in ({"page_size": 4}, {"kv_dtype": "int8"}):
        spec = replace(CAUSAL, **how)
        assert isinstance(attention.compile(spec, target="sm_90a", emulate=True).plan, MixedPlan)
        with pytest.raises(UnsupportedError, match=r"(is|are) for the kernels of mma\.sync"):
            attention.compile(spec, target="sm_90a", emulate=True, plan=HOPPER)
    with pytest.raises(UnsupportedError, match="give a MixedPlan, or none"):
        attention.compile(CAUSAL, target="sm_80", emulate=True, plan=HOPPER)
    unscheduled = replace(HOPPER, few=replace(PLAN.few, scheduled=False))
    with pytest.raises(UnsupportedError, match="few must be scheduled=True"):
        attention.compile(CAUSAL, target="sm_90a", emulate=True, plan=unscheduled)


def test_8_bit_keys_have_no_prompt_tiles() -> None:
    with pytest.raises(UnsupportedError, match="prompt must be None with kv_dtype='int8'"):
        attention.compile(replace(CAUSAL, kv_dtype="int8"), target="sm_80", emulate=True, plan=PLAN)


# ---- on a GPU


def on_gpu(cupy: Any, inputs: Inputs) -> tuple[list[Any], dict[str, Any]]:
    arrays = [cupy.asarray(array) for array in (inputs.q, inputs.k, inputs.v)]
    given = inputs.captures | inputs.ragged
    return arrays, {name: cupy.asarray(value) if np.ndim(value) else value for name, value in given.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=lambda number: VARIANTS[number].name)
@pytest.mark.quick_every(8)
def test_every_variant_on_a_gpu(number: int) -> None:
    cupy = pytest.importorskip("cupy")
    spec, inputs = case_of(number, (700, 5, 300)[number % 3], (2000, 4000, 1000)[number % 3])
    arrays, given = on_gpu(cupy, inputs)
    dropout: dict[str, Any] = {"seed": SEED} if spec.dropout else {}
    out, lse = (cupy.asarray(array) for array in poisoned_outputs(spec, inputs.q))
    attention.compile(spec)(*arrays, return_lse=True, out=(out, lse), **given, **dropout)
    found = (cupy.asnumpy(out), cupy.asnumpy(lse))
    verdict = judged(spec, inputs.q, inputs.k, inputs.v, *found, inputs.captures | inputs.ragged, **dropout)
    assert verdict.ok, str(verdict)


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("lengths", MIXTURES.values(), ids=list(MIXTURES))
def test_mixtures_on_a_gpu(lengths: Lengths, kv_dtype: str | None) -> None:
    """With torch's tensors, whose 8-bit types CuPy lacks."""
    torch = pytest.importorskip("torch")
    spec = fg.AttentionSpec(128, "bfloat16", mask=fg.causal(), page_size=16, kv_dtype=kv_dtype, layout="thd")
    longer = tuple((queries if queries < 64 else queries * 4, keys * 8) for queries, keys in lengths) * 3
    inputs, types = inputs_of(spec, longer, (8, 2)), {1: kv_dtype, 2: "bfloat16"}
    arrays = [
        torch.from_numpy(array.view(np.int8 if array.itemsize == 1 else np.int16))
        .cuda()
        .view(getattr(torch, str(types[array.itemsize])))
        for array in (inputs.q, inputs.k, inputs.v)
    ]
    given = {name: torch.from_numpy(value).cuda() for name, value in (inputs.captures | inputs.ragged).items()}
    out, lse = attention.compile(spec)(*arrays, return_lse=True, **given)
    found = (out.float().cpu().numpy().astype(inputs.q.dtype), lse.cpu().numpy())
    assert judged(spec, inputs.q, inputs.k, inputs.v, *found, inputs.captures | inputs.ragged).ok


def replays(cupy: Any, compiled: Attention, seed: int, rounds: int) -> None:
    """Checks that a captured graph, replayed with other offsets, lengths and pages, gives the results of a call."""
    random = np.random.default_rng(seed)
    inputs = inputs_of(CAUSAL, ((300, 900), *((1, 800),) * 6), (8, 2), outside=0)
    arrays, given = on_gpu(cupy, inputs)
    for array in arrays[1:]:
        array[...] = cupy.nan_to_num(array)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        out = compiled(*arrays, **given)
        stream.begin_capture()
        compiled(*arrays, out=out, **given)
        graph = stream.end_capture()
        for _ in range(rounds):
            cuts = np.sort(random.integers(0, 307, 6))
            given["cu_seqlens_q"].set(np.array([0, *cuts, 306], np.int32))
            given["seqused_k"].set(random.integers(0, 901, 7).astype(np.int32))
            given["page_table"].set(random.integers(0, len(inputs.k), given["page_table"].shape).astype(np.int32))
            out.fill(np.nan)
            graph.launch(stream)
            expected = compiled(*arrays, **given)
            stream.synchronize()
            np.testing.assert_array_equal(cupy.asnumpy(out), cupy.asnumpy(expected))
            told = {name: cupy.asnumpy(given[name]) for name in ("page_table", "seqused_k", "cu_seqlens_q")}
            wanted = reference.attention(CAUSAL, *(cupy.asnumpy(array) for array in arrays), **told)
            assert np.abs(cupy.asnumpy(out) - wanted).max() < 5e-3


@pytest.mark.gpu
@pytest.mark.quick
def test_a_graph_replayed_with_other_lengths() -> None:
    replays(pytest.importorskip("cupy"), attention.compile(CAUSAL), seed=0, rounds=10)


@pytest.mark.gpu
@pytest.mark.quick
def test_eight_threads_with_separate_graphs() -> None:
    cupy, compiled = pytest.importorskip("cupy"), attention.compile(CAUSAL)
    replays(cupy, compiled, seed=100, rounds=1)  # nothing may be compiled during capture
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(replays, cupy, compiled, seed, 3) for seed in range(8)]:
            done.result()
