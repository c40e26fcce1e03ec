"""Decode of wide heads with more than 16 rows per KV head on sm_90a, by wgmma: results on the emulator and on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import attention
from flashgen.codegen.hopper.decode_plans import HopperDecodePlan
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.runtime.schedule import Schedule
from flashgen.verify import Case, verify
from flashgen.verify.check import judged
from flashgen.verify.problems import Inputs, Shape, random_inputs
from paged import WRONG, assert_right, call

LATENT: Mapping[str, Any] = {"head_dim": 576, "value_dim": 512, "shared_kv": True, "dtype": "bfloat16"}
SINK = fg.Tensor("sinks", "float32", 1)
CALLS: Mapping[str, tuple[dict[str, Any], Shape]] = {
    "128 heads": (dict(LATENT), Shape(1, 300, 1, 128, 1)),
    "96 heads": (dict(LATENT), Shape(1, 260, 1, 96, 1)),
    "two tokens": ({**LATENT, "mask": fg.causal()}, Shape(2, 400, 1, 24, 1)),
    "16 tokens": ({**LATENT, "mask": fg.causal(), "layout": "bshd"}, Shape(16, 260, 1, 6, 1)),
    "K = V": (
        {"head_dim": 512, "shared_kv": True, "sink": SINK, "mask": fg.sliding_window(90)},
        Shape(1, 300, 2, 20, 1),
    ),
    "apart": ({"head_dim": 512, "mask": fg.causal()}, Shape(3, 300, 1, 24, 2)),
    "score": ({"head_dim": 320, "score": fg.alibi("slopes"), "mask": fg.causal()}, Shape(3, 300, 1, 24, 2)),
    "odd dims": ({"head_dim": 264, "value_dim": 40, "out_dtype": "float32"}, Shape(3, 300, 2, 12, 1)),
    "padding": ({**LATENT, "mask": fg.padding("lengths")}, Shape(1, 300, 3, 24, 1)),
    "pages": ({**LATENT, "page_size": 64}, Shape(1, 300, 3, 128, 1)),
    "tokens over pages": ({**LATENT, "page_size": 64, "mask": fg.causal()}, Shape(2, 300, 3, 24, 1)),
    "one sequence over pages": ({**LATENT, "page_size": 64, "mask": fg.causal()}, Shape(20, 500, 1, 20, 1)),
    "small pages": ({"head_dim": 512, "shared_kv": True, "page_size": 16}, Shape(2, 300, 3, 24, 1)),
    "pages apart": (
        {"head_dim": 320, "page_size": 64, "sink": SINK, "score": fg.softcap(20.0)},
        Shape(5, 200, 3, 24, 2),
    ),
}


def _plan(options: Mapping[str, Any], shape: Shape) -> Any:
    compiled = attention.compile(fg.AttentionSpec(**options), target="sm_90a", emulate=True)
    return compiled.plan_for(shape.len_q, shape.len_k, shape.batch, shape.heads_q, shape.heads_kv)


@pytest.mark.rotated(15)
@pytest.mark.parametrize("sanitize", [None, "address", "thread"])
@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str, sanitize: Any) -> None:
    options, shape = CALLS[name]
    assert isinstance(_plan(options, shape), HopperDecodePlan)
    given: Any = {"target": "sm_90a", "emulate": True, "sanitize": sanitize, "schedule_count": 2 if sanitize else 1}
    for result in verify([Case(fg.AttentionSpec(**options), shape)], **given):
        assert result.ok, (result.problem, result.verdicts)


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("name", CALLS)
def test_calls_on_a_gpu(name: str) -> None:
    options, shape = CALLS[name]
    larger = Shape(shape.len_q, 17 * shape.len_k, 2 * shape.batch + 1, shape.heads_q, shape.heads_kv)
    for result in verify([Case(fg.AttentionSpec(**options), larger)]):
        assert result.ok, (result.problem, result.verdicts)


@pytest.mark.rotated(3)
@pytest.mark.parametrize("splits", [1, 2, 3, 20])
def test_any_number_of_splits(splits: int) -> None:
    """Also more splits than there are tiles of keys, some of which have no key."""
    spec = fg.AttentionSpec(320, shared_kv=True, mask=fg.causal(), sink=SINK)
    assert_right(spec, Shape(2, 300, 2, 24, 1), splits, plan=HopperDecodePlan(32), target="sm_90a")


def test_the_number_of_splits_decides_the_bits_of_a_sequence() -> None:
    spec = fg.AttentionSpec(320, shared_kv=True)
    compiled = attention.compile(spec, target="sm_90a", emulate=True)
    inputs = random_inputs(spec, Shape(1, 200, 3, 24, 1))
    whole, _ = call(compiled, inputs, num_splits=3)
    alone, _ = call(compiled, Inputs(inputs.q[1:2], inputs.k[1:2], None, {}), num_splits=3)
    assert np.array_equal(whole[1:2], alone)


@pytest.mark.rotated(8)
@pytest.mark.parametrize("len_k", [1, 31, 32, 33, 63, 64, 65, 129])
def test_lengths_around_page_and_tile_borders(len_k: int) -> None:
    """Unused rows of the last page are NaN."""
    for size in (8, 32, 64):
        spec = fg.AttentionSpec(320, shared_kv=True, mask=fg.causal(), page_size=size)
        schedule = Schedule("random", "random", seed=len_k)
        for scheduled in (False, True):
            plan = HopperDecodePlan(32, scheduled=scheduled)
            assert_right(spec, Shape(2, len_k, 3, 12, 1), plan=plan, schedule=schedule, target="sm_90a")


def test_a_schedule_of_other_lengths_still_gives_right_results() -> None:
    spec = fg.AttentionSpec(320, shared_kv=True, page_size=16)
    compiled = attention.compile(spec, target="sm_90a", emulate=True)
    inputs = random_inputs(spec, Shape(1, 300, 4, 24, 1))
    table, lengths = inputs.captures["page_table"], inputs.captures["seqused_k"]
    for stored in (lengths, np.full_like(lengths, 40), lengths[::-1].copy()):
        schedule = compiled.decode_schedule(1, page_table=table, seqused_k=stored, heads=24, heads_kv=1)
        assert isinstance(schedule.sizes.plan, HopperDecodePlan)
        found = call(compiled, inputs, decode_schedule=schedule)
        assert judged(spec, inputs.q, inputs.k, None, *found, inputs.captures).ok


@pytest.mark.parametrize("name", WRONG)
def test_nothing_outside_of_the_pages_is_read(name: str) -> None:
    """An invalid table or length gives some output, and no report of AddressSanitizer."""
    spec = fg.AttentionSpec(320, shared_kv=True, page_size=16)
    inputs = random_inputs(spec, Shape(1, 100, 3, 24, 1))
    table, lengths = WRONG[name](inputs.captures["page_table"], inputs.captures["seqused_k"], len(inputs.k))
    where = {"page_table": table.astype(np.int32), "seqused_k": lengths.astype(np.int32)}
    compiled = attention.compile(spec, target="sm_90a", emulate=True, sanitize="address")
    compiled(inputs.q, inputs.k, **where)


def test_which_calls_decode_by_wgmma() -> None:
    latent, paged = dict(LATENT), {**LATENT, "page_size": 64}
    for options, scheduled in ((latent, False), (paged, True)):
        assert _plan(options, Shape(1, 4096, 4, 128, 1)) == HopperDecodePlan(64, 3, scheduled)
        assert _plan(options, Shape(1, 4096, 4, 16, 1)) == HopperDecodePlan(64, 3, scheduled), "few rows"
    assert not isinstance(_plan(latent, Shape(1, 100, 4, 128, 1)), HopperDecodePlan), "a step or two"
    assert not isinstance(_plan(latent, Shape(4096, 4096, 8, 128, 1)), HopperDecodePlan), "a prompt fills the GPU"
    assert isinstance(_plan({**paged, "mask": fg.causal()}, Shape(500, 700, 1, 16, 1)), HopperDecodePlan)
    for options in ({"head_dim": 128}, {**latent, "dropout": 0.1}, {**latent, "mask": fg.document("ids")}):
        assert not isinstance(_plan(options, Shape(1, 4096, 4, 128, 1)), HopperDecodePlan)


@pytest.mark.parametrize(
    ("plan", "options", "said"),
    [
        (HopperDecodePlan(64), {"head_dim": 128}, "rows of more than 256 columns"),
        (HopperDecodePlan(64), {"head_dim": 320, "dropout": 0.1}, "dropout is for the decode kernel of mma.sync"),
        (HopperDecodePlan(64), {"head_dim": 320, "mask": fg.document("ids")}, "reads tile lists"),
        (HopperDecodePlan(64, 1), {"head_dim": 320, "shared_kv": True}, "stages=1 must be at least 2"),
        (HopperDecodePlan(40), {"head_dim": 320}, "multiple of 16"),
        (HopperDecodePlan(64, 2, True), {"head_dim": 320}, "scheduled=True needs a paged KV cache"),
        (HopperDecodePlan(64, 4), {"head_dim": 512}, "take fewer keys or stages"),
    ],
    ids=str,
)
def test_plans_that_do_not_fit(plan: HopperDecodePlan, options: dict[str, Any], said: str) -> None:
    with pytest.raises((UnsupportedError, ArgumentError), match=said):
        attention.compile(fg.AttentionSpec(**options), target="sm_90a", emulate=True, plan=plan)
