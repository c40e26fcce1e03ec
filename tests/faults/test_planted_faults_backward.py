"""Mistakes planted in the emitted backward kernels: each is caught, by the check that the table names.

A check that finds a fault proves something only if it finds nothing in the kernel as it is: that is tested beside it.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from planting import replaced_once

from flashgen.errors import LaunchError
from flashgen.runtime.schedule import Schedule

sys.path.insert(0, str(Path(__file__).parent))
from backward_subjects import SUBJECTS, Gradients, launch_backward

LATE, GREEDY = Schedule("in_order", "late"), Schedule("greedy_warp", "late")
OTHERS = r"other < kSplit; \+\+other\) \{[^;]*;\s+multiply_shared<kQueriesPerWarp, kTileQ / 8"
BARRIER, WAIT = r"__syncthreads\(\);", r"copy_async_wait<\d>\(\);"

# Both modes, warps that share no keys, that share them by 2 and by 4, and one and two stages: whole in the first set.
COVERING = ("two stages", "split in 4, one stage", "exact, split in 2", "queries, split in 2, one stage")
THE_REST = (
    "one stage",
    "split in 2",
    "split in 2, one stage",
    "split in 4",
    "exact, one stage",
    "exact, two stages",
    "exact, split in 4",
    "queries, one stage",
    "queries, two stages",
    "queries, split in 2",
)


@dataclass(frozen=True)
class Fault:
    """`pattern`, a regular expression that stands once in the text of the subject's kernel, becomes `replacement`."""

    name: str
    subject: str
    pattern: str
    replacement: str

    def planted(self) -> str:
        return replaced_once(self.name, self.pattern, self.replacement, SUBJECTS[self.subject].source)


@dataclass(frozen=True)
class Removed:
    """The statement number `number` of those that `pattern` finds, taken out; `name` says which."""

    subject: str
    pattern: str
    number: int

    @property
    def _found(self) -> re.Match[str]:
        return list(re.finditer(self.pattern, SUBJECTS[self.subject].source))[self.number]

    @property
    def name(self) -> str:
        rest = SUBJECTS[self.subject].source[self._found.end() :].splitlines()
        what = rest[0].strip(" /") or rest[1].strip()
        return f"{self.subject}: {self._found[0]} no. {self.number} before {what}"

    def planted(self) -> str:
        source = SUBJECTS[self.subject].source
        return source[: self._found.start()] + source[self._found.end() :]


def removals(pattern: str, subjects: tuple[str, ...]) -> list[Removed]:
    return [
        Removed(name, pattern, number)
        for name in subjects
        for number in range(len(re.findall(pattern, SUBJECTS[name].source)))
    ]


def named(faults: Any, **marks: Any) -> Any:
    return pytest.mark.parametrize("fault", faults, ids=lambda fault: fault.name, **marks)


@cache
def as_emitted(subject: str, sanitize: Any = None, schedule: Schedule = LATE) -> Gradients:
    return launch_backward(SUBJECTS[subject], sanitize=sanitize, schedule=schedule)


def assert_races(fault: Any) -> None:
    assert as_emitted(fault.subject, "thread", GREEDY).is_right
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*data race|in flight"):
        launch_backward(SUBJECTS[fault.subject], fault.planted(), sanitize="thread", schedule=GREEDY)


@named(removals(BARRIER, COVERING))
def test_every_barrier_is_missed_by_thread_sanitizer(fault: Removed) -> None:
    assert_races(fault)


@pytest.mark.slow
@named(removals(BARRIER, THE_REST))
@pytest.mark.rotated(4)
def test_every_barrier_of_other_plans_is_missed_by_thread_sanitizer(fault: Removed) -> None:
    assert_races(fault)


