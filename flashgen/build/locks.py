"""One builder per key, however many processes ask: a file lock that the system drops when its owner dies."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flashgen.build.cache_folder import say
from flashgen.build.trust import may_own, owner_name
from flashgen.errors import BuildError

_log = logging.getLogger(__name__)

_held: set[int] = set()  # descriptors of locks that this process holds


@contextmanager
def exclusive(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds the lock file `path`. Gives whether it is held, which is False only with `wait=False`.

    The lock is the system's own (`flock`), so a killed owner never leaves it behind, and threads exclude each other
    as processes do. The file is removed on release: whoever waited for a removed file notices and starts over.

    Raises:
        BuildError: the platform has no such locks.
        OSError: the file cannot be made, or its file system has no such locks.
    """
    descriptor = _acquire(path, wait)
    if descriptor is None:
        yield False
        return
    owner = os.getpid()
    _held.add(descriptor)
    try:
        yield True
    finally:
        if os.getpid() == owner:  # a forked child leaves its parent's lock alone
            _held.discard(descriptor)
            with suppress(OSError):  # a disk that can no longer be written keeps an empty file
                path.unlink()
            os.close(descriptor)


def _acquire(path: Path, wait: bool) -> int | None:
    """A descriptor of the locked file that `path` names now, or None when it is taken and we do not wait."""
    while True:
        descriptor = _open(path)
        if descriptor is None:
            continue
        try:
            locked = _flock(descriptor, path, wait)
            if locked and _is_still(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if not locked:
            return None


def _open(path: Path) -> int | None:
    """A descriptor of the lock file, made if need be. A file or link that somebody planted is removed: None.

    Its owner could hold the lock for ever, or have another file made or locked in its place.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError:
        if not path.is_symlink():
            raise
        _remove_planted(path, "it is a link")
        return None
    status = os.fstat(descriptor)
    if may_own(status.st_uid, path.parent.stat()):
        return descriptor
    os.close(descriptor)
    _remove_planted(path, f"it belongs to {owner_name(status)}")
    return None


def _remove_planted(path: Path, problem: str) -> None:
    path.unlink(missing_ok=True)
    say(f"the lock {path} of the cache cannot be trusted: {problem}; it was removed")


def _flock(descriptor: int, path: Path, wait: bool) -> bool:
    try:
        import fcntl
    except ImportError as error:
        raise BuildError(
            "flashgen's cache needs POSIX file locks (fcntl), which this platform lacks; "
            "use Linux, macOS or WSL, or a folder of prebuilt kernels in FLASHGEN_RELEASE"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise _no_locks(path, error) from error
    if not wait:
        return False
    _log.info("waiting for another process that builds %s", path.name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        raise _no_locks(path, error) from error
    return True


def _no_locks(path: Path, error: OSError) -> OSError:
    return OSError(error.errno, f"its file system cannot lock files: {error.strerror}", str(path))


def _is_still(descriptor: int, path: Path) -> bool:
    """Whether `path` names the locked file, and not one that was made after a former owner removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _drop_in_child() -> None:
    # A fork shares the lock: were the child to keep it open, the lock would outlive the owner.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)
