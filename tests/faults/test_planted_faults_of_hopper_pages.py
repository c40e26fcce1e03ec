"""Mistakes planted in how Hopper's forward kernel copies pages: each is caught, by the check that the table names."""

from __future__ import annotations

from typing import Any

import pytest
from planting import Fault, named

from flashgen.errors import LaunchError
from flashgen.runtime.schedule import Schedule

LATE = Schedule("in_order", "late")
PAGES, LARGE = "hopper, pages", "hopper, large pages"

PROTOCOL = [
    Fault("a tail cleared before it lands", PAGES, r"mbarrier_wait\(full, tails_used\);"),
    Fault("a tail's parity", PAGES, r"tails_used \^= 1;"),
    Fault("a tail told before it is cleared", PAGES, r"left < kTileK \? barriers\.tail_full\(\) :", ""),
    Fault("clearing shown to nobody", PAGES, r"fence_async_shared\(\);(   // products)", r"\1"),
    Fault("nobody hears of a tail", PAGES, r"release\(barriers\.values_full\(use\)\);"),
    Fault("a stage not waited for", PAGES, r"mbarrier_wait\(empty, [^;]*;"),
    Fault("bytes of a box", PAGES, r"kTileK( \* kColumns \* kElementBytes\);)", r"kBoxKeys\1"),
]


@named(PROTOCOL)
def test_a_broken_protocol_is_caught_by_line(fault: Fault, launch: Any, subjects: Any) -> None:
    subject = subjects[fault.subject]
    assert launch(subject, schedule=LATE).is_right
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: "):
        launch(subject, fault.planted(subject.compiled.source), schedule=LATE)


def test_lanes_that_still_clear_are_caught_by_engines_that_are_early(launch: Any, subjects: Any) -> None:
    fault, early = Fault("", PAGES, r"(way than stores write\s+)__syncwarp\(\);", r"\1"), Schedule("in_order", "early")
    subject = subjects[fault.subject]
    assert launch(subject, schedule=early).is_right
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*was overwritten before"):
        launch(subject, fault.planted(subject.compiled.source), schedule=early)


def test_a_tail_cleared_before_it_lands_is_caught_by_thread_sanitizer(launch: Any, subjects: Any) -> None:
    subject, schedule = subjects[PAGES], Schedule("greedy_warp", "early")
    assert launch(subject, sanitize="thread", schedule=schedule).is_right
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*data race"):
        launch(subject, PROTOCOL[0].planted(subject.compiled.source), sanitize="thread", schedule=schedule)


WRONG = [
    Fault("a tail not cleared", PAGES, r"clear_rows<kValueDimPadded, kValuePanel>[^;]*;"),
    Fault("a row too few cleared", PAGES, r"values_at\(0, use\), left\)", "values_at(0, use), left + 1)"),
    Fault("a row too many cleared", PAGES, r"values_at\(0, use\), left\)", "values_at(0, use), left - 1)"),
    Fault("another stage cleared", PAGES, r"values_at\(0, use\)", "values_at(0, use + 1)"),
    Fault(
        "one page of a tile",
        PAGES,
        r"__shfl_sync\(0xffffffffu, page, first \+ i\)",
        "__shfl_sync(0xffffffffu, page, 0)",
    ),
    Fault("pages of another sequence", PAGES, r"static_cast<unsigned>\(sequence\) \*", "0 *"),
    Fault("pages of the tile before", PAGES, r"(entry = arguments\.page_table \+ .*?key / kPageSize)", r"\1 / 2"),
    Fault("the first rows of a page", LARGE, r"row = key % kPageSize / kBoxKeys \* kBoxKeys", "row = 0"),
    Fault("the length of the first", PAGES, r"seqused_k \+ sequence", "seqused_k"),
]


@named(WRONG)
def test_a_wrong_number_is_caught_by_the_verdict(fault: Fault, launch: Any, subjects: Any) -> None:
    subject = subjects[fault.subject]
    assert launch(subject, schedule=LATE).is_right
    try:
        outcome = launch(subject, fault.planted(subject.compiled.source), schedule=LATE)
    except LaunchError:  # what is read there may be worse than wrong
        return
    assert not outcome.is_right


OUTSIDE = [
    Fault("pages behind the table", PAGES, r"min\((first_key \+ static_cast[^;]*), arguments\.len_k - 1\);", r"\1;"),
    Fault("a length that is none", PAGES, r"min\(max\((__ldg\(launched\.seqused_k.*?\)), 0\), most\)", r"\1 + 900"),
]


@named(OUTSIDE)
def test_an_access_outside_of_the_table_is_caught_by_address_sanitizer(
    fault: Fault, launch: Any, subjects: Any
) -> None:
    subject = subjects[fault.subject]
    assert launch(subject, sanitize="address").is_right
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*heap-buffer-overflow"):
        launch(subject, fault.planted(subject.compiled.source), sanitize="address")
