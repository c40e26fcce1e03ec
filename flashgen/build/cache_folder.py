"""The folder of the kernel cache: where it is, whether it can be used, and the one warning where it cannot."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashgen.build.entries import holds_entries_alone
from flashgen.build.trust import why_not_trusted
from flashgen.errors import BuildError, FlashgenWarning
from flashgen.files import flush

_log = logging.getLogger(__name__)
_said: set[object] = set()  # what this process has warned of


class UnusableCache(BuildError):
    """The cache folder cannot be used. The text says why, and what to do; `kind` is equal for equal causes."""

    def __init__(self, message: str, kind: object) -> None:
        super().__init__(message)
        self.kind = kind


def default_root() -> Path:
    """FLASHGEN_CACHE_DIR, else `flashgen` in XDG_CACHE_HOME, ~/.cache, or on macOS ~/Library/Caches."""
    chosen = os.environ.get("FLASHGEN_CACHE_DIR")
    if chosen:
        return absolute(chosen, "FLASHGEN_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return absolute(base, "XDG_CACHE_HOME") / "flashgen"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise BuildError(f"there is no home folder for the kernel cache ({error}); set FLASHGEN_CACHE_DIR") from error
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "flashgen"


def absolute(path: Path | str, what: str) -> Path:
    """The absolute path of a text that may begin with `~`; BuildError, naming `what`, where there is no such home."""
    try:
        return Path(path).expanduser().absolute()
    except (RuntimeError, OSError) as error:
        raise BuildError(f"{what}={str(path)!r} names no folder ({error}); give an absolute path") from error


def make(root: Path) -> None:
    """Makes the folder readable by its user alone, as sharing must be on purpose. Raises OSError."""
    root.parent.mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def trusted(root: Path) -> Iterator[None]:
    """Raises UnusableCache where others may write to the folder, or the operating system refuses the body."""
    with accessible(root):
        problem = why_not_trusted(root, holds_entries_alone)
        if problem is not None:
            raise UnusableCache(f"the kernel cache {root} cannot be trusted: {problem}", root)
        yield


@contextmanager
def accessible(root: Path) -> Iterator[None]:
    """Raises UnusableCache where the operating system refuses what the body does in the folder."""
    try:
        yield
    except OSError as error:
        raise UnusableCache(
            f"the kernel cache {root} cannot be used ({error.strerror}: {error.filename or root}); "
            "set FLASHGEN_CACHE_DIR to a folder that you can read and write",
            (root, error.errno),
        ) from error


def why_unusable(root: Path) -> str | None:
    """Why the folder cannot be used, and what to do; None where it can. It is made, and a file is tried in it."""
    try:
        with trusted(root):
            make(root)
            with tempfile.TemporaryFile(dir=root) as file:
                file.write(bytes(4096))
                flush(file)
    except UnusableCache as problem:
        return str(problem)
    return None


def say(message: str) -> None:
    """Warns the user of something that was put right, and logs it."""
    _log.warning("%s", message)
    warnings.warn(message, FlashgenWarning, stacklevel=5)


def say_once(problem: UnusableCache, remedy: str) -> None:
    """Warns the user of a cache that cannot be used, once in a process for each cause."""
    if problem.kind not in _said:
        _said.add(problem.kind)
        say(f"{problem}; {remedy}")
