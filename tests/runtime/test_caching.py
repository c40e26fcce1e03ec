"""Caches that are used by many threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from flashgen.runtime import streams
from flashgen.runtime.caching import Cache, locked_cached_property

AtOnce = Callable[..., list[Any]]
LONG = 30  # seconds after which a thread that waits forever fails the test


def test_a_value_is_created_once_and_then_returned() -> None:
    kept: Cache[str, int] = Cache()
    assert kept.get("a") is None
    assert [kept.get_or_make("a", iter(range(9)).__next__) for _ in range(3)] == [0, 0, 0] and kept.get("a") == 0
    assert kept.get_or_make("nothing", lambda: None) is None  # type: ignore[arg-type, return-value]
    assert kept.get_or_make("nothing", lambda: 1 // 0) is None, "None is a valid value"


def test_the_oldest_entry_is_evicted() -> None:
    kept: Cache[int, int] = Cache(3)
    for number in range(5):
        kept.get_or_make(number, lambda number=number: number)
        assert len(kept) == min(number + 1, 3)
    assert kept.values() == (2, 3, 4) and kept.get(1) is None


def test_threads_with_one_key_wait_for_one_creation(at_once: AtOnce) -> None:
    kept: Cache[str, object] = Cache(1)
    entered, finish, made = threading.Event(), threading.Event(), []

    def make() -> object:
        entered.set()
        assert finish.wait(LONG)
        made.append(object())
        return made[-1]

    def ask(number: int) -> object:
        if number == 0:
            assert entered.wait(LONG)
            finish.set()
        return kept.get_or_make("a", make)

    found = at_once(ask)
    assert len(made) == 1 and set(found) == set(made)


def test_a_creation_does_not_block_other_keys(at_once: AtOnce) -> None:
    """Each of two threads finishes creating only after the other has begun."""
    kept: Cache[int, int] = Cache()
    both = threading.Barrier(2)
    assert at_once(lambda number: kept.get_or_make(number, lambda: both.wait(LONG) * 0 + number), 2) == [0, 1]


def test_after_an_error_the_next_thread_tries_again(at_once: AtOnce) -> None:
    kept: Cache[str, str] = Cache()
    waiting = threading.Event()

    def fail() -> str:
        assert waiting.wait(LONG)
        raise ValueError("no")

    def ask(number: int) -> str:
        if number:
            waiting.set()
            return kept.get_or_make("a", lambda: "made")
        try:
            return kept.get_or_make("a", fail)
        except ValueError:
            return "failed"

    results = at_once(ask)
    assert results[0] in ("failed", "made") and set(results[1:]) == {"made"} and not kept._locks


def test_more_keys_than_entries_in_many_threads(at_once: AtOnce, hurried: None) -> None:
    kept: Cache[int, int] = Cache(2)

    def ask(number: int) -> None:
        for step in range(2000):
            key = (number * 7 + step) % 5
            assert kept.get_or_make(key, lambda key=key: -key) == -key

    at_once(ask)
    assert len(kept) == 2 and not kept._locks


def test_a_key_invalidated_during_creation_is_not_stored() -> None:
    kept: Cache[str, str] = Cache()

    def make() -> str:
        kept.clear()
        return "old"

    assert kept.get_or_make("a", make) == "old"
    assert kept.get_or_make("a", lambda: "new") == "new"
    kept.clear()
    assert len(kept) == 0


class Slow:
    """Has a property that is computed once; `meet` is called during the computation."""

    def __init__(self, meet: Callable[[], Any]) -> None:
        self.meet, self.made = meet, 0

    @locked_cached_property
    def value(self) -> object:
        """The computed value."""
        self.meet()
        self.made += 1
        return object()


def test_a_property_is_computed_once(at_once: AtOnce) -> None:
    asked = threading.Event()
    slow = Slow(lambda: asked.wait(0.2))
    assert len(set(at_once(lambda number: slow.value))) == 1 and slow.made == 1
    assert Slow.value.__doc__ == "The computed value."


def test_properties_of_two_instances_are_computed_concurrently(at_once: AtOnce) -> None:
    """`functools.cached_property` had one lock for all of them, and later none."""
    both = threading.Barrier(2)
    slow = [Slow(lambda: both.wait(LONG)) for _ in range(2)]
    at_once(lambda number: slow[number].value, 2)
    assert [one.made for one in slow] == [1, 1]


def test_per_thread_streams_are_distinct(at_once: AtOnce) -> None:
    """One handle, 2, stands for them; other handles are one stream each, for every thread."""
    assert len(set(at_once(lambda number: streams.identity(2)))) == 8
    assert streams.identity(2) is streams.identity(2)


def test_the_legacy_stream_is_the_same_for_all_threads(at_once: AtOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    """By both of its handles; other handles have the identity that the driver reports."""
    monkeypatch.setattr(streams, "_number", lambda stream: 100 + stream)
    found = {at_once(lambda number, stream=stream: streams.identity(stream), 2)[1] for stream in (0, 1)}
    assert len(found) == 1 and found.isdisjoint({streams.identity(3), streams.identity(2)})
