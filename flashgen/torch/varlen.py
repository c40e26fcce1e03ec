"""Packed sequences, as flash-attn's flash_attn_varlen_func has them: ragged batches, layout "thd"."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from flashgen.errors import ArgumentError
from flashgen.language import functions as f
from flashgen.language import masks, scores
from flashgen.language.captures import Tensor as Captured
from flashgen.language.operations import LONGEST
from flashgen.language.spec import AttentionSpec
from flashgen.torch.autocast import converted
from flashgen.torch.fitting import checked_dropout, cut_heads, nothing_kept, padded_heads, scale_of_call
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
    """Attention of sequences that stand behind each other: each over its own keys, as flash-attn's users call it.

    Args:
        q: (tokens of queries, heads, dim). k, v: (tokens of keys, heads of keys, dim). A dim that is no multiple of 8
            is padded, which costs a copy; over pages it is refused.
        cu_seqlens_q: integers (sequences + 1,): sequence i is q[cu_seqlens_q[i]:cu_seqlens_q[i + 1]]. cu_seqlens_k:
            likewise; over pages the sums of their lengths, or None. Both on the device of q, where kernels alone read
            them: a captured graph follows them. Queries and keys behind the last sequence attend to nothing.
        max_seqlen_q, max_seqlen_k: as flash-attn takes them; kernels need no such bound, so that no batch is another
            call for its longest sequence.
        dropout_p: the probability of dropping a weight, rounded to steps of 1/256; 1 gives zeros. ArgumentError for one
            that is not 0 or 1 and would be rounded to it.
        softmax_scale: None is 1/sqrt(dim). A tensor of one number is read when kernels run, and has a gradient where it
            requires one.
        causal, window_size: aligned to the end of each sequence: its last query stands on its last key. -1 is no bound.
        softcap: of the scores; 0 is none. alibi_slopes: float32 (heads,) or (sequences, heads), of -slope·|distance|.
        return_lse: give the LSE, float32 (heads, tokens of queries), too.
        block_table: int32 (sequences, pages of a sequence): k and v are pages, (pages, page_size, heads of keys, dim),
            which it assigns to sequences. Prompts and single queries may stand in one call. There are no gradients.
        seqused_q: integers (sequences,): how many of its queries each sequence has, the first ones, the last of which
            stands on the last key; the others attend to nothing. None is all of them.
        seqused_k: integers (sequences,): how many of its keys each sequence has; None is all of them.
        sinks: floats (heads,): a score of each head that every row's softmax counts and that has no value; learned
            where it requires a gradient.

    Lengths compile nothing; a window, a cap and a scale of another size do.
    """
    _check_bounds(max_seqlen_q, max_seqlen_k)
    check_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q)
    check_tensors(**{"cu_seqlens_k": cu_seqlens_k} if cu_seqlens_k is not None else {})
    if block_table is None:
        _check(q, k, v, cu_seqlens_q, cu_seqlens_k)
        page_size, where = None, {"cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
    else:
        page_size = _page_size(q, k, v)
        where = {"page_table": block_table, "seqused_k": _used(cu_seqlens_k, seqused_k)}
    q, k, v = (*converted(q), k, v) if page_size else converted(q, k, v)
    dropout_p, v = _dropped(fixed(dropout_p), v, page_size)
    factor = scale_of_call("softmax_scale", softmax_scale, q) if isinstance(softmax_scale, torch.Tensor) else None
    scale = softmax_scale if factor is None else 1.0
    value_dim = v.shape[-1]
    if not page_size and (q.shape[-1] % 8 or k.shape[-1] % 8 or value_dim % 8):
        padded = padded_heads(q, k, v)
        q, k, v, scale = padded.q, padded.k, padded.v, padded.scale if scale is None else scale
    captures: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, **where}
    declared = _NONE
    if not alibi_slopes is sinks is factor is seqused_q is None:
        given = {"slopes": alibi_slopes, "sinks": sinks, "scale": factor, "seqused_q": seqused_q}
        known = {name: tensor for name, tensor in given.items() if tensor is not None}
        captures, declared = captures | known, tuple([_declared(name, tensor) for name, tensor in known.items()])
    numbers = [fixed(each) for each in (scale, dropout_p, softcap, *_sides(window_size, causal))]
    options = (emulate, is_deterministic(deterministic))
    sizes = (fixed(q.shape[-1]), fixed(v.shape[-1]), dtype_of(q))
    entry = _entry(options, *sizes, *numbers, declared, fixed(page_size))
    made = call(entry, {}, q, k, v, captures, return_lse=return_lse)
    if sizes[1] == value_dim:
        return made
    return (cut_heads(made[0], value_dim), made[1]) if return_lse else cut_heads(made, value_dim)


def _dropped(probability: Any, v: Tensor, page_size: int | None) -> tuple[float, Tensor]:
    """The probability of a spec, and the values that are attended to."""
    if not probability or checked_dropout("dropout_p", probability) < 1:
        return probability, v
    if page_size:
        raise ArgumentError("dropout_p=1 is not supported with block_table: the output would be zeros")
    return 0.0, nothing_kept(v)


def _sides(size: Any, causal: bool) -> tuple[int, int]:
    """The bounds of a window, -1 for none; ArgumentError for what is no pair."""
    if not isinstance(size, (tuple, list)) or len(size) != 2:
        raise ArgumentError(f"window_size={size!r} must be (left, right), each -1 for no bound, such as (1023, 0)")
    return int(size[0]), 0 if causal else int(size[1])


def _page_size(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Keys of a page; ArgumentError where k and v are none."""
    if q.ndim != 3 or k.ndim != 4 or v.ndim != 4:
        raise ArgumentError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: with block_table give (tokens, heads, dim), and k "
            "and v as (pages, page_size, heads, dim)"
        )
    return k.shape[1]


