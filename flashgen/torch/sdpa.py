"""torch.nn.functional.scaled_dot_product_attention, by its own signature and meaning."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flashgen.errors import ArgumentError
from flashgen.language.captures import Tensor as Captured
from flashgen.language.masks import causal
from flashgen.language.spec import AttentionSpec
from flashgen.torch.autocast import converted
from flashgen.torch.fitting import checked_dropout, cut_heads, nothing_kept, padded_heads, scale_of_call
from flashgen.torch.functional import call, is_deterministic
from flashgen.torch.table import Registered, constant, fixed, registered
from flashgen.torch.tensors import Tensor, causal_bias, check_mask, check_tensors, dtype_of


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    *,
    emulate: bool | None = None,
) -> Tensor:
    """Attention as torch's function of this name gives it, for float16 and bfloat16.

    Args:
        query: (..., heads, length, dim), with any dimensions before, or none. key, value: likewise; dimensions before
            the length broadcast. A dim that is no multiple of 8 is padded, which costs a copy.
        attn_mask: booleans, of what may be attended to, or numbers of float16, bfloat16 or float32 that are added to
            the scores; of a shape that broadcasts to (..., heads, len_q, len_k). Added numbers that require a gradient
            get one. Or a CausalBias of torch.nn.attention.bias.
        dropout_p: the probability of dropping a weight, rounded to steps of 1/256; 0 in evaluation is the caller's to
            say. 1 gives zeros.
        is_causal: query i attends to keys up to i: aligned to the top left, as torch does.
        scale: None is 1/sqrt(dim). A tensor of one number is read when kernels run, and has a gradient where it
            requires one.
        enable_gqa: fewer heads of key and value than of query, each for a group of them.
        emulate: run CPU tensors on the emulator.

    A query that may attend to nothing has an output of 0, where torch's is NaN or 0 by its backend. Raises
    ArgumentError for what torch refuses, for float32 (convert, or call under torch.autocast), and for a dropout_p that
    is not 0 or 1 and would be rounded to it.
    """
    check_tensors(query=query, key=key, value=value)
    q, k, v = converted(query, key, value)
    shape, of_keys, of_values = q.shape, k.shape, v.shape
    leading: tuple[int, ...] | None = None  # of the output before its length, where that is not (batch, heads)
    if not _are_in_four(shape, of_keys, of_values, enable_gqa):
        q, k, v, leading = _in_four(q, k, v, enable_gqa)
    captures: dict[str, Tensor] = {}
    alignment = "top_left" if is_causal else None
    if attn_mask is not None:
        if is_causal:
            raise ArgumentError("attn_mask and is_causal=True are both given: give one, or a mask that is causal")
        alignment = causal_bias(attn_mask, shape[-2], of_keys[-2])
        if alignment is None:
            check_mask(attn_mask)
            captures["attn_mask"] = _mask_in_four(attn_mask, q, k, shape[:2] if leading is None else leading)
    dropout = fixed(dropout_p)
    if dropout and checked_dropout("dropout_p", dropout) == 1:
        dropout, v = 0.0, nothing_kept(v)
    if isinstance(scale, torch.Tensor):
        captures["scale"], scale = scale_of_call("scale", scale, q), 1.0
    head_dim, value_dim = shape[-1], of_values[-1]
    cut = None
    if head_dim % 8 or of_keys[-1] % 8 or value_dim % 8:
        padded, cut = padded_heads(q, k, v), value_dim
        q, k, v = padded.q, padded.k, padded.v
        head_dim, value_dim, scale = q.shape[-1], v.shape[-1], padded.scale if scale is None else scale
    entry = _entry(
        (emulate, is_deterministic(None)),
        fixed(head_dim),
        fixed(value_dim),
        dtype_of(q),
        alignment,
        fixed(scale),
        dropout,
        tuple([(name, dtype_of(each), each.requires_grad) for name, each in captures.items()]) if captures else (),
    )
    out: Tensor = call(entry, {}, q, k, v, captures)
    if cut is not None:
        out = cut_heads(out, cut)
    return out if leading is None else out.reshape(*leading, *out.shape[2:])


def _are_in_four(of_q: Any, of_k: Any, of_v: Any, enable_gqa: bool) -> bool:
    """Whether shapes are (batch, heads, length, dim), of one batch, and of heads that a call takes as they are."""
    if not len(of_q) == len(of_k) == len(of_v) == 4:
        return False
    return of_q[0] == of_k[0] == of_v[0] and of_k[1] == of_v[1] and (enable_gqa or of_q[1] == of_k[1])


class _InFour(NamedTuple):
    """(batch, heads, length, dim) of each, and the dimensions of the output before its length."""

    q: Tensor
    k: Tensor
    v: Tensor
    leading: tuple[int, ...]


def _in_four(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> _InFour:
    """Dimensions before the heads are one batch, those that are not there are 1, and others broadcast.

    ArgumentError where they do not.
    """
    if min(q.ndim, k.ndim, v.ndim) < 2:
        raise ArgumentError(f"query has shape {tuple(q.shape)}: give (..., heads, length, dim)")
    if q.ndim == k.ndim == v.ndim == 3 and not enable_gqa:  # there is one head
        q, k, v, leading = _broadcast(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), enable_gqa)
        return _InFour(q, k, v, leading[:1])
    if max(q.ndim, k.ndim, v.ndim) == 2:
        return _InFour(q[None, None], k[None, None], v[None, None], ())
    q, k, v = (tensor.unsqueeze(0) if tensor.ndim == 2 else tensor for tensor in (q, k, v))
    return _broadcast(q, k, v, enable_gqa)


def _broadcast(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> _InFour:
    """Of tensors (..., heads, length, dim)."""
    if _are_in_four(q.shape, k.shape, v.shape, enable_gqa):
        return _InFour(q, k, v, q.shape[:-2])
    before = _common(*(tensor.shape[:-3] for tensor in (q, k, v)))
    (heads,) = _common(q.shape[-3:-2]) if enable_gqa else _common(*(x.shape[-3:-2] for x in (q, k, v)))
    of_keys = heads if max(k.shape[-3], v.shape[-3]) > 1 else 1  # one head is for all queries' without a copy
    sizes = (heads, k.shape[-3], v.shape[-3]) if enable_gqa else (heads, of_keys, of_keys)
    wanted = [(*before, own, *x.shape[-2:]) for x, own in zip((q, k, v), sizes, strict=True)]
    q, k, v = (_one_batch(tensor.expand(shape)) for tensor, shape in zip((q, k, v), wanted, strict=True))
    return _InFour(q, k, v, (*before, heads))


def _one_batch(tensor: Tensor) -> Tensor:
    """(batch, heads, length, dim) of any dimensions before the heads, or none."""
    if tensor.ndim == 3:
        return tensor.unsqueeze(0)
    return tensor.flatten(0, -4) if tensor.ndim > 4 else tensor


def _common(*shapes: Any) -> tuple[int, ...]:
    """The shape that these broadcast to; ArgumentError where they do not."""
    longest = max(map(len, shapes))
    found = []
    for sizes in zip(*((1,) * (longest - len(shape)) + tuple(shape) for shape in shapes), strict=True):
        others = [size for size in sizes if size != 1] or [1]
        if any(size != others[0] for size in others):
            raise ArgumentError(
                f"query, key and value have sizes {', '.join(map(str, sizes))} in one dimension, which do not "
                "broadcast: give one size or 1, or enable_gqa=True where each head of key is for a group of query's"
            )
        found.append(others[0])
    return tuple(found)


def _mask_in_four(mask: Tensor, q: Tensor, k: Tensor, leading: Any) -> Tensor:
    """The mask as (batch or 1, heads or 1, len_q or 1, len_k or 1)."""
    wanted = (*leading, q.shape[2], k.shape[2])
    if mask.ndim > len(wanted) or any(
        own not in (1, size) for own, size in zip(mask.shape[::-1], wanted[::-1], strict=False)
    ):
        raise ArgumentError(f"attn_mask has shape {tuple(mask.shape)}, which does not broadcast to {tuple(wanted)}")
    if len(wanted) > 4 and mask.ndim > 3:
        return mask.expand(*leading[:-1], *mask.shape[-3:]).flatten(0, -4)
    if len(leading) == 1 and leading[0] == q.shape[0] and mask.ndim == 3:  # (batch, len_q, len_k): there is one head
        return mask.unsqueeze(1)
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
    alignment: str | None,
    scale: float | None,
    dropout: float,
    captures: tuple[tuple[str, str, bool], ...],
) -> AttentionSpec:
    """The spec of a call. captures: (name, dtype, whether it is learned) of the mask and the scale."""
    if dtype not in ("float16", "bfloat16"):
        raise ArgumentError(
            f"query is {dtype}; flashgen computes in float16 and bfloat16: convert it, or call under torch.autocast"
        )
    axes = {"attn_mask": 4, "scale": 1}
    declared = {name: Captured(name, kind, axes[name], grad=learned) for name, kind, learned in captures}
    mask: Any = causal(alignment) if alignment else None
    factor, bias = declared.get("scale"), declared.get("attn_mask")
    if bias is not None and bias.capture.dtype == "bool":
        kept = bias
        mask, bias = lambda b, h, q, k: kept[b, h, q, k], None
    score: Any = None
    if factor is not None and bias is not None:
        score = lambda s, b, h, q, k: s * factor[0] + bias[b, h, q, k]
    elif factor is not None:
        score = lambda s, b, h, q, k: s * factor[0]
    elif bias is not None:
        score = lambda s, b, h, q, k: s + bias[b, h, q, k]
    return AttentionSpec(head_dim, dtype, value_dim, scale, dropout=dropout, score=score, mask=mask)
