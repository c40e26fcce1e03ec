"""A cache entry on disk: a folder of files with their hashes in `meta.json`. It is either complete or absent.

An entry is written to a staging folder next to its final location, flushed to the disk, and renamed. A process that
dies at any moment leaves the old entry, no entry or the new entry, and possibly a staging folder, which the next
builder of the same key removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashgen.build.keys import KEY_FORMAT, SHORT_KEY
from flashgen.build.trust import why_file_not_trusted
from flashgen.files import flush_folder, is_plain_name, open_file, write_new
from flashgen.strict_json import parse_json

META = "meta.json"
RECORD = ".written-"  # and the user's number: the record of `flashgen.build.written`
_SEAL = "seal"
_STAGING, _TRASH, _LOCK = ".staging-", ".trash-", ".lock-"
_DIGITS = f"([0-9a-f]{{{SHORT_KEY}}})"
_ENTRY = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]*\.{_DIGITS}")
_LEFTOVER = re.compile(rf"\.(?:staging|trash)-{_DIGITS}-[0-9a-f]{{12}}")
_LOCK_FILE = re.compile(rf"\.lock-{_DIGITS}")
_RECORD_FILE = re.compile(rf"{re.escape(RECORD)}\d+")
_MAX_META_BYTES = 16 * 2**20  # meta.json contains the log of a compiler


@dataclass(frozen=True)
class Artifacts:
    """The result of a build: files by plain name, facts for `meta.json`, and which files are executables."""

    files: Mapping[str, bytes]
    facts: Mapping[str, Any] = field(default_factory=dict)
    executables: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StoredEntry:
    """A verified entry: its folder, the bytes of its files when they were verified, and its `meta.json`."""

    path: Path
    files: Mapping[str, bytes]
    meta: Mapping[str, Any]


class DamagedEntry(Exception):
    """An entry differs from what was written. The message describes the difference."""


def read_entry(folder: Path, key: str) -> StoredEntry | None:
    """Reads an entry and verifies every byte against `meta.json`. Returns None if there is no entry.

    Raises:
        DamagedEntry: a file is missing, truncated, altered or not a regular file, the entry has another key, or a user
            who is not trusted may have written it.
        PermissionError: the entry may not be read.
    """
    while True:
        try:
            cache_status = folder.parent.stat()
            descriptor = _open_folder(folder, cache_status)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return _read_checked(_OpenEntry(folder, descriptor, cache_status), key)
        except FileNotFoundError as error:
            # If the entry was cleared or replaced between two reads, it is looked up again.
            if _is_still(descriptor, folder):
                raise DamagedEntry(f"{error.filename} is missing") from error
        finally:
            os.close(descriptor)


def write_entry(folder: Path, key: str, artifacts: Artifacts) -> StoredEntry:
    """Writes an entry, replacing a damaged one if necessary. The caller must hold the lock of the key."""
    files = dict(sorted(artifacts.files.items()))
    for name in files:
        if name == META or not is_plain_name(name):
            raise ValueError(f"an entry's file must have a plain name other than {META}, got {name!r}")
    described = {name: describe(data) for name, data in files.items()}
    meta = _sealed({**artifacts.facts, "format": KEY_FORMAT, "key": key, "files": described})
    staging = _sibling(folder, _STAGING, key)
    allowed = _make_staging(staging, folder.parent.stat())
    try:
        for name, data in {**files, META: canonical_json(meta)}.items():
            write_new(staging / name, data, allowed if name in artifacts.executables else allowed & 0o666)
        flush_folder(staging)
        discard(folder, key)
        staging.rename(folder)
    except BaseException:
        _remove(staging)
        raise
    flush_folder(folder.parent)
    return StoredEntry(folder, files, meta)


def discard(folder: Path, key: str) -> bool:
    """Removes an entry. A rename first makes it disappear atomically. Returns whether there was an entry."""
    trash = _sibling(folder, _TRASH, key)
    try:
        folder.rename(trash)
    except FileNotFoundError:
        return False
    _remove(trash)
    return True


def remove_leftovers(root: Path, short_key: str) -> None:
    """Removes the remains of killed builds of a key. The caller must hold its lock, so that no build is running."""
    for path in _leftovers(root):
        if _short_key(path) == short_key and not path.name.startswith(_LOCK):
            _remove(path)


def lock_path(root: Path, key: str) -> Path:
    """Returns the lock file that the builder of a key holds."""
    return root / f"{_LOCK}{key[:SHORT_KEY]}"


def leftover_keys(root: Path) -> set[str]:
    """Returns the short keys of all staging folders, trash folders and lock files, including those still in use."""
    return {_short_key(path) for path in _leftovers(root)}


def is_entry(folder: Path) -> bool:
    """Returns whether a folder is an entry, possibly damaged: its name and its `meta.json` must have the same key."""
    name = _ENTRY.fullmatch(folder.name)
    if name is None or folder.is_symlink() or not folder.is_dir():
        return False
    try:
        with open_file(folder / META, _MAX_META_BYTES, follow=False) as file:
            meta = parse_json(file.read())
    except (OSError, ValueError):
        return False
    return (
        isinstance(meta, dict) and isinstance(meta.get("files"), dict) and str(meta.get("key"))[:SHORT_KEY] == name[1]
    )


def holds_entries_alone(root: Path) -> bool:
    """Returns whether a folder has only names of entries, staging folders, locks and records. Raises OSError."""
    names = [path.name for path in root.iterdir()]
    return all(any(form.fullmatch(name) for form in (_ENTRY, _LEFTOVER, _LOCK_FILE, _RECORD_FILE)) for name in names)


def describe(data: bytes) -> dict[str, Any]:
    """Returns the hash and size of a file, which are compared when it is read."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def canonical_json(value: Any) -> bytes:
    """Serializes a value to JSON that is the same on every machine and readable: sorted keys, indented."""
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


