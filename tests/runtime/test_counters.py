"""Counters on a mock GPU: one per stream, and a separate one for each captured launch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashgen.runtime import counters, gpu

EACH_THREADS = 2


class Card:
    """The parts of CuPy and of the driver that the counters use; memory is NumPy's.

    `numbers` are the streams' ids by handle.
    """

    def __init__(self) -> None:
        self.capturing: set[int] = set()
        self.cleared: list[tuple[int, int, int, int]] = []
        self.numbers: dict[int, int] = {}
        self.allocated, self.beside = 0, False
        runtime = SimpleNamespace(
            streamIsCapturing=self.capturing.__contains__, memsetAsync=lambda *given: self.cleared.append(given)
        )
        self.cuda = SimpleNamespace(
            runtime=runtime, Device=nullcontext, Memory=self.allocate, MemoryPointer=lambda memory, at: memory,
            Stream=lambda non_blocking: SimpleNamespace(ptr=99, synchronize=lambda: None),
        )  # fmt: skip

    def identity(self, stream: int) -> int:
        return self.numbers.get(stream, stream)

    @contextmanager
    def allowed_during_captures(self) -> Iterator[None]:
        self.beside = True
        yield
        self.beside = False

    def allocate(self, size: int) -> int:
        assert self.beside, "the allocation is allowed during capture"
        self.allocated += 1
        return self.allocated << 32

    def ndarray(self, shape: tuple[int], dtype: str, pointer: int) -> Any:
        assert dtype == "uint32"
        return Slices(pointer, shape[0])


class Slices:
    def __init__(self, pointer: int, size: int) -> None:
        self.data, self.size = SimpleNamespace(ptr=pointer), size

    def __getitem__(self, which: slice) -> Slices:
        assert 0 <= which.start < which.stop <= self.size
        return Slices(self.data.ptr + 4 * which.start, which.stop - which.start)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()
    monkeypatch.setattr(gpu, "cupy", lambda: made)
    monkeypatch.setattr(counters, "identity", made.identity)
    monkeypatch.setattr(counters, "allowed_during_captures", made.allowed_during_captures)
    return made


def address(these: counters.Counters, stream: int) -> int:
    return int(these.for_launch(stream).data.ptr)


def test_launches_of_a_stream_share_a_counter(card: Card) -> None:
    these = counters.Counters(0)
    taken = [address(these, stream) for stream in (7, 8, 7)]
    assert taken[0] == taken[2] != taken[1]
    assert card.allocated == 1 and card.cleared == [(1 << 32, 0, 4 * 16384, 99)]  # at their creation


def test_launches_that_need_more_counters_get_more(card: Card) -> None:
    """As many consecutive ones; launches with fewer use the first of them, disjoint from earlier ones."""
    these = counters.Counters(0)
    one = address(these, 7)
    many = these.for_launch(7, 100)
    assert many.size == 100 and not many.data.ptr <= one < many.data.ptr + 400
    assert address(these, 7) == many.data.ptr == these.for_launch(7, 100).data.ptr
    other = these.for_launch(8, 20000)
    assert other.size == 20000 and card.allocated == 2 and card.cleared[1][2] == 4 * 20000
    card.capturing.add(7)
    captured = [these.for_launch(7, 5).data.ptr for _ in range(2)]
    assert abs(captured[0] - captured[1]) >= 20


def test_captured_launches_keep_their_counter(card: Card) -> None:
    card.capturing.add(7)
    these = counters.Counters(0)
    captured = [address(these, 7) for _ in range(3)]
    card.capturing.clear()
    assert len({*captured, address(these, 7), address(these, 8)}) == 5


def test_per_thread_streams_have_separate_counters(card: Card) -> None:
    these, found = counters.Counters(0), []
    own = address(these, EACH_THREADS)
    thread = threading.Thread(target=lambda: found.append(address(these, EACH_THREADS)))
    thread.start()
    thread.join()
    assert found != [own] and address(these, EACH_THREADS) == own


def test_a_new_stream_with_a_reused_handle_has_a_new_counter(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last launches of the old stream may still run; its counter is reused after many others."""
    monkeypatch.setattr(counters, "_MAX_RETIRED", 3)
    these, seen = counters.Counters(0), []
    for number in range(100, 110):
        card.numbers[7] = number
        seen.append(address(these, 7))
        assert address(these, 7) == seen[-1]
    assert len(set(seen[:4])) == 4 and seen[4:8] == seen[:4]


def test_threads_that_use_a_new_stream_at_once_share_its_counter(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    these, found, both = counters.Counters(0), [], threading.Barrier(2)

    def number(stream: int) -> int:
        both.wait(10)  # both look for the counter at once
        return stream

    monkeypatch.setattr(counters, "identity", number)
    threads = [threading.Thread(target=lambda: found.append(address(these, 7))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and len(set(found)) == 1


def test_memory_grows_when_it_is_used_up(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_COUNTERS_PER_ALLOCATION", 3)
    these = counters.Counters(0)
    assert len({address(these, stream) for stream in range(10, 17)}) == 7 and card.allocated == 3
    assert np.diff(sorted(address(these, stream) for stream in range(10, 13))).tolist() == [4, 4]
