"""Which rows of a sequence a rank has: `positions`, `shard` and `unshard`."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.ranks import Layout
from flashgen.torch.context_parallel.collectives import all_gather
from flashgen.torch.context_parallel.groups import Ranks, ranks_of
from flashgen.torch.tensors import Tensor


def positions(length: int, *, group: Any = None, shards: str = "zigzag", device: Any = None) -> Tensor:
    """Returns the positions of this rank's rows in the sequence, int64 (length / ranks,), as for rotary embeddings.

    Args:
        length: the length of the sequence. Raises ArgumentError if it cannot be divided among the ranks.
        group, shards: as in `attention`.
        device: the device of the result.
    """
    ranks = _ranks(group)
    layout = Layout(ranks.size, length, shards)
    starts = layout.starts(ranks.rank)
    return torch.cat([torch.arange(start, start + layout.chunk, device=device) for start in starts])


def shard(tensor: Tensor, dim: int, *, group: Any = None, shards: str = "zigzag") -> Tensor:
    """Returns this rank's rows along `dim` of a tensor that all ranks have. Rows of other ranks get zero gradients.

    Args:
        tensor: the whole tensor, equal on all ranks.
        dim: its dimension of positions.
        group: the process group or device mesh; None for the default group.
        shards: "zigzag" or "plain", or the positions of each rank.
    """
    rows = positions(tensor.shape[dim], group=group, shards=shards, device=tensor.device)
    return tensor.index_select(dim, rows)


def unshard(tensor: Tensor, dim: int, *, group: Any = None, shards: str = "zigzag") -> Tensor:
    """Returns the whole tensor along `dim` on all ranks, from the rows of each: the inverse of `shard`.

    The gradient is that of this rank's rows: a loss that all ranks compute from the whole tensor counts once.

    Args:
        tensor: this rank's rows.
        dim, group, shards: as in `shard`.
    """
    result: Tensor = _Unshard.apply(tensor, dim, _ranks(group), shards)
    return result


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, ranks: Ranks, shards: str) -> Tensor:
        layout = Layout(ranks.size, tensor.shape[dim] * ranks.size, shards)
        ctx.saved = layout, ranks.rank, dim
        gathered = tensor
        for group in reversed(ranks.groups):  # ranks of a heads group are consecutive
            gathered = all_gather(gathered, group)
        gathered = gathered.reshape(ranks.size, *tensor.shape)
        chunks = [gathered[owner].narrow(dim, first, layout.chunk) for owner, first in layout.in_order()]
        return torch.cat(chunks, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        layout, rank, dim = ctx.saved
        chunks = [gradient.narrow(dim, start, layout.chunk) for start in layout.starts(rank)]
        return torch.cat(chunks, dim), None, None, None


def _ranks(group: Any) -> Ranks:
    has_two_groups = isinstance(group, (tuple, list)) or getattr(group, "ndim", 1) == 2
    return ranks_of(group, "ulysses_ring" if has_two_groups else "ring")
