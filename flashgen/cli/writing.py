"""Errors in writing output: a read-only folder, a full disk, a closed or full standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashgen.errors import ArgumentError


@contextmanager
def writing(path: Path, option: str = "--output") -> Iterator[None]:
    """Raises ArgumentError, naming the option, where the body cannot write to the path."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename not in (None, str(path)) else ""
        raise ArgumentError(f"{option} {path} cannot be written{where}: {error.strerror or error}") from error


def make_folder(path: Path, option: str = "--output") -> None:
    """Makes the folder and those above it, if they are missing. Raises ArgumentError where it cannot."""
    if path.exists() and not path.is_dir():
        raise ArgumentError(f"{option} {path} is a file: give a folder, which is made if it is not there")
    with writing(path, option):
        path.mkdir(parents=True, exist_ok=True)


def stdout_problem() -> OSError | None:
    """Why standard output takes no more, such as a full disk; None where it does.

    It flushes what was written, so that the answer holds for that, and drops what it cannot flush: the interpreter
    would try once more at its end and print a traceback.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return error
    return None
