"""Rows of keys and values one behind the other in a flat buffer, as messages take them."""

from __future__ import annotations

from collections.abc import Iterable

from flashgen.torch.tensors import Tensor

Pair = tuple[Tensor, Tensor]
"""Rows of keys and of values, or of gradients of theirs."""


def elements(rows: int, like: Pair, layout: str) -> int:
    """Elements of so many rows of keys and values like these."""
    return rows * sum(elements_of_row(each, layout) for each in like)


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


class ByRows:
    """Rows of keys and values in one buffer, both of a row side by side: so any run of rows is contiguous, as messages
    are, and what arrives beside other rows lies where kernels read it."""

    def __init__(self, rows: int, like: Pair, layout: str) -> None:
        self._like, self._layout = like, layout
        self._of_keys, of_values = (elements_of_row(each, layout) for each in like)
        self._buffer = like[0].new_empty((rows, self._of_keys + of_values))

    def run(self, first: int, count: int) -> Tensor:
        """Rows as a message: contiguous."""
        return self._buffer.narrow(0, first, count)

    def pair(self) -> Pair:
        """All rows as keys and values, in the layout of what they are like."""
        keys, values = self._like
        return self._view(keys, self._buffer[:, : self._of_keys]), self._view(values, self._buffer[:, self._of_keys :])

    def fill(self, first: int, rows: Pair) -> None:
        """Copies rows to where they belong."""
        axis = 2 if self._layout == "bhsd" else 1
        for place, each in zip(self.pair(), rows, strict=True):
            place.narrow(axis, first, each.shape[axis]).copy_(each)

    def _view(self, like: Tensor, columns: Tensor) -> Tensor:
        batch, second, third, dim = like.shape
        heads = second if self._layout == "bhsd" else third
        rows = columns.unflatten(1, (batch, heads, dim))
        return rows.permute(1, 2, 0, 3) if self._layout == "bhsd" else rows.transpose(0, 1)


def elements_of_row(like: Tensor, layout: str) -> int:
    """Elements of one row of a tensor like this, of all its sequences and heads."""
    batch, second, third, dim = _shape(like, layout, 1)
    return batch * second * third * dim


def _shape(like: Tensor, layout: str, rows: int) -> tuple[int, int, int, int]:
    batch, second, third, dim = like.shape
    return (batch, second, rows, dim) if layout == "bhsd" else (batch, rows, third, dim)
