"""File locks that allow one builder per key. The operating system releases a lock when its owner dies."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flashgen.build.cache_folder import warn_user
from flashgen.build.trust import may_own, owner_name
from flashgen.errors import BuildError

_log = logging.getLogger(__name__)

_held: set[int] = set()  # descriptors of the locks that this process holds


@contextmanager
def exclusive(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds the lock file `path`. Yields whether the lock is held, which is False only with `wait=False`.

    The lock is a `flock` of the operating system: it does not outlive a killed owner, and it excludes threads as well
    as processes. The file is removed on release. A process that waited for a removed file detects this and retries.

    Raises:
        BuildError: the platform has no such locks.
        OSError: the file cannot be created, or its file system does not support locks.
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
        if os.getpid() == owner:  # a forked child must not release the lock of its parent
            _held.discard(descriptor)
            with suppress(OSError):  # on a disk that has become read-only an empty file remains
                path.unlink()
            os.close(descriptor)


def _acquire(path: Path, wait: bool) -> int | None:
    """Returns a descriptor of the locked file, or None if another owner holds the lock and `wait` is False."""
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
    """Opens the lock file, creating it if necessary. Removes a link or a file of an untrusted user and returns None.

    The owner of such a file could hold the lock forever, or redirect it to another file.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError:
        if not path.is_symlink():
            raise
        _remove_untrusted(path, "it is a link")
        return None
    status = os.fstat(descriptor)
    if may_own(status.st_uid, path.parent.stat()):
        return descriptor
    os.close(descriptor)
    _remove_untrusted(path, f"it belongs to {owner_name(status)}")
    return None


def _remove_untrusted(path: Path, problem: str) -> None:
    path.unlink(missing_ok=True)
    warn_user(f"the lock {path} of the cache cannot be trusted: {problem}; it was removed")


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
    """Returns whether `path` still names the locked file, not one created after a former owner removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _drop_in_child() -> None:
    # A forked child shares the lock. If the child kept the file open, the lock would outlive its owner.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)
