"""Decoding combined with sinks and with seeds in memory, over every kind of cache; refusals of varlen batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import attention
from flashgen.codegen.mma_sync.decode_plans import DecodePlan
from flashgen.codegen.stages import kernels_of
from flashgen.codegen.targets import target_named
from flashgen.errors import ArgumentError, FlashgenError, SpecError, UnsupportedError
from flashgen.verify.check import judged
from flashgen.verify.problems import Shape, poisoned_outputs, random_inputs

SINKS = fg.Tensor("sinks", "float32", 1)
PLAN = DecodePlan(16, 32, 2, 2)
SHAPE = Shape(3, 200, 2, 4, 2)
STORED: tuple[dict[str, Any], ...] = ({}, {"page_size": 16}, {"kv_dtype": "int8"}, {"page_size": 8, "kv_dtype": "int8"})
stored = pytest.mark.parametrize("how", STORED, ids=str)


def sinks_of(shape: Shape, random: np.random.Generator) -> dict[str, Any]:
    """Sinks that count as much as a score, dominate all scores, have no effect, and have little effect."""
    return {"sinks": np.array([0.5, 12.0, -np.inf, -3.0], np.float32)}


def assert_right(spec: fg.AttentionSpec, shape: Shape, splits: int | None, **given: Any) -> None:
    compiled = attention.compile(spec, target="sm_80", emulate=True, plan=PLAN)
    inputs = random_inputs(spec, shape, captures=sinks_of)
    found = poisoned_outputs(spec, inputs.q)
    arrays = (inputs.q, inputs.k, inputs.v)
    compiled(*arrays, out=found, return_lse=True, num_splits=splits, **inputs.captures, **given)
    verdict = judged(spec, *arrays, *found, inputs.captures, **given)
    assert verdict.ok, f"{splits} splits of {shape}: {verdict}"


@pytest.mark.parametrize("splits", [None, 1, 3, 40])
@stored
@pytest.mark.covering(6)
def test_a_sink_counts_once(how: dict[str, Any], splits: int | None) -> None:
    """For any number of warps and blocks per row; also with a score function, whose scores are not scaled."""
    for more in ({}, {"score": fg.softcap(5.0)}):
        assert_right(fg.AttentionSpec(32, mask=fg.sliding_window(150), sink=SINKS, **how, **more), SHAPE, splits)


@pytest.mark.parametrize("splits", [1, 3])
def test_sinks_of_rows_without_keys(splits: int) -> None:
    """The output is 0, and the LSE is the sink."""
    spec = fg.AttentionSpec(32, mask=fg.trace_mask(lambda b, h, q, k: (k < 70) & (h != 0)), sink=SINKS)
    assert_right(spec, SHAPE, splits)
    assert_right(spec, Shape(2, 0, 2, 4, 2), splits)


def test_sinks_of_rows_that_are_dropped() -> None:
    assert_right(fg.AttentionSpec(32, mask=fg.causal(), sink=SINKS, dropout=0.3), SHAPE, 3, seed=7)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_prompts_over_pages_with_sinks(target: str) -> None:
    """The forward kernel also reads pages."""
    spec = fg.AttentionSpec(32, mask=fg.causal(), sink=SINKS, page_size=16)
    compiled = attention.compile(spec, target=target, emulate=True)
    inputs = random_inputs(spec, Shape(90, 130, 2, 4, 2), captures=sinks_of)
    arrays = (inputs.q, inputs.k, inputs.v)
    found = compiled(*arrays, return_lse=True, **inputs.captures)
    assert judged(spec, *arrays, *found, inputs.captures).ok


@stored
def test_a_seed_in_memory(how: dict[str, Any]) -> None:
    """Bit for bit the dropout of the same number, read at each call."""
    spec = fg.AttentionSpec(32, mask=fg.causal(), dropout=0.5, **how)
    compiled = attention.compile(spec, target="sm_80", emulate=True)
    inputs, held = random_inputs(spec, SHAPE), np.zeros((), np.int64)
    outs = []
    for seed in (1, 2**40 + 3):
        held[...] = seed
        by_number, by_array = (
            compiled(inputs.q, inputs.k, inputs.v, seed=given, offset=5, num_splits=3, **inputs.captures)
            for given in (seed, held)
        )
        np.testing.assert_array_equal(by_array, by_number)
        outs.append(by_array)
    assert (outs[0] != outs[1]).any()


def test_packed_8_bit_keys_are_refused() -> None:
    with pytest.raises(
        SpecError, match="kv_dtype='int8' is not supported for layout='thd' without pages: declare page_"
    ):
        fg.AttentionSpec(32, layout="thd", kv_dtype="int8")
    assert fg.AttentionSpec(32, layout="thd", kv_dtype="int8", page_size=16).page_size == 16


def test_varlen_calls_refuse_num_splits() -> None:
    spec = fg.AttentionSpec(32, layout="thd")
    compiled = attention.compile(spec, target="sm_80", emulate=True)
    q = np.zeros((8, 2, 32), np.float16)
    begins = np.array([0, 3, 8], np.int32)
    with pytest.raises(UnsupportedError, match="num_splits is not supported for layout='thd': leave it out"):
        compiled(q, q, q, cu_seqlens_q=begins, num_splits=2)
    for name in ("page_table", "k_scale"):
        with pytest.raises(ArgumentError, match=f"{name}: the spec has no"):
            compiled(q, q, q, cu_seqlens_q=begins, **{name: begins})
        with pytest.raises(ArgumentError, match=f"{name} is not supported for layout='thd'"):
            fg.reference.attention(spec, q, q, q, cu_seqlens_q=begins, **{name: begins})


def test_varlen_batches_have_no_decode_kernel() -> None:
    spec = fg.AttentionSpec(32, layout="thd")
    with pytest.raises(FlashgenError, match="layout='thd': the decode kernel takes no varlen batches"):
        attention.compile(spec, target="sm_80", emulate=True, plan=PLAN)
    with pytest.raises(UnsupportedError, match="layout='thd': the decode kernel takes no varlen batches"):
        kernels_of(spec, target_named("sm_80"), ("decode",))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_seqused_k_needs_pages_or_varlen(layout: str) -> None:
    spec = fg.AttentionSpec(32, layout=layout)
    compiled = attention.compile(spec, target="sm_80", emulate=True)
    q = np.zeros((1, 2, 2, 32), np.float16)
    with pytest.raises(ArgumentError, match="seqused_k is of varlen batches and pages"):
        compiled(q, q, q, seqused_k=np.array([1], np.int32))
