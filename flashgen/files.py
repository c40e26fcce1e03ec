"""Writes files atomically, and reads regular files only."""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_NO_WAITING = getattr(os, "O_NONBLOCK", 0)  # without this flag, opening a pipe that has no writer blocks
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


def write_file(path: Path | str, data: bytes | str) -> None:
    """Writes a file atomically. Text is encoded as UTF-8. Raises OSError like `replacing`."""
    with replacing(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def replacing(path: Path | str) -> Iterator[IO[bytes]]:
    """Opens a file for writing that replaces `path` when the body ends without an error.

    The data is written to a temporary file in the same folder, flushed to disk and renamed. A full disk, an error in
    the body or a killed process leaves the old file unchanged (a killed process also leaves a hidden `.flashgen-*`).
    Symbolic links are followed and kept, and a replaced file keeps its permissions. A path that is not a regular file,
    such as a pipe or /dev/stdout, is written to directly.

    Raises:
        OSError: The file cannot be written. `filename` is `path`.
    """
    target = Path(os.path.realpath(path))
    staged = target.with_name(f".flashgen-{secrets.token_hex(6)}")
    try:
        mode = _mode(target)
        if mode is not None and not stat.S_ISREG(mode):
            with target.open("wb") as file:
                yield file
            return
        try:
            with os.fdopen(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
                if mode is not None:
                    staged.chmod(stat.S_IMODE(mode))
                yield file
                flush(file)
            staged.replace(target)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
        flush_folder(target.parent)
    except OSError as error:
        if error.filename not in (None, str(staged), str(target)):
            raise  # raised by the body, for another file
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_new(path: Path, data: bytes, mode: int) -> None:
    """Writes a file that must not exist yet, and flushes it to disk. `mode` is before the umask. Raises OSError."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(data)
        flush(file)


@contextmanager
def open_file(
    path: Path | str, max_bytes: int | None = None, *, folder: int | None = None, follow: bool = True
) -> Iterator[IO[bytes]]:
    """Opens a regular file for reading. It neither reads nor blocks on anything else, such as a pipe or a device.

    Args:
        path: The file.
        max_bytes: The largest size in bytes. None means no limit.
        folder: A descriptor of the folder that a relative path refers to. None means the current folder.
        follow: Whether to follow a symbolic link. False refuses it.

    Raises:
        OSError: The file cannot be opened, is not a regular file (EINVAL), is larger than `max_bytes` (EFBIG), or is a
            refused link (ELOOP).
    """
    descriptor = _opened(path, folder, follow)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if max_bytes is not None and status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, more than {max_bytes}", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def read_file(path: Path | str, max_bytes: int | None = None) -> bytes:
    """Returns the bytes of a regular file of at most `max_bytes` bytes. Raises OSError like `open_file`."""
    with open_file(path, max_bytes) as file:
        return file.read()


def read_text(path: Path | str) -> str:
    """Returns the text of a regular UTF-8 file, with `\\n` as line ends.

    Raises:
        OSError: As for `open_file`.
        UnicodeDecodeError: The file is not valid UTF-8.
    """
    return io.TextIOWrapper(io.BytesIO(read_file(path)), encoding="utf-8").read()


def flush(file: IO[bytes]) -> None:
    """Flushes an open file to disk. Raises OSError if the disk is full."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Flushes the entries of a folder to disk, which makes renames in it durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def why_not_writable(folder: Path | str) -> str | None:
    """Returns why no file can be created in a folder, or None if one can, which is tried.

    For a folder that does not exist yet, its nearest existing parent is tried.
    """
    path = Path(folder).absolute()
    nearest = next((each for each in (path, *path.parents) if os.path.exists(each)), path)
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return f"{error.strerror} ({nearest})"


def is_plain_name(name: object) -> bool:
    """Returns whether a text is a printable file name that stays in its folder: no path separators, no "." or ".."."""
    return isinstance(name, str) and name not in ("", ".", "..") and name.isprintable() and not set(name) & {"/", "\\"}


def _opened(path: Path | str, folder: int | None, follow: bool) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | _NO_WAITING | (0 if follow else _NO_LINKS)
    try:
        return os.open(path, flags, dir_fd=folder)
    except OSError as error:
        if not follow and error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", str(path)) from error
        raise


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
