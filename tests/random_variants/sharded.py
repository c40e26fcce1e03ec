"""A call in shards, as several ranks compute it: each shard of q over each shard of k, by kernels of a sharded spec.

Outputs over different shards of k are merged by their LSE; gradients of captures are summed over all shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flashgen.attention.gradients import Gradients
from flashgen.language.shards import BLOCK_K
from random_variants.meaning import Array

if TYPE_CHECKING:
    from flashgen.attention import Attention
    from flashgen.language import AttentionSpec


class Part(NamedTuple):
    """A shard: ranges of sequences, of rows of q, and of rows of k."""

    sequences: slice
    queries: slice
    keys: slice


class Sharded:
    """Makes calls of whole arrays by an attention of a sharded spec; `spec` is the same variant without shards."""

    def __init__(self, spec: AttentionSpec, attention: Attention) -> None:
        self.spec, self._attention = spec, attention
        self._rows = 2 if spec.layout == "bhsd" else 1  # the axis of a sequence's rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)

    def __call__(self, q: Array, k: Array, v: Array, *, return_lse: bool, out: Any, **given: Any) -> Any:
        of_parts, into = [], out
        # Keys are whole where there are sinks, which count once.
        for part in self._parts(q, [self._rows_of(k)] if self.spec.sink else self._halves(k), self._halves(q)):
            arrays = self._of_queries(q, part), self._of_keys(k, part), self._of_keys(v, part)
            own: dict[str, Any] = self._places(part, q, k) | given
            made = self._attention(*arrays, return_lse=True, **own)
            of_parts.append((part, *made))
        lse = np.full(into[1].shape, -np.inf)
        for part, _, of_part in of_parts:
            with np.errstate(invalid="ignore"):
                lse[part.sequences, :, part.queries] = np.logaddexp(lse[part.sequences, :, part.queries], of_part)
        merged = np.zeros(into[0].shape)
        for part, own_out, of_part in of_parts:
            whole = lse[part.sequences, :, part.queries]
            with np.errstate(invalid="ignore"):
                share = np.where(np.isneginf(of_part), 0.0, np.exp(of_part - whole))[..., None]
            share = share if self._rows == 2 else share.swapaxes(1, 2)
            self._of_queries(merged, part)[...] += share * own_out.astype(np.float64)
        into[0][...], into[1][...] = merged.astype(into[0].dtype), lse.astype(into[1].dtype)
        return into

    def backward(
        self, d_out: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, *, into: Any, **given: Any
    ) -> Gradients:
        """Gradients of q by shards of q over all keys, and of k and v by shards of k over all queries.

        So each is rounded once: the rule does not cover sums of rounded gradients.
        """
        d_lse, whole = given.pop("d_lse", None), (self._rows_of(q), self._rows_of(k))
        dq, dk, dv, *of_captures = into
        captures: dict[str, Array] = {}

        def gradients(part: Part) -> Gradients:
            rows = [self._of_queries(array, part) for array in (d_out, q, out)]
            keys = self._of_keys(k, part), self._of_keys(v, part)
            of_rows = {"lse": lse} if d_lse is None else {"lse": lse, "d_lse": d_lse}
            own: dict[str, Any] = self._places(part, q, k) | given
            for name, array in of_rows.items():
                own[name] = np.ascontiguousarray(array[part.sequences, :, part.queries])
            return self._attention.backward(rows[0], rows[1], *keys, rows[2], **own)

        for part in self._parts(q, [whole[1]], self._halves(q)):
            found = gradients(part)
            self._of_queries(dq, part)[...] = found.dq
            for name, gradient in found.captures.items():
                captures[name] = captures.get(name, 0.0) + np.asarray(gradient).astype(np.float64)
        for part in self._parts(q, self._halves(k), [whole[0]]):
            found = gradients(part)
            self._of_keys(dk, part)[...], self._of_keys(dv, part)[...] = found.dk, found.dv
        for sums, poisoned in zip(captures.values(), of_captures, strict=True):
            poisoned[...] = sums.astype(poisoned.dtype)
        return Gradients(dq, dk, dv, dict(zip(captures, of_captures, strict=True)))

    def _of_queries(self, array: Array, part: Part) -> Array:
        rows = (slice(None),) * (self._rows - 1) + (part.queries,)
        return array[(part.sequences, *rows)]

    def _of_keys(self, array: Array, part: Part) -> Array:
        rows = (slice(None),) * (self._rows - 1) + (part.keys,)
        return array[(part.sequences, *rows)]

    def _places(self, part: Part, q: Array, k: Array) -> dict[str, int]:
        first = {"shard_b": part.sequences.start, "shard_h": 0}
        first |= {"shard_q": part.queries.start, "shard_k": part.keys.start}
        return first | {"whole_q": q.shape[self._rows], "whole_k": k.shape[self._rows]}

    def _parts(self, q: Array, keys: list[slice], queries: list[slice]) -> Iterator[Part]:
        """Shards of each sequence; one of all where there is no sequence, or where captures have 16-bit gradients."""
        together = any(capture.grad and capture.dtype != "float32" for capture in self.spec.captures)
        if together or not q.shape[0]:
            yield Part(slice(0, q.shape[0]), self._rows_of(q), slice(0, keys[-1].stop))
            return
        for sequence in range(q.shape[0]):
            for own_queries in queries:
                for own_keys in keys:
                    yield Part(slice(sequence, sequence + 1), own_queries, own_keys)

    def _rows_of(self, array: Array) -> slice:
        return slice(0, array.shape[self._rows])

    def _halves(self, array: Array) -> list[slice]:
        """Its rows in two halves, the second of which begins at a multiple of BLOCK_K, if there are enough rows."""
        length = array.shape[self._rows]
        middle = -(-length // 2 // BLOCK_K) * BLOCK_K
        return [slice(0, middle), slice(middle, length)] if 0 < middle < length else [slice(0, length)]
