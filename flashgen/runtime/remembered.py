"""What outlives a call, for any number of threads: results that are remembered, and values that are made once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar, overload

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_NOTHING: Any = object()


class Remembered(Generic[Key, Value]):
    """The last results of something that takes time to make.

    A hit takes no lock. What is missing is made by one thread: others that want the same wait for it, others that want
    something else do not.

    Attributes:
        get: the value of a key, or None: one look into a dictionary.
        forgotten: how often everything was forgotten.
    """

    def __init__(self, limit: int | None = None) -> None:
        """limit: how many are kept; the oldest makes room. None keeps all."""
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: dict[Key, Value] = {}  # changed with the lock held
        self._turns: dict[Key, threading.RLock] = {}  # for the values that are being made
        self.forgotten = 0
        self.get: Callable[[Key], Value | None] = self._kept.get

    def get_or_make(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of a key, made now where there is none. An error of `make` is the caller's; the next one tries."""
        found: Value = self._kept.get(key, _NOTHING)
        if found is not _NOTHING:
            return found
        with self._lock:
            turn = self._turns.setdefault(key, threading.RLock())
        try:
            with turn:
                found = self._kept.get(key, _NOTHING)  # another thread may have made it while this one waited
                return self._made(key, make) if found is _NOTHING else found
        finally:
            with self._lock:
                if self._turns.get(key) is turn:
                    del self._turns[key]

    def forget(self) -> None:
        """Forgets everything, also what is being made: its maker gets it, and nobody afterwards."""
        with self._lock:
            self.forgotten += 1
            self._kept.clear()

    def values(self) -> tuple[Value, ...]:
        """What is kept, the oldest first."""
        with self._lock:
            return tuple(self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def _made(self, key: Key, make: Callable[[], Value]) -> Value:
        before = self.forgotten
        value = make()
        with self._lock:
            if before == self.forgotten:
                while self._limit is not None and len(self._kept) >= self._limit:
                    del self._kept[next(iter(self._kept))]
                self._kept[key] = value
        return value


class made_once(Generic[Value]):
    """A `functools.cached_property` that one thread makes while the others wait, with a lock for each instance.

    Python's own has no lock from 3.12 on, and one for all instances before: kernels would be loaded twice, or one
    attention would wait while another's are compiled.
    """

    def __init__(self, make: Callable[[Any], Value]) -> None:
        self._make, self.__doc__ = make, make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> made_once[Value]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: object | None, owner: type) -> made_once[Value] | Value:
        """Is called until the value stands in the instance, where Python looks first."""
        if instance is None:
            return self
        attributes = instance.__dict__
        with attributes.setdefault(f"_{self._name}_turn", threading.RLock()):
            if self._name not in attributes:
                attributes[self._name] = self._make(instance)
            value: Value = attributes[self._name]
            return value