@named(removals(WAIT, COVERING) + removals(WAIT, ("one stage", "queries, two stages")))
def test_every_wait_is_missed_by_copies_that_land_late(fault: Removed) -> None:
    assert as_emitted(fault.subject).is_right
    try:
        gradients = launch_backward(SUBJECTS[fault.subject], fault.planted(), schedule=LATE)
    except LaunchError as error:  # copies that nobody is left to wait for
        assert "in flight" in str(error)
    else:
        assert gradients.holds_nan and not gradients.is_right


RACES = [
    Fault("missing syncwarp of dK and dV", "two stages", r"__syncwarp\(\);", ""),
    Fault("missing syncwarp of dQ", "queries, two stages", r"__syncwarp\(\);", ""),
    Fault(
        "next copies before the barrier",
        "exact, two stages",
        rf"({BARRIER})(\s+if \(step \+ 1.*?copy_async_commit\(\);)",
        r"\2 \1",
    ),
]
# Additions of one block to what others add to are no race that the emulator sees, which runs block after block: that
# dQ's are atomic is held by the text, in tests/codegen/test_backward_text.py.
ATOMICS = [
    Fault(
        "a capture's sums added without atomics", "bias", r"atomicAdd\(sums \+ place, value\)", "sums[place] += value"
    ),
    Fault(
        "exact sums added without atomics",
        "exact bias",
        r"atomicAdd\(sums, ([^;]*)\);",
        r"*sums += \1;",
    ),
]


@named([*RACES, *ATOMICS])
def test_a_race_is_caught_by_thread_sanitizer(fault: Fault) -> None:
    assert_races(fault)


