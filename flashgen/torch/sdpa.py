"""`scaled_dot_product_attention`, with the signature and meaning of the function in torch.nn.functional."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flashgen.dtypes import ELEMENTS
from flashgen.errors import ArgumentError
from flashgen.language.captures import Tensor as Captured
from flashgen.language.masks import causal
from flashgen.language.spec import AttentionSpec
from flashgen.torch.autocast import converted
from flashgen.torch.fitting import checked_dropout, cut_heads, padded_heads, scale_of_call, zeros_of
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
    """Computes attention as torch's function of the same name, in float16 or bfloat16.

    A query that may attend to no key has an output of 0. torch's own output is NaN or 0, depending on its backend.

    Args:
        query: (..., heads, len_q, dim). Leading dimensions, and the heads, may be missing.
        key, value: (..., heads, len_k, dim). All dimensions before the length broadcast with those of query. A dim
            that is not a multiple of 8 is padded by a copy.
        attn_mask: a boolean tensor that is True where a query may attend to a key; or a tensor of float16, bfloat16 or
            float32 that is added to the scores, and gets a gradient if it requires one. Its shape broadcasts to
            (..., heads, len_q, len_k). Or a CausalBias of torch.nn.attention.bias.
        dropout_p: the probability of dropping a weight, rounded to steps of 1/256. 1 gives zeros. As in torch, the
            caller sets it to 0 for evaluation.
        is_causal: let query i attend to keys 0 to i. The alignment is top left, as in torch.
        scale: the factor of the scores; None is 1/sqrt(dim). A tensor with one number is read when kernels run, and
            gets a gradient if it requires one.
        enable_gqa: allow fewer heads of key and value than of query, each shared by a group of query heads.
        emulate: run CPU tensors on the emulator. None takes the setting of `flashgen.torch.emulated()`.

    Returns:
        The output, (..., heads, len_q, dim of value).

    Raises:
        ArgumentError: torch would refuse the arguments; query is float32 (convert it, or call under torch.autocast);
            or dropout_p would be rounded to 0 or 1 and is neither.
    """
    check_tensors(query=query, key=key, value=value)
    q, k, v = converted(query, key, value)
    shape, k_shape, v_shape = q.shape, k.shape, v.shape
    leading: tuple[int, ...] | None = None  # the output's leading dimensions, if not (batch, heads)
    if not _is_four_dimensional(shape, k_shape, v_shape, enable_gqa):
        q, k, v, leading = _flatten_to_four(q, k, v, enable_gqa)
    captures: dict[str, Tensor] = {}
    alignment = "top_left" if is_causal else None
    if attn_mask is not None:
        if is_causal:
            raise ArgumentError("attn_mask and is_causal=True are both given: give one, or a mask that is causal")
        alignment = causal_bias(attn_mask, shape[-2], k_shape[-2])
        if alignment is None:
            check_mask(attn_mask)
            captures["attn_mask"] = _four_dimensional_mask(attn_mask, q, k, shape[:2] if leading is None else leading)
    dropout = fixed(dropout_p)
    if dropout and checked_dropout("dropout_p", dropout) == 1:
        dropout, v = 0.0, zeros_of(v)
    if isinstance(scale, torch.Tensor):
        captures["scale"], scale = scale_of_call("scale", scale, q), 1.0
    head_dim, value_dim = shape[-1], v_shape[-1]
    cut = None
    if head_dim % 8 or k_shape[-1] % 8 or value_dim % 8:
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


def _is_four_dimensional(q_shape: Any, k_shape: Any, v_shape: Any, enable_gqa: bool) -> bool:
    """Whether shapes are (batch, heads, length, dim) with equal batches and with heads that need no broadcast."""
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        return False
    heads_fit = k_shape[1] == v_shape[1] and (enable_gqa or q_shape[1] == k_shape[1])
    return q_shape[0] == k_shape[0] == v_shape[0] and heads_fit


class _FourDimensional(NamedTuple):
    """q, k and v as (batch, heads, length, dim), and the output's dimensions before the length."""

    q: Tensor
    k: Tensor
    v: Tensor
    leading: tuple[int, ...]


