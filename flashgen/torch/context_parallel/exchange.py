"""Heads for rows: ranks that each have all heads of some rows get some heads of all their rows, and back (Ulysses).

Source: Jacobs et al. 2023, DeepSpeed Ulysses.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from flashgen.ranks import Layout
from flashgen.torch.context_parallel.collectives import all_to_all, moved
from flashgen.torch.tensors import Tensor


class Exchange(NamedTuple):
    """Who exchanges: a group, of `ranks` ranks whose first is the `first` of those of `rows`, in a layout."""

    group: Any
    ranks: int
    first: int
    layout: str

    def order(self, rows: Layout) -> list[tuple[int, int]]:
        """(rank of the group, first of its rows) of each chunk that its ranks have, in the order of positions."""
        chunks = [(of - self.first, row) for of, row in rows.in_order()]
        return [(of, row) for of, row in chunks if 0 <= of < self.ranks]


def to_heads(rows: Tensor, exchange: Exchange, positions: Layout) -> Tensor:
    """(batch, heads, rows, dim) of a rank -> (batch, heads / ranks, rows · ranks, dim) in the order of positions."""
    return moved(rows, *(partial(move, exchange=exchange, positions=positions) for move in (_to_heads, _to_rows)))


def to_rows(heads: Tensor, exchange: Exchange, positions: Layout) -> Tensor:
    """The inverse of `to_heads`."""
    return moved(heads, *(partial(move, exchange=exchange, positions=positions) for move in (_to_rows, _to_heads)))


def _to_heads(rows: Tensor, exchange: Exchange, positions: Layout) -> Tensor:
    of_heads, of_rows = _axes(exchange.layout)
    parts = torch.stack(rows.tensor_split(exchange.ranks, of_heads))
    every = all_to_all(parts, exchange.group)
    chunks = [every[of].narrow(of_rows, row, positions.chunk) for of, row in exchange.order(positions)]
    return torch.cat(chunks, of_rows)


def _to_rows(heads: Tensor, exchange: Exchange, positions: Layout) -> Tensor:
    of_heads, of_rows = _axes(exchange.layout)
    chunks = dict(zip(exchange.order(positions), heads.split(positions.chunk, of_rows), strict=True))
    ranks = [[chunks[of, row] for of, row in sorted(chunks) if of == rank] for rank in range(exchange.ranks)]
    every = all_to_all(torch.stack([torch.cat(of_rank, of_rows) for of_rank in ranks]), exchange.group)
    return torch.cat(list(every), of_heads)


def _axes(layout: str) -> tuple[int, int]:
    return (1, 2) if layout == "bhsd" else (2, 1)
