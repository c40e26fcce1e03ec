"""The arguments of a varlen call beside q, k and v: the offsets of the sequences and their maximum lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashgen.attention.problem import NO_BOUNDS, Bounds
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.language.batch_layout import BATCH_LAYOUTS
from flashgen.language.operations import LONGEST
from flashgen.language.spec import AttentionSpec

_VARLEN = BATCH_LAYOUTS["thd"]
_ARGUMENTS = _VARLEN.arguments
_ARGUMENT_SET = frozenset(_ARGUMENTS)
_NO_ARRAYS: Mapping[str, Any] = {}


def split_varlen_arguments(
    spec: AttentionSpec, given: Mapping[str, Any], q: Any, k: Any
) -> tuple[Mapping[str, Any], Bounds, Mapping[str, Any]]:
    """Splits the named arguments of a call into varlen arrays by their names in structs, maximum lengths, and captures.

    Raises ArgumentError if varlen arguments are given to a spec of another layout, or if a varlen call lacks
    cu_seqlens_q, or cu_seqlens_k for a k with another number of tokens.
    """
    if not spec.batch_layout.sequence_arrays:
        if _ARGUMENT_SET.isdisjoint(given):
            return _NO_ARRAYS, NO_BOUNDS, given
        declared = {capture.name for capture in spec.captures}
        unknown = [name for name in _ARGUMENTS if name in given and name not in declared]
        if unknown:
            raise ArgumentError(f"{unknown[0]} is of varlen batches: make the spec with layout='thd', or leave it out")
        return _NO_ARRAYS, NO_BOUNDS, given
    arrays = {name: given[name] for name in _VARLEN.sequence_arrays if given.get(name) is not None}
    if "cu_seqlens_q" not in arrays:
        raise ArgumentError("cu_seqlens_q is missing: give int32 (sequences + 1,), where each sequence begins in q")
    if spec.page_size:
        if "cu_seqlens_k" in arrays:
            raise ArgumentError("cu_seqlens_k: keys in pages have page_table and seqused_k; leave it out")
    else:
        check_shared_offsets(arrays, q, k)
        arrays.setdefault("cu_seqlens_k", arrays["cu_seqlens_q"])
    captures = {name: value for name, value in given.items() if name not in _ARGUMENT_SET}
    max_q, max_k = (_max_length(given, name) for name in _VARLEN.max_lengths)
    return arrays, (max_q, max_k), captures


def check_shared_offsets(given: Mapping[str, Any], q: Any, k: Any) -> None:
    """Raises ArgumentError if cu_seqlens_k is missing although q and k have different numbers of tokens.

    Without it the offsets of q are used for k as well, which is right only for equal numbers of tokens.
    """
    shape_q, shape_k = (tuple(getattr(array, "shape", ())) for array in (q, k))
    if (
        given.get("cu_seqlens_k") is None
        and len(shape_q) == len(shape_k) == len(_VARLEN.axes)
        and shape_q[0] != shape_k[0]
    ):
        raise ArgumentError(
            f"cu_seqlens_k is missing: q has {shape_q[0]} tokens and k {shape_k[0]}; give int32 (sequences + 1,), "
            "where each sequence begins in k and v"
        )


def refuse_varlen(spec: AttentionSpec, what: str, remedy: str) -> None:
    """Raises UnsupportedError if only the device knows the lengths of calls, which the feature `what` needs."""
    if not spec.batch_layout.supports("plans by sizes"):
        raise UnsupportedError(f"{what} is not supported for layout='thd': {remedy}")


def _max_length(given: Mapping[str, Any], name: str) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value <= LONGEST:
        raise ArgumentError(f"{name}={value!r} must be an integer from 0 to {LONGEST}, or None")
    return int(value)
