"""Buffers for messages of rows of keys and values: tensor by tensor, or row by row."""

from __future__ import annotations

import math
from collections.abc import Iterable

from flashgen.language.batch_layout import BATCH_LAYOUTS
from flashgen.torch.tensors import Tensor

Pair = tuple[Tensor, Tensor]
"""Rows of keys and of values, or of their gradients."""


def elements(rows: int, like: Pair, layout: str) -> int:
    """Returns the number of elements of `rows` rows of keys and values like these."""
    return rows * sum(elements_of_row(each, layout) for each in like)


def pairs_in(flat: Tensor, counts: Iterable[int], like: Pair, layout: str) -> list[Pair]:
    """Returns views of a buffer as consecutive pairs of keys and values like these, with `counts` rows each."""
    offset, pairs = 0, []
    for rows in counts:
        pair = []
        for each in like:
            shape = list(each.shape)
            shape[BATCH_LAYOUTS[layout].rows_axis] = rows
            size = math.prod(shape)
            pair.append(flat.narrow(0, offset, size).view(shape))
            offset += size
        pairs.append((pair[0], pair[1]))
    return pairs


class PackedRows:
    """Keys and values in one buffer, row by row: the key elements of a row, then its value elements.

    Consecutive rows are contiguous, as messages must be, and one copy places them beside other rows.
    """

    def __init__(self, buffer: Tensor, like: Pair, layout: str) -> None:
        """buffer: (rows, key elements of a row + value elements of a row)."""
        self.buffer, self._like, self._layout = buffer, like, layout

    @classmethod
    def empty(cls, rows: int, like: Pair, layout: str) -> PackedRows:
        """Returns uninitialised memory for rows like these."""
        return cls(like[0].new_empty((rows, elements(1, like, layout))), like, layout)

    def rows_at(self, first: int, count: int) -> PackedRows:
        """Returns a view of consecutive rows."""
        return PackedRows(self.buffer.narrow(0, first, count), self._like, self._layout)

    def pair(self) -> Pair:
        """Returns views of keys and values in the layout of `like`."""
        (keys, values), key_elements = self._like, elements_of_row(self._like[0], self._layout)
        return self._view(self.buffer[:, :key_elements], keys), self._view(self.buffer[:, key_elements:], values)

    def fill(self, rows: Pair) -> None:
        """Copies rows into the buffer."""
        for target, each in zip(self.pair(), rows, strict=True):
            target.copy_(each)

    def _view(self, columns: Tensor, like: Tensor) -> Tensor:
        layout = BATCH_LAYOUTS[self._layout]
        batch, heads, _, dim = layout.to_bhsd(tuple(like.shape))
        rows: Tensor = layout.swap_heads(columns.unflatten(1, (batch, heads, dim)).permute(1, 2, 0, 3))
        return rows


def elements_of_row(like: Tensor, layout: str) -> int:
    """Returns the number of elements of a row, over all sequences and heads."""
    batch, heads, _, dim = BATCH_LAYOUTS[layout].to_bhsd(tuple(like.shape))
    return batch * heads * dim
