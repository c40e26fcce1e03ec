"""The folder of the kernel cache: its location, whether it can be used, and the single warning if it cannot."""

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
_warned_kinds: set[object] = set()  # causes of warnings that this process has issued


class UnusableCache(BuildError):
    """The cache folder cannot be used. The message gives the reason and a remedy; `kind` is equal for equal causes."""

    def __init__(self, message: str, kind: object) -> None:
        super().__init__(message)
        self.kind = kind


def default_root() -> Path:
    """Returns FLASHGEN_CACHE_DIR, else `flashgen` in XDG_CACHE_HOME, ~/.cache, or on macOS ~/Library/Caches."""
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
    """Returns the absolute form of a path that may start with `~`. Raises BuildError if that home does not exist.

    what: the name of the setting, for the error message.
    """
    try:
        return Path(path).expanduser().absolute()
    except (RuntimeError, OSError) as error:
        raise BuildError(f"{what}={str(path)!r} names no folder ({error}); give an absolute path") from error


def create_folder(root: Path) -> None:
    """Creates the folder, accessible by its user only, because sharing must be a deliberate choice. Raises OSError."""
    root.parent.mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def trusted(root: Path) -> Iterator[None]:
    """Raises UnusableCache if others may write to the folder, or if the body fails with an OSError."""
    with accessible(root):
        problem = why_not_trusted(root, holds_entries_alone)
        if problem is not None:
            raise UnusableCache(f"the kernel cache {root} cannot be trusted: {problem}", root)
        yield


@contextmanager
def accessible(root: Path) -> Iterator[None]:
    """Raises UnusableCache if the body fails with an OSError in the folder."""
    try:
        yield
    except OSError as error:
        raise UnusableCache(
            f"the kernel cache {root} cannot be used ({error.strerror}: {error.filename or root}); "
            "set FLASHGEN_CACHE_DIR to a folder that you can read and write",
            (root, error.errno),
        ) from error


def why_unusable(root: Path) -> str | None:
    """Returns why the folder cannot be used, with a remedy, or None if it can. Creates it and writes a test file."""
    try:
        with trusted(root):
            create_folder(root)
            with tempfile.TemporaryFile(dir=root) as file:
                file.write(bytes(4096))
                flush(file)
    except UnusableCache as problem:
        return str(problem)
    return None


def warn_user(message: str) -> None:
    """Warns the user of a problem that has been handled, and logs it."""
    _log.warning("%s", message)
    warnings.warn(message, FlashgenWarning, stacklevel=5)


def warn_once(problem: UnusableCache, remedy: str) -> None:
    """Warns the user of an unusable cache, once per process and cause."""
    if problem.kind not in _warned_kinds:
        _warned_kinds.add(problem.kind)
        warn_user(f"{problem}; {remedy}")
