"""What the warps of a kernel's first block do, step by step, as the emulator records it where somebody asks."""

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

_MOST_EVENTS = 2**18  # of a launch: 7 MB


class Did(IntEnum):
    """What a warp did: `Did` of templates/emulator/interface.h; keep both alike."""

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


# TimelineEvent of templates/emulator/interface.h; keep both alike.
EVENT = np.dtype([(name, np.uint32) for name in ("warp", "did", "line", "exponentials", "object", "phase", "amount")])


@dataclass
class Recorder:
    """The events of the launches of one thread of Python, kernel by kernel.

    launches: (the kernel's function, its events in the order in which the emulator came to them).
    """

    buffer: Array = field(default_factory=lambda: np.zeros(_MOST_EVENTS, EVENT))
    launches: list[tuple[str, Array]] = field(default_factory=list)
    running: str = ""

    def begin(self, kernel: str) -> None:
        self.running = kernel

    def end(self, count: int) -> None:
        """Keeps the events of the launch that has ended. Raises LaunchError where there were too many."""
        if count > len(self.buffer):
            raise LaunchError(
                f"{self.running}: {count} events, and {len(self.buffer)} can be recorded: record a shorter call"
            )
        self.launches.append((self.running, self.buffer[:count].copy()))


_recorder: ContextVar[Recorder | None] = ContextVar("flashgen timeline recorder", default=None)


def recorder() -> Recorder | None:
    """Who records the launches of this thread; None where nobody does."""
    return _recorder.get()


@contextmanager
def recording() -> Iterator[Recorder]:
    """Records the emulator's launches of this thread that are run without a sanitizer, until the block ends."""
    made = Recorder()
    token = _recorder.set(made)
    try:
        yield made
    finally:
        _recorder.reset(token)
