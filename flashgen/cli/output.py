"""Files that a command writes where its user says: whole or not at all, and an error that names the option."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from flashgen.errors import ArgumentError
from flashgen.files import replacing


@contextmanager
def output_file(path: Path, option: str = "--output") -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of `path` when the body ends, as `flashgen.files.replacing` has it.

    Raises ArgumentError, naming the option and the path, where it cannot be written; what stood there is unharmed.
    """
    try:
        with replacing(path) as file:
            yield file
    except OSError as error:
        raise ArgumentError(f"{option} {path} cannot be written: {error.strerror or error}") from error


def write_output(path: Path, data: bytes | str, option: str = "--output") -> None:
    """Put a file into its place, whole; text is written as UTF-8. Raises what `output_file` raises."""
    with output_file(path, option) as file:
        file.write(data.encode() if isinstance(data, str) else data)
