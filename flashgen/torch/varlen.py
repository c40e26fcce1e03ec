"""Packed sequences, as flash-attn's flash_attn_varlen_func has them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from flashgen.errors import ArgumentError
from flashgen.language.captures import Tensor as Captured
from flashgen.language.functions import abs as absolute
from flashgen.language.scores import softcap
from flashgen.language.spec import AttentionSpec
from flashgen.torch.functional import call, is_deterministic
from flashgen.torch.table import Registered, constant, registered
from flashgen.torch.tensors import Tensor, dtype_of


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
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
    *,
    emulate: bool | None = None,
) -> Any:
    """Attention of sequences that stand behind each other: each over its own keys, as flash-attn's users call it.

    Args:
        q: (tokens of queries, heads, dim). k, v: (tokens of keys, heads of keys, dim).
        cu_seqlens_q: integers (sequences + 1,): sequence i is q[cu_seqlens_q[i]:cu_seqlens_q[i + 1]]. cu_seqlens_k:
            likewise. Both on the device of q; queries and keys behind the last sequence attend to nothing.
        max_seqlen_q, max_seqlen_k: as flash-attn takes them; kernels need no such bound.
        causal, window_size: aligned to the end of each sequence: its last query stands on its last key. -1 is no bound.
        softcap: of the scores; 0 is none. alibi_slopes: float32 (heads,), of -slope·|distance|.
        return_lse: give the LSE, float32 (heads, tokens of queries), too.

    Masks are read from three numbers of each query, so that lengths compile nothing; tiles are listed in each call.
    """
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3:
        raise ArgumentError(f"q has shape {tuple(q.shape)}: packed tokens are (tokens, heads, dim)")
    if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.ndim != 1:
        raise ArgumentError(
            f"cu_seqlens_q has shape {tuple(cu_seqlens_q.shape)} and cu_seqlens_k {tuple(cu_seqlens_k.shape)}: give "
            "(sequences + 1,) of both"
        )
    if causal:
        window_size = (window_size[0], 0)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    captures = _ranges(q.shape[0], cu_seqlens_q, cu_seqlens_k, window_size)
    if alibi_slopes is not None:
        captures["slopes"] = alibi_slopes
    else:
        captures.pop("place")
    learned = alibi_slopes is not None and alibi_slopes.requires_grad
    slopes = None if alibi_slopes is None else learned
    options = (emulate, is_deterministic(deterministic))
    entry = _entry(options, q.shape[-1], v.shape[-1], dtype_of(q), softmax_scale, dropout_p, softcap, slopes)
    made = call(entry, {}, q[None], k[None], v[None], captures, return_lse=return_lse)
    return (made[0][0], made[1][0]) if return_lse else made[0]


def _ranges(tokens: Any, starts_q: Tensor, starts_k: Tensor, window: tuple[int, int]) -> dict[str, Tensor]:
    """Of each query: the first and the last key that it attends to, and the key that it stands on; int32."""
    positions = torch.arange(tokens, device=starts_q.device, dtype=starts_q.dtype)
    sequence = torch.searchsorted(starts_q[1:].contiguous(), positions, right=True)
    inside = sequence < starts_q.shape[0] - 1
    sequence = sequence.clamp(max=starts_q.shape[0] - 2)
    begin, end = starts_k[sequence], starts_k[sequence + 1]
    place = positions - starts_q[sequence + 1] + end
    first = begin if window[0] < 0 else torch.maximum(begin, place - window[0])
    last = end - 1 if window[1] < 0 else torch.minimum(end - 1, place + window[1])
    last = torch.where(inside, last, torch.full_like(last, -1))
    return {"first": first.to(torch.int32), "last": last.to(torch.int32), "place": place.to(torch.int32)}


@constant
def _entry(options: tuple[bool | None, bool], *key: Any) -> Registered:
    return registered(_made(*key), emulate=options[0], deterministic=options[1])


@lru_cache(maxsize=256)
def _made(
    head_dim: int, value_dim: int, dtype: str, scale: float | None, dropout: float, cap: float, slopes: bool | None
) -> AttentionSpec:
    first, last, place = (Captured(name, "int32", 1) for name in ("first", "last", "place"))
    score: Any = softcap(cap) if cap else None
    if slopes is not None:
        slope = Captured("slopes", "float32", 1, grad=slopes)
        cap_first = score or (lambda s, b, h, q, k: s)
        score = lambda s, b, h, q, k: cap_first(s, b, h, q, k) - slope[h] * absolute(k - place[q])
    mask = lambda b, h, q, k: (first[q] <= k) & (k <= last[q])
    return AttentionSpec(head_dim, dtype, value_dim, scale, "bshd", dropout, score, mask)
