"""Makes calls of equal lengths as varlen calls: the same sequences, packed into one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.attention.gradients import Gradients
from random_variants.meaning import Array

if TYPE_CHECKING:
    from flashgen.attention import Attention
    from flashgen.language import AttentionSpec

_BEFORE, _BEHIND = 5, 3  # rows of no sequence, which hold garbage; there are none of an array without a token


class Varlen:
    """Makes calls of layout "bshd" by an attention of layout "thd"; `spec` is the same variant of layout "bshd"."""

    def __init__(self, spec: AttentionSpec, attention: Attention) -> None:
        self.spec, self._attention = spec, attention

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)

    def __call__(self, q: Array, k: Array, v: Array, *, return_lse: bool, out: Any, **given: Any) -> Any:
        rows, own = _rows(*q.shape[:2])
        into = np.full((rows, *out[0].shape[2:]), np.nan, out[0].dtype), np.full((q.shape[2], rows), np.nan, np.float32)
        if self.spec.page_size:  # a table says where keys are
            starts = _starts_of_queries(q)
        else:
            starts, k, v = _starts(q, k), _packed(k), _packed(v)
        self._attention(_packed(q), k, v, return_lse=True, out=into, **starts, **given)
        outside = np.delete(np.arange(rows), own)
        assert (into[0][outside] == 0).all() and (into[1][:, outside] == -np.inf).all(), "rows of no sequence"
        return _apart(into[0], q.shape), _rows_apart(into[1], q.shape)

    def backward(
        self, d_out: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, *, into: Any, **given: Any
    ) -> Gradients:
        d_lse = given.pop("d_lse", None)
        d_out, *rows, out = (_packed(array) for array in (d_out, q, k, v, out))
        packed_q, packed_k, packed_v = rows
        options: dict[str, Any] = {**_starts(q, k), **given}
        options["d_lse"] = None if d_lse is None else _packed_rows(d_lse, 0.0)
        options["into"] = (*(np.full(array.shape, np.nan, into[0].dtype) for array in rows), *into[3:])
        found = self._attention.backward(
            d_out, packed_q, packed_k, packed_v, out, _packed_rows(lse, -np.inf), **options
        )
        dq, dk, dv = (_apart(found[i], array.shape) for i, array in enumerate((q, k, v)))
        return Gradients(dq, dk, dv, found.captures)


def _rows(batch: int, length: int) -> tuple[int, slice]:
    """The number of rows of a packed array of such sequences, and which of these belong to sequences."""
    own = batch * length
    return (_BEFORE + own + _BEHIND, slice(_BEFORE, _BEFORE + own)) if own else (0, slice(0, 0))


def _starts(q: Array, k: Array) -> dict[str, Any]:
    batch = np.arange(q.shape[0] + 1)
    firsts = [_rows(*array.shape[:2])[1].start for array in (q, k)]
    begins = [(first + batch * array.shape[1]).astype(np.int32) for first, array in zip(firsts, (q, k), strict=True)]
    bounds = {"max_seqlen_q": q.shape[1], "max_seqlen_k": k.shape[1]}
    return {"cu_seqlens_q": begins[0], "cu_seqlens_k": begins[1], **bounds}


def _starts_of_queries(q: Array) -> dict[str, Any]:
    return {name: value for name, value in _starts(q, q).items() if name.endswith("_q")}


def _packed(array: Array) -> Array:
    batch, length, heads, dim = array.shape
    rows, own = _rows(batch, length)
    packed = np.full((rows, heads, dim), np.nan, array.dtype)
    packed[own] = array.reshape(batch * length, heads, dim)
    return packed


def _apart(packed: Array, shape: tuple[int, ...]) -> Array:
    batch, length = shape[:2]
    return packed[_rows(batch, length)[1]].reshape(batch, length, *packed.shape[1:])


def _packed_rows(array: Array, outside: float) -> Array:
    batch, heads, length = array.shape
    rows, own = _rows(batch, length)
    packed = np.full((heads, rows), outside, np.float32)
    packed[:, own] = array.swapaxes(0, 1).reshape(heads, batch * length)
    return packed


def _rows_apart(packed: Array, shape: tuple[int, ...]) -> Array:
    batch, length = shape[:2]
    rows = packed[:, _rows(batch, length)[1]].reshape(packed.shape[0], batch, length)
    return np.ascontiguousarray(rows.swapaxes(0, 1))
