"""What attention over all keys is, of what it is over parts of them, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def merge_states(outs: Sequence[Any], lses: Sequence[Any], layout: str = "bhsd") -> tuple[Any, Any]:
    """The output and the LSE, float64: O = sum of exp(LSE_i - LSE) O_i, LSE = log of the sum of exp(LSE_i).

    outs: (batch, heads, len_q, dim), or as `layout` says. lses: (batch, heads, len_q). Parts whose LSE is -inf have no
    key and do not count, whatever their outputs hold.
    """
    states = np.stack([np.asarray(lse, np.float64) for lse in lses])
    largest = states.max(0)
    shift = np.where(np.isneginf(largest), 0.0, largest)
    weights = np.exp(states - shift)
    total = weights.sum(0)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + shift
    shares = weights / np.where(total == 0, 1.0, total)
    out = np.zeros(np.shape(outs[0]), np.float64)
    for part, share in zip(outs, shares, strict=True):
        weight = (share if layout == "bhsd" else share.swapaxes(1, 2))[..., None]
        out += np.where(weight > 0, np.asarray(part, np.float64), 0.0) * weight
    return out, lse
