"""Conversions of arguments that torch's signatures allow and kernels do not: head dims, batches, scales, dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashgen.errors import ArgumentError
from flashgen.language.spec import MAX_HEAD_DIM, MAX_VALUE_DIM
from flashgen.runtime.arrays import inverse, nesting
from flashgen.torch.tensors import Tensor

_MULTIPLE = 8  # of a spec's head_dim and value_dim
_DROPOUT_STEPS = 256


class Padded(NamedTuple):
    """q, k and v with last dimensions that a spec accepts.

    head_dim, value_dim: the dimensions before padding. scale: 1/sqrt(head_dim) if q and k were padded; otherwise None,
    as the spec's default is right.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    head_dim: int
    value_dim: int
    scale: float | None


def padded_heads(q: Tensor, k: Tensor, v: Tensor) -> Padded:
    """Pads the last dimensions of q, k and v with zeros to multiples of 8. Padding copies a tensor.

    Autograd removes the padding from gradients, and `cut_heads` from the output. Dimensions above 512 are not padded:
    the spec refuses them. Raises ArgumentError if q and k differ in their last dimension.
    """
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    if head_dim != k.shape[-1]:
        raise ArgumentError(f"query has a last dimension of {head_dim} and key of {k.shape[-1]}: give both the same")
    scale = None
    if head_dim % _MULTIPLE and head_dim < MAX_HEAD_DIM:
        q, k, scale = _padded(q), _padded(k), head_dim**-0.5
    if value_dim % _MULTIPLE and value_dim < MAX_VALUE_DIM:
        v = _padded(v)
    return Padded(q, k, v, head_dim, value_dim, scale)


def cut_heads(out: Tensor, value_dim: int) -> Tensor:
    """Returns the output without the padding: itself, or a view."""
    return out if out.shape[-1] == value_dim else out[..., :value_dim]


def _padded(tensor: Tensor) -> Tensor:
    """Pads the last dimension, and keeps the order of the axes in memory."""
    order, last = nesting(tensor.stride()), tensor.ndim - 1
    inner = last - order.index(last)  # axes with smaller strides than the last dimension
    extra = (0, 0) * inner + (0, -tensor.shape[-1] % _MULTIPLE)
    return torch.nn.functional.pad(tensor.permute(order), extra).permute(inverse(order))


def expand_batch(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Expands k and v of batch 1 to the batch of q, as views. Autograd sums their gradients."""
    batch = q.shape[0]
    if k.shape[0] == 1 != batch:
        k = k.expand(batch, *k.shape[1:])
    if v.shape[0] == 1 != batch:
        v = v.expand(batch, *v.shape[1:])
    return k, v


def scale_of_call(name: str, scale: Tensor, q: Tensor) -> Tensor:
    """Returns a scale in a tensor as float32 (1,) on the device of q. Raises ArgumentError unless it is one number."""
    if scale.numel() != 1 or scale.is_complex() or scale.dtype == torch.bool:
        raise ArgumentError(
            f"{name} is a {scale.dtype} tensor of shape {tuple(scale.shape)}: give a number, or a tensor with one"
        )
    return scale.reshape(1).to(q.device, torch.float32)


def checked_dropout(name: str, probability: Any) -> float:
    """Returns the probability of dropping a weight. Raises ArgumentError if it is not one or rounds to 0 or 1.

    Weights are kept in steps of 1/256. A probability above 0 that rounds to 0 would drop nothing, and one below 1 that
    rounds to 1 would drop everything. 1 itself is returned: callers then use `zeros_of`.
    """
    if isinstance(probability, bool) or not isinstance(probability, (int, float)) or not 0 <= probability <= 1:
        raise ArgumentError(f"{name}={probability!r} must be a number from 0 to 1")
    kept = round(_DROPOUT_STEPS * (1 - probability))
    if probability and kept == _DROPOUT_STEPS:
        raise ArgumentError(
            f"{name}={probability!r} would drop nothing: weights are kept in steps of 1/256; give 0, or at least 1/256"
        )
    if probability < 1 and not kept:
        raise ArgumentError(
            f"{name}={probability!r} would drop everything: weights are kept in steps of 1/256; give 1, or at most "
            "255/256"
        )
    return float(probability)


def zeros_of(v: Tensor) -> Tensor:
    """Returns zeros for v, for a dropout of 1. The gradient of v is zero too, even if v holds infinities or NaN."""
    keeps_none = torch.zeros((), dtype=torch.bool, device=v.device)
    return torch.where(keeps_none, v, v.new_zeros(()))
