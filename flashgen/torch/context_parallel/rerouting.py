"""Rows in any order: they are sent to the ranks that own their positions in a layout, and results are sent back."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from flashgen.errors import ArgumentError
from flashgen.ranks import Layout
from flashgen.torch.context_parallel.collectives import all_gather, all_to_all, permute_rows
from flashgen.torch.tensors import Tensor

_LOCK = threading.Lock()
_ROUTES: Any = WeakTensorKeyDictionary()


class Route(NamedTuple):
    """The permutation from given rows to the rows of a layout.

    Attributes:
        group: the process group.
        source_rows: this rank's rows in the order in which they are sent.
        send_counts: the number of rows for each rank.
        target_rows: the rows of the layout that received rows are written to.
        receive_counts: the number of rows from each rank.
    """

    group: Any
    source_rows: Tensor
    send_counts: list[int]
    target_rows: Tensor
    receive_counts: list[int]

    @property
    def inverse(self) -> Route:
        """The inverse route."""
        return Route(self.group, self.target_rows, self.receive_counts, self.source_rows, self.send_counts)


def route(positions: Tensor, layout: Layout, rank: int, group: Any) -> Route:
    """Returns the route of rows with these positions, cached until the tensor is modified.

    Raises ArgumentError unless the ranks together have each position once.
    """
    key = (layout, positions._version)
    with _LOCK:
        found = _ROUTES.get(positions, {}).get(key)
    if found is None:
        found = _route(positions, layout, rank, group)
        with _LOCK:
            _ROUTES[positions] = {key: found}
    return found


def rerouted(rows: Tensor, path: Route, axis: int) -> Tensor:
    """Sends rows along an axis to their owners in the layout."""
    return permute_rows(rows, partial(_send_along, path, axis), partial(_send_along, path.inverse, axis))


def returned(rows: Tensor, path: Route, axis: int) -> Tensor:
    """Sends rows back: the inverse of `rerouted`."""
    return rerouted(rows, path.inverse, axis)


def _send_along(path: Route, axis: int, rows: Tensor) -> Tensor:
    sent = rows.movedim(axis, 0)[path.source_rows].contiguous()
    received = all_to_all(sent, path.group, path.send_counts, path.receive_counts)
    result = torch.empty_like(received)
    result[path.target_rows] = received
    return result.movedim(0, axis).contiguous()


def _route(positions: Tensor, layout: Layout, rank: int, group: Any) -> Route:
    if positions.dtype not in (torch.int32, torch.int64) or tuple(positions.shape) != (layout.rows,):
        raise ArgumentError(
            f"shards is {positions.dtype} of shape {tuple(positions.shape)}: give 'zigzag', 'plain', or the positions "
            f"of this rank's {layout.rows} rows, int32 or int64"
        )
    own = positions.detach().to(torch.int64)
    all_positions = all_gather(own, group).flatten().cpu()
    if not torch.equal(all_positions.sort().values, torch.arange(layout.length)):
        raise ArgumentError(f"shards: together the ranks must have each position from 0 to {layout.length - 1} once")
    ranks, rows = _ranks_and_rows(layout)
    mine, owner = own.cpu(), torch.arange(layout.ranks).repeat_interleave(layout.rows)
    order = torch.argsort(ranks[mine] * layout.length + rows[mine])
    arriving = torch.nonzero(ranks[all_positions] == rank).flatten()
    arriving = arriving[torch.argsort(owner[arriving] * layout.length + rows[all_positions[arriving]])]
    sends, receives = (torch.bincount(each, minlength=layout.ranks).tolist() for each in (ranks[mine], owner[arriving]))
    return Route(group, order.to(positions.device), sends, rows[all_positions[arriving]].to(positions.device), receives)


def _ranks_and_rows(layout: Layout) -> tuple[Tensor, Tensor]:
    """Returns the rank and the row of each position."""
    ranks, rows = torch.empty(layout.length, dtype=torch.int64), torch.empty(layout.length, dtype=torch.int64)
    for rank in range(layout.ranks):
        for index, start in enumerate(layout.starts(rank)):
            ranks[start : start + layout.chunk] = rank
            rows[start : start + layout.chunk] = torch.arange(index * layout.chunk, (index + 1) * layout.chunk)
    return ranks, rows
