"""Mistakes in how Hopper's kernels divide a mixed batch, planted in emitted text; each must be noticed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from planting import Fault, named

import flashgen as fg
from flashgen.codegen.hopper.mixed_plans import HopperMixedPlan
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.mma_sync.decode_plans import DecodePlan
from flashgen.errors import LaunchError
from flashgen.launch.engines import Emulator
from flashgen.runtime.schedule import Schedule
from flashgen.verify import judged
from flashgen.verify.problems import Shape, poisoned_outputs, random_inputs

SPEC = fg.AttentionSpec(16, mask=fg.causal(), page_size=8, layout="thd")
PLAN = HopperMixedPlan(HopperPlan(1, 32), DecodePlan(16, 32, 2, 2, scheduled=True))
# (queries, keys): prompts of several tiles, of one, and without keys; more sequences than a warp looks at at once.
LENGTHS = ((1, 50), (150, 190), (63, 70), (64, 64), *((0, 3), (1, 9)) * 16, (70, 0), (130, 100))
OUTSIDE = 70
PLACES = 3  # for blocks, each of which takes several tiles
PROMPTS, FEW = "fwd-", "few-"


def call(source: dict[str, str] | None = None, sanitize: Any = None, schedule: Schedule | None = None) -> bool:
    """Whether a call is right, of kernels with these texts."""
    compiled = fg.compile(
        SPEC, "sm_90a", emulate=True, plan=PLAN, source=source, sanitize=sanitize, schedule=schedule or Schedule()
    )
    paged = fg.AttentionSpec(16, mask=fg.causal(), page_size=8, layout="bshd")
    inputs = random_inputs(paged, Shape(1, 190, len(LENGTHS), 6, 2), seed=1)
    for array in (inputs.k, inputs.v):
        np.nan_to_num(array, copy=False)
    begins = OUTSIDE + np.cumsum([0, *(queries for queries, _ in LENGTHS)])
    random = np.random.default_rng(2)
    q = random.standard_normal((begins[-1] + OUTSIDE, 6, 16), np.float32).astype(np.float16)
    given = {
        "cu_seqlens_q": begins.astype(np.int32),
        "page_table": np.maximum(inputs.captures["page_table"], 0),
        "seqused_k": np.array([keys for _, keys in LENGTHS], np.int32),
    }
    out, lse = poisoned_outputs(SPEC, q, inputs.v)
    with mock.patch.object(Emulator, "multiprocessors", lambda self, device: PLACES):
        compiled(q, inputs.k, inputs.v, return_lse=True, out=(out, lse), **given)
    return judged(SPEC, q, inputs.k, inputs.v, out, lse, given).ok


def planted(fault: Fault) -> dict[str, str]:
    """The kernels' texts with the mistake; its subject says in whose."""
    texts = fg.compile(SPEC, "sm_90a", emulate=True, plan=PLAN).sources
    (name,) = (name for name in texts if name.startswith(fault.subject))
    return texts | {name: fault.planted(texts[name])}


def test_the_call_without_a_mistake() -> None:
    for sanitize in (None, "address", "thread"):
        assert call(sanitize=sanitize, schedule=Schedule("greedy_warp", "late"))


WRONG = [
    Fault("keys of the sequence before", PROMPTS, r"seqused_k \+ number", "seqused_k + max(number - 1, 0)"),
    Fault("an LSE that begins with the first", PROMPTS, r"arguments\.lse \+= sequence\.first_q;"),
    Fault("a prompt of a query less", PROMPTS, r"len_q >= kPromptQueries", "len_q > kPromptQueries"),
    Fault("a sequence of none", FEW, r"len_q >= kPromptQueries", "len_q >= kPromptQueries - 1"),
    Fault(
        "a tile less", PROMPTS, r"is_prompt\(\) \? \(sequence\.len_q \+ kTileQ - 1\)", "is_prompt() ? (sequence.len_q)"
    ),
    Fault("no rows before the first sequence", PROMPTS, r"(number = static_cast<int>\(threadIdx\.x % 32\)) - 1", r"\1"),
    Fault(
        "no rows behind the last sequence", PROMPTS, r"if \(number > launched\.batch\)", "if (number >= launched.batch)"
    ),
    Fault("a lane too few summed", PROMPTS, r"if \(lane >= distance\) sum", "if (lane > distance) sum"),
    Fault("the sequence behind", PROMPTS, r"before \+ sum > place", "before + sum >= place"),
    Fault("sequences looked at before forgotten", PROMPTS, r"before \+= __shfl_sync\(0xffffffffu, sum, 31\);"),
    Fault("the first tile of a sequence", PROMPTS, r"tile = place - before - __shfl[^;]*;", "tile = 0;"),
    Fault("queries of another head", PROMPTS, r"first_head \+ rest % heads, launched\)", "first_head, launched)"),
    Fault("a tile that nobody takes", PROMPTS, r"gridDim\.x \+ atomicInc", "gridDim.x + 1 + atomicInc"),
]


@named(WRONG)
def test_a_wrong_number_is_caught_by_the_verdict(fault: Fault) -> None:
    try:
        assert not call(planted(fault))
    except LaunchError:  # what is read there may be worse than wrong, and a tile that there is not is waited for
        return


def test_a_number_that_lanes_read_before_it_is_there_is_caught_by_thread_sanitizer() -> None:
    fault = Fault("no syncwarp", PROMPTS, r"(kept = tiles;\s+)__syncwarp\(\);", r"\1")
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*data race"):
        call(planted(fault), sanitize="thread", schedule=Schedule("greedy_warp", "early"))


OUTSIDE_OF_ARRAYS = [
    Fault(
        "offsets that are not bounded",
        PROMPTS,
        r"return min\(max\((__ldg\([^;]*?\)), 0\), arguments\.total_q\);",
        r"return \1 + 999;",
    ),
    Fault(
        "a length that is not bounded",
        PROMPTS,
        r"min\(max\((__ldg\(arguments\.seqused_k[^;]*?\)), 0\), most\)",
        r"\1 + 9999",
    ),
]


@named(OUTSIDE_OF_ARRAYS)
def test_an_access_outside_is_caught_by_address_sanitizer(fault: Fault) -> None:
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*heap-buffer-overflow"):
        call(planted(fault), sanitize="address")
