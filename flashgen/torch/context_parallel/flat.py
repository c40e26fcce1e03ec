"""Rows of keys and values as messages take them: one tensor behind the other, or row by row."""

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
    """Keys and values in one buffer, both of a row side by side.

    Any run of rows is contiguous, as messages are, so that rows are put beside others by one copy.
    """

    def __init__(self, buffer: Tensor, like: Pair, layout: str) -> None:
        """buffer: (rows, elements of a row of keys, and of one of values)."""
        self.buffer, self._like, self._layout = buffer, like, layout

    @classmethod
    def empty(cls, rows: int, like: Pair, layout: str) -> ByRows:
        """So many rows like these, which hold anything."""
        return cls(like[0].new_empty((rows, elements(1, like, layout))), like, layout)

    def run(self, first: int, count: int) -> ByRows:
        """Some of the rows."""
        return ByRows(self.buffer.narrow(0, first, count), self._like, self._layout)

    def pair(self) -> Pair:
        """Keys and values, in the layout of what they are like."""
        (keys, values), of_keys = self._like, elements_of_row(self._like[0], self._layout)
        return self._of(self.buffer[:, :of_keys], keys), self._of(self.buffer[:, of_keys:], values)

    def fill(self, rows: Pair) -> None:
        """Copies rows here."""
        for place, each in zip(self.pair(), rows, strict=True):
            place.copy_(each)

    def _of(self, columns: Tensor, like: Tensor) -> Tensor:
        batch, second, third, dim = like.shape
        if self._layout == "bhsd":
            return columns.unflatten(1, (batch, second, dim)).permute(1, 2, 0, 3)
        return columns.unflatten(1, (batch, third, dim)).transpose(0, 1)


def elements_of_row(like: Tensor, layout: str) -> int:
    """Elements of one row of a tensor like this, of all its sequences and heads."""
    batch, second, third, dim = _shape(like, layout, 1)
    return batch * second * third * dim


def _shape(like: Tensor, layout: str, rows: int) -> tuple[int, int, int, int]:
    batch, second, third, dim = like.shape
    return (batch, second, rows, dim) if layout == "bhsd" else (batch, rows, third, dim)
