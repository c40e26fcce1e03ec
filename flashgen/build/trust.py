"""Decides which cache folders and files are trusted: a folder that others can write to may contain their programs.

As with the files of ssh, a cache folder is used only if it belongs to this user or to root and no other user may write
to it. The same is required of each entry and each file that is read, because another user may have added one while the
folder was writable. FLASHGEN_CACHE_SHARED=1 also trusts the owner and the group of the folder, which a folder shared by
a team needs. A world-writable folder is never used. Parent folders are not checked; the user must protect them.
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
    """Returns which other users may write to a cache folder and a remedy, or None if none may or it does not exist.

    is_cache: returns whether a folder contains only cache entries. A `chmod` is suggested only for these folders.

    Raises:
        OSError: the folder cannot be accessed.
        BuildError: FLASHGEN_CACHE_SHARED is neither 0 nor 1.
    """
    shared = _is_shared()
    try:
        status, link = folder.stat(), folder.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(status.st_mode):  # creating the folder reports this
        return None
    if status.st_mode & stat.S_IWOTH:
        return _writable_by("everybody", folder, status, is_cache)
    if not may_own(status.st_uid, status):
        return f"it belongs to {owner_name(status)}; {_OWN_FOLDER}, {_SHARING}"
    if not may_own(link.st_uid, status):
        return f"it is a link that belongs to {owner_name(link)}; {_OWN_FOLDER}"
    if status.st_mode & stat.S_IWGRP and not shared:
        return f"{_writable_by('its group', folder, status, is_cache)}, {_SHARING}"
    return None


def why_file_not_trusted(status: os.stat_result, folder: os.stat_result, what: str) -> str | None:
    """Returns why an entry or file in a trusted cache folder may be from an untrusted user, or None if it cannot be.

    status, folder: of the file and of the cache folder. what: the name of the file, for the message.
    """
    if not may_own(status.st_uid, folder):
        return f"{what} belongs to {owner_name(status)}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) & ~_trusted_to_write(status, folder):
        return f"others may write to {what} (mode {mode_text(status)})"
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        return f"{what} is a hard link, so it may also be written to under another name"
    return None


def may_own(user: int, folder: os.stat_result) -> bool:
    """Returns whether a user is trusted to own a cache folder and the files in it."""
    if _is_this_user(user) or user == ROOT_USER:
        return True
    return _is_shared() and (user == folder.st_uid or _is_member(user, folder.st_gid))


def owner_name(status: os.stat_result) -> str:
    """Returns the name of the owner of a file, or the user number if it has no name."""
    try:
        import pwd

        return pwd.getpwuid(status.st_uid).pw_name
    except (ImportError, KeyError):
        return f"user {status.st_uid}"


def mode_text(status: os.stat_result) -> str:
    """Returns the permissions as octal digits for `chmod`."""
    return f"{stat.S_IMODE(status.st_mode):04o}"


def _writable_by(who: str, folder: Path, status: os.stat_result, is_cache: Callable[[Path], bool]) -> str:
    """Returns the message for a folder to which `who` may write. Only its owner can change its permissions."""
    ours = _is_this_user(status.st_uid) and is_cache(folder)
    remedy = f"`chmod -R go-w {shlex.quote(str(folder))}` fixes that" if ours else _OWN_FOLDER
    return f"{who} may write to it (mode {mode_text(status)}); {remedy}"


def _is_this_user(user: int) -> bool:
    return not hasattr(os, "geteuid") or user == os.geteuid()


def _trusted_to_write(status: os.stat_result, folder: os.stat_result) -> int:
    """Returns the group-write bit if the cache is shared, group-writable, and has the group of the file; else 0."""
    shared = _is_shared() and status.st_gid == folder.st_gid
    return folder.st_mode & stat.S_IWGRP if shared else 0


@functools.cache
def _is_member(user: int, group: int) -> bool:
    """Returns whether a user is a member of a group. A user without a name counts as no member."""
    import pwd

    try:
        account = pwd.getpwuid(user)
    except KeyError:
        return False
    return group in os.getgrouplist(account.pw_name, account.pw_gid)


def _is_shared() -> bool:
    value = os.environ.get("FLASHGEN_CACHE_SHARED", "")
    if value not in ("", "0", "1"):
        raise BuildError(
            f"FLASHGEN_CACHE_SHARED must be 1 (the cache folder's owner and group are trusted) or 0, got {value!r}"
        )
    return value == "1"
