"""Estimates the time that a sequence of runs takes, and says it from time to time where no progress bar is drawn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from flashgen.cli.console import note

INTERVAL = 15.0  # seconds between two lines


class Pace:
    """Prints a line on stderr every INTERVAL seconds: the runs done, the time they took, and the time left.

    The estimate leaves out the first run, which includes the compilation of the emulator. Nothing is printed if stderr
    is a terminal, where a progress bar shows the same.
    """

    def __init__(self, planned: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._planned, self._clock = planned, clock
        self._begin = self._printed = clock()
        self._first_end: float | None = None

    def update(self, done: int) -> None:
        """Is called after each run. Prints a line if the last one, or the start, was INTERVAL seconds ago.

        done: the number of runs done.
        """
        now = self._clock()
        if self._first_end is None:
            self._first_end = now
        if done < 2 or done >= self._planned or now - self._printed < INTERVAL or sys.stderr.isatty():
            return
        self._printed = now
        left = (now - self._first_end) / (done - 1) * (self._planned - done)
        note(f"{done} of {self._planned} runs in {duration(now - self._begin)}, about {duration(left)} left")


def duration(seconds: float) -> str:
    """Returns a duration in words: "40 s", "5 min" from 90 seconds, "2.0 h" from 90 minutes."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
