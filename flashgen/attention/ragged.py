"""What a call of a ragged batch is given beside q, k and v: where sequences begin, and how long they are at most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashgen.attention.problem import NO_BOUNDS, Bounds
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.language.operations import LONGEST
from flashgen.language.spec import VARLEN_ARGUMENTS, AttentionSpec

_ARRAYS, _BOUNDS = VARLEN_ARGUMENTS[:3], VARLEN_ARGUMENTS[3:]
_AXES = 3  # tokens, heads, dim
_NO_ARRAYS: Mapping[str, Any] = {}


def taken_apart(
    spec: AttentionSpec, given: Mapping[str, Any], q: Any, k: Any
) -> tuple[Mapping[str, Any], Bounds, Mapping[str, Any]]:
    """Of what a call is given by name: the arrays of a ragged batch by their names in structs, bounds, the captures.

    ArgumentError where a spec of another layout is given any of it, or one of this layout not where sequences of q, or
    of a k of other tokens, begin.
    """
    if not spec.is_ragged:
        own = [name for name in VARLEN_ARGUMENTS if name in given] if given else []
        unknown = [name for name in own if all(capture.name != name for capture in spec.captures)]
        if unknown:
            raise ArgumentError(f"{unknown[0]} is of ragged batches: make the spec with layout='thd', or leave it out")
        return _NO_ARRAYS, NO_BOUNDS, given
    arrays = {name: given[name] for name in _ARRAYS if given.get(name) is not None}
    if "cu_seqlens_q" not in arrays:
        raise ArgumentError("cu_seqlens_q is missing: give int32 (sequences + 1,), where each sequence begins in q")
    if spec.page_size:
        if "cu_seqlens_k" in arrays:
            raise ArgumentError("cu_seqlens_k: keys in pages have page_table and seqused_k; leave it out")
    else:
        check_shared_offsets(arrays, q, k)
        arrays.setdefault("cu_seqlens_k", arrays["cu_seqlens_q"])
    captures = {name: value for name, value in given.items() if name not in VARLEN_ARGUMENTS}
    return arrays, (_bound(given, "max_seqlen_q"), _bound(given, "max_seqlen_k")), captures


def check_shared_offsets(given: Mapping[str, Any], q: Any, k: Any) -> None:
    """ArgumentError where cu_seqlens_k is left out of a call whose q and k are not of as many tokens.

    Keys then begin where queries do, which is not so where there are more or fewer of them.
    """
    of_q, of_k = (tuple(getattr(array, "shape", ())) for array in (q, k))
    if given.get("cu_seqlens_k") is None and len(of_q) == len(of_k) == _AXES and of_q[0] != of_k[0]:
        raise ArgumentError(
            f"cu_seqlens_k is missing: q has {of_q[0]} tokens and k {of_k[0]}; give int32 (sequences + 1,), where each "
            "sequence begins in k and v"
        )


def refuse_ragged(spec: AttentionSpec, what: str, remedy: str) -> None:
    """UnsupportedError for a ragged spec where something is not done for ragged batches."""
    if spec.is_ragged:
        raise UnsupportedError(f"{what} is not supported for layout='thd': {remedy}")


def _bound(given: Mapping[str, Any], name: str) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value <= LONGEST:
        raise ArgumentError(f"{name}={value!r} must be an integer from 0 to {LONGEST}, or None")
    return int(value)
