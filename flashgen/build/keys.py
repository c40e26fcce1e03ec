"""Keys of binaries: a hash of everything that a binary is made from, and of nothing else.

A key contains no time, PATH, absolute path or run-time object, so that it is the same on all machines. The only
exception is a library for the CPU: its key contains the user's flags for the C++ compiler, including paths.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping

KEY_FORMAT = 1  # incremented when the meaning of an entry changes, so that old entries are no longer found
SHORT_KEY = 16  # hexadecimal digits of the key in the name of a folder
_MAX_NAME_LENGTH = 150  # the name of a folder, with its key and a staging prefix, stays below the usual 255 bytes

_ABSOLUTE_PATH = re.compile(r"(?:^|=|^-I|^-L|^-isystem)(?:/|[A-Za-z]:[\\/])")
_UNREADABLE = re.compile(r"[^A-Za-z0-9._-]+")


def content_key(kind: str, parts: Mapping[str, str]) -> str:
    """Returns the key (64 hexadecimal digits) of a binary of some kind. parts: its inputs by name, in any order."""
    text = json.dumps({"format": KEY_FORMAT, "kind": kind, "parts": dict(parts)}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def kernel_key(source: str, architecture: str, options: Iterable[str], nvrtc_version: tuple[int, int]) -> str:
    """Returns the key of a cubin, from its source, the portable options, NVRTC's version and the architecture."""
    major, minor = nvrtc_version
    return content_key(
        "cubin",
        {
            "source": source,
            "options": json.dumps(portable_options(options)),
            "nvrtc": f"{major}.{minor}",
            "architecture": architecture,
        },
    )


def portable_options(options: Iterable[str]) -> tuple[str, ...]:
    """Returns the options without an absolute path, because the location of a file does not change the binary."""
    return tuple(option for option in options if not _ABSOLUTE_PATH.search(option))


def readable_name(name: str) -> str:
    """Returns a name for use in file names: at most 150 letters, digits, `.`, `_` and `-`, without a leading dot."""
    return _UNREADABLE.sub("_", name).lstrip(".")[:_MAX_NAME_LENGTH] or "kernel"


def folder_name(name: str, key: str) -> str:
    """Returns `<readable-name>.<16 hex>`."""
    return f"{readable_name(name)}.{key[:SHORT_KEY]}"
