"""Files on disk: written whole or not at all, and read as the plain files that they should be."""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_NO_WAITING = getattr(os, "O_NONBLOCK", 0)  # opening a pipe that nobody writes to would wait for ever
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


def write_file(path: Path | str, data: bytes | str) -> None:
    """Put a file into its place, whole; text is written as UTF-8. Raises OSError as `replacing` does."""
    with replacing(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def replacing(path: Path | str) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of `path` when the body ends without an error.

    It is written beside its place, flushed to the disk and renamed: a full disk, an error of the body or a killed
    process leaves what stood there as it was (and the last one a hidden `.flashgen-*`). A link is followed and stays,
    and so do the permissions of a file that is replaced. What is no regular file, such as a pipe or /dev/stdout, is
    written to as it is.

    Raises:
        OSError: it cannot be written; `filename` is `path`.
    """
    place = Path(os.path.realpath(path))
    staged = place.with_name(f".flashgen-{secrets.token_hex(6)}")
    try:
        mode = _mode(place)
        if mode is not None and not stat.S_ISREG(mode):
            with place.open("wb") as file:
                yield file
            return
        try:
            with os.fdopen(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
                if mode is not None:
                    staged.chmod(stat.S_IMODE(mode))
                yield file
                flush(file)
            staged.replace(place)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
        flush_folder(place.parent)
    except OSError as error:
        if error.filename not in (None, str(staged), str(place)):
            raise  # the body's own, of another file
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_new(path: Path, data: bytes, mode: int) -> None:
    """Write a file that must not exist yet, and flush it to the disk. `mode` is before the umask. Raises OSError."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(data)
        flush(file)


@contextmanager
def open_file(
    path: Path | str, most: int | None = None, *, folder: int | None = None, follow: bool = True
) -> Iterator[IO[bytes]]:
    """A regular file, open for reading. What stands in its place instead is neither read nor waited for.

    Args:
        path: the file.
        most: bytes that it may have; None is any number.
        folder: a descriptor of the folder to which a relative path refers; None is the current folder.
        follow: False refuses a symbolic link.

    Raises:
        OSError: it cannot be opened, is a folder, a pipe or a device (EINVAL), is larger (EFBIG), or is a link that is
            refused (ELOOP).
    """
    descriptor = _opened(path, folder, follow)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if most is not None and status.st_size > most:
            raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, more than {most}", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def read_file(path: Path | str, most: int | None = None) -> bytes:
    """The bytes of a regular file of at most `most` bytes. Raises OSError as `open_file` does."""
    with open_file(path, most) as file:
        return file.read()


def read_text(path: Path | str) -> str:
    """The text of a regular file in UTF-8, each line ended by `\\n`.

    Raises:
        OSError: as `open_file` does.
        UnicodeDecodeError: it is not UTF-8.
    """
    return io.TextIOWrapper(io.BytesIO(read_file(path)), encoding="utf-8").read()


def flush(file: IO[bytes]) -> None:
    """Have what was written to a file on the disk. Raises OSError where there is no room."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Have a folder's names on the disk: a rename in it is certain afterwards."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_plain_name(name: object) -> bool:
    """Whether a text names a file of the folder that it is looked up in: no path, no way out, nothing unprintable."""
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
