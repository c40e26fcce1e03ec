"""Output files of commands: checked before the work, never replaced if edited, written atomically; errors of output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated

import typer

from flashgen.errors import ArgumentError
from flashgen.files import replacing, why_not_writable

Force = Annotated[bool, typer.Option("--force", help="Replace files that were edited or that flashgen did not write.")]


@contextmanager
def writing(path: Path, option: str = "--output") -> Iterator[None]:
    """Converts an OSError of its body to an ArgumentError that names the option and the path."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename not in (None, str(path)) else ""
        raise ArgumentError(f"{option} {path} cannot be written{where}: {error.strerror or error}") from error


def check_output(path: Path, force: bool, option: str = "--output") -> None:
    """Checks the path of a file before anything is computed.

    Raises ArgumentError if the file cannot be written, or if it exists, flashgen did not write it as it is, and `force`
    is False.
    """
    if path.is_dir():
        raise ArgumentError(f"{option} {path} is a folder: give the name of a file")
    if path.exists() and not path.is_file():
        return  # a pipe or a device, such as /dev/stdout
    if not path.parent.exists():
        raise ArgumentError(f"{option} {path} cannot be written: there is no folder {path.parent}")
    problem = why_not_writable(path.parent)
    if problem is not None:
        raise ArgumentError(f"{option} {path} cannot be written: {problem}")
    check_unedited([path], force, option)


def check_folder(path: Path, option: str = "--output") -> None:
    """Raises ArgumentError if files cannot be written to a folder, which is created when the first one is written."""
    if path.exists() and not path.is_dir():
        raise ArgumentError(f"{option} {path} is a file: give a folder, which is created if it does not exist")
    problem = why_not_writable(path)
    if problem is not None:
        raise ArgumentError(f"{option} {path} cannot be written: {problem}")


def check_unedited(paths: Iterable[Path], force: bool, option: str = "--output") -> None:
    """Raises ArgumentError if files exist that flashgen did not write as they are, unless `force` is True."""
    from flashgen.build.written import changed_files, recorded_hashes

    edited = [] if force else changed_files(paths, recorded_hashes())
    if edited:
        more = f" and {len(edited) - 1} more" if len(edited) > 1 else ""
        raise ArgumentError(
            f"{option}: {edited[0]}{more} would be replaced, and was edited or not written by flashgen: give another "
            "path, or --force to replace it"
        )


def write_output(path: Path, data: bytes | str, option: str = "--output") -> None:
    """Writes a file atomically and records that flashgen wrote it. Raises ArgumentError if that fails."""
    with replacing_output(path, option) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def replacing_output(path: Path, option: str = "--output") -> Iterator[IO[bytes]]:
    """Opens a file like `replacing`, and records that flashgen wrote it. Raises ArgumentError if that fails."""
    from flashgen.build.written import record_file

    with writing(path, option):
        with replacing(path) as file:
            yield file
        record_file(path)


def stdout_problem() -> OSError | None:
    """Flushes standard output. Returns the error if that fails, for example because of a full disk, else None.

    Output that cannot be flushed is discarded, because the interpreter would try to flush it again at exit and print a
    traceback.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        return error
    return None
