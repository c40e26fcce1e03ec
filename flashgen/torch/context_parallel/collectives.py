"""What all ranks of a group do together: gather, sum and scatter, exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from flashgen.torch.context_parallel.failures import peer_errors
from flashgen.torch.context_parallel.giving_way import give_way
from flashgen.torch.tensors import Tensor


def all_gather(part: Tensor, group: Any) -> Tensor:
    """(ranks, *shape): the tensors of all ranks, which are of one shape."""
    size = dist.get_world_size(group)
    flat = part.contiguous().view(-1)
    every = flat.new_empty(size * flat.numel())
    with peer_errors():
        dist.all_gather_into_tensor(every, flat, group=group)
    return every.view(size, *part.shape)


def reduce_scatter(parts: Tensor, group: Any) -> Tensor:
    """This rank's part, (ranks, *shape) -> shape, of the sum over all ranks."""
    made = torch.empty_like(parts[0])
    with peer_errors():
        dist.reduce_scatter_tensor(made.view(-1), parts.reshape(-1), group=group)
    return made


def all_to_all(parts: Tensor, group: Any, to: list[int] | None = None, of: list[int] | None = None) -> Tensor:
    """What all ranks send to this one; parts along the first dimension, equal ones or as many as `to` says."""
    received = torch.empty_like(parts)
    with peer_errors():
        dist.all_to_all_single(received, parts, of, to, group=group)
    return received


def begin_all_to_all(parts: Tensor, to: list[int], of: list[int], group: Any) -> tuple[Tensor, Any]:
    """(what is received, one behind the other; what to wait for) of as many rows to and of each rank as these say.

    What the current stream is given from here on runs meanwhile, until it waits.
    """
    received = parts.new_empty((sum(of), *parts.shape[1:]))
    with peer_errors():
        work = dist.all_to_all_single(received, parts, of, to, group=group, async_op=True)
    give_way(parts.device)
    return received, work


def wait(work: Any) -> None:
    """What the current stream is given from here on comes after a message."""
    with peer_errors():
        work.wait()


def moved(rows: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """`there(rows)`, an order of rows over the ranks in which each stands once; its gradient goes `back`."""
    made: Tensor = _Moved.apply(rows, there, back)
    return made


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.back(gradient), None, None
