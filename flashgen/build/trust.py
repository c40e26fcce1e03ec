"""Whose kernels are run: a cache folder that others can write to may hold programs of theirs.

A cache folder is used, as ssh uses its files, where it belongs to this user or to root and nobody else may write to it.
FLASHGEN_CACHE_SHARED=1 trusts its owner and its group too, which a folder that a team shares needs. A folder that
everybody may write to is never used. The folders above it are the user's to guard.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from flashgen.errors import BuildError

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
ROOT_USER = 0


def why_not_trusted(folder: Path) -> str | None:
    """Who else may put programs into a cache folder, and what to do; None where nobody may, or there is no folder.

    Raises:
        OSError: the folder cannot be looked at.
        BuildError: FLASHGEN_CACHE_SHARED is neither 0 nor 1.
    """
    shared = _is_shared()
    try:
        status = folder.stat()
    except FileNotFoundError:
        return None
    if status.st_mode & stat.S_IWOTH:
        return f"everybody may write to it (mode {mode_text(status)}); `chmod -R go-w {folder}` ends that"
    if shared or not hasattr(os, "geteuid"):
        return None
    trust = "or FLASHGEN_CACHE_SHARED=1 says that you trust its owner and its group"
    if status.st_uid not in (os.geteuid(), ROOT_USER):
        return f"it belongs to {owner_name(status)}; set FLASHGEN_CACHE_DIR to a folder of your own, {trust}"
    if status.st_mode & stat.S_IWGRP:
        return f"its group may write to it (mode {mode_text(status)}); `chmod -R go-w {folder}` ends that, {trust}"
    return None


def opened_to_others(inner: os.stat_result, outer: os.stat_result) -> bool:
    """Whether somebody may write to `inner`, an entry, who may not write to `outer`, the cache folder around it."""
    return bool(inner.st_mode & ~outer.st_mode & _OTHERS)


def owner_name(status: os.stat_result) -> str:
    """The name of the user to whom a file belongs, or the number where it has none."""
    try:
        import pwd

        return pwd.getpwuid(status.st_uid).pw_name
    except (ImportError, KeyError):
        return f"user {status.st_uid}"


def mode_text(status: os.stat_result) -> str:
    """Permissions as `chmod` takes them."""
    return f"{stat.S_IMODE(status.st_mode):04o}"


def _is_shared() -> bool:
    said = os.environ.get("FLASHGEN_CACHE_SHARED", "")
    if said not in ("", "0", "1"):
        raise BuildError(
            f"FLASHGEN_CACHE_SHARED must be 1 (the cache folder's owner and group are trusted) or 0, got {said!r}"
        )
    return said == "1"
