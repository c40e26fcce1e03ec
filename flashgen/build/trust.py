"""Whose kernels are run: a cache folder that others can write to may hold programs of theirs.

A cache folder is used, as ssh uses its files, where it belongs to this user or to root and nobody else may write to it.
The same is asked of each entry and of each file that is read from it, since somebody may have put one there while the
folder was open to others. FLASHGEN_CACHE_SHARED=1 trusts the folder's owner and its group too, which a folder that a
team shares needs. A folder that everybody may write to is never used. The folders above it are the user's to guard.
"""

from __future__ import annotations

import functools
import os
import shlex
import stat
from collections.abc import Callable
from pathlib import Path

from flashgen.errors import BuildError

ROOT_USER = 0
_OWN_FOLDER = "set FLASHGEN_CACHE_DIR to a folder of your own"
_SHARING = "or FLASHGEN_CACHE_SHARED=1 says that you trust its owner and its group"


def why_not_trusted(folder: Path, is_cache: Callable[[Path], bool]) -> str | None:
    """Who else may put programs into a cache folder, and what to do; None where nobody may, or there is no folder.

    is_cache: whether a folder holds nothing but what a cache does. The permissions of others are not to be changed.

    Raises:
        OSError: the folder cannot be looked at.
        BuildError: FLASHGEN_CACHE_SHARED is neither 0 nor 1.
    """
    shared = _is_shared()
    try:
        status, link = folder.stat(), folder.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(status.st_mode):  # which making the folder reports
        return None
    if status.st_mode & stat.S_IWOTH:
        return _open_to("everybody", folder, status, is_cache)
    if not may_own(status.st_uid, status):
        return f"it belongs to {owner_name(status)}; {_OWN_FOLDER}, {_SHARING}"
    if not may_own(link.st_uid, status):
        return f"it is a link that belongs to {owner_name(link)}; {_OWN_FOLDER}"
    if status.st_mode & stat.S_IWGRP and not shared:
        return f"{_open_to('its group', folder, status, is_cache)}, {_SHARING}"
    return None


def why_planted(status: os.stat_result, folder: os.stat_result, what: str) -> str | None:
    """Who else may have written an entry or a file, `what`, of a trusted cache folder; None where nobody may have."""
    if not may_own(status.st_uid, folder):
        return f"{what} belongs to {owner_name(status)}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) & ~_trusted_to_write(status, folder):
        return f"others may write to {what} (mode {mode_text(status)})"
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        return f"{what} is a hard link, whose other names may stand anywhere"
    return None


def may_own(user: int, folder: os.stat_result) -> bool:
    """Whether a user may own what stands in a cache folder, and the folder itself."""
    if _is_this_user(user) or user == ROOT_USER:
        return True
    return _is_shared() and (user == folder.st_uid or _is_member(user, folder.st_gid))


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


def _open_to(who: str, folder: Path, status: os.stat_result, is_cache: Callable[[Path], bool]) -> str:
    """The message of a folder to which others may write. Only its owner can change the permissions of a cache."""
    ours = _is_this_user(status.st_uid) and is_cache(folder)
    remedy = f"`chmod -R go-w {shlex.quote(str(folder))}` ends that" if ours else _OWN_FOLDER
    return f"{who} may write to it (mode {mode_text(status)}); {remedy}"


def _is_this_user(user: int) -> bool:
    return not hasattr(os, "geteuid") or user == os.geteuid()


def _trusted_to_write(status: os.stat_result, folder: os.stat_result) -> int:
    """The bit of the group where a shared folder's own group may write to both, else none."""
    shared = _is_shared() and status.st_gid == folder.st_gid
    return folder.st_mode & stat.S_IWGRP if shared else 0


@functools.cache
def _is_member(user: int, group: int) -> bool:
    """Whether a user is known to be a member of a group. One without a name is not."""
    import pwd

    try:
        known = pwd.getpwuid(user)
    except KeyError:
        return False
    return group in os.getgrouplist(known.pw_name, known.pw_gid)


def _is_shared() -> bool:
    said = os.environ.get("FLASHGEN_CACHE_SHARED", "")
    if said not in ("", "0", "1"):
        raise BuildError(
            f"FLASHGEN_CACHE_SHARED must be 1 (the cache folder's owner and group are trusted) or 0, got {said!r}"
        )
    return said == "1"
