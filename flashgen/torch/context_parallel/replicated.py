"""Arrays that are equal on all ranks. Their gradients are summed over the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from flashgen.torch.context_parallel.failures import peer_errors
from flashgen.torch.tensors import Tensor


def replicated(array: Tensor, groups: list[Any]) -> Tensor:
    """Returns the array. Its gradient is summed over one group after the other, in float32."""
    result: Tensor = _Replicated.apply(array, groups)
    return result


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, array: Tensor, groups: list[Any]) -> Tensor:
        ctx.groups = groups
        return array.view_as(array)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.to(torch.float32, copy=True)
        for group in ctx.groups:
            with peer_errors():
                dist.all_reduce(total, group=group)
        return total.to(gradient.dtype), None
