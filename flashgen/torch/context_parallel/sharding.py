"""Which rows of a sequence a rank has: `positions`, `shard` and `unshard`."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.ranks import Layout
from flashgen.torch.context_parallel.collectives import all_gather
from flashgen.torch.context_parallel.groups import Ranks, ranks_of
from flashgen.torch.tensors import Tensor


def positions(length: int, *, group: Any = None, shards: str = "zigzag", device: Any = None) -> Tensor:
    """The positions of this rank's rows of a sequence, int64 (length / ranks,): of use for rotary embeddings.

    group: as `attention` takes it. Raises ArgumentError where the length cannot be dealt.
    """
    ranks = _ranks(group)
    layout = Layout(ranks.size, length, shards)
    starts = layout.starts(ranks.rank)
    return torch.cat([torch.arange(start, start + layout.chunk, device=device) for start in starts])


def shard(tensor: Tensor, dim: int, *, group: Any = None, shards: str = "zigzag") -> Tensor:
    """This rank's rows, along `dim`, of a tensor that all ranks have whole. Its gradient is 0 at the rows of others."""
    rows = positions(tensor.shape[dim], group=group, shards=shards, device=tensor.device)
    return tensor.index_select(dim, rows)


def unshard(tensor: Tensor, dim: int, *, group: Any = None, shards: str = "zigzag") -> Tensor:
    """The whole of what each rank has rows of along `dim`: the inverse of `shard`, on all ranks of a group.

    Its gradient is that of this rank's rows: what all ranks compute alike of the whole counts once.
    """
    made: Tensor = _Unshard.apply(tensor, dim, _ranks(group), shards)
    return made


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, ranks: Ranks, shards: str) -> Tensor:
        layout = Layout(ranks.size, tensor.shape[dim] * ranks.size, shards)
        ctx.how = layout, ranks.rank, dim
        every = tensor
        for group in reversed(ranks.groups):  # those of a heads group stand side by side
            every = all_gather(every, group)
        every = every.reshape(ranks.size, *tensor.shape)
        chunks = [every[of].narrow(dim, first, layout.chunk) for of, first in layout.in_order()]
        return torch.cat(chunks, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        layout, rank, dim = ctx.how
        chunks = [gradient.narrow(dim, start, layout.chunk) for start in layout.starts(rank)]
        return torch.cat(chunks, dim), None, None, None


def _ranks(group: Any) -> Ranks:
    two = isinstance(group, (tuple, list)) or getattr(group, "ndim", 1) == 2
    return ranks_of(group, "ulysses_ring" if two else "ring")
