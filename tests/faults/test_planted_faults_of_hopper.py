"""Mistakes planted in the emitted forward kernel of Hopper: each is caught, by the check that the table names.

What its instructions alone can get wrong stands in test_planted_hopper_faults.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
from planting import replaced_once

from flashgen.errors import LaunchError
from flashgen.runtime.schedule import Schedule

LATE, EARLY = Schedule("in_order", "late"), Schedule("greedy_warp", "early")


@dataclass(frozen=True)
class Fault:
    """`pattern`, a regular expression that stands once in the kernel, becomes `replacement`.

    `finding` is what is said of it.
    """

    name: str
    pattern: str
    replacement: str
    finding: str = ""

    def planted(self, source: str) -> str:
        return replaced_once(self.name, self.pattern, self.replacement, source)


def named(faults: list[Fault]) -> Any:
    return pytest.mark.parametrize("fault", faults, ids=lambda fault: fault.name)


def is_caught(
    fault: Fault, launch: Any, subjects: Any, sanitize: Any, schedule: Schedule, name: str = "hopper"
) -> None:
    subject = subjects[name]
    assert launch(subject, sanitize=sanitize, schedule=schedule).is_right
    finding = f"data race|{fault.finding}" if sanitize == "thread" else fault.finding
    with pytest.raises(LaunchError) as error:
        launch(subject, fault.planted(subject.compiled.source), sanitize=sanitize, schedule=schedule)
    assert re.search(rf"kernel\.cu:\d+: .*({finding})", str(error.value), re.DOTALL), str(error.value)


def is_judged_wrong(fault: Fault, launch: Any, subject: Any) -> None:
    assert launch(subject, schedule=LATE).is_right
    assert not launch(subject, fault.planted(subject.compiled.source), schedule=LATE).is_right


UNREAD = "nothing has been written to|may still write|over-arrival|nobody has waited"
OVERWRITES = "may still read|over-arrival"
VALUES = "shared_address(shared_memory) + kValueOffset"
UNGUARDED = [
    Fault("keys not waited for", r"mbarrier_wait\(barriers\.keys_full\(use \+ 1\), [^;]*;", "", UNREAD),
    Fault(
        "values not waited for",
        r"mbarrier_wait\(barriers\.values_full\(use\), [^;]*;(\s+start_output\([^;]*;\s+pass_turn)",
        r"\1",
        UNREAD,
    ),
    Fault("queries not waited for", r"mbarrier_wait\(barriers\.queries_full\(\), [^;]*;", "", UNREAD),
    Fault(
        "place of queries not waited for",
        r"mbarrier_wait\(barriers\.queries_empty\(\), [^;]*;(\s+barriers\.tile_index[^;]*;\s+mbarrier_expect)",
        r"\1",
        OVERWRITES,
    ),
    Fault("stage of keys not waited for", r"mbarrier_wait\(empty, [^;]*;", rf"if (tile >= {VALUES}) \g<0>", OVERWRITES),
    Fault(
        "stage of values not waited for", r"mbarrier_wait\(empty, [^;]*;", rf"if (tile < {VALUES}) \g<0>", OVERWRITES
    ),
    Fault(
        "keys released early",
        r"(await_product<1>\(scores\);\s+)(release\(barriers\.keys_empty\(use \+ 1\)\);)",
        r"\2 \1",
        OVERWRITES,
    ),
    Fault(
        "values released early",
        r"(await_product<0>\(output\);\s+)(release\(barriers\.values_empty\(use\)\);)",
        r"\2 \1",
        OVERWRITES,
    ),
    Fault("no wait for products", r"wgmma_wait<kPending>\(\);(\s+order)", r"\1", f"{OVERWRITES}|wgmma_wait"),
    Fault(
        "output shown to nobody", r"fence_async_shared\(\);(\s+__syncwarp)", r"\1", "fence_async_shared.* is missing"
    ),
    Fault(
        "output's place not waited for",
        r"if \(threadIdx.x % 32 == 0\) bulk_wait_read<0>\(\);(   // of the)",
        r"\1",
        OVERWRITES,
    ),
    Fault(
        "last output not waited for",
        r"if \(lane == 0\) bulk_wait_read<0>\(\);(   // shared)",
        r"\1",
        "bulk_wait_read is",
    ),
]


@named(UNGUARDED)
def test_what_is_not_waited_for_is_caught_by_engines_that_are_late(fault: Fault, launch: Any, subjects: Any) -> None:
    is_caught(fault, launch, subjects, None, LATE)


# A stage of values is loaded again too late for one released a little early to show in any of these schedules.
@named([fault for fault in UNGUARDED if fault.name != "values released early"])
def test_what_is_not_waited_for_is_caught_at_random(fault: Fault, launch: Any, subjects: Any) -> None:
    subject = subjects["hopper"]
    source = fault.planted(subject.compiled.source)
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: "):
        for seed in range(8):
            schedule = Schedule("random", "random", seed)
            assert launch(subject, schedule=schedule).is_right
            launch(subject, source, schedule=schedule)


PROTOCOL = [
    Fault("too many bytes of a stage", r"(full, kTileK \* kColumns \* kElementBytes)\)", r"\1 + 16)", "deadlock"),
    Fault("too few bytes of a stage", r"(full, kTileK \* kColumns) \* kElementBytes\)", r"\1)", "byte count"),
    Fault("parity that never changes", r"return use / kStages & 1;", "return 0;", "parity slip"),
    Fault("stages of another number", r"return use / kStages & 1;", "return use / (kStages + 1) & 1;", "parity|dead"),
    Fault("parity of queries", r";; queries_use \^= 1\)", ";;)", "parity slip|deadlock"),
    Fault(
        "every warpgroup releases",
        r"values_empty\(stage\), kConsumers \* 4",
        "values_empty(stage), kConsumers",
        "may still|over-arrival",
    ),
    Fault(
        "nobody has the first turn", r"if \(warpgroup == kConsumers - 1\) pass_turn[^;]*;", "", "deadlock.*barrier 1"
    ),
    Fault(
        "a turn of half the threads", r"barrier_sync\(1 \+ warpgroup, 256\)", "barrier_sync(1 + warpgroup, 128)", "256"
    ),
    Fault("registers that nobody has", r"registers_decrease<24>", "registers_decrease<64>", "deadlock.*registers"),
    Fault(
        "no fence before products", r"(start_scores\(float.*?)wgmma_fence\(\);", r"\1", r"wgmma without a wgmma_fence"
    ),
    Fault("groups of keys too far apart", r"\(keys, 16, 8 \*", "(keys, 16, 1600 *", "bounds|nothing has|may still"),
]


@named(PROTOCOL)
def test_a_broken_protocol_is_caught_by_line(fault: Fault, launch: Any, subjects: Any) -> None:
    is_caught(fault, launch, subjects, None, LATE)


WRONG = [
    Fault("groups of queries too close", r"\(queries, 16, 8 \*", "(queries, 16, 4 *"),
    Fault("another head's keys", r"2 \* work\.head \+ 1, ", "1, "),
    Fault("keys of the step before", r"keys_at\(shared, use \+ 1\)\);", "keys_at(shared, use));"),
    Fault("old output not rescaled", r"rescale\(output, shrink\);", ""),
    Fault("old sums not rescaled", r"sum \*= shrink;", ""),
    Fault("references that nobody sees outgrown", r"return fmaxf\(sums\[0\], sums\[1\]\) [^;]*;", "return false;"),
]


@named(WRONG)
def test_a_wrong_number_is_caught_by_the_verdict(fault: Fault, launch: Any, subjects: Any) -> None:
    subject = subjects["hopper"]
    assert launch(subject, schedule=LATE).is_right
    try:
        outcome = launch(subject, fault.planted(subject.compiled.source), schedule=LATE)
    except LaunchError:  # what is read there may be worse than wrong
        return
    assert not outcome.is_right


PACKED = [
    Fault("rows of one head", r"kPackedHeads \+ row % kPackedHeads", "kPackedHeads"),
    Fault("rows of a query each", r"first_query \+ row / kPackedHeads", "first_query + row"),
    Fault("a lane's second row like its first", r"n / 2 % 2 \* 8 / kPackedHeads(, k)", r"0\1"),
    Fault("as many queries as rows", r"first_query \+ group \* kPartQ", "first_query + group * 64"),
    Fault("queries of another pack", r"work\.head \* kPackedHeads, work\.first", "work.head, work.first"),
    Fault("keys of another pack", r"2 \* work\.head \+ 1, ", "8 * work.head + 1, "),
    Fault("output of another head", r"position\.query, position\.head, position\.batch\)", "position.query, 0, 0)"),
    Fault("sums of one head", r"r \* 8 / kPackedHeads", "r * 8"),
]


@named(PACKED)
def test_a_row_of_another_query_or_head_is_caught_by_the_verdict(fault: Fault, launch: Any, subjects: Any) -> None:
    is_judged_wrong(fault, launch, subjects["packed"])


DRAWN = [
    Fault("a round of philox too few", r"philox<3, 7>", "philox<3, 6>"),
    Fault("blind to the batch", r"position\.batch << 16 \| position\.head, offset", "position.head, offset"),
    Fault("block 0's words left in", r"block\.x \^ origin\.x", "block.x"),
    Fault("the step before's", r"drawn_at\(step - begin\)", "drawn_at(step - begin - (step > begin))"),
    Fault("never drawn again", r"if \(begin > first\) draw\(", "if (begin < first) draw("),
    Fault("calls exchanged", r"dropped\[i \+ 1\], 0x7632", "dropped[i + 1], 0x3276"),
]


@named(DRAWN)
def test_what_is_drawn_amiss_is_caught_by_the_verdict(fault: Fault, launch: Any, subjects: Any) -> None:
    is_judged_wrong(fault, launch, subjects["hopper, dropout"])


RACES = [
    *UNGUARDED[:8],
    Fault("no barrier after initialising", r"__syncthreads\(\);(\s+const int warpgroup)", r"\1", "no mbarrier"),
    Fault("no syncwarp before the store", r"__syncwarp\(\);(\s+if \(lane == 0[^)]*\) \{)", r"\1", "is missing"),
]


@named(RACES)
def test_a_race_is_caught_by_thread_sanitizer(fault: Fault, launch: Any, subjects: Any) -> None:
    is_caught(fault, launch, subjects, "thread", EARLY)


def test_an_output_over_queries_that_other_warps_may_still_read_is_caught_by_thread_sanitizer(
    launch: Any, subjects: Any
) -> None:
    fault = Fault("no barrier before the output", r"named_barrier_sync\(1 \+ kConsumers \+ warpgroup, 128\);", "")
    is_caught(fault, launch, subjects, "thread", EARLY, "hopper, no room")
