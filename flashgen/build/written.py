"""Recognises files that were edited since flashgen wrote them, by the SHA-256 hashes of what it wrote.

The manifest of a release has the hashes of the release's files. The hashes of other files that commands write are
recorded in the cache folder, in a file for each user, so that the files may be moved. A file whose hash is unknown is
either edited or of another origin, and is replaced only on request.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Iterable
from pathlib import Path

from flashgen.build.cache_folder import create_folder, default_root, trusted
from flashgen.build.entries import RECORD
from flashgen.errors import BuildError
from flashgen.files import open_file, read_file, write_file

_PART_BYTES = 2**20  # that are hashed at a time
_MAX_BYTES = 2**20  # of the record; the older half is dropped beyond it


def changed_files(paths: Iterable[Path], hashes: Container[str]) -> list[Path]:
    """Returns those of the paths at which a regular file has none of these hashes, or cannot be read."""
    return [path for path in paths if path.is_file() and _hash(path) not in hashes]


def recorded_hashes() -> set[str]:
    """Returns the recorded hashes of files that commands wrote; none if the cache folder cannot be used."""
    try:
        with trusted(root := default_root()):
            return set(_read(root / _name()))
    except BuildError:
        return set()


def record_file(path: Path) -> None:
    """Records the hash of a file that a command has written. Does nothing if the cache folder cannot be used."""
    found = _hash(path) if path.is_file() else None
    if found is None:
        return
    try:
        with trusted(root := default_root()):
            create_folder(root)
            _append(root / _name(), found)
    except BuildError:
        return


def _name() -> str:
    return f"{RECORD}{os.getuid()}"


def _hash(path: Path) -> str | None:
    digest = hashlib.sha256()
    try:
        with open_file(path) as file:
            while part := file.read(_PART_BYTES):
                digest.update(part)
    except OSError:
        return None
    return digest.hexdigest()


def _read(record: Path) -> list[str]:
    try:
        return read_file(record).decode("ascii", "replace").split()
    except FileNotFoundError:
        return []


def _append(record: Path, line: str) -> None:
    known = _read(record)
    if line in known:
        return
    if len(known) * (len(line) + 1) > _MAX_BYTES:
        write_file(record, "".join(f"{each}\n" for each in known[len(known) // 2 :]))
    with os.fdopen(os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(f"{line}\n")
