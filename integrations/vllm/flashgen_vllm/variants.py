"""The attention of a layer as a spec of flashgen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

import flashgen as fg


@dataclass(frozen=True)
class Variant:
    """What distinguishes the attention of a layer from that of others, beside sizes that calls give.

    Attributes:
        head_dim: elements of a query, key or value.
        dtype: "float16" or "bfloat16", the type of queries and outputs.
        scale: the factor of scores.
        window: the number of keys that a query attends to, with its own; None for all.
        softcap: the bound of scores; 0 for none.
        alibi: whether calls give `slopes`, one for each head.
        sink_dtype: the type of the array `sinks` of a call; None if there are no sinks.
        kv_dtype: "float8_e4m3fn" for a cache of that type; None for one of `dtype`.
        clamps_ranges: whether ranges of bidirectional attention end at the window's first key.
    """

    head_dim: int
    dtype: str
    scale: float
    window: int | None = None
    softcap: float = 0.0
    alibi: bool = False
    sink_dtype: str | None = None
    kv_dtype: str | None = None
    clamps_ranges: bool = False


@lru_cache(maxsize=256)
def spec_of(variant: Variant, page_size: int, layout: str, causal: bool, ranges: bool) -> fg.AttentionSpec:
    """Returns the spec of a layer.

    Args:
        variant: the attention of the layer.
        page_size: keys of a block of the cache.
        layout: "thd" for packed tokens, "bshd" for one token of each request.
        causal: whether a query attends to keys up to its own position only.
        ranges: whether tokens within a range attend to all of it; for layout "thd". Calls then give `query_starts`,
            which is cu_seqlens_q, and for each token `first_keys` and `last_keys`, the ends of its range.
    """
    mask = base_mask(variant.window, causal)
    score: Any = None
    if variant.softcap:
        score = fg.softcap(variant.softcap)
    elif variant.alibi:
        score = fg.alibi("slopes")
    return fg.AttentionSpec(
        variant.head_dim,
        variant.dtype,
        scale=variant.scale,
        layout=layout,
        score=score,
        mask=_with_ranges(mask, variant) if ranges else mask,
        page_size=page_size,
        kv_dtype=variant.kv_dtype,
        sink=fg.Tensor("sinks", variant.sink_dtype, 1) if variant.sink_dtype else None,
    )


def base_mask(window: int | None, causal: bool) -> fg.Mask:
    """Returns the mask of a window of keys that ends with the query's own, or has it in its middle; None is all."""
    if window is None:
        return fg.causal() if causal else fg.full()
    return fg.sliding_window(window - 1, 0 if causal else window - 1)


def _with_ranges(base: fg.Mask, variant: Variant) -> Any:
    """Returns a mask that also keeps the range of each query. Ranges count positions from a request's first token."""
    starts, first, last = (fg.Tensor(name, "int32", 1) for name in ("query_starts", "first_keys", "last_keys"))

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        token = starts[b] + q
        in_range = (first[token] <= k) & (k <= last[token])
        if variant.clamps_ranges and variant.window is not None:
            in_range = in_range & (q + fg.len_k - fg.len_q - k < variant.window)
        return base(b, h, q, k) | in_range

    return mask


def name_of(dtype: torch.dtype) -> str:
    """Returns the name of a type as specs have it."""
    return str(dtype).removeprefix("torch.")
