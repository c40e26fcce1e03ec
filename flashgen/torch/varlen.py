"""`varlen_attention`: packed sequences (layout "thd"), with the arguments of flash_attn_varlen_func."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from flashgen.dtypes import ELEMENTS
from flashgen.errors import ArgumentError
from flashgen.language import functions as f
from flashgen.language import masks, scores
from flashgen.language.captures import Tensor as Captured
from flashgen.language.operations import LONGEST
from flashgen.language.spec import AttentionSpec
from flashgen.torch.autocast import converted
from flashgen.torch.fitting import checked_dropout, cut_heads, padded_heads, scale_of_call, zeros_of
from flashgen.torch.functional import call, is_deterministic
from flashgen.torch.table import Registered, constant, fixed, registered
from flashgen.torch.tensors import Tensor, check_tensors, dtype_of

_Declared = tuple[str, str, int, bool]
_NONE: tuple[_Declared, ...] = ()


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    sinks: Tensor | None = None,
    emulate: bool | None = None,
) -> Any:
    """Computes attention of packed sequences, each over its own keys.

    The positional arguments are those of flash_attn_varlen_func, with `return_lse` in place of return_attn_probs.
    Sequence lengths never cause a compilation. Other numbers, dims, dtypes and combinations of tensors do.

    Args:
        q: (total_q, heads, head_dim), the query tokens of all sequences.
        k: (total_k, heads_kv, head_dim), the key tokens of all sequences. A head_dim that is not a multiple of 8 is
            padded by a copy, except in a paged KV cache, where it is refused.
        v: (total_k, heads_kv, value_dim), padded in the same way.
        cu_seqlens_q: integers (sequences + 1,) on the device of q. Sequence i has the tokens from cu_seqlens_q[i] to
            cu_seqlens_q[i + 1] - 1. The host never reads it, so that a replay of a CUDA graph uses its current values.
            Tokens after the last sequence attend to nothing.
        cu_seqlens_k: the same for keys. With a paged KV cache, give either seqused_k or cu_seqlens_k, whose
            differences are then the numbers of keys.
        max_seqlen_q, max_seqlen_k: accepted as by flash-attn. Kernels do not need these bounds.
        dropout_p: the probability of dropping an attention probability, rounded to steps of 1/256. 1 gives zeros.
        softmax_scale: the factor of the scores; None is 1/sqrt(dim). A tensor with one number is read when kernels
            run, and gets a gradient if it requires one.
        causal: let a query attend only to keys up to its own position: it sets the right bound of the window to 0. The
            last query of a sequence is aligned with its last key (bottom-right alignment).
        window_size: (left, right), the numbers of keys before and after a query's position; a negative number is no
            bound.
        softcap: replaces scores by softcap * tanh(score / softcap); 0 leaves them.
        alibi_slopes: float32 (heads,) or (sequences, heads); adds -slope·|distance| to the scores.
        deterministic: compute gradients that are bitwise equal from run to run. None takes the setting of
            torch.use_deterministic_algorithms.
        return_lse: also return the LSE (natural logarithm), float32 (heads, total_q).
        block_table: int32 (sequences, pages of a sequence), the pages of each sequence. k and v are then pages, (pages,
            page_size, heads_kv, dim). Prefill and decode may be mixed in one call. There are no gradients.
        seqused_q: integers (sequences,), the number of valid queries at the start of each sequence. The last of them
            is aligned with the last key, and the queries after it attend to nothing. None is all.
        seqused_k: integers (sequences,), the number of valid keys at the start of each sequence. None is all.
        sinks: floats (heads,), attention-sink logits: one more logit of each row in the denominator of the softmax. It
            gets a gradient if it requires one.
        emulate: run CPU tensors on the emulator. None takes the setting of `flashgen.torch.emulated()`.

    Returns:
        The output, (total_q, heads, value_dim), or the pair (output, LSE).

    Raises:
        ArgumentError: arguments do not fit, or dropout_p would be rounded to 0 or 1 and is neither.
        UnsupportedError: a gradient is required of a call with a paged KV cache.
    """
    _check_bounds(max_seqlen_q, max_seqlen_k)
    check_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q)
    if cu_seqlens_k is not None:
        check_tensors(cu_seqlens_k=cu_seqlens_k)
    if block_table is None:
        _check(q, k, v, cu_seqlens_q, cu_seqlens_k)
        page_size, key_arrays = None, {"cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
    else:
        page_size = _page_size(q, k, v)
        key_arrays = {"page_table": block_table, "seqused_k": _used_keys(cu_seqlens_k, seqused_k)}
    q, k, v = (*converted(q), k, v) if page_size else converted(q, k, v)
    dropout_p, v = _replace_full_dropout(fixed(dropout_p), v, page_size)
    factor = scale_of_call("softmax_scale", softmax_scale, q) if isinstance(softmax_scale, torch.Tensor) else None
    scale = softmax_scale if factor is None else 1.0
    value_dim = v.shape[-1]
    if not page_size and (q.shape[-1] % 8 or k.shape[-1] % 8 or value_dim % 8):
        padded = padded_heads(q, k, v)
        q, k, v, scale = padded.q, padded.k, padded.v, padded.scale if scale is None else scale
    captures: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, **key_arrays}
    declared = _NONE
    optional = {"slopes": alibi_slopes, "sinks": sinks, "scale": factor, "seqused_q": seqused_q}
    if given := {name: tensor for name, tensor in optional.items() if tensor is not None}:
        captures, declared = captures | given, tuple([_declared(name, tensor) for name, tensor in given.items()])
    numbers = [fixed(each) for each in (scale, dropout_p, softcap, *_window_bounds(window_size, causal))]
    options = (emulate, is_deterministic(deterministic))
    sizes = (fixed(q.shape[-1]), fixed(v.shape[-1]), dtype_of(q))
    entry = _entry(options, *sizes, *numbers, declared, fixed(page_size))
    result = call(entry, {}, q, k, v, captures, return_lse=return_lse)
    if sizes[1] == value_dim:
        return result
    return (cut_heads(result[0], value_dim), result[1]) if return_lse else cut_heads(result, value_dim)


def _replace_full_dropout(probability: Any, v: Tensor, page_size: int | None) -> tuple[float, Tensor]:
    """Returns (dropout, v). A dropout of 1 becomes no dropout with a v of zeros."""
    if not probability or checked_dropout("dropout_p", probability) < 1:
        return probability, v
    if page_size:
        raise ArgumentError("dropout_p=1 is not supported with block_table; the output is zeros: leave the call out")
    return 0.0, zeros_of(v)


def _window_bounds(size: Any, causal: bool) -> tuple[int, int]:
    """Returns the bounds of a window, -1 for none. Raises ArgumentError if `size` is not a pair."""
    if not isinstance(size, (tuple, list)) or len(size) != 2:
        raise ArgumentError(f"window_size={size!r} must be (left, right), each -1 for no bound, such as (1023, 0)")
    return int(size[0]), 0 if causal else int(size[1])


def _page_size(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Returns the page size. Raises ArgumentError if k and v are not pages."""
    if q.ndim != 3 or k.ndim != 4 or v.ndim != 4:
        raise ArgumentError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: with block_table give (tokens, heads, dim), and k "
            "and v as (pages, page_size, heads, dim)"
        )
    return k.shape[1]


