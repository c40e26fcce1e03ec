"""Mistakes planted in the emitted forward kernel: each is caught, by the check that the table names.

A check that finds a fault proves something only if it finds nothing in the kernel as it is: that is tested beside it.
"""

from __future__ import annotations

from typing import Any

import pytest
from planting import Fault, named

from flashgen.errors import LaunchError
from flashgen.runtime.schedule import Schedule

BARRIER, WAIT = r"__syncthreads\(\);", r"copy_async_wait<0>\(\);"
LATE, GREEDY = Schedule("in_order", "late"), Schedule("greedy_warp", "late")


UNGUARDED = [
    Fault("missing wait for keys", "one stage", rf"{WAIT}(\s+{BARRIER}\s+copy_values\()", r"\1"),
    Fault("missing wait for values", "one stage", rf"{WAIT}(\s+{BARRIER}\s+if \(step \+ 1)", r"\1"),
    Fault("missing wait for both", "two stages", WAIT, ""),
    Fault("wait for the group before", "two stages", WAIT, "copy_async_wait<1>();"),
]


@named(UNGUARDED)
def test_a_missing_wait_is_caught_by_copies_that_land_late(fault: Fault, launch: Any, subjects: Any) -> None:
    subject = subjects[fault.subject]
    assert launch(subject, schedule=LATE).is_right
    try:
        outcome = launch(subject, fault.planted(subject.compiled.source), schedule=LATE)
    except LaunchError as error:  # the last copies have nobody left to wait for them
        assert "in flight" in str(error)
    else:
        assert outcome.holds_nan and not outcome.is_right


RACES = [
    Fault("missing barrier before values", "one stage", rf"{BARRIER}(\s+copy_values\()", r"\1"),
    Fault("missing barrier before keys", "one stage", rf"{BARRIER}(\s+if \(step \+ 1)", r"\1"),
    Fault("missing barrier of a step", "two stages", rf"{BARRIER}(\s+if \(step \+ 1)", r"\1"),
    Fault(
        "missing barrier before the output",
        "wide values",
        rf"{BARRIER}(\s+// every warp is done with the tiles)",
        r"\1",
    ),
    Fault("missing syncwarp of the output", "one stage", r"__syncwarp\(\);", ""),
    Fault(
        "next copies before the barrier",
        "two stages",
        rf"{BARRIER}(\s+if \(step \+ 1.*?copy_async_commit\(\);)",
        r"\1 __syncthreads();",
    ),
]


@named([*RACES, *UNGUARDED])
def test_a_race_is_caught_by_thread_sanitizer(fault: Fault, launch: Any, subjects: Any) -> None:
    subject = subjects[fault.subject]
    assert launch(subject, sanitize="thread", schedule=GREEDY).is_right
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*data race|in flight"):
        launch(subject, fault.planted(subject.compiled.source), sanitize="thread", schedule=GREEDY)


@named([RACES[0], RACES[1], RACES[2]])
def test_a_missing_barrier_is_caught_by_warps_that_drift_apart(fault: Fault, launch: Any, subjects: Any) -> None:
    subject = subjects[fault.subject]
    assert launch(subject, schedule=GREEDY).is_right
    outcome = launch(subject, fault.planted(subject.compiled.source), schedule=GREEDY)
    assert outcome.holds_nan and not outcome.is_right


NANS = [
    Fault("unguarded rescaling", "rows without keys", r"reference == minus_infinity\(\) \? 1\.0f : ", ""),
    Fault("unguarded exponent", "rows without keys", r"reference == minus_infinity\(\) \? 0\.0f : ", ""),
    Fault("offsets that rows have not", "rows without keys", r"return fabsf\(reference\) < [^;]*;", "return true;"),
    Fault("unguarded division", "rows without keys", r"rows\[i\]\[r\]\.sum == 0\.0f \? 0 : pair", "pair"),
]


@named(NANS)
def test_a_missing_guard_is_caught_by_rows_without_keys(fault: Fault, launch: Any, subjects: Any) -> None:
    subject = subjects[fault.subject]
    right = launch(subject)
    assert right.is_right and not right.holds_nan
    wrong = launch(subject, fault.planted(subject.compiled.source))
    assert wrong.holds_nan and not wrong.is_right


