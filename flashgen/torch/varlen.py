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
from flashgen.torch.functional import call, is_deterministic
from flashgen.torch.table import Registered, constant, fixed, registered
from flashgen.torch.tensors import Tensor, check_tensors, dtype_of


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
    sinks: Tensor | None = None,
    emulate: bool | None = None,
) -> Any:
    """Attention of sequences that stand behind each other: each over its own keys, as flash-attn's users call it.

    Args:
        q: (tokens of queries, heads, dim). k, v: (tokens of keys, heads of keys, dim).
        cu_seqlens_q: integers (sequences + 1,): sequence i is q[cu_seqlens_q[i]:cu_seqlens_q[i + 1]]. cu_seqlens_k:
            likewise; over pages the sums of their lengths, or None. Both on the device of q, where kernels alone read
            them: a captured graph follows them. Queries and keys behind the last sequence attend to nothing.
        max_seqlen_q, max_seqlen_k: as flash-attn takes them; kernels need no such bound, so that no batch is another
            call for its longest sequence.
        causal, window_size: aligned to the end of each sequence: its last query stands on its last key. -1 is no bound.
        softcap: of the scores; 0 is none. alibi_slopes: float32 (heads,) or (sequences, heads), of -slope·|distance|.
        return_lse: give the LSE, float32 (heads, tokens of queries), too.
        block_table: int32 (sequences, pages of a sequence): k and v are pages, (pages, page_size, heads of keys, dim),
            which it assigns to sequences. Prompts and single queries may stand in one call. There are no gradients.
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
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (q.to(dtype), k, v) if page_size else (q.to(dtype), k.to(dtype), v.to(dtype))
    captures: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, **where}
    slopes, sink = _declared(alibi_slopes), _declared(sinks)
    captures |= {"slopes": alibi_slopes} if slopes else {}
    captures |= {"sinks": sinks} if sink else {}
    left, right = _sides(window_size, causal)
    numbers = [fixed(each) for each in (softmax_scale, dropout_p, softcap, left, right)]
    options = (emulate, is_deterministic(deterministic))
    sizes = (fixed(q.shape[-1]), fixed(v.shape[-1]), dtype_of(q))
    entry = _entry(options, *sizes, *numbers, slopes, sink, fixed(page_size))
    return call(entry, {}, q, k, v, captures, return_lse=return_lse)


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
    if (starts_k is None) == (used is None):
        raise ArgumentError("block_table: give seqused_k, or cu_seqlens_k, whose differences it is; and not both")
    return torch.diff(starts_k) if used is None else used


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


def _declared(tensor: Tensor | None) -> tuple[str, int, bool] | None:
    """dtype, dimensions and whether a gradient is wanted of an array of the call."""
    return None if tensor is None else (dtype_of(tensor), tensor.ndim, tensor.requires_grad)


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
    slopes: tuple[str, int, bool] | None,
    sinks: tuple[str, int, bool] | None,
    page_size: int | None,
) -> AttentionSpec:
    if dtype not in ("float16", "bfloat16"):
        raise ArgumentError(
            f"q is {dtype}; flashgen computes in float16 and bfloat16: convert it, or call under torch.autocast"
        )
    score: Any = scores.softcap(cap) if cap else None
    if slopes is not None:
        slope = Captured("slopes", slopes[0], slopes[1], grad=slopes[2])
        capped = score or (lambda s, b, h, q, k: s)
        of_head = (lambda b, h: slope[h]) if slopes[1] == 1 else (lambda b, h: slope[b, h])
        score = lambda s, b, h, q, k: capped(s, b, h, q, k) - of_head(b, h) * f.abs(k - (q + (f.len_k - f.len_q)))
    sink = Captured("sinks", sinks[0], sinks[1], grad=sinks[2]) if sinks else None
    mask = _window(left, right)
    return AttentionSpec(head_dim, dtype, value_dim, scale, "thd", dropout, score, mask, page_size, sink=sink)


def _window(left: int, right: int) -> masks.Mask:
    """Keys that a query sees, so many to its left and to its right; less than 0 is no bound."""
    if left >= 0 and right >= 0:
        return masks.sliding_window(left, right)
    if left < 0 and right < 0:
        return masks.full()
    if right == 0:
        return masks.causal()
    if right > 0:
        return masks.trace_mask(lambda b, h, q, k: k <= q + (f.len_k - f.len_q) + right)
    return masks.trace_mask(lambda b, h, q, k: q + (f.len_k - f.len_q) - left <= k)
