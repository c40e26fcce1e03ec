"""Handles errors in writing output: a read-only folder, a full disk, a closed or full standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashgen.errors import ArgumentError


@contextmanager
def writing(path: Path, option: str = "--output") -> Iterator[None]:
    """Converts an OSError of its body to an ArgumentError that names the option and the path."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename not in (None, str(path)) else ""
        raise ArgumentError(f"{option} {path} cannot be written{where}: {error.strerror or error}") from error


def make_folder(path: Path, option: str = "--output") -> None:
    """Creates the folder and its parents if they are missing. Raises ArgumentError if that fails."""
    if path.exists() and not path.is_dir():
        raise ArgumentError(f"{option} {path} is a file: give a folder, which is created if it does not exist")
    with writing(path, option):
        path.mkdir(parents=True, exist_ok=True)


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