def _flatten_to_four(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> _FourDimensional:
    """Flattens the dimensions before the heads into one batch and broadcasts. Missing dimensions have size 1.

    Raises ArgumentError if the shapes do not broadcast.
    """
    if min(q.ndim, k.ndim, v.ndim) < 2:
        raise ArgumentError(f"query has shape {tuple(q.shape)}: give (..., heads, length, dim)")
    if q.ndim == k.ndim == v.ndim == 3 and not enable_gqa:  # (batch, length, dim): one head
        q, k, v, leading = _broadcast(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), enable_gqa)
        return _FourDimensional(q, k, v, leading[:1])
    if max(q.ndim, k.ndim, v.ndim) == 2:
        return _FourDimensional(q[None, None], k[None, None], v[None, None], ())
    q, k, v = (tensor.unsqueeze(0) if tensor.ndim == 2 else tensor for tensor in (q, k, v))
    return _broadcast(q, k, v, enable_gqa)


def _broadcast(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> _FourDimensional:
    """Broadcasts tensors of shape (..., heads, length, dim) and flattens them to four dimensions."""
    if _is_four_dimensional(q.shape, k.shape, v.shape, enable_gqa):
        return _FourDimensional(q, k, v, q.shape[:-2])
    before = _broadcast_shape(*(tensor.shape[:-3] for tensor in (q, k, v)))
    (heads,) = _broadcast_shape(*(x.shape[-3:-2] for x in ((q,) if enable_gqa else (q, k, v))))
    key_heads = heads if max(k.shape[-3], v.shape[-3]) > 1 else 1  # kernels share a single head of keys without a copy
    sizes = (heads, k.shape[-3], v.shape[-3]) if enable_gqa else (heads, key_heads, key_heads)
    wanted = [(*before, own, *x.shape[-2:]) for x, own in zip((q, k, v), sizes, strict=True)]
    q, k, v = (_flatten_batch(tensor.expand(shape)) for tensor, shape in zip((q, k, v), wanted, strict=True))
    return _FourDimensional(q, k, v, (*before, heads))


def _flatten_batch(tensor: Tensor) -> Tensor:
    """Flattens all dimensions before the heads into one batch, of size 1 if there are none."""
    if tensor.ndim == 3:
        return tensor.unsqueeze(0)
    return tensor.flatten(0, -4) if tensor.ndim > 4 else tensor


def _broadcast_shape(*shapes: Any) -> tuple[int, ...]:
    """Returns the shape that shapes broadcast to. Raises ArgumentError if they do not broadcast."""
    longest = max(map(len, shapes))
    found = []
    for sizes in zip(*((1,) * (longest - len(shape)) + tuple(shape) for shape in shapes), strict=True):
        others = [size for size in sizes if size != 1] or [1]
        if any(size != others[0] for size in others):
            raise ArgumentError(
                f"query, key and value have sizes {', '.join(map(str, sizes))} in one dimension, which do not "
                "broadcast: give one size or 1, or enable_gqa=True if each head of key serves a group of query heads"
            )
        found.append(others[0])
    return tuple(found)


def _four_dimensional_mask(mask: Tensor, q: Tensor, k: Tensor, leading: Any) -> Tensor:
    """Returns the mask as (batch or 1, heads or 1, len_q or 1, len_k or 1)."""
    wanted = (*leading, q.shape[2], k.shape[2])
    if mask.ndim > len(wanted) or any(
        own not in (1, size) for own, size in zip(mask.shape[::-1], wanted[::-1], strict=False)
    ):
        raise ArgumentError(f"attn_mask has shape {tuple(mask.shape)}, which does not broadcast to {tuple(wanted)}")
    if len(wanted) > 4 and mask.ndim > 3:
        return mask.expand(*leading[:-1], *mask.shape[-3:]).flatten(0, -4)
    if len(leading) == 1 and leading[0] == q.shape[0] and mask.ndim == 3:  # (batch, len_q, len_k): one head
        return mask.unsqueeze(1)
    return _with_leading_ones(mask)


def _with_leading_ones(mask: Tensor) -> Tensor:
    return mask[(None,) * (4 - mask.ndim)] if mask.ndim < 4 else mask


@constant
def _entry(options: tuple[bool | None, bool], *key: Any) -> Registered:
    return registered(_build_spec(*key), emulate=options[0], deterministic=options[1])


@lru_cache(maxsize=1024)
def _build_spec(
    head_dim: int,
    value_dim: int,
    dtype: str,
    alignment: str | None,
    scale: float | None,
    dropout: float,
    captures: tuple[tuple[str, str, bool], ...],
) -> AttentionSpec:
    """Builds the spec of a call. captures: (name, dtype, requires gradient) of the mask and the scale."""
    if dtype not in ELEMENTS:
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
