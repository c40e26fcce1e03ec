"""Entries that no cache folder took. This process keeps them, and builds each once however many threads ask."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from flashgen.build.entries import Artifacts, write_entry

Place = tuple[Path, str]
"""Where an entry would stand: its folder, and its key."""


class ProcessMemory:
    """Entries by the place where they would stand. They go with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Place, Future[Artifacts]] = {}
        self._folder: Path | None = None

    def find(self, place: Place) -> Artifacts | None:
        """The entry's files and facts, or None where they are not kept here."""
        future = self._entries.get(place)
        return future.result() if future and future.done() and not future.exception() else None

    def get_or_build(self, place: Place, build: Callable[[], Artifacts]) -> tuple[Artifacts, bool]:
        """(files and facts, whether they were there). Raises what `build` raises, and then keeps nothing."""
        with self._lock:
            future = self._entries.get(place)
            mine = future is None
            if future is None:
                future = self._entries[place] = Future()
        if not mine:
            return future.result(), True
        try:
            artifacts = build()
        except BaseException as error:
            with self._lock:
                del self._entries[place]
            future.set_exception(error)
            raise
        future.set_result(artifacts)
        return artifacts, False

    def on_disk(self, place: Place, artifacts: Artifacts) -> Path:
        """A folder of the entry's files, for programs that take nothing else; removed when the process ends.

        Raises OSError where no temporary folder takes them.
        """
        folder, key = place
        with self._lock:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="flashgen-"))
                atexit.register(_remove, self._folder, os.getpid())
            written = self._folder / folder.name
            if not written.exists():
                write_entry(written, key, artifacts)
        return written

    def in_child(self) -> None:
        """Runs after a fork: what the parent was building is built anew, and the folder stays the parent's."""
        self._lock, self._folder = threading.Lock(), None
        self._entries = {place: future for place, future in self._entries.items() if future.done()}


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child leaves its parent's files alone
        shutil.rmtree(folder, ignore_errors=True)


MEMORY = ProcessMemory()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=MEMORY.in_child)
