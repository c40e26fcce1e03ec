"""JSON that anybody may have written: read into plain values, or refused with a sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

DEEPEST = 256  # levels: twice what a spec's expression may have, and far from where Python's own recursion ends


def parse_json(data: bytes | str) -> Any:
    """The value of a JSON text, which can be walked, compared and written again without surprises.

    Stricter than `json.loads`: bytes are UTF-8, numbers are finite, a name stands once in an object, texts are valid
    Unicode, and lists and objects nest at most 256 deep.

    Raises:
        ValueError: it is not so; the message says what is wrong, and where.
    """
    try:
        value = json.loads(data.decode() if isinstance(data, bytes) else data, object_pairs_hook=_unique)
    except RecursionError:
        raise _too_deep() from None
    level = [("it", value)]
    for _ in range(DEEPEST + 1):
        level = [child for name, parent in level for child in _children(name, parent)]
        if not level:
            return value
    raise _too_deep()


def _children(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """What a value holds, with the names there. ValueError for a leaf that JSON has not."""
    if isinstance(value, dict):
        return (*((key, key) for key in value), *value.items())
    if isinstance(value, list):
        return ((name, item) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name[:40]} is {value}, and JSON's numbers are finite")
    if isinstance(value, str):
        value.encode()  # half of a surrogate pair is a UnicodeEncodeError, which is a ValueError
    return ()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in value if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice[:40]!r} twice")
    return value


def _too_deep() -> ValueError:
    return ValueError(f"it is nested too deep: more than {DEEPEST} levels")