@dataclass(frozen=True)
class _OpenEntry:
    """An entry that is being read: its folder, a descriptor of the folder, and the status of the cache folder."""

    folder: Path
    descriptor: int
    cache_status: os.stat_result

    def read(self, name: str, max_bytes: int) -> bytes:
        """Returns the bytes of a file. Raises DamagedEntry if it is unreadable or may be from an untrusted user."""
        try:
            with open_file(name, max_bytes, folder=self.descriptor, follow=False) as file:
                _check_trusted(os.fstat(file.fileno()), self.cache_status, name)
                return file.read()
        except FileNotFoundError:
            raise
        except PermissionError as error:
            raise PermissionError(error.errno, error.strerror, str(self.folder / name)) from error
        except OSError as error:
            raise DamagedEntry(f"{name} cannot be read ({error.strerror})") from error


def _open_folder(folder: Path, cache_status: os.stat_result) -> int:
    """Opens the folder of an entry. Raises DamagedEntry if it is not a folder or an untrusted user may have made it."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise DamagedEntry("it is a link" if stat.S_ISLNK(status.st_mode) else "it is not a folder")
    _check_trusted(status, cache_status, "it")
    return os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)


def _check_trusted(status: os.stat_result, cache_status: os.stat_result, what: str) -> None:
    problem = why_file_not_trusted(status, cache_status, what)
    if problem is not None:
        raise DamagedEntry(problem)


def _read_checked(entry: _OpenEntry, key: str) -> StoredEntry:
    meta = _parse_meta(entry.read(META, _MAX_META_BYTES), key)
    files = {}
    for name, expected in meta["files"].items():
        if not is_plain_name(name):
            raise DamagedEntry(f"{META} names a file outside of the entry, {name!r}")
        size = expected.get("bytes") if isinstance(expected, dict) else None
        if not isinstance(size, int):
            raise DamagedEntry(f"{META} does not describe {name}")
        files[name] = entry.read(name, size)
        if describe(files[name]) != expected:
            raise DamagedEntry(f"{name} is not what was written ({len(files[name])} bytes)")
    return StoredEntry(entry.folder, files, meta)


def _parse_meta(data: bytes, key: str) -> dict[str, Any]:
    try:
        meta = parse_json(data)
    except ValueError as error:
        raise DamagedEntry(f"{META} is not JSON ({error})") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("files"), dict):
        raise DamagedEntry(f"{META} does not list the files")
    if meta.get("key") != key or meta.get("format") != KEY_FORMAT:
        raise DamagedEntry(f"{META} belongs to another key or format")
    if canonical_json(_sealed(meta)) != data:
        raise DamagedEntry(f"{META} is not what was written")
    return meta


def _sealed(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the hash of the facts to them, so that `meta.json` can be verified like every other file."""
    rest = json.loads(canonical_json({name: value for name, value in meta.items() if name != _SEAL}))
    return {**rest, _SEAL: hashlib.sha256(canonical_json(rest)).hexdigest()}


def _is_still(descriptor: int, folder: Path) -> bool:
    """Returns whether `folder` still names the open folder, whose inode number is not reused while it is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _make_staging(staging: Path, cache_status: os.stat_result) -> int:
    """Creates a staging folder. Returns its mode, which executables get too: the permissions of the cache folder.

    If new folders get another group than the cache folder has, that group gets no write permission.
    """
    allowed = cache_status.st_mode & 0o077 | 0o700
    staging.mkdir(allowed)
    status = staging.stat()
    if status.st_mode & stat.S_IWGRP and status.st_gid != cache_status.st_gid:
        allowed &= ~stat.S_IWGRP
        staging.chmod(allowed & status.st_mode)
    return allowed


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sibling(folder: Path, prefix: str, key: str) -> Path:
    return folder.parent / f"{prefix}{key[:SHORT_KEY]}-{secrets.token_hex(6)}"


def _leftovers(root: Path) -> Iterator[Path]:
    """Yields the staging folders, trash folders and lock files, which are empty, in a cache folder."""
    for path in root.iterdir() if root.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name) or (_LOCK_FILE.fullmatch(path.name) and _is_empty_file(path)):
            yield path


def _is_empty_file(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:  # the builder that held the lock has finished
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == 0


def _short_key(path: Path) -> str:
    return path.name.split("-")[1]
