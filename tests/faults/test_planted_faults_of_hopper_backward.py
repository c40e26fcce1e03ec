"""Mistakes planted in the emitted backward kernels of Hopper: each is caught, by the check that the table names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from planting import replaced_once

import flashgen.language as fg
from flashgen import attention
from flashgen.codegen.hopper.backward_plans import HopperBackwardPlan
from flashgen.codegen.hopper.wide_plans import HopperWidePlan
from flashgen.errors import LaunchError
from flashgen.runtime.schedule import Schedule
from flashgen.verify import Shape, gradients_by_name, judged_gradients, random_gradients, random_inputs
from flashgen.verify.gradients import poisoned_gradients
from flashgen.verify.variants import learned

LATE, EARLY, RANDOM = Schedule("in_order", "late"), Schedule("greedy_warp", "early"), Schedule("random", "random", 5)
SHAPE = Shape(330, 600, 1, 2, 1)  # several tiles either way, the last ones ragged, and a group of two query heads


@dataclass(frozen=True)
class Subject:
    """A backward pass, and the kernel of it that faults are planted in."""

    spec: fg.AttentionSpec
    part: str = "keys"
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    shape: Shape = SHAPE

    def compiled(self, **how: Any) -> attention.Attention:
        return attention.compile(self.spec, target="sm_90a", emulate=True, **self.options, **how)

    @property
    def source(self) -> str:
        return next(text for name, text in self.compiled().backward_sources.items() if f"-{self.part}-" in name)


SUBJECTS = {
    "keys": Subject(fg.AttentionSpec(64, mask=fg.causal()), options={"backward_plan": HopperBackwardPlan(64)}),
    "late": Subject(fg.AttentionSpec(64, mask=fg.causal())),
    "wide": Subject(fg.AttentionSpec(144, value_dim=136, mask=fg.causal())),
    # With more stages of Q than of q * k, whose places are not free by what Q's are.
    "wide, learned": Subject(
        fg.AttentionSpec(144, value_dim=136, mask=fg.causal(), score=learned(fg.softcap(20)(fg.alibi("slopes")))),
        options={"backward_plan": HopperWidePlan(32, 3)},
    ),
    "wide, dropped": Subject(
        fg.AttentionSpec(144, value_dim=136, mask=fg.causal(), score=fg.softcap(20), dropout=0.25),
        options={"backward_plan": HopperWidePlan(32, 3)},
    ),
    "queries": Subject(
        fg.AttentionSpec(64, mask=fg.causal()),
        "queries",
        {"deterministic": True, "backward_plan": HopperBackwardPlan(64)},
    ),
    "turns": Subject(fg.AttentionSpec(64), options={"backward_plan": HopperBackwardPlan(64, in_turns=True)}),
    "finished apart": Subject(
        fg.AttentionSpec(64, mask=fg.causal()), options={"backward_plan": HopperBackwardPlan(64, finish_apart=True)}
    ),
    "untouched": Subject(  # tiles of keys that nobody attends to, one behind the other
        fg.AttentionSpec(64, mask=fg.trace_mask(lambda b, h, q, k: (k < 100) | (k >= 512))),
        options={"backward_plan": HopperBackwardPlan(64)},
    ),
    "parts": Subject(  # a tile of keys in four parts
        fg.AttentionSpec(64), options={"backward_plan": HopperBackwardPlan(64)}, shape=Shape(2100, 90, 1, 1, 1)
    ),
    "before parts": Subject(
        fg.AttentionSpec(64),
        "prepare",
        options={"backward_plan": HopperBackwardPlan(64)},
        shape=Shape(2100, 90, 1, 1, 1),
    ),
    "distances": Subject(fg.AttentionSpec(64, score=learned(fg.relative_bias("table", 24)))),
    "apart": Subject(
        fg.AttentionSpec(64, mask=fg.causal()),
        options={"backward_plan": HopperBackwardPlan(128, early_scores=False, heads_apart=True)},
    ),
}


def seed_of(spec: fg.AttentionSpec) -> dict[str, int]:
    return {"seed": 7} if spec.dropout else {}


@cache
def call(name: str) -> tuple[Any, ...]:
    """The inputs of a subject's call, its output and LSE, and the gradients that it begins with."""
    spec, shape = SUBJECTS[name].spec, SUBJECTS[name].shape
    inputs = random_inputs(spec, shape, seed=11)
    given = {**inputs.captures, **seed_of(spec)}
    out, lse = SUBJECTS[name].compiled()(inputs.q, inputs.k, inputs.v, return_lse=True, **given)
    return inputs, out, lse, random_gradients(spec, shape, 11)[0]


