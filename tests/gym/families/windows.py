"""Causality, windows and prefixes, and combinations with global tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

import flashgen.language as fg
from families.entry import Captures, Entry, longest, nowhere, positions
from flashgen.verify import Shape


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def sliding_window(window: int) -> fg.Mask:
    return fg.trace_mask(lambda b, h, q, k: (q - k <= window) & (q >= k), f"sliding_window({window})")


def dilated(window: int, dilation: int) -> fg.Mask:
    def dilated(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (abs(q - k) <= window) & (abs(q - k) % dilation == 0)

    return fg.trace_mask(dilated, f"dilated({window}, {dilation})")


def prefix_lm(prefix: int) -> fg.Mask:
    return fg.trace_mask(lambda b, h, q, k: (k < prefix) | (q >= k), f"prefix_lm({prefix})")


def global_window(window: int) -> fg.Mask:
    is_global = fg.Tensor("is_global", "bool", 1)

    def global_window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (abs(q - k) <= window) | is_global[q] | is_global[k]

    return fg.trace_mask(global_window, f"global_window({window})")


def global_tokens(shape: Shape, random: np.random.Generator) -> Captures:
    is_global = np.zeros(longest(shape), bool)
    is_global[[0, 1, longest(shape) // 2]] = True
    return {"is_global": is_global}


def per_token_window(b: Any, h: Any, q: Any, k: Any) -> Any:
    before, after = fg.Tensor("before", "int32", 1), fg.Tensor("after", "int16", 1)
    return (k >= q - before[q]) & (k <= q + after[q])


def token_windows(shape: Shape, random: np.random.Generator) -> Captures:
    before = random.integers(0, 1 + shape.len_k // 4, shape.len_q, dtype=np.int32)
    return {"before": before, "after": random.integers(-3, 9, shape.len_q, dtype=np.int16)}


def per_head_window(b: Any, h: Any, q: Any, k: Any) -> Any:
    width = fg.Tensor("width", "int32", 1)
    return (q >= k) & (q - k < width[h])


def head_windows(shape: Shape, random: np.random.Generator) -> Captures:
    return {"width": np.array([shape.len_k // 16 << h for h in range(shape.heads_q)], np.int32)}


def rows(shape: Shape, first_and_end: Any) -> np.ndarray:
    """allowed[q, first:end] for (first, end) = first_and_end(q)."""
    allowed = nowhere(shape)
    for q in range(shape.len_q):
        first, end = first_and_end(q)
        allowed[q, max(first, 0) : max(end, 0)] = True
    return allowed


def dilated_rows(shape: Shape, window: int, dilation: int) -> np.ndarray:
    allowed = nowhere(shape)
    for q in range(shape.len_q):
        for distance in range(0, window + 1, dilation):
            for k in (q - distance, q + distance):
                if 0 <= k < shape.len_k:
                    allowed[q, k] = True
    return allowed


def global_rows(shape: Shape, window: int, captures: Captures) -> np.ndarray:
    allowed = rows(shape, lambda q: (q - window, q + window + 1))
    for token in np.flatnonzero(captures["is_global"]):
        allowed[token : token + 1, :] = True
        allowed[:, token : token + 1] = True
    return allowed


def per_head_rows(shape: Shape, captures: Captures) -> np.ndarray:
    q, k = positions(shape)
    return np.stack([(k <= q) & (q < k + width) for width in captures["width"]])


def entries(length: int) -> tuple[Entry, ...]:
    window, prefix = length // 5, length // 4
    return (
        Entry("causal", fg.trace_mask(causal), allowed=lambda s, c: rows(s, lambda q: (0, q + 1))),
        Entry(
            "bottom_right_causal",
            fg.causal(),
            allowed=lambda s, c: rows(s, lambda q: (0, s.len_k - s.len_q + q + 1)),
        ),
        Entry("sliding_window", sliding_window(window), allowed=lambda s, c: rows(s, lambda q: (q - window, q + 1))),
        Entry("dilated", dilated(window, 3), allowed=lambda s, c: dilated_rows(s, window, 3)),
        Entry("prefix_lm", prefix_lm(prefix), allowed=lambda s, c: rows(s, lambda q: (0, max(prefix, q + 1)))),
        Entry(
            "global_window",
            global_window(window // 2),
            captures=global_tokens,
            allowed=lambda s, c: global_rows(s, window // 2, c),
        ),
        Entry(
            "per_token_window",
            fg.trace_mask(per_token_window),
            captures=token_windows,
            allowed=lambda s, c: rows(s, lambda q: (q - int(c["before"][q]), q + int(c["after"][q]) + 1)),
        ),
        Entry("per_head_window", fg.trace_mask(per_head_window), captures=head_windows, allowed=per_head_rows),
    )
