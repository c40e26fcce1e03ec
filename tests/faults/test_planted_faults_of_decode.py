"""Mistakes planted in what the emitted decode kernel has beside the forward's: each is caught, as the table says."""

from __future__ import annotations

from typing import Any

import pytest
from planting import Fault, named

from flashgen.errors import LaunchError
from flashgen.runtime.schedule import Schedule

BARRIER, WAIT = r"__syncthreads\(\);", r"copy_async_wait<kStages - 2>\(\);"
LATE = Schedule("in_order", "late")


WAITS = [
    Fault("missing wait of a step", "splits", rf"{WAIT}(\s+__syncwarp)", r"\1"),
    Fault("wait for the step before", "splits", rf"{WAIT}(\s+__syncwarp)", r"copy_async_wait<kStages - 1>();\1"),
]


@named(WAITS)
def test_a_missing_wait_is_caught_by_copies_that_land_late(fault: Fault, launch: Any, subjects: Any) -> None:
    subject = subjects[fault.subject]
    assert launch(subject, schedule=LATE).is_right
    try:
        outcome = launch(subject, fault.planted(subject.compiled.source), schedule=LATE)
    except LaunchError as error:
        assert "in flight" in str(error)
    else:
        assert outcome.holds_nan and not outcome.is_right


RACES = [
    *WAITS,
    Fault("missing wait for queries", "splits", rf"{WAIT}(\s+__syncthreads)", r"\1"),
    Fault("no wait for a step", "splits, one stage", r"copy_async_wait<0>\(\);(\s+__syncwarp)", r"\1"),
    Fault("queries of others", "one split", rf"{BARRIER}(\s+// Q has landed)", r"\1"),
    Fault("shares over tiles", "one split", rf"{BARRIER}(\s+// every warp is done)", r"\1"),
    Fault("shares of others", "one split", rf"(lay_share\(output, rows\);\s+){BARRIER}", r"\1"),
    Fault("tiles over shares", "runs", rf"{BARRIER}(\s+// every thread is done with the run and)", r"\1"),
    Fault("sums of other warps", "runs", rf"(of_warps\[warp\] = sum;\s+){BARRIER}", r"\1"),
    Fault("none over a run", "runs", rf"(// a column that has none\s+){BARRIER}", r"\1"),
    Fault("a run not found yet", "runs", rf"{BARRIER}(\s+const Run run = \*found)", r"\1"),
    Fault("tiles over a run", "runs", rf"{BARRIER}(\s+// every thread has read it)", r"\1"),
]


@named(RACES)
def test_a_race_is_caught_by_thread_sanitizer(fault: Fault, launch: Any, subjects: Any) -> None:
    subject, schedule = subjects[fault.subject], Schedule("greedy_warp", "late")
    assert launch(subject, sanitize="thread", schedule=schedule).is_right
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*data race|in flight"):
        launch(subject, fault.planted(subject.compiled.source), sanitize="thread", schedule=schedule)


