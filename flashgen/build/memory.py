"""In-memory entries of this process, for a cache folder that cannot be used. Each is built once for all threads."""

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

Location = tuple[Path, str]
"""The location that an entry would have on disk: its folder and its key."""


class ProcessMemory:
    """Entries by their location. They live as long as the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Location, Future[Artifacts]] = {}
        self._folder: Path | None = None

    def find(self, location: Location) -> Artifacts | None:
        """Returns the files and facts of an entry, or None if it is not here."""
        future = self._entries.get(location)
        return future.result() if future and future.done() and not future.exception() else None

    def get_or_build(self, location: Location, build: Callable[[], Artifacts]) -> tuple[Artifacts, bool]:
        """Returns the files and facts, and whether they already existed. If `build` raises, nothing is stored."""
        with self._lock:
            future = self._entries.get(location)
            is_builder = future is None
            if future is None:
                future = self._entries[location] = Future()
        if not is_builder:
            return future.result(), True
        try:
            artifacts = build()
        except BaseException as error:
            with self._lock:
                del self._entries[location]
            future.set_exception(error)
            raise
        future.set_result(artifacts)
        return artifacts, False

    def write_to_disk(self, location: Location, artifacts: Artifacts) -> Path:
        """Writes an entry to a temporary folder, for programs that need files. The folder is removed at exit.

        Raises OSError if no temporary folder can be written.
        """
        folder, key = location
        with self._lock:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="flashgen-"))
                atexit.register(_remove, self._folder, os.getpid())
            written = self._folder / folder.name
            if not written.exists():
                write_entry(written, key, artifacts)
        return written

    def reset_in_child(self) -> None:
        """Runs in a child after a fork: drops unfinished builds of the parent, and leaves its folder to the parent."""
        self._lock, self._folder = threading.Lock(), None
        self._entries = {location: future for location, future in self._entries.items() if future.done()}


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not remove the files of its parent
        shutil.rmtree(folder, ignore_errors=True)


MEMORY = ProcessMemory()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=MEMORY.reset_in_child)
