"""What is remembered across calls, asked for by many threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from flashgen.runtime import streams
from flashgen.runtime.caching import Cache, locked_cached_property

AtOnce = Callable[..., list[Any]]
LONG = 30  # seconds, after which a thread that waits for ever fails the test


def test_a_value_is_made_once_and_then_got() -> None:
    kept: Cache[str, int] = Cache()
    assert kept.get("a") is None
    assert [kept.get_or_make("a", iter(range(9)).__next__) for _ in range(3)] == [0, 0, 0] and kept.get("a") == 0
    assert kept.get_or_make("nothing", lambda: None) is None  # type: ignore[arg-type, return-value]
    assert kept.get_or_make("nothing", lambda: 1 // 0) is None, "None is a value, too"


def test_the_oldest_makes_room() -> None:
    kept: Cache[int, int] = Cache(3)
    for number in range(5):
        kept.get_or_make(number, lambda number=number: number)
        assert len(kept) == min(number + 1, 3)
    assert kept.values() == (2, 3, 4) and kept.get(1) is None


def test_threads_that_want_the_same_wait_for_one_that_makes_it(at_once: AtOnce) -> None:
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


def test_what_is_being_made_keeps_nobody_waiting_who_wants_something_else(at_once: AtOnce) -> None:
    """Each of two threads finishes making only when the other has begun."""
    kept: Cache[int, int] = Cache()
    both = threading.Barrier(2)
    assert at_once(lambda number: kept.get_or_make(number, lambda: both.wait(LONG) * 0 + number), 2) == [0, 1]


def test_after_an_error_the_next_thread_tries(at_once: AtOnce) -> None:
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


def test_more_keys_than_there_is_room_for_in_many_threads(at_once: AtOnce, hurried: None) -> None:
    kept: Cache[int, int] = Cache(2)

    def ask(number: int) -> None:
        for step in range(2000):
            key = (number * 7 + step) % 5
            assert kept.get_or_make(key, lambda key=key: -key) == -key

    at_once(ask)
    assert len(kept) == 2 and not kept._locks


def test_what_is_forgotten_while_it_is_made_is_not_kept() -> None:
    kept: Cache[str, str] = Cache()

    def make() -> str:
        kept.clear()
        return "old"

    assert kept.get_or_make("a", make) == "old"
    assert kept.get_or_make("a", lambda: "new") == "new"
    kept.clear()
    assert len(kept) == 0


class Slow:
    """Has something that is made once; `meet` is called by whoever makes it."""

    def __init__(self, meet: Callable[[], Any]) -> None:
        self.meet, self.made = meet, 0

    @locked_cached_property
    def value(self) -> object:
        """What is made."""
        self.meet()
        self.made += 1
        return object()


def test_a_property_is_made_once(at_once: AtOnce) -> None:
    asked = threading.Event()
    slow = Slow(lambda: asked.wait(0.2))
    assert len(set(at_once(lambda number: slow.value))) == 1 and slow.made == 1
    assert Slow.value.__doc__ == "What is made."


def test_properties_of_two_instances_are_made_beside_each_other(at_once: AtOnce) -> None:
    """`functools.cached_property` had one lock for all of them, and later none."""
    both = threading.Barrier(2)
    slow = [Slow(lambda: both.wait(LONG)) for _ in range(2)]
    at_once(lambda number: slow[number].value, 2)
    assert [one.made for one in slow] == [1, 1]


def test_the_stream_of_each_thread_is_as_many_streams(at_once: AtOnce) -> None:
    """One handle, 2; other handles are one stream each, whoever launches there."""
    assert len(set(at_once(lambda number: streams.identity(2)))) == 8
    assert streams.identity(2) is streams.identity(2)


def test_the_legacy_stream_is_one_whoever_asks(at_once: AtOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    """By both of its handles; others are what the driver says."""
    monkeypatch.setattr(streams, "_number", lambda stream: 100 + stream)
    found = {at_once(lambda number, stream=stream: streams.identity(stream), 2)[1] for stream in (0, 1)}
    assert len(found) == 1 and found.isdisjoint({streams.identity(3), streams.identity(2)})
