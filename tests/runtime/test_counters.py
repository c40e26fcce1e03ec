"""Counters on a GPU that is made up: one for a stream, one of its own for whatever is captured, cleared each time."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashgen.runtime import counters, gpu

EACH_THREADS = 2


class Card:
    """What of CuPy the counters use; memory is NumPy's."""

    def __init__(self) -> None:
        self.capturing: set[int] = set()
        self.cleared: list[tuple[int, int, int, int]] = []
        self.allocated = 0
        runtime = SimpleNamespace(
            streamIsCapturing=self.capturing.__contains__, memsetAsync=lambda *given: self.cleared.append(given)
        )
        self.cuda = SimpleNamespace(
            runtime=runtime, Device=nullcontext, Memory=self.allocate, MemoryPointer=lambda memory, at: memory
        )

    def allocate(self, size: int) -> int:
        assert not self.capturing, "memory is taken during a capture"
        self.allocated += 1
        return self.allocated << 32

    def ndarray(self, shape: tuple[int], dtype: str, pointer: int) -> Any:
        assert dtype == "int32"
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
    return made


def test_launches_of_a_stream_share_a_counter_and_each_clears_it(card: Card) -> None:
    these = counters.Counters(0)
    taken = [these.cleared(stream).data.ptr for stream in (7, 8, 7)]
    assert taken[0] == taken[2] != taken[1]
    assert card.cleared == [(address, 0, 4, stream) for address, stream in zip(taken, (7, 8, 7), strict=True)]
    assert card.allocated == 1


def test_what_is_captured_has_a_counter_for_ever(card: Card) -> None:
    these = counters.Counters(0)
    before = these.cleared(7).data.ptr
    card.capturing.add(7)
    captured = [these.cleared(7).data.ptr for _ in range(3)]
    card.capturing.clear()
    assert len({before, *captured}) == 4 and these.cleared(7).data.ptr == before
    assert these.cleared(8).data.ptr not in captured


def test_the_stream_of_each_thread_is_as_many_streams(card: Card) -> None:
    these, found = counters.Counters(0), []
    own = these.cleared(EACH_THREADS).data.ptr
    thread = threading.Thread(target=lambda: found.append(these.cleared(EACH_THREADS).data.ptr))
    thread.start()
    thread.join()
    assert found != [own] and these.cleared(EACH_THREADS).data.ptr == own


def test_more_memory_is_taken_where_it_is_used_up(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_OF_AN_ALLOCATION", 3)
    these = counters.Counters(0)
    assert len({these.cleared(stream).data.ptr for stream in range(10, 17)}) == 7 and card.allocated == 3
    assert np.diff(sorted(these.cleared(stream).data.ptr for stream in range(10, 13))).tolist() == [4, 4]
