"""Rows in any order: those of a rank go to the ranks that have their positions in a layout, and results come back."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from flashgen.errors import ArgumentError
from flashgen.ranks import Layout
from flashgen.torch.context_parallel.collectives import all_gather, all_to_all, moved
from flashgen.torch.tensors import Tensor

_LOCK = threading.Lock()
_ROUTES: Any = WeakTensorKeyDictionary()


class Route(NamedTuple):
    """From rows as they are given to those of a layout, and back.

    sent: a rank's rows in the order in which they are sent, so many to each rank (`to`). kept: where received rows
    stand in the layout's order, so many from each rank (`of`).
    """

    group: Any
    sent: Tensor
    to: list[int]
    kept: Tensor
    of: list[int]

    @property
    def back(self) -> Route:
        """The way back: what was received is sent, and kept where it was sent from."""
        return Route(self.group, self.kept, self.of, self.sent, self.to)


def route(positions: Tensor, layout: Layout, rank: int, group: Any) -> Route:
    """The route of a rank's rows, whose positions these are; made once for a tensor that stays as it is.

    ArgumentError unless the ranks together have each position once.
    """
    key = (layout, positions._version)
    with _LOCK:
        known = _ROUTES.get(positions, {}).get(key)
    if known is None:
        known = _route(positions, layout, rank, group)
        with _LOCK:
            _ROUTES[positions] = {key: known}
    return known


def rerouted(rows: Tensor, way: Route, axis: int) -> Tensor:
    """Rows along an axis, in the order of the layout."""
    return moved(rows, partial(_along, way=way, axis=axis), partial(_along, way=way.back, axis=axis))


def returned(rows: Tensor, way: Route, axis: int) -> Tensor:
    """The inverse of `rerouted`."""
    return rerouted(rows, way.back, axis)


def _along(rows: Tensor, way: Route, axis: int) -> Tensor:
    sent = rows.movedim(axis, 0)[way.sent].contiguous()
    received = all_to_all(sent, way.group, to=way.to, of=way.of)
    made = torch.empty_like(received)
    made[way.kept] = received
    return made.movedim(0, axis).contiguous()


def _route(positions: Tensor, layout: Layout, rank: int, group: Any) -> Route:
    if positions.dtype not in (torch.int32, torch.int64) or tuple(positions.shape) != (layout.rows,):
        raise ArgumentError(
            f"shards is {positions.dtype} of shape {tuple(positions.shape)}: give 'zigzag', 'plain', or the positions "
            f"of this rank's {layout.rows} rows, int32 or int64"
        )
    own = positions.detach().to(torch.int64)
    whole = all_gather(own, group).flatten().cpu()
    if not torch.equal(whole.sort().values, torch.arange(layout.length)):
        raise ArgumentError(f"shards: the ranks' positions together are not each of 0 to {layout.length - 1} once")
    ranks, rows = _places(layout)
    mine, owner = own.cpu(), torch.arange(layout.ranks).repeat_interleave(layout.rows)
    order = torch.argsort(ranks[mine] * layout.length + rows[mine])
    arriving = torch.nonzero(ranks[whole] == rank).flatten()
    arriving = arriving[torch.argsort(owner[arriving] * layout.length + rows[whole[arriving]])]
    to, of = (torch.bincount(each, minlength=layout.ranks).tolist() for each in (ranks[mine], owner[arriving]))
    return Route(group, order.to(positions.device), to, rows[whole[arriving]].to(positions.device), of)


def _places(layout: Layout) -> tuple[Tensor, Tensor]:
    """The rank of each position, and its row there."""
    ranks, rows = torch.empty(layout.length, dtype=torch.int64), torch.empty(layout.length, dtype=torch.int64)
    for rank in range(layout.ranks):
        for index, start in enumerate(layout.starts(rank)):
            ranks[start : start + layout.chunk] = rank
            rows[start : start + layout.chunk] = torch.arange(index * layout.chunk, (index + 1) * layout.chunk)
    return ranks, rows
