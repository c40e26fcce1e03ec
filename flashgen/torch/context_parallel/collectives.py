"""Collectives of a process group: all-gather, reduce-scatter and all-to-all. They raise PeerError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from flashgen.torch.context_parallel.failures import peer_errors
from flashgen.torch.context_parallel.launch_order import launch_after_messages
from flashgen.torch.tensors import Tensor


def all_gather(part: Tensor, group: Any) -> Tensor:
    """Returns the tensors of all ranks, which have equal shapes, as (ranks, *shape)."""
    size = dist.get_world_size(group)
    flat = part.contiguous().view(-1)
    gathered = flat.new_empty(size * flat.numel())
    with peer_errors():
        dist.all_gather_into_tensor(gathered, flat, group=group)
    return gathered.view(size, *part.shape)


def reduce_scatter(parts: Tensor, group: Any) -> Tensor:
    """Sums (ranks, *shape) over all ranks and returns this rank's part, of shape `shape`."""
    result = torch.empty_like(parts[0])
    with peer_errors():
        dist.reduce_scatter_tensor(result.view(-1), parts.reshape(-1), group=group)
    return result


def all_to_all(parts: Tensor, group: Any, sends: list[int] | None = None, receives: list[int] | None = None) -> Tensor:
    """Exchanges parts along the first dimension. sends, receives: rows to and from each rank; None is equal parts."""
    received = torch.empty_like(parts)
    with peer_errors():
        dist.all_to_all_single(received, parts, receives, sends, group=group)
    return received


def begin_all_to_all(parts: Tensor, sends: list[int], receives: list[int], group: Any) -> tuple[Tensor, Any]:
    """Starts an exchange of rows. Returns the received rows in the order of ranks, and the work to wait for.

    Kernels that are launched before the wait overlap with the exchange. sends, receives: rows to and from each rank.
    """
    received = parts.new_empty((sum(receives), *parts.shape[1:]))
    with peer_errors():
        work = dist.all_to_all_single(received, parts, receives, sends, group=group, async_op=True)
    launch_after_messages(parts.device)
    return received, work


def wait(work: Any) -> None:
    """Makes the current stream wait for a message."""
    with peer_errors():
        work.wait()


def permute_rows(rows: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns `there(rows)`, a permutation of rows over the ranks. `back`, its inverse, permutes the gradient."""
    result: Tensor = _PermuteRows.apply(rows, there, back)
    return result


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.back(gradient), None, None