def is_right(name: str, source: str | None = None, **engine: Any) -> bool:
    subject = SUBJECTS[name]
    inputs, out, lse, d_out = call(name)
    edited = {} if source is None else {"source": {subject.part: source}}
    into = poisoned_gradients(subject.spec, inputs)
    compiled = subject.compiled(**edited, **engine)
    given = {**inputs.captures, **seed_of(subject.spec)}
    found = compiled.backward(d_out, inputs.q, inputs.k, inputs.v, out, lse, into=into, **given)
    arrays = (subject.spec, inputs.q, inputs.k, inputs.v, d_out)
    verdicts = judged_gradients(*arrays, gradients_by_name(found), **given)
    return all(verdict.ok for verdict in verdicts.values())


@dataclass(frozen=True)
class Fault:
    """`pattern`, found once in the kernel as a regular expression, becomes `replacement`; `finding` is said of it."""

    name: str
    pattern: str
    replacement: str
    finding: str
    subject: str = "keys"

    def planted(self) -> str:
        return replaced_once(self.name, self.pattern, self.replacement, SUBJECTS[self.subject].source)


UNREAD = "nothing has been written to|may still write|over-arrival|nobody has waited"
OVERWRITES = "may still read|over-arrival|was overwritten"
UNFENCED = r"fence_async_shared\(\) is missing"

