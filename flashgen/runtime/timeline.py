"""Recordings of what the warps of a kernel's first CTA do, made by the emulator on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from flashgen.errors import LaunchError

Array = np.ndarray[Any, Any]

_MAX_EVENTS = 2**18  # of a launch: 7 MB


class Did(IntEnum):
    """The kind of an event. The same as `Did` in templates/emulator/interface.h; change both together."""

    COPY = 0
    COMMIT_COPIES = 1
    AWAIT_COPIES = 2
    LOAD = 3
    STORE = 4
    MULTIPLY = 5
    MULTIPLY_ASYNC = 6
    COMMIT_PRODUCTS = 7
    AWAIT_PRODUCTS = 8
    ARRIVE = 9
    AWAIT_PHASE = 10
    REACH = 11
    LEAVE = 12


# The same as TimelineEvent in templates/emulator/interface.h; change both together.
EVENT = np.dtype([(name, np.uint32) for name in ("warp", "did", "line", "exponentials", "object", "phase", "amount")])


@dataclass
class Recorder:
    """The events of all launches of one Python thread.

    launches: (function of the kernel, its events in the emulator's order) for each launch.
    """

    buffer: Array = field(default_factory=lambda: np.zeros(_MAX_EVENTS, EVENT))
    launches: list[tuple[str, Array]] = field(default_factory=list)
    running: str = ""

    def begin(self, kernel: str) -> None:
        self.running = kernel

    def end(self, count: int) -> None:
        """Stores the events of a finished launch. Raises LaunchError if there were too many."""
        if count > len(self.buffer):
            raise LaunchError(
                f"{self.running}: {count} events, and {len(self.buffer)} can be recorded: record a shorter call"
            )
        self.launches.append((self.running, self.buffer[:count].copy()))


_recorder: ContextVar[Recorder | None] = ContextVar("flashgen timeline recorder", default=None)


def recorder() -> Recorder | None:
    """Returns the recorder of this thread's launches, or None."""
    return _recorder.get()


@contextmanager
def recording() -> Iterator[Recorder]:
    """Records this thread's launches on the emulator, except sanitized ones, inside the `with` block."""
    recorder = Recorder()
    token = _recorder.set(recorder)
    try:
        yield recorder
    finally:
        _recorder.reset(token)