def _used(starts_k: Tensor | None, used: Tensor | None) -> Tensor:
    """How many keys sequences have in pages: as is said, or by the sums of these that flash-attn takes."""
    if used is not None and starts_k is None:
        return used
    if used is not None or starts_k is None:
        raise ArgumentError("block_table: give seqused_k, or cu_seqlens_k, whose differences it is; and not both")
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


def _check_bounds(*longest: Any) -> None:
    """One that is a tensor is not looked at: that would wait for the device."""
    for name, bound in zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True):
        if isinstance(bound, (bool, float, str)) or (isinstance(bound, int) and not 0 <= bound <= LONGEST):
            raise ArgumentError(f"{name}={bound!r} must be an integer from 0 to {LONGEST}, or None")


def _declared(name: str, tensor: Tensor) -> _Declared:
    """Name, dtype, dimensions and whether a gradient is wanted of an array of the call."""
    check_tensors(**{name: tensor})
    if name == "seqused_q" and (tensor.dtype not in (torch.int32, torch.int64) or tensor.ndim != 1):
        raise ArgumentError(
            f"seqused_q is {dtype_of(tensor)} of shape {tuple(tensor.shape)}: give integers (sequences,)"
        )
    return name, "int32" if name == "seqused_q" else dtype_of(tensor), tensor.ndim, tensor.requires_grad


@constant
def _entry(options: tuple[bool | None, bool], *key: Any) -> Registered:
    return registered(_made(*key), emulate=options[0], deterministic=options[1])


@lru_cache(maxsize=256)
def _made(
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
    """The spec of a call. captures: (name, dtype, dimensions, whether it is learned) of the arrays that it is given."""
    if dtype not in ("float16", "bfloat16"):
        raise ArgumentError(
            f"q is {dtype}; flashgen computes in float16 and bfloat16: convert it, or call under torch.autocast"
        )
    declared = {name: Captured(name, kind, ndim, grad=learned) for name, kind, ndim, learned in captures}
    used, sink = declared.get("seqused_q"), declared.get("sinks")
    score = _score(declared.get("scale"), cap, declared.get("slopes"), used)
    mask = _window(left, right, used)
    return AttentionSpec(head_dim, dtype, value_dim, scale, "thd", dropout, score, mask, page_size, sink=sink)


def _shift(used: Captured | None, b: Any) -> Any:
    """From a query to the key that it stands on."""
    return f.len_k - (f.len_q if used is None else used[b])


def _score(factor: Captured | None, cap: float, slope: Captured | None, used: Captured | None) -> Any:
    """The score function: a factor, a cap, slopes, in this order; None where there is none of them."""
    if factor is None and slope is None:
        return scores.softcap(cap) if cap else None
    scaled = (lambda s: s) if factor is None else (lambda s: s * factor[0])
    capped = scores.softcap(cap) if cap else (lambda s, b, h, q, k: s)
    if slope is None:
        return lambda s, b, h, q, k: capped(scaled(s), b, h, q, k)
    of_head = (lambda b, h: slope[h]) if slope.capture.ndim == 1 else (lambda b, h: slope[b, h])
    return lambda s, b, h, q, k: capped(scaled(s), b, h, q, k) - of_head(b, h) * f.abs(k - (q + _shift(used, b)))


def _window(left: int, right: int, used: Captured | None) -> masks.Mask:
    """Keys that a query sees, so many to its left and to its right; less than 0 is no bound."""
    if used is not None:
        return masks.trace_mask(lambda b, h, q, k: (q < used[b]) & _between(q + _shift(used, b), k, left, right))
    if left >= 0 and right >= 0:
        return masks.sliding_window(left, right)
    if left < 0 and right < 0:
        return masks.full()
    if right == 0:
        return masks.causal()
    return masks.trace_mask(lambda b, h, q, k: _between(q + _shift(None, b), k, left, right))


def _between(middle: Any, k: Any, left: int, right: int) -> Any:
    """Whether a key is so near to the one that a query stands on."""
    if left < 0 and right < 0:
        return k >= 0
    if left < 0:
        return k <= middle + right
    return (middle - left <= k) & (k <= middle + right) if right >= 0 else middle - left <= k