WRONG = [
    # runs of scores that read one element of a captured array
    Fault("runs not ended", "distances", r"end_runs\(gathered\.run\d, [^;]*;", ""),
    Fault("a run's element forgotten", "distances", r"place == run\.place", "run.place >= 0"),
    Fault(
        "a warp's runs taken for one", "elements of lanes", r"__all_sync\(0xffffffffu, run\.place == first\)", "true"
    ),
    # tiles whose scores all read one element
    Fault("tiles taken for alike", "far distances", r"k_first - q_last", "k_first - q_first"),
    Fault("the first element for all", "far distances", r"kTests == Tests::kAlike \? 0 : steps", "0"),
    Fault("a run's sum begun anew", "far distances", r"run0\.sum \+= sum;", "run0.sum = sum;"),
    # what the kernels of rows and of sums do
    Fault("LSE to another base", "rows", r" \* kLog2E;", ";"),
    Fault("gradient of the LSE forgotten", "of the LSE", r"if \(arguments\.d_lse\) d -= [^;]*;", ""),
    Fault(
        "LSE of -inf left",
        "rows of nothing but -inf",
        r"if \(lse == minus_infinity\(\)\) \{",
        "if (row >= arguments.len_q) {",
    ),
    Fault("D of half a row", "rows", r"d \+= __shfl_xor_sync\(0xffffffffu, d, distance\);", ""),
    Fault("dQ without the scale", "sums", r"low \* kScale, high \* kScale", "low, high"),
    Fault("sums taken from elsewhere", "sums", r"row / 8 % 2 \* 2 \+ column % 2", "row / 8 % 2 + column % 2 * 2"),
    # what a step does with its scores
    Fault("statistics not loaded", "two stages", r"copy_statistics\(k_tile[^;]*;", ""),
    Fault("D forgotten", "two stages", r" - \(e % 2 \? rows\.w : rows\.y\)", ""),
    Fault("D forgotten by queries", "queries, two stages", r" - \(rows\[i\]\[e / 2\]\.y\)", ""),
    Fault("mask off by one", "two stages", r"return k <= q", "return k < q"),
    Fault("mask off by one in queries", "queries, two stages", r"return k <= q", "return k < q"),
    Fault("dS not masked", "two stages", r"d_score = attended \? d_score : 0\.0f;", ""),
    Fault("dS not masked in queries", "queries, two stages", r"d_score = attended \? d_score : 0\.0f;", ""),
    Fault("P not masked", "two stages", r"attended \? probability : 0\.0f", "probability"),
    Fault("partial tiles taken for full", "two stages", r"else if \(!full\)", "else if (false)"),
    Fault("partial tiles taken for full by queries", "queries, two stages", r"!tiles\.full\(step\)", "false"),
    Fault("window's edge taken for full", "window", r"\(full_begin \+ kTileQ - 1\) / kTileQ", "full_begin / kTileQ"),
    Fault(
        "last query forgotten",
        "one query over",
        r"\(arguments\.len_q \+ kTileQ - 1\)",
        "(arguments.len_q + kTileQ - 2)",
    ),
    Fault("keys beyond the last count", "low scores", r"\(k < arguments\.len_k\)", "true"),
    Fault(
        "keys beyond the last count in queries",
        "low scores, queries",
        r"\|\| k < arguments\.len_k;",
        "|| true;",
    ),
    Fault("ragged keys not cut", "low scores", r"work\.first_key \+ kTileK > arguments\.len_k \|\|", ""),
    Fault("ragged keys not cut by queries", "low scores, queries", r"first_key \+ kTileK > arguments\.len_k", "false"),
    Fault("queries beyond the last count", "bias of ends", r" & \(q < arguments\.len_q\)", ""),
    Fault("ragged queries not cut", "bias of ends", r" \|\| first_query \+ kTileQ > arguments\.len_q", ""),
    Fault("slope forgotten", "softcap", r"d_score \* slope;", "d_score;"),
    Fault("slope forgotten by queries", "softcap, queries", r"d_score \* slope;", "d_score;"),
    # sums over steps, heads and warps
    Fault("dK without the scale", "two stages", r"d_keys, kScale", "d_keys, 1.0f"),
    Fault("dQ without the scale in queries", "queries, two stages", r"d_queries, kScale", "d_queries, 1.0f"),
    Fault("one head of a group", "two stages", r"member < arguments\.heads_per_kv", "member < 1"),
    Fault(
        "another head's statistics", "two stages", r"arguments\.heads_q \+ head\) \* arg", "arguments.heads_q) * arg"
    ),
    Fault("another head's keys", "two groups, queries", r"kv_head_of\(work\.head, arguments\);", "work.head % 2;"),
    Fault("the others' P forgotten", "split in 2", rf"other = 1; ({OTHERS}, kValueDimPadded)", r"other = kSplit; \1"),
    Fault("another's dS forgotten", "split in 4", rf"other = 1; ({OTHERS}, kHeadDimPadded)", r"other = 2; \1"),
    Fault("a part's columns twice", "split in 4", r"q_rows, part \* kHeadTiles\)", "q_rows, 0)"),
    Fault("a part's queries twice", "split in 4", r"q_tile \+ part \* kQueriesPerWarp", "q_tile + 0 * kQueriesPerWarp"),
    # dropout
    Fault("halves not exchanged", "dropout", r"__shfl_xor_sync\(0xffffffffu, mine, 4\)", "mine"),
    Fault("wrong byte", "dropout", r"e / 2 % 2 \* 4 \+ e / 4 \* 2", "e / 2 % 2 * 2 + e / 4 * 4"),
    Fault("wrong keys", "dropout", r"\(position\.key \+ i \* 16\) / 16 % 2", "(position.key + i * 16) / 32 % 2"),
    Fault("wrong keys, split", "dropout, split in 2", r"\(position\.key \+ i \* 16\) / 16 % 2", "i % 2"),
    Fault(
        "wrong queries, split",
        "dropout, split in 2",
        r"\(first_query \+ position\.query \+ j \* 8\) / 16",
        "(first_query + j * 8) / 16",
    ),
    Fault("wrong byte in queries", "dropout, queries", r">> 16 << j % 8 \* 4", ">> 15 << j % 8 * 4"),
    Fault("a round of philox too few", "dropout", r"philox<0, 7>", "philox<0, 6>"),
    Fault("blind to the batch", "dropout", r"position\.batch << 16 \| position\.head", "position.head"),
    Fault(
        "blind to the batch in queries", "dropout, queries", r"position\.batch << 16 \| position\.head", "position.head"
    ),
    Fault("dP not made up for", "dropout", r" \* kKeepScale : 0\.0f", " : 0.0f"),
    Fault("dP not made up for in queries", "dropout, queries", r" \* kKeepScale : 0\.0f", " : 0.0f"),
    Fault("dP of what was dropped", "dropout", r"kept \? (d_scores[^:]*) : 0\.0f", r"\1"),
    Fault("dV not made up for", "dropout", r"d_values, kKeepScale", "d_values, 1.0f"),
    Fault("P of what was dropped", "dropout", r"kept & attended \?", "attended ?"),
    # gradients of captures
    Fault("sums of a head not added", "slopes", r"\n    add_gathered\(gathered, position, arguments\);", ""),
    Fault(
        "exact sums of a head not added", "exact slopes", r"\n    add_gathered\(gathered, position, arguments\);", ""
    ),
    Fault("sums of keys not added", "bias", r"\n    add_gathered\(gathered, position, arguments\);", ""),
    Fault("sums of half a quad", "bias", r"return x \+ __shfl_xor_sync\(0xffffffffu, x, 2\);", "return x;"),
    Fault("sums of the queries of one row", "bias", r"of_query2\[e % 2\] \+=", "of_query2[0] +="),
    Fault("a gather's other head", "bias", r"gather0_place\(position\.head", "gather0_place(0"),
    Fault("a gather without its factor", "slopes", r" \* gather0_factor\(q, k, arguments\)", ""),
    Fault("exact sums of magnitudes", "exact bias", r"negative = bits >> 31", "negative = false"),
    Fault("exact sums without the carry", "exact bias", r"if \(high\) atomicAdd[^;]*;", ""),
]


