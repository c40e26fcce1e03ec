"""An entry of the acceptance suite: a variant as a user writes it, and an independent second definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashgen.language as fg
from flashgen.verify import CaptureMaker, Shape, Variant

Array = np.ndarray[Any, Any]
Captures = dict[str, Any]

# The keys that each query may attend to, bool, broadcastable to (batch, heads_q, len_q, len_k).
Allowed = Callable[[Shape, Captures], Array]
# The modified scores, float64 (batch, heads_q, len_q, len_k).
Modified = Callable[[Array, Shape, Captures], Array]


@dataclass(frozen=True)
class Entry:
    """`allowed` and `modified` are plain NumPy or loops over the captures, independent of flashgen's tracing."""

    name: str
    mask: fg.Mask | None = None
    score: fg.Score | None = None
    captures: CaptureMaker | None = None
    allowed: Allowed | None = None
    modified: Modified | None = None

    def __post_init__(self) -> None:
        assert (self.mask is None) == (self.allowed is None), self.name
        assert (self.score is None) == (self.modified is None), self.name

    @property
    def variant(self) -> Variant:
        return Variant(fg.full() if self.mask is None else self.mask, self.score, captures=self.captures)

    def captures_for(self, shape: Shape, seed: int = 0) -> Captures:
        return self.captures(shape, np.random.default_rng(seed)) if self.captures else {}


def positions(shape: Shape) -> tuple[Array, Array]:
    """Returns q as a column and k as a row."""
    return np.arange(shape.len_q)[:, None], np.arange(shape.len_k)[None, :]


def nowhere(shape: Shape) -> Array:
    """Returns (len_q, len_k) of False, to be filled in."""
    return np.zeros((shape.len_q, shape.len_k), bool)


def heads(shape: Shape) -> tuple[Array, Array]:
    """Returns b and h, shaped to broadcast with (batch, heads, len_q, len_k)."""
    return np.arange(shape.batch).reshape(-1, 1, 1, 1), np.arange(shape.heads_q).reshape(-1, 1, 1)


def longest(shape: Shape) -> int:
    """Returns the length that a table by position needs if both queries and keys index it."""
    return max(shape.len_q, shape.len_k)