UNGUARDED = [
    Fault("Q not waited for", r"if \(!again\) mbarrier_wait\(barriers\.queries_full\(use\), [^;]*;", "", UNREAD),
    Fault("dO not waited for", r"if \(!again\) mbarrier_wait\(barriers\.outputs_full\(use\), [^;]*;", "", UNREAD),
    Fault("place of Q not waited for", r"mbarrier_wait\(barriers\.queries_empty\(use\), [^;]*;", "", OVERWRITES),
    Fault("place of dO not waited for", r"mbarrier_wait\(barriers\.outputs_empty\(use\), [^;]*;", "", OVERWRITES),
    Fault(
        "Q released early",
        r"(    start_sum<kHeadDimPadded, .*?)(    release\(barriers\.queries_empty\(use\)\);\n)",
        r"\2\1",
        OVERWRITES,
        "late",
    ),
    Fault(
        "the other's dS not waited for",
        r"mbarrier_wait\(barriers\.scores_full\(use\), [^;]*;",
        "",
        f"{UNREAD}|{UNFENCED}",
    ),
    Fault("place of dS not waited for", r"mbarrier_wait\(barriers\.scores_empty\(use\), [^;]*;", "", OVERWRITES),
    Fault(
        "dS shown to nobody",
        r"fence_async_shared\(\);(\s+__syncwarp\(\);\s+release\(barriers\.scores)",
        r"\1",
        UNFENCED,
    ),
    Fault(
        "dQ shown to nobody",
        r"fence_async_shared\(\);(\s+__syncwarp\(\);\s+release\(barriers\.gradients)",
        r"\1",
        UNFENCED,
    ),
    Fault("place of dQ not waited for", r"bulk_wait_read<0>\(\);(\s+mbarrier_arrive)", r"\1", OVERWRITES),
    Fault(
        "place of K not waited for", r"mbarrier_wait\(barriers\.keys_empty\(\), [^;]*;(\s+load_rows)", r"\1", OVERWRITES
    ),
    Fault(
        "place of V not waited for",
        r"mbarrier_wait\(barriers\.values_empty\(\), [^;]*;(\s+load_rows)",
        r"\1",
        "may still write",
    ),
    Fault(
        "V released before dV is stored",
        r"if \([^)]*\) bulk_wait_read<0>\(\);([^\n]*\s+release\(barriers\.values)",
        r"\1",
        OVERWRITES,
    ),
    Fault(
        "dQ handed over before dK is stored",
        r"(begun = true;\s+)if \([^)]*\) bulk_wait_read<0>\(\);",
        r"\1",
        OVERWRITES,
    ),
    Fault("dQ not committed", r"(bulk_reduce_add\([^;]*;\s+)bulk_commit\(\);", r"\1", f"bulk_commit|{OVERWRITES}"),
    Fault(
        "dQ added before it is there", r"mbarrier_wait\(barriers\.gradients_full\(use\), [^;]*;", "", UNREAD, "turns"
    ),
    Fault(
        "dQ not added yet",
        r"if \(again\) mbarrier_wait\(barriers\.gradients_empty\(\), [^;]*;",
        "",
        OVERWRITES,
        "turns",
    ),
    Fault("dK over dQ", r"if \(any\) mbarrier_wait\(barriers\.gradients_empty\(\), [^;]*;", "", OVERWRITES),
    Fault(
        "dQ handed over unseen",
        r"fence_async_shared\(\);(\s+__syncwarp\(\);\s+release\(barriers\.gradients)",
        r"\1",
        UNFENCED,
        "turns",
    ),
    Fault("no wait for products", r"wgmma_wait<kPending>\(\);(\s+order)", r"\1", f"{OVERWRITES}|wgmma_wait"),
    Fault(
        "dK shown to nobody",
        r"fence_async_shared\(\);(\s+__syncwarp\(\);\s+if \(lane == 0\) \{\s+#pragma)",
        r"\1",
        UNFENCED,
    ),
    Fault("K in use", r"named_barrier_sync\(1, kConsumers \* 128\);", "", "data race", "finished apart"),
    Fault(
        "K released before its gradient is stored",
        r"if \([^)]*\) bulk_wait_read<0>\(\);(\s+release\(barriers\.keys)",
        r"\1",
        OVERWRITES,
        "finished apart",
    ),
    Fault("V never released", r"release\(barriers\.values_empty\(\)\);", "", "deadlock", "apart"),
    Fault("P not waited for", r"mbarrier_wait\(barriers\.scores_full\(use\), [^;]*;", "", "data race", "wide"),
    Fault(
        "place of q * k not waited for",
        r"mbarrier_wait\(barriers\.scores_empty\(use\), [^;]*;",
        "",
        "data race",
        "wide, learned",
    ),
    Fault(
        "place of factors not waited for",
        r"mbarrier_wait\(barriers\.scores_empty\(use\), [^;]*;",
        "",
        "over-arrival",
        "wide, dropped",
    ),
    Fault(
        "factors not waited for",
        r"mbarrier_wait\(barriers\.scores_full\(use\), [^;]*;",
        "",
        "over-arrival",
        "wide, dropped",
    ),
    Fault(
        "q * k released early",
        r"(    take_over\(scores, use\);\n)(.*?)"
        r"(    __syncwarp\(\);\n    release\(barriers\.scores_empty\(use\)\);)",
        r"\3\1\2",
        "data race",
        "wide, learned",
    ),
    Fault(
        "Q released early",
        r"(      start_sum<kHeadDimPadded, .*?)(      release\(barriers\.queries_empty\(use\)\);\n)",
        r"\2\1",
        OVERWRITES,
        "wide",
    ),
    Fault(
        "keys released early",
        r"(    start_sum<kHeadDimPadded, .*?)(    release\(barriers\.keys_empty\(step\)\);\n)",
        r"\2\1",
        OVERWRITES,
        "queries",
    ),
]
RACES = [fault for fault in UNGUARDED if fault.finding == "data race"]


def named(faults: list[Fault]) -> Any:
    return pytest.mark.parametrize("fault", faults, ids=lambda fault: f"{fault.subject}: {fault.name}")


@pytest.mark.parametrize("name", SUBJECTS)
def test_what_has_no_fault_is_right(name: str) -> None:
    for schedule in (LATE, EARLY, RANDOM):
        assert is_right(name, schedule=schedule)