@pytest.mark.rotated(6)
@named(WRONG)
def test_a_wrong_number_is_caught_by_the_verdict(fault: Fault) -> None:
    assert as_emitted(fault.subject).is_right
    assert not launch_backward(SUBJECTS[fault.subject], fault.planted(), schedule=LATE).is_right


OVERFLOWS = [
    Fault(
        "one row of dK and dV too many", "two stages", r"(first_row \+ row) < (row_count && chunk \* 8)", r"\1 <= \2"
    ),
    Fault("one row of Q or K too many", "two stages", r"(first_row \+ row) < (row_count && \()", r"\1 <= \2"),
    Fault(
        "one row of dQ too many", "queries, two stages", r"(first_row \+ row) < (row_count && chunk \* 8)", r"\1 <= \2"
    ),
    Fault("one row of O too many", "rows", r"row < (arguments\.len_q && lane)", r"row <= \1"),
    Fault(
        "one row of dQ too many of the sums", "sums", r">= arguments\.len_q\) continue", "> arguments.len_q) continue"
    ),
    Fault(
        "one tile of statistics too many",
        "no mask",
        r"\(arguments\.len_q \+ kTileQ - 1\)",
        "(arguments.len_q + 3 * kTileQ - 1)",
    ),
    Fault(
        "another batch's sums",
        "two stages",
        r"\(first_row \+ first_query\) \* kHeadDimPadded",
        "(first_row + arguments.rows + first_query) * kHeadDimPadded",
    ),
]


@named(OVERFLOWS)
def test_an_access_outside_an_array_is_caught_by_address_sanitizer(fault: Fault) -> None:
    assert as_emitted(fault.subject, "address").is_right
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*heap-buffer-overflow"):
        launch_backward(SUBJECTS[fault.subject], fault.planted(), sanitize="address")


@pytest.mark.parametrize("name", ["two stages", "split in 4, one stage", "queries, split in 2, one stage"])
def test_a_plan_that_asks_for_a_byte_too_little_is_caught(name: str) -> None:
    assert as_emitted(name, "address").is_right
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: "):
        launch_backward(SUBJECTS[name], sanitize="address", short_by=1)