def _used_keys(starts_k: Tensor | None, used: Tensor | None) -> Tensor:
    """Returns the number of keys of each sequence over pages, from seqused_k or as differences of cu_seqlens_k."""
    if used is not None and starts_k is None:
        return used
    if used is not None or starts_k is None:
        raise ArgumentError("block_table: give either seqused_k or cu_seqlens_k, the sums of these lengths")
    return torch.diff(starts_k)


def _check(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor | None) -> None:
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3:
        raise ArgumentError(f"q has shape {tuple(q.shape)}: packed tokens are (tokens, heads, dim)")
    if starts_k is None:
        raise ArgumentError("cu_seqlens_k is None: give (sequences + 1,), or keys in pages with block_table")
    if starts_q.shape != starts_k.shape or starts_q.ndim != 1:
        raise ArgumentError(
            f"cu_seqlens_q has shape {tuple(starts_q.shape)} and cu_seqlens_k {tuple(starts_k.shape)}: give "
            "(sequences + 1,) of both"
        )


def _check_bounds(*bounds: Any) -> None:
    """Raises ArgumentError for wrong bounds. A bound in a tensor is not checked, which would wait for the device."""
    for name, bound in zip(("max_seqlen_q", "max_seqlen_k"), bounds, strict=True):
        if isinstance(bound, (bool, float, str)) or (isinstance(bound, int) and not 0 <= bound <= LONGEST):
            raise ArgumentError(f"{name}={bound!r} must be an integer from 0 to {LONGEST}, or None")


