"""Exchange of heads for rows: ranks with all heads of some rows get some heads of all rows, and back (Ulysses).

Source: Jacobs et al. 2023, DeepSpeed Ulysses.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from flashgen.language.batch_layout import BATCH_LAYOUTS
from flashgen.ranks import Layout
from flashgen.torch.context_parallel.collectives import all_to_all, permute_rows
from flashgen.torch.tensors import Tensor


class Exchange(NamedTuple):
    """A group that exchanges heads: `ranks` ranks, from rank `first` of the row layout on, and the tensor layout."""

    group: Any
    ranks: int
    first: int
    layout: str

    def order(self, rows: Layout) -> list[tuple[int, int]]:
        """Returns (rank in the group, first row there) of each chunk of the group, in the order of positions."""
        chunks = [(owner - self.first, row) for owner, row in rows.in_order()]
        return [(owner, row) for owner, row in chunks if 0 <= owner < self.ranks]


def to_heads(rows: Tensor, exchange: Exchange, positions: Layout) -> Tensor:
    """Converts (batch, heads, rows, dim) to (batch, heads / ranks, rows * ranks, dim), rows in order of positions."""
    return permute_rows(rows, partial(_to_heads, exchange, positions), partial(_to_rows, exchange, positions))


def to_rows(heads: Tensor, exchange: Exchange, positions: Layout) -> Tensor:
    """The inverse of `to_heads`."""
    return permute_rows(heads, partial(_to_rows, exchange, positions), partial(_to_heads, exchange, positions))


def _to_heads(exchange: Exchange, positions: Layout, rows: Tensor) -> Tensor:
    head_axis, row_axis = _axes(exchange.layout)
    parts = torch.stack(rows.tensor_split(exchange.ranks, head_axis))
    received = all_to_all(parts, exchange.group)
    chunks = [received[owner].narrow(row_axis, row, positions.chunk) for owner, row in exchange.order(positions)]
    return torch.cat(chunks, row_axis)


def _to_rows(exchange: Exchange, positions: Layout, heads: Tensor) -> Tensor:
    head_axis, row_axis = _axes(exchange.layout)
    chunks = dict(zip(exchange.order(positions), heads.split(positions.chunk, row_axis), strict=True))
    ranks = [[chunks[owner, row] for owner, row in sorted(chunks) if owner == rank] for rank in range(exchange.ranks)]
    received = all_to_all(torch.stack([torch.cat(parts, row_axis) for parts in ranks]), exchange.group)
    return torch.cat(list(received), head_axis)


def _axes(layout: str) -> tuple[int, int]:
    """Returns the positions of the heads and of the rows."""
    return BATCH_LAYOUTS[layout].heads_axis, BATCH_LAYOUTS[layout].rows_axis
