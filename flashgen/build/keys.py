"""Names of binaries: a hash of everything that one was made from, and of nothing else.

No time, no PATH, no absolute path and no run-time object goes into a key, so that two machines agree on it. Only a
library for the CPU has paths in its key: those in the user's own flags for the C++ compiler.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping

KEY_FORMAT = 1  # raised when the meaning of an entry changes: old entries are then never found
SHORT_KEY = 16  # hexadecimal digits in a folder's name
_LONGEST_NAME = 150  # a folder's name, with its key and a staging prefix, stays below the usual 255 bytes

_ABSOLUTE_PATH = re.compile(r"(?:^|=|^-I|^-L|^-isystem)(?:/|[A-Za-z]:[\\/])")
_UNREADABLE = re.compile(r"[^A-Za-z0-9._-]+")


def content_key(kind: str, parts: Mapping[str, str]) -> str:
    """The key (64 hexadecimal digits) of a binary of some kind made from the named texts, in any order."""
    text = json.dumps({"format": KEY_FORMAT, "kind": kind, "parts": dict(parts)}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def kernel_key(source: str, architecture: str, options: Iterable[str], nvrtc_version: tuple[int, int]) -> str:
    """The key of a cubin: the emitted source, the portable options, NVRTC's version and the architecture."""
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
    """The options that hold no absolute path: where a file stands does not change what is compiled."""
    return tuple(option for option in options if not _ABSOLUTE_PATH.search(option))


def readable_name(name: str) -> str:
    """The name as part of a file's name: letters, digits, `.`, `_` and `-`, at most 150 of them, no leading dot."""
    return _UNREADABLE.sub("_", name).lstrip(".")[:_LONGEST_NAME] or "kernel"


def folder_name(name: str, key: str) -> str:
    """`<readable-name>.<16 hex>`."""
    return f"{readable_name(name)}.{key[:SHORT_KEY]}"
