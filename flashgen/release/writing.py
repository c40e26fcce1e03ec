"""Puts a release into its folder, all of it or nothing, and removes of an earlier one only what that one made."""

from __future__ import annotations

import re
import secrets
import shutil
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flashgen.build.entries import describe
from flashgen.build.prebuilt import MANIFEST, PrebuiltFolder
from flashgen.errors import BuildError, FlashgenWarning
from flashgen.files import flush_folder, read_file, write_new

SUFFIXES = (".cu", ".cubin", ".h")  # of the files that a release writes beside its manifest
_STAGING = re.compile(r"\.staging-[0-9a-f]{12}")

Files = Mapping[str, Mapping[str, Any]]
"""Files by name, each with its size and its hash."""


def earlier_files(out: Path) -> Files:
    """The files of the release that a folder holds, as its manifest describes them; none for a new or an empty folder.

    Raises BuildError when it holds something else, or its manifest names what no release writes.
    """
    try:
        present = {path.name for path in out.iterdir() if not _STAGING.fullmatch(path.name)} if out.exists() else set()
    except OSError as error:
        raise BuildError(f"out={str(out)!r} must be a folder ({error.strerror})") from error
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


def write_folder(out: Path, files: Mapping[str, bytes], manifest: bytes, earlier: Files) -> None:
    """Brings a folder up to date. A reader never sees half a file, and finds the manifest when all files are there.

    Everything is written to a folder of its own before anything is put into its place, so that a full disk leaves the
    folder as it was. `earlier` files that are no longer among `files` are removed; one that somebody changed since is
    left, and the user is told.

    Raises BuildError where it cannot be written.
    """
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        try:
            _put(out, {**files, MANIFEST: manifest})
            _remove(out, {name: file for name, file in earlier.items() if name not in files})
            flush_folder(out)
        except BaseException:
            if is_new:
                with suppress(OSError):  # the folder stays if something is in it
                    out.rmdir()
            raise
    except OSError as error:
        raise BuildError(f"out={str(out)!r} cannot be written ({error.strerror}: {error.filename or out})") from error


def _put(out: Path, files: Mapping[str, bytes]) -> None:
    for path in out.iterdir():
        if _STAGING.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)  # a killed build left it
    staging = out / f".staging-{secrets.token_hex(6)}"
    staging.mkdir()
    try:
        changed = [name for name, data in files.items() if not _holds(out / name, data)]
        for name in changed:
            write_new(staging / name, files[name], 0o666)
        for name in changed:
            (staging / name).replace(out / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _remove(out: Path, files: Files) -> None:
    for name, file in files.items():
        path = out / name
        try:
            data = read_file(path)
        except FileNotFoundError:
            continue
        if describe(data) == {part: file[part] for part in ("bytes", "sha256")}:
            path.unlink()
        else:
            message = f"{path} is not what the earlier release wrote, so it is left there"
            warnings.warn(message, FlashgenWarning, stacklevel=4)


def _holds(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data