@named([fault for fault in UNGUARDED if fault not in RACES])
def test_what_is_not_waited_for_is_caught_by_name(fault: Fault) -> None:
    """By engines that are late, or at random."""
    for schedule in (LATE, RANDOM):
        try:
            assert is_right(fault.subject, fault.planted(), schedule=schedule), "wrong numbers, and nothing is said"
        except LaunchError as error:
            assert re.search(rf"kernel\.cu:\d+: .*({fault.finding})", str(error), re.DOTALL), str(error)
            return
    pytest.fail("nothing found it")


@named(RACES)
def test_a_race_is_caught_by_thread_sanitizer(fault: Fault) -> None:
    with pytest.raises(LaunchError, match="data race"):
        is_right(fault.subject, fault.planted(), sanitize="thread", schedule=EARLY)


PROTOCOL = [
    Fault(
        "Q's parity slips",
        r"(queries_full\(use\), barriers\.)parity\(use\)",
        r"\g<1>parity(use + kStages)",
        f"parity|deadlock|{UNREAD}",
    ),
    Fault("dS's parity slips", r"score_parity\(use\) \^ 1", "score_parity(use)", "parity slip|deadlock"),
    Fault("too few bytes", r"kQueryBytes \+ kStatisticsBytes \+", "kQueryBytes +", "wrong byte count"),
    Fault(
        "too few arrivals",
        r"mbarrier_init\(scores_full\(stage\), kConsumers \* 4\)",
        "mbarrier_init(scores_full(stage), 4)",
        f"over-arrival|{UNREAD}",
    ),
    Fault("no q * k handed over", r"release\(barriers\.scores_full\(use\)\);", "", "deadlock", "wide, learned"),
    Fault(
        "one warp for both",
        r"gradients_empty\(\) \+ 8 \+ use % 2 \* 8",
        "gradients_empty() + 8",
        "initialised before",
        "turns",
    ),
    Fault("nobody stores", r"!stored && atomicCAS\(place, 0u, 1u\) == 0", "false", "waited for for ever"),
    Fault("nobody counts", r"count_added\(arguments[^;]*;", "", "deadlock"),
    Fault("no work is told", r"mbarrier_arrive\(barriers\.work_full\(turn\)\);(\s+load_tiles)", r"\1", "deadlock"),
    Fault("K never released", r"release\(barriers\.keys_empty\(\)\);", "", "deadlock"),
    Fault("no turn ends", r"end_turn\(place, turn\);", "", "waited for for ever", "turns"),
    Fault(
        "turns of parts begin anywhere",
        r"arguments\.part_turns\[i\] = 0;",
        ";",
        "while the next is 4294967295",
        "before parts",
    ),
    Fault("no part ends", r"if \(lane == 0\) end_turn\(turn, part\);", "", "waited for for ever", "parts"),
    Fault(
        "last parts first",
        r"part = number - whole;",
        "part = arguments.tiles - 1 - number;",
        "waited for for ever",
        "parts",
    ),
    Fault(
        "first keys first",
        r"arguments\.tiles_k - 1 - place / members",
        "place / members",
        "waited for for ever",
        "turns",
    ),
    Fault("no P handed over", r"release\(barriers\.scores_full\(use\)\);", "", "deadlock", "wide"),
    Fault(
        "V's parity slips",
        r"(values_full\(step\), barriers\.)value_parity\(step\)",
        r"\g<1>value_parity(step + kValueStages)",
        f"parity|deadlock|{UNREAD}",
        "queries",
    ),
]


@named(PROTOCOL)
def test_a_broken_protocol_is_caught_by_name(fault: Fault) -> None:
    with pytest.raises(LaunchError) as error:
        is_right(fault.subject, fault.planted(), schedule=LATE)
    assert re.search(fault.finding, str(error.value)), str(error.value)


OUT_OF_TURN = [
    Fault(
        "turns not awaited",
        r"if \(!first\) await_turn\(place, turn\);",
        "",
        "turn [0-9]+ ends while the next is",
        "turns",
    ),
    Fault(
        "only others awaited",
        r"turn == 0 \|\| !query",
        "turn == 0 || query",
        "turn [0-9]+ ends while the next is",
        "turns",
    ),
    Fault(
        "parts not awaited",
        r"if \(lane == 0\) await_turn\(turn, part\);",
        "",
        "turn [0-9]+ ends while the next is",
        "parts",
    ),
]


