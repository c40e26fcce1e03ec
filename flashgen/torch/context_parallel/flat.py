"""Rows of keys and values one behind the other in a flat buffer, as messages take them."""

from __future__ import annotations

from collections.abc import Iterable

from flashgen.torch.tensors import Tensor

Pair = tuple[Tensor, Tensor]
"""Rows of keys and of values, or of gradients of theirs."""


def elements(rows: int, like: Pair, layout: str) -> int:
    """Elements of so many rows of keys and values like these."""
    shapes = [_shape(each, layout, rows) for each in like]
    return sum(batch * second * third * dim for batch, second, third, dim in shapes)


def pairs_in(flat: Tensor, counts: Iterable[int], like: Pair, layout: str) -> list[Pair]:
    """A buffer as pairs of so many rows each, one behind the other, like these."""
    place, made = 0, []
    for rows in counts:
        pair = []
        for each in like:
            batch, second, third, dim = shape = _shape(each, layout, rows)
            size = batch * second * third * dim
            pair.append(flat.narrow(0, place, size).view(shape))
            place += size
        made.append((pair[0], pair[1]))
    return made


def _shape(like: Tensor, layout: str, rows: int) -> tuple[int, int, int, int]:
    batch, second, third, dim = like.shape
    return (batch, second, rows, dim) if layout == "bhsd" else (batch, rows, third, dim)