WRONG = [
    Fault("mask off by one", "one stage", r"return k <= q \+ ", "return k < q + "),
    Fault("window off by one", "window", r"return \(x0 - 40 <= k\)", "return (x0 - 40 < k)"),
    Fault("last key forgotten", "one key over", r"const int end = ([^;]*);", r"const int end = \1 - 1;"),
    Fault("mask forgotten on the diagonal", "one stage", r"full_end / kTileK\}", "(full_end + kTileK - 1) / kTileK}"),
    Fault(
        "window's edge taken for full", "window", r"\(full_begin \+ kTileK - 1\) / kTileK, ", "full_begin / kTileK, "
    ),
    Fault("ragged keys not masked", "grouped heads", r"n % 2 >= left\)", "n % 2 > left)"),
    Fault("another head's keys", "grouped heads", r"kv_head_of\(work\.head, arguments\);", "work.head % 2;"),
    Fault("a tile of queries done twice", "one stage", r"gridDim\.x - 1 - blockIdx\.x;", "0;"),
    Fault("scores taken for alike", "distances", r"k_first - q_last", "k_first - q_first"),
    Fault("scores taken for alike on Hopper", "hopper, distances", r"k_first - q_last", "k_first - q_first"),
    Fault("a score's head", "score", r"load_slopes\(arguments, h\)", "load_slopes(arguments, 0)"),
    Fault("old output not rescaled", "steep scores", r"output\[i\]\[j\]\[2 \* r \+ 1\] \*= shrink;", ""),
    Fault("old sum not rescaled", "steep scores", r"sum \*= shrink;", ""),
    Fault("never rescaled", "steep scores", r"\(0xffffffffu, outgrown\)", "(0xffffffffu, false)"),
    Fault("sum of half the lanes", "one stage", r"return x \+ __shfl_xor_sync\(0xffffffffu, x, 2\);", "return x;"),
    Fault("wrong byte of dropout", "dropout", r"dropped >> e & 1", "dropped >> (e ^ 1) & 1"),
    Fault("a round of philox too few", "dropout", r"philox<0, 7>", "philox<0, 6>"),
    Fault("half of a byte's bits", "dropout", r"if \(n == 4\) greater <<= 16;", ""),
    Fault("bits of another weight", "dropout", r"\(kThreshold - 1\) >> n & 1", "(kThreshold - 1) >> (7 - n) & 1"),
    Fault("dropout blind to the batch", "dropout", r"position\.batch << 16 \| position\.head", "position.head"),
    Fault("dropout not made up for", "dropout", r"(normalise = )[0-9.]+f /", r"\g<1>1.0f /"),
    Fault("LSE without its maximum", "one stage", r"rows\[i\]\[r\]\.reference \* kScoreToLog2 \+ log2", "log2"),
]


@named(WRONG)
def test_a_wrong_number_is_caught_by_the_verdict(fault: Fault, launch: Any, subjects: Any) -> None:
    subject = subjects[fault.subject]
    assert launch(subject).is_right
    assert not launch(subject, fault.planted(subject.compiled.source)).is_right


OVERFLOWS = [
    Fault("one row of output too many", "one stage", r"(first_row \+ row) < (row_count && chunk)", r"\1 <= \2"),
    Fault("one number of LSE too many", "one stage", r"\(query >= arguments\.len_q\)", "(query > arguments.len_q)"),
    Fault("one row of keys too many", "one stage", r"(first_row \+ row) < (row_count && \(chunk)", r"\1 <= \2"),
    Fault("one tile of keys too many", "score", r"(const bool valid = )first_row \+ row < row_count && ", r"\1"),
    Fault(
        "an index that is not clamped",
        "score",
        r"i0 = min\([^;]*;",
        "i0 += 2;",
    ),
]


@named(OVERFLOWS)
def test_an_access_outside_an_array_is_caught_by_address_sanitizer(fault: Fault, launch: Any, subjects: Any) -> None:
    subject = subjects[fault.subject]
    assert launch(subject, sanitize="address").is_right
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*heap-buffer-overflow"):
        launch(subject, fault.planted(subject.compiled.source), sanitize="address")


@pytest.mark.parametrize("name", ["one stage", "two stages"])
def test_a_byte_beyond_shared_memory_is_caught_by_address_sanitizer(name: str, launch: Any, subjects: Any) -> None:
    subject = subjects[name]
    statement = f"if (threadIdx.x == 7) shared_memory[{subject.shared_bytes}] = 1;"
    fault = Fault("one byte too far", name, r"(  write_lse\(rows, pos)", rf"  {statement}\n\1")
    source = fault.planted(subject.compiled.source)
    line = next(number for number, text in enumerate(source.splitlines(), 1) if statement in text)
    assert launch(subject, sanitize="address").is_right
    with pytest.raises(LaunchError, match=rf"kernel\.cu:{line}: .*heap-buffer-overflow") as error:
        launch(subject, source, sanitize="address")
    assert "shared memory: is located 0 bytes" in str(error.value)


@pytest.mark.parametrize("name", ["one stage", "two stages"])
def test_a_plan_that_asks_for_a_byte_too_little_is_caught(name: str, launch: Any, subjects: Any) -> None:
    subject = subjects[name]
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: "):
        launch(subject, sanitize="address", shared_bytes=subject.shared_bytes - 1)
