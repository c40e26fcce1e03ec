"""Merges partial attention results, each over a split of the keys, into the result over all keys, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flashgen.language.batch_layout import BATCH_LAYOUTS


def merge_states(outs: Sequence[Any], lses: Sequence[Any], layout: str = "bhsd") -> tuple[Any, Any]:
    """Returns the merged output and LSE in float64: LSE = log sum_i exp(LSE_i), O = sum_i exp(LSE_i - LSE) O_i.

    A row whose partial LSE is -inf has seen no key, and its partial output is ignored.

    Args:
        outs: partial outputs (batch, heads, len_q, dim), with heads and length swapped if layout is "bshd".
        lses: their LSE, (batch, heads, len_q).
        layout: "bhsd" or "bshd".
    """
    states = np.stack([np.asarray(lse, np.float64) for lse in lses])
    largest = states.max(0)
    shift = np.where(np.isneginf(largest), 0.0, largest)
    exponentials = np.exp(states - shift)
    total = exponentials.sum(0)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + shift
    weights = exponentials / np.where(total == 0, 1.0, total)
    out = np.zeros(np.shape(outs[0]), np.float64)
    for partial, weight in zip(outs, weights, strict=True):
        factor = BATCH_LAYOUTS[layout].swap_heads(weight[..., None])
        out += np.where(factor > 0, np.asarray(partial, np.float64), 0.0) * factor
    return out, lse
