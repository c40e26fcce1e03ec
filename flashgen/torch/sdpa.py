"""torch.nn.functional.scaled_dot_product_attention, by its own signature and meaning."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from flashgen.errors import ArgumentError
from flashgen.language.captures import Tensor as Captured
from flashgen.language.masks import causal
from flashgen.language.spec import AttentionSpec
from flashgen.torch.functional import call, is_deterministic
from flashgen.torch.table import Registered, constant, fixed, registered
from flashgen.torch.tensors import Tensor, check_mask, check_tensors, dtype_of


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    emulate: bool | None = None,
) -> Tensor:
    """Attention as torch's function of this name gives it, for float16 and bfloat16.

    Args:
        query: (..., heads, length, dim), with any dimensions before, or none. key, value: likewise.
        attn_mask: booleans, of what may be attended to, or numbers of float16, bfloat16 or float32 that are added to
            the scores; of a shape that broadcasts to (..., heads, len_q, len_k). Added numbers that require a gradient
            get one.
        dropout_p: the probability of dropping a weight, in steps of 1/256; 0 in evaluation is the caller's to say.
        is_causal: query i attends to keys up to i: aligned to the top left, as torch does.
        scale: None is 1/sqrt(dim).
        enable_gqa: fewer heads of key and value than of query, each for a group of them.
        emulate: run CPU tensors on the emulator.

    A query that may attend to nothing has an output of 0, where torch's is NaN or 0 by its backend. Raises
    ArgumentError for what torch refuses, and for float32: convert, or call under torch.autocast.
    """
    check_tensors(query=query, key=key, value=value)
    if attn_mask is not None:
        check_mask(attn_mask)
    if attn_mask is not None and is_causal:
        raise ArgumentError("attn_mask and is_causal=True are both given: give one, or a mask that is causal")
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    leading, (q, k, v) = query.shape[:-2], _in_four(query, key, value)
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ArgumentError(
            f"query has {q.shape[1]} heads and key {k.shape[1]}: say enable_gqa=True where each is for a group"
        )
    captures: dict[str, Tensor] = {}
    if attn_mask is not None:
        captures["attn_mask"] = _mask_in_four(attn_mask, q, k, leading)
    kind = None if attn_mask is None else dtype_of(attn_mask)
    learned = attn_mask is not None and attn_mask.requires_grad
    options = (emulate, is_deterministic(None))
    entry = _entry(
        options,
        fixed(q.shape[-1]),
        fixed(v.shape[-1]),
        dtype_of(q),
        is_causal,
        fixed(scale),
        fixed(dropout_p),
        kind,
        learned,
    )
    out: Tensor = call(entry, {}, q, k, v, captures)
    return out.reshape(*leading, *out.shape[2:])


def _in_four(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(batch, heads, length, dim) of each: dimensions before these are one batch, those that are not there are 1."""
    if min(tensor.ndim for tensor in tensors) < 2:
        raise ArgumentError(f"query has shape {tuple(tensors[0].shape)}: give (..., heads, length, dim)")
    made = []
    for tensor in tensors:
        if tensor.ndim < 4:
            tensor = tensor.unsqueeze(1) if tensor.ndim == 3 else tensor[None, None]
        made.append(tensor.flatten(0, -4) if tensor.ndim > 4 else tensor)
    return tuple(made)


def _mask_in_four(mask: Tensor, q: Tensor, k: Tensor, leading: Any) -> Tensor:
    """The mask as (batch or 1, heads or 1, len_q or 1, len_k or 1)."""
    wanted = (*leading, q.shape[2], k.shape[2])
    if mask.ndim > len(wanted) or any(
        own not in (1, size) for own, size in zip(mask.shape[::-1], wanted[::-1], strict=False)
    ):
        raise ArgumentError(f"attn_mask has shape {tuple(mask.shape)}, which does not broadcast to {tuple(wanted)}")
    if len(wanted) > 4:
        return mask.expand(*leading[:-1], *mask.shape[-3:]).flatten(0, -4) if mask.ndim > 3 else _padded(mask)
    if len(wanted) == 3:  # (batch, len_q, len_k): there is one head
        return _padded(mask.unsqueeze(1)) if mask.ndim == 3 else _padded(mask)
    return _padded(mask)


def _padded(mask: Tensor) -> Tensor:
    return mask[(None,) * (4 - mask.ndim)] if mask.ndim < 4 else mask


@constant
def _entry(options: tuple[bool | None, bool], *key: Any) -> Registered:
    return registered(_made(*key), emulate=options[0], deterministic=options[1])


@lru_cache(maxsize=1024)
def _made(
    head_dim: int,
    value_dim: int,
    dtype: str,
    is_causal: bool,
    scale: float | None,
    dropout: float,
    mask_dtype: str | None,
    learned: bool,
) -> AttentionSpec:
    if dtype not in ("float16", "bfloat16"):
        raise ArgumentError(
            f"query is {dtype}; flashgen computes in float16 and bfloat16: convert it, or call under torch.autocast"
        )
    mask: Any = causal("top_left") if is_causal else None
    score: Any = None
    if mask_dtype is not None:
        bias = Captured("attn_mask", mask_dtype, 4, grad=learned)
        if mask_dtype == "bool":
            mask = lambda b, h, q, k: bias[b, h, q, k]
        else:
            score = lambda s, b, h, q, k: s + bias[b, h, q, k]
    return AttentionSpec(head_dim, dtype, value_dim, scale, dropout=dropout, score=score, mask=mask)