UNSEEN = Fault(
    "works without steps told early",
    r"if \(walk\.ended\(arguments\)\) \{.*?\n    \}\n",
    "",
    "over-arrival",
    "untouched",
)


@pytest.mark.parametrize(
    ("fault", "workers"),
    [*((fault, 4) for fault in OUT_OF_TURN), (UNSEEN, 1)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_who_is_early_is_caught_by_name(fault: Fault, workers: int) -> None:
    """Of blocks that run side by side, or beside a warp that is slow, soon."""
    for seed in range(50):
        try:
            is_right(fault.subject, fault.planted(), schedule=Schedule("random", "random", seed, workers=workers))
        except LaunchError as error:
            assert re.search(fault.finding, str(error)), str(error)
            return
    pytest.fail("nothing found it")


HANDED_ON = [
    Fault("a part handed on by one lane", r"__syncwarp\(\);(\s+if \(lane == 0\) end_turn\(turn)", r"\1", "", "parts"),
    Fault("a part seen by one lane", r"(await_turn\(turn, part\);\s+)__syncwarp\(\);", r"\1", "", "parts"),
]


@named(HANDED_ON)
def test_what_other_lanes_have_is_missed_by_the_numbers(fault: Fault) -> None:
    """Of blocks that run side by side, soon: ThreadSanitizer has them one after the other."""
    schedules = (Schedule("random", "random", seed, workers=4) for seed in range(50))
    assert not all(is_right(fault.subject, fault.planted(), schedule=schedule) for schedule in schedules)


WRONG = [
    Fault(
        "the other's half of dQ",
        r"column_part = warpgroup % kGradientColumnParts;(\s+order)",
        r"column_part = 0;\1",
        "",
    ),
    Fault("dS in the wrong chunk", r"chunk \^ lane % 8", "chunk ^ lane % 4", ""),
    Fault("heads not waited for", r"await_added\(arguments[^;]*;", ";", ""),
    Fault("half of dQ's rows finished", r"part % parts_of_head \*", "part % parts_of_head / 2 *", ""),
    Fault("dQ not transposed", r"quad_transpose\(rows\[i\]\);", "", ""),
    Fault("dK of the first keys for all", r"work\.first_key \+ row;", "row;", "", "apart"),
    Fault(
        "heads' sums mixed",
        r"if \(walk\.head\(work, arguments\) != position\.head\) end_head\(\);",
        "",
        "",
        "wide, learned",
    ),
    Fault("what was dropped not said", r" \| drops\);", ");", "", "wide, dropped"),
    Fault("no slope in a factor", r"attended \* slope;", "attended;", "", "wide, dropped"),
    Fault("the last head's sum lost", r"end_head\(\);(\s+await)", r"\1", "", "wide, learned"),
    Fault("dV of earlier parts lost", r"pick_up<kValueDimPadded>\([^;]*;", "", "", "parts"),
    Fault("all steps in each part", r"left = \(part \+ 1\) [^;]*;", "", "", "parts"),
    Fault("who is first adds", r"if \(first\) bulk_store\(", "if (first) bulk_reduce_add(", "", "turns"),
    Fault("tiles taken for alike", r"k_first - q_last", "k_first - q_first", "", "distances"),
    Fault("a diagonal ends with its tile", r"ends \? second_before : second", "second", "", "distances"),
    Fault("a diagonal's rest forgotten", r"sum \+= one_on", "sum += 0.0f", "", "distances"),
    Fault("the first element for all", r"kTests == Tests::kAlike \? 0 : steps", "0", "", "distances"),
    Fault("D forgotten", r" - \(e % 2 \? rows\.w : rows\.y\)", "", "", "wide"),
    Fault("dQ not scaled", r"\(d_queries, kScale,", "(d_queries, 1.0f,", "", "queries"),
    Fault("no tile has a mask", r"!tiles\.full\(step\)", "false", "", "queries"),
]


@named(WRONG)
def test_a_wrong_place_is_caught_by_the_numbers(fault: Fault) -> None:
    assert not is_right(fault.subject, fault.planted(), schedule=LATE)