def _declared(name: str, tensor: Tensor) -> _Declared:
    """Returns name, dtype, number of dimensions and requires_grad of an array of the call."""
    check_tensors(**{name: tensor})
    if name == "seqused_q" and (tensor.dtype not in (torch.int32, torch.int64) or tensor.ndim != 1):
        raise ArgumentError(
            f"seqused_q is {dtype_of(tensor)} of shape {tuple(tensor.shape)}: give integers (sequences,)"
        )
    return name, "int32" if name == "seqused_q" else dtype_of(tensor), tensor.ndim, tensor.requires_grad


@constant
def _entry(options: tuple[bool | None, bool], *key: Any) -> Registered:
    return registered(_build_spec(*key), emulate=options[0], deterministic=options[1])


@lru_cache(maxsize=256)
def _build_spec(
    head_dim: int,
    value_dim: int,
    dtype: str,
    scale: float | None,
    dropout: float,
    cap: float,
    left: int,
    right: int,
    captures: tuple[_Declared, ...],
    page_size: int | None,
) -> AttentionSpec:
    """Builds the spec of a call. captures: (name, dtype, dimensions, requires gradient) of the arrays of the call."""
    if dtype not in ELEMENTS:
        raise ArgumentError(
            f"q is {dtype}; flashgen computes in float16 and bfloat16: convert it, or call under torch.autocast"
        )
    declared = {name: Captured(name, kind, ndim, grad=learned) for name, kind, ndim, learned in captures}
    used, sink = declared.get("seqused_q"), declared.get("sinks")
    score = _score(declared.get("scale"), cap, declared.get("slopes"), used)
    mask = window_mask(left, right, used)
    return AttentionSpec(head_dim, dtype, value_dim, scale, "thd", dropout, score, mask, page_size, sink=sink)


def _shift(used: Captured | None, b: Any) -> Any:
    """The difference between the position of a query among the keys and its index."""
    return f.len_k - (f.len_q if used is None else used[b])


def _score(factor: Captured | None, cap: float, slope: Captured | None, used: Captured | None) -> Any:
    """The score function: scale, softcap and ALiBi slopes, in this order; None if there is none of them."""
    if factor is None and slope is None:
        return scores.softcap(cap) if cap else None
    scaled = (lambda s: s) if factor is None else (lambda s: s * factor[0])
    capped = scores.softcap(cap) if cap else (lambda s, b, h, q, k: s)
    if slope is None:
        return lambda s, b, h, q, k: capped(scaled(s), b, h, q, k)
    slope_of_head = (lambda b, h: slope[h]) if slope.capture.ndim == 1 else (lambda b, h: slope[b, h])
    return lambda s, b, h, q, k: capped(scaled(s), b, h, q, k) - slope_of_head(b, h) * f.abs(k - (q + _shift(used, b)))


def window_mask(left: int, right: int, used: Captured | None = None) -> masks.Mask:
    """Returns the mask of a window of keys around the position of each query. A negative bound is none.

    used: the numbers of queries that sequences use, where a call gives them.
    """
    if used is not None:
        return masks.trace_mask(lambda b, h, q, k: (q < used[b]) & _is_between(q + _shift(used, b), k, left, right))
    if left >= 0 and right >= 0:
        return masks.sliding_window(left, right)
    if left < 0 and right < 0:
        return masks.full()
    if right == 0:
        return masks.causal()
    return masks.trace_mask(lambda b, h, q, k: _is_between(q + _shift(None, b), k, left, right))


def _is_between(middle: Any, k: Any, left: int, right: int) -> Any:
    """Whether key k is within the bounds around `middle`, the position of the query among the keys."""
    if left < 0 and right < 0:
        return k >= 0
    if left < 0:
        return k <= middle + right
    return (middle - left <= k) & (k <= middle + right) if right >= 0 else middle - left <= k
