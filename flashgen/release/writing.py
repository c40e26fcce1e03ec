"""Writes a release or an export to its folder completely or not at all, and removes only files of an earlier one."""

from __future__ import annotations

import re
import secrets
import shutil
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flashgen.build.prebuilt import MANIFEST, PrebuiltFolder
from flashgen.build.written import changed_files
from flashgen.errors import BuildError, FlashgenWarning
from flashgen.files import flush_folder, why_not_writable, write_new

SUFFIXES = (".cu", ".cubin", ".h")  # of the files of a release other than its manifest; the sources come first
_STAGING = re.compile(r"\.staging-[0-9a-f]{12}")

Files = Mapping[str, Mapping[str, Any]]
"""Files by name, each with its size and hash."""


def previous_files(out: Path) -> Files:
    """Returns the files of the release in a folder, as its manifest describes them; none for a new or empty folder.

    Raises BuildError if the folder has other content, or its manifest lists files that no release writes.
    """
    try:
        present = {path.name for path in out.iterdir() if not _STAGING.fullmatch(path.name)} if out.exists() else set()
    except OSError as error:
        raise BuildError(f"out={str(out)!r} must be a folder ({error.strerror})") from error
    problem = why_not_writable(out)
    if problem is not None:
        raise BuildError(f"out={str(out)!r} cannot be written: {problem}")
    if not present:
        return {}
    if MANIFEST not in present:
        raise BuildError(
            f"out={str(out)!r} holds {sorted(present)[0]!r} and no {MANIFEST}, so it is not a release folder; "
            "name an empty or a new folder"
        )
    files = {
        file["path"]: file
        for kernel in PrebuiltFolder.open(out).manifest["kernels"]
        for file in kernel["files"].values()
    }
    foreign = sorted(name for name in files if not name.endswith(SUFFIXES))
    if foreign:
        raise BuildError(
            f"{out / MANIFEST} names {foreign[0]!r}, which no release writes, so it is not a release folder; "
            "name an empty or a new folder"
        )
    return files


def refuse_changed(out: Path, names: Iterable[str], previous: Files) -> None:
    """Raises BuildError if files of these names exist that the earlier release did not write as they are."""
    changed = changed_files((out / name for name in names), {file["sha256"] for file in previous.values()})
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise BuildError(
            f"{changed[0]}{more} would be replaced, and was edited or not written by an earlier release: name another "
            "folder, or replace it with --force (force=True in Python)"
        )


def write_folder(out: Path, files: Mapping[str, bytes], previous: Files) -> None:
    """Updates a folder. Readers never see partial files, and the last file, the manifest, appears after all others.

    All files are first written to a staging folder, so that a full disk leaves the folder unchanged. `previous` files
    that are not among `files` are removed. One that has been changed since is kept, with a warning.

    Raises BuildError if the folder cannot be written.
    """
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        try:
            _write_files(out, files)
            _remove_files(out, {name: file for name, file in previous.items() if name not in files})
            flush_folder(out)
        except BaseException:
            if is_new:
                with suppress(OSError):  # the folder stays if it is not empty
                    out.rmdir()
            raise
    except OSError as error:
        raise BuildError(f"out={str(out)!r} cannot be written ({error.strerror}: {error.filename or out})") from error


def _write_files(out: Path, files: Mapping[str, bytes]) -> None:
    for path in out.iterdir():
        if _STAGING.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)  # left by a killed build
    staging = out / f".staging-{secrets.token_hex(6)}"
    staging.mkdir()
    try:
        changed = [name for name, data in files.items() if not _file_holds(out / name, data)]
        for name in changed:
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            write_new(staging / name, files[name], 0o666)
        for name in changed:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / name).replace(out / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _remove_files(out: Path, files: Files) -> None:
    for name, file in files.items():
        path = out / name
        if not changed_files([path], {file["sha256"]}):
            path.unlink(missing_ok=True)
        else:
            message = f"{path} was changed after the earlier release wrote it, so it is kept"
            warnings.warn(message, FlashgenWarning, stacklevel=4)


def _file_holds(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data
