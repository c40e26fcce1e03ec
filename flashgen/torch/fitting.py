"""What functions of torch's signatures take and kernels do not, as what kernels take: head dims, batches, scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashgen.errors import ArgumentError
from flashgen.runtime.arrays import inverse, nesting
from flashgen.torch.tensors import Tensor

_STEP, _MOST = 8, 256  # of a spec's head_dim and value_dim
_STEPS_OF_DROPOUT = 256


class Padded(NamedTuple):
    """q, k and v whose last dimensions a spec takes.

    head_dim, value_dim: those before. scale: 1/sqrt(head_dim) where q and k were padded, None where they were not, so
    that the spec's default is right.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    head_dim: int
    value_dim: int
    scale: float | None


def padded_heads(q: Tensor, k: Tensor, v: Tensor) -> Padded:
    """q, k and v with their last dimensions padded with zeros to multiples of 8, by a copy where one is none.

    Autograd cuts gradients to what was given; `cut_heads` cuts the output. Dimensions above 256 are left to the spec,
    which refuses them. ArgumentError where q and k differ in their last dimension.
    """
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    if head_dim != k.shape[-1]:
        raise ArgumentError(f"query has a last dimension of {head_dim} and key of {k.shape[-1]}: give both the same")
    scale = None
    if head_dim % _STEP and head_dim < _MOST:
        q, k, scale = _padded(q), _padded(k), head_dim**-0.5
    if value_dim % _STEP and value_dim < _MOST:
        v = _padded(v)
    return Padded(q, k, v, head_dim, value_dim, scale)


def cut_heads(out: Tensor, value_dim: int) -> Tensor:
    """An output without the elements that padding added to it: itself, or a view."""
    return out if out.shape[-1] == value_dim else out[..., :value_dim]


def _padded(tensor: Tensor) -> Tensor:
    """The tensor with its last dimension padded, its axes nested as they were."""
    order, last = nesting(tensor.stride()), tensor.ndim - 1
    behind = last - order.index(last)  # axes that are inside of the last dimension
    extra = (0, 0) * behind + (0, -tensor.shape[-1] % _STEP)
    return torch.nn.functional.pad(tensor.permute(order), extra).permute(inverse(order))


def of_one_batch(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with the batch of q, (batch, ...): a view where theirs is 1, whose gradients are summed by autograd."""
    batch = q.shape[0]
    if k.shape[0] == 1 != batch:
        k = k.expand(batch, *k.shape[1:])
    if v.shape[0] == 1 != batch:
        v = v.expand(batch, *v.shape[1:])
    return k, v


def scale_of_call(name: str, scale: Tensor, q: Tensor) -> Tensor:
    """A scale that is a tensor as a capture, float32 (1,) where q is; ArgumentError for more than one number."""
    if scale.numel() != 1 or scale.is_complex() or scale.dtype == torch.bool:
        raise ArgumentError(
            f"{name} is a {scale.dtype} tensor of shape {tuple(scale.shape)}: give a number, or one in it"
        )
    return scale.reshape(1).to(q.device, torch.float32)


def checked_dropout(name: str, probability: Any) -> float:
    """The probability of dropping a weight; ArgumentError for one that cannot be, or that rounding would change.

    Weights are kept in steps of 1/256. A probability that is not 0 and rounds to 0 would drop nothing, and one below 1
    that rounds to 1 would drop everything. 1 itself is given back: `nothing_kept` is what it means.
    """
    if isinstance(probability, bool) or not isinstance(probability, (int, float)) or not 0 <= probability <= 1:
        raise ArgumentError(f"{name}={probability!r} must be a number from 0 to 1")
    kept = round(_STEPS_OF_DROPOUT * (1 - probability))
    if probability and kept == _STEPS_OF_DROPOUT:
        raise ArgumentError(
            f"{name}={probability!r} would drop nothing: weights are kept in steps of 1/256; give 0, or at least 1/256"
        )
    if probability < 1 and not kept:
        raise ArgumentError(
            f"{name}={probability!r} would drop everything: weights are kept in steps of 1/256; give 1, or at most "
            "255/256"
        )
    return float(probability)


def nothing_kept(v: Tensor) -> Tensor:
    """v for attention that drops every weight: zeros, and the gradient of v is zeros, too, whatever v holds."""
    nowhere = torch.zeros((), dtype=torch.bool, device=v.device)
    return torch.where(nowhere, v, v.new_zeros(()))