WRONG = [
    Fault("a tile of two splits", "splits", r"min\(split, tiles % splits\)", "min(split + 1, tiles % splits)"),
    Fault("a tile of none", "splits", r" \+ min\(split, tiles % splits\)"),
    Fault("another step's keys", "one split", r"(const int first_key = )tiles[^;]*;", r"\1tiles.first_key(step + 1);"),
    Fault("all keys by each warp", "one split", r"(arguments\.splits\)) \+ threadIdx\.x / 32;", r"\1;"),
    Fault("the first to arrive merges", "splits", r"parts - 1\) \+ 1 == parts", "9) == 0"),
    Fault("a share too few", "splits", r"kWarpsShares \? kWarps : arguments\.splits;", "kWarps;"),
    Fault("shares not weighed", "splits, steep scores", r"exp2_approx\(\(state\.x - [^;]*;", "1.0f;"),
    Fault("sums not weighed", "splits, steep scores", r"fmaf\(state\.y, weight, merged\.sum\)", "merged.sum + state.y"),
    Fault("another split's share", "splits", r"outputs_of_split\(work, work\.split,", "outputs_of_split(work, 0,"),
    Fault("heads by rows of the tile", "splits", r"const int place = work\.offset \+ row;", "const int place = row;"),
    Fault("rows of one query", "splits", r"work\.first_query \+ place / arguments\.packed,", "work.first_query,"),
    Fault("the tile's first query for all", "splits", r"= row\.query;", "= work.first_query;"),
    Fault("dropout of a row's first half", "splits, dropout", r" >> query / 8 % 2 \* 2"),
    Fault("dropout of the first head", "splits, dropout", r"position\.head\[i / 2\]\[r\]", "position.head[0][0]"),
    Fault("a mask of the last query alone", "splits", r"\(first_row \+ rows - 1\) / arguments\.packed",
          "first_row / arguments.packed"),
    Fault("the table of the first sequence", "pages", r"arguments\.page_table \+ work\.batch \* arguments\.table_pitch",
          "arguments.page_table"),
    Fault("the length of the first sequence", "pages", r"seqused_k \+ blockIdx\.z", "seqused_k"),
    Fault("the length of the table", "pages", r"min\(max\(__ldg\([^;]*, most\);", "most;"),
    Fault("a page for a whole tile", "pages", r"page_of\(first_key \+ row, ", "page_of(first_key, "),
    Fault("rows by their numbers", "pages", r"\(first_key \+ row\) % kPageSize", "(row + 1) % kPageSize"),
    Fault("a tile at its page's begin", "large pages", r" \+ first_key % kPageSize \* strides\.row"),
    Fault("another key's page", "large pages", r"first_key\(min\(step \+ kWarps, end - 1\)\)", "first_key(begin)"),
    Fault("the length of the first sequence for all", "runs", r"of_sequence\(given, run\.unit / given\.row_tiles\)",
          "of_sequence(given, 0)"),
    Fault("a part too many", "runs", r"last - first \+ 1;", "last - first + 2;"),
    Fault("a column without tiles", "runs", r"last_tile = run\.stop - kBeginning - 1;", "last_tile = run.stop - 1;"),
    Fault("units from the run's begin on", "runs", r"work\.split == 0 \? 0 : ", ""),
    Fault("runs that overlap", "runs", r"(return min\(static_cast<int>\(blockIdx\.x) \+ 1\)", r"\1 + 2)"),
    Fault("one place for all shares", "runs", r"max\(2 \* part - 1, 0\)", "0"),
    Fault("one place for two shares of a column", "runs", r"return max\(2 \* part - 1, 0\);", "return 2 * part;"),
    Fault("a unit twice", "runs", r"return \{run\.stop, stop, run\.length, unit\};",
          "return {run.stop, stop, run.length, run.unit};"),
    Fault("the first column's run", "runs", r"begin = blockIdx\.x \* length;", "begin = 0;"),
    Fault("keys that are not scaled", "bytes", r" \*= n % 4 < 2 \? above : below", ""),
    Fault("rows of queries that are not scaled", "bytes", r"key_scale \* __uint_as_float\([^;]*;", "key_scale;"),
    Fault("values that are not scaled", "bytes", r"even\[2 \* r\] \* scale", "even[2 * r]"),
    Fault("the scale of the first head", "bytes", r"k_scale \+ head_kv \* arguments\.k_scales", "k_scale"),
    Fault("queries in their own order", "bytes", r"halves_of\(left, right, 0x5410\)", "left"),
    Fault("the upper halves twice", "bytes", r"halves_of\(left, right, 0x5410\)", "halves_of(left, right, 0x7632)"),
    Fault("bytes exchanged", "bytes", r"keys\.x, keys\.y", "keys.y, keys.x"),
    Fault("odd columns for even ones", "bytes", r"first\.y, second\.y", "first.x, second.x"),
]  # fmt: skip


@pytest.mark.rotated(6)
@named(WRONG)
def test_a_wrong_number_is_caught_by_the_verdict(fault: Fault, launch: Any, subjects: Any) -> None:
    subject = subjects[fault.subject]
    assert launch(subject).is_right
    assert not launch(subject, fault.planted(subject.compiled.source)).is_right


NANS = [
    Fault("unguarded weight", "splits, rows without keys", r"state\.x == minus_infinity\(\) \? 0\.0f : "),
    Fault("unguarded division", "splits, rows without keys", r"empty \? make_uint2\(0, 0\) : rounded", "rounded"),
]


@named(NANS)
def test_a_missing_guard_is_caught_by_rows_without_keys(fault: Fault, launch: Any, subjects: Any) -> None:
    subject = subjects[fault.subject]
    right = launch(subject)
    assert right.is_right and not right.holds_nan
    wrong = launch(subject, fault.planted(subject.compiled.source))
    assert wrong.holds_nan and not wrong.is_right


OF_SEQUENCE = r"min\(max\((__ldg\(arguments\.seqused_k \+ blockIdx\.z\)), 0\), most\)"
LAST_PAGE = r"return min\(static_cast<unsigned>\((.*?)\), arguments\.pages - 1u\);"
OVERFLOWS = [
    Fault("parts from their own column on", "runs", r"given\.splits \+ first;", "given.splits + column;"),
    Fault("a page behind the last", "pages", LAST_PAGE, r"return \1 + arguments.pages;"),
    Fault("a length beyond the table", "large pages", OF_SEQUENCE, r"\1 + 1000"),
    Fault(
        "rows that are not there",
        "splits of a head",
        r"const int rows = min\(kTileQ, [^;]*;",
        "const int rows = kTileQ;",
    ),
    Fault("queries that are not there", "splits of a head", r", row < work\.rows && ", ", "),
    Fault("a counter too far", "splits", r"arguments\.arrivals \+ work\.unit", "arguments.arrivals + work.unit + 1"),
    Fault(
        "a share too far", "splits", r"outputs_of_split\(work, work\.split,", "outputs_of_split(work, work.split + 1,"
    ),
]


@named(OVERFLOWS)
def test_an_access_outside_an_array_is_caught_by_address_sanitizer(fault: Fault, launch: Any, subjects: Any) -> None:
    subject = subjects[fault.subject]
    assert launch(subject, sanitize="address").is_right
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*heap-buffer-overflow"):
        launch(subject, fault.planted(subject.compiled.source), sanitize="address")


def test_a_plan_that_asks_for_a_byte_too_little_is_caught(launch: Any, subjects: Any) -> None:
    subject = subjects["one split"]
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: "):
        launch(subject, sanitize="address", shared_bytes=subject.shared_bytes - 1)
