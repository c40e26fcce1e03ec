"""Parses JSON from untrusted sources into plain values, or raises an error that says what is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

MAX_DEPTH = 256  # levels: twice the limit of a spec's expression, and far below Python's recursion limit


def parse_json(data: bytes | str) -> Any:
    """Returns the value of a JSON text.

    Stricter than `json.loads`: bytes must be UTF-8, numbers finite, keys unique within an object, texts valid Unicode,
    and lists and objects nested at most 256 levels deep.

    Raises:
        ValueError: The text violates one of these rules. The message says which, and where.
    """
    try:
        value = json.loads(data.decode() if isinstance(data, bytes) else data, object_pairs_hook=_unique)
    except RecursionError:
        raise _too_deep() from None
    level = [("it", value)]
    for _ in range(MAX_DEPTH + 1):
        level = [child for name, parent in level for child in _children(name, parent)]
        if not level:
            return value
    raise _too_deep()


def _children(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Returns the children of a value, with their names. Raises ValueError for a leaf that JSON does not have."""
    if isinstance(value, dict):
        return (*((key, key) for key in value), *value.items())
    if isinstance(value, list):
        return ((name, item) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name[:40]} is {value}, and JSON's numbers are finite")
    if isinstance(value, str):
        value.encode()  # an unpaired surrogate raises UnicodeEncodeError, which is a ValueError
    return ()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in value if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice[:40]!r} twice")
    return value


def _too_deep() -> ValueError:
    return ValueError(f"it is nested too deep: more than {MAX_DEPTH} levels")
