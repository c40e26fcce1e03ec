"""Caches and cached properties that many threads may use at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar, overload

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_MISSING: Any = object()


class Cache(Generic[Key, Value]):
    """A thread-safe cache of values that take time to create.

    A hit takes no lock. On a miss, one thread creates the value, and other threads that ask for the same key wait for
    it. Threads that ask for other keys do not wait.

    Attributes:
        get: returns the value of a key, or None, by one look-up in a dictionary.
        generation: how often the cache was cleared.
    """

    def __init__(self, limit: int | None = None) -> None:
        """limit: the maximum number of entries, beyond which the oldest is evicted; None for no limit."""
        self._limit = limit
        self._lock = threading.Lock()
        self._entries: dict[Key, Value] = {}  # changed only while the lock is held
        self._locks: dict[Key, threading.RLock] = {}  # of the values that are being created
        self.generation = 0
        self.get: Callable[[Key], Value | None] = self._entries.get

    def get_or_make(self, key: Key, make: Callable[[], Value]) -> Value:
        """Returns the value of a key, and creates it on a miss.

        An error of `make` is raised to its caller and is not cached: the next thread that asks calls its own `make`.
        """
        found: Value = self._entries.get(key, _MISSING)
        if found is not _MISSING:
            return found
        with self._lock:
            lock = self._locks.setdefault(key, threading.RLock())
        try:
            with lock:
                found = self._entries.get(key, _MISSING)  # another thread may have created it in the meantime
                return self._create(key, make) if found is _MISSING else found
        finally:
            with self._lock:
                if self._locks.get(key) is lock:
                    del self._locks[key]

    def clear(self) -> None:
        """Removes all entries. A value that is being created now is returned to its caller, but not cached."""
        with self._lock:
            self.generation += 1
            self._entries.clear()

    def values(self) -> tuple[Value, ...]:
        """Returns the cached values, the oldest first."""
        with self._lock:
            return tuple(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def _create(self, key: Key, make: Callable[[], Value]) -> Value:
        generation = self.generation
        value = make()
        with self._lock:
            if generation == self.generation:
                while self._limit is not None and len(self._entries) >= self._limit:
                    del self._entries[next(iter(self._entries))]
                self._entries[key] = value
        return value


class locked_cached_property(Generic[Value]):
    """A `functools.cached_property` with a lock for each instance: one thread computes the value, the others wait.

    The property of the standard library has no lock since Python 3.12, so two threads would load the same kernels. It
    had one lock for all instances before, so one attention would wait while the kernels of another are compiled.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> locked_cached_property[Value]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: object | None, owner: type) -> locked_cached_property[Value] | Value:
        """Returns the value, and stores it in the instance's dictionary, where Python finds it before this method."""
        if instance is None:
            return self
        attributes = instance.__dict__
        with attributes.setdefault(f"_{self._name}_lock", threading.RLock()):
            if self._name not in attributes:
                attributes[self._name] = self._compute(instance)
            value: Value = attributes[self._name]
            return value
