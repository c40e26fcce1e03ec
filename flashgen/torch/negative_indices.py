"""Negative indices. In torch they count from the end of an array; kernels clamp indices to the array by default.

A kernel that counts from the end compares each index with 0. So it runs only if the sizes and numbers of a call do not
exclude a negative index. With 64 queries and 64 keys, the index of `table[h, q - k + 63]` is never negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import sympy

from flashgen.analysis.integer_bounds import Bounds
from flashgen.analysis.intervals.evaluation import interval_of
from flashgen.errors import ArgumentError
from flashgen.language import operations as ops
from flashgen.language.captures import Scalar
from flashgen.language.modifiers import Mask, Score
from flashgen.language.operations import Load
from flashgen.language.spec import AttentionSpec


class Sizes(NamedTuple):
    """The sizes of a call, which bound its indices."""

    batch: int
    heads: int
    len_q: int
    len_k: int

    def boxes(self) -> dict[sympy.Basic, tuple[int, int]]:
        """Returns the minimum and the maximum of each symbol."""
        counts = dict(zip(ops.INDICES, self, strict=True))
        ranges = {symbol: (0, max(count - 1, 0)) for symbol, count in counts.items()}
        return ranges | {ops.LEN_Q: (self.len_q, self.len_q), ops.LEN_K: (self.len_k, self.len_k)}


def sizes_of(q: Any, k: Any) -> Sizes:
    """Returns the sizes of a call with q and k of (batch, heads, length, dim)."""
    return Sizes(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


class OpenIndex(NamedTuple):
    """An index of an axis of a captured array that is negative in some calls."""

    index: sympy.Basic
    name: str
    axis: int

    @property
    def size(self) -> str:
        """The name of the Scalar that holds the length of the axis."""
        return f"size_{self.axis}_of_{self.name}"


def open_indices(spec: AttentionSpec, names: Sequence[str]) -> tuple[OpenIndex, ...]:
    """Returns the indices of loads from these arrays that are not proven non-negative for every call."""
    bounds = Bounds()
    found: dict[OpenIndex, None] = {}
    for expression in (spec.mask.expression, *([spec.score.expression] if spec.score else [])):
        for load in expression.atoms(Load):
            for axis, index in enumerate(load.indices if load.capture.name in names else ()):
                if bounds.limits(index)[0] < 0:
                    found[OpenIndex(index, load.capture.name, axis)] = None
    return tuple(found)


def any_below_zero(indices: Sequence[OpenIndex], sizes: Sizes, numbers: Mapping[str, Any]) -> bool:
    """Whether an index may be negative in a call of these sizes and captured numbers. Errs towards True."""
    boxes = sizes.boxes()
    return any(_may_be_below_zero(each.index, boxes, numbers) for each in indices)


def _may_be_below_zero(index: sympy.Basic, boxes: Mapping[sympy.Basic, Any], numbers: Mapping[str, Any]) -> bool:
    try:
        return not bool((interval_of(index, boxes, numbers).low >= 0).all())
    except ArgumentError:  # the index depends on values of an array on the device
        return True


def counting_from_the_end(spec: AttentionSpec, indices: Sequence[OpenIndex]) -> AttentionSpec:
    """Returns the spec with negative indices counted from the end. Axis lengths are Scalars (`OpenIndex.size`)."""
    sizes = {(each.index, each.name, each.axis): Scalar(each.size).node for each in indices}

    def rewrite(node: sympy.Basic) -> sympy.Basic:
        if not node.args:
            return node
        args = [rewrite(arg) for arg in node.args]
        if isinstance(node, Load):
            for axis, index in enumerate(node.indices):
                size = sizes.get((index, node.capture.name, axis))
                if size is not None:
                    inner = args[axis + 1]
                    args[axis + 1] = ops.Where(ops.Less(inner, sympy.Integer(0)), ops.Add(inner, size), inner)
        return node.func(*args)

    score = spec.score and Score(spec.score.name, rewrite(spec.score.expression))
    mask = Mask(spec.mask.name, rewrite(spec.mask.expression))
    return AttentionSpec(spec.head_dim, spec.dtype, spec.value_dim, spec.scale, spec.layout, score=score, mask=mask)
