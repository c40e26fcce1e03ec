"""What a spec does to the scores and probabilities of a tile: score function, mask and dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from flashgen.language.evaluate import evaluate
from flashgen.language.operations import BATCH, HEAD, KEY, LEN_K, LEN_Q, QUERY, SCORE
from flashgen.reference.dropout import keep_tile
from flashgen.reference.inputs import Array, Problem

Rounding = Callable[[Array], Array]


@dataclass(frozen=True, eq=False)
class HeadTiles:
    """The elementwise steps of one head; tiles are named by a range of queries and a range of keys."""

    problem: Problem
    b: int
    h: int

    def modify(self, scores: Array, queries: range, keys: range, rounding: Rounding | None = None) -> Array:
        """Scores (queries, keys), already scaled, after the score function and with -inf where the mask forbids.

        `rounding`, if given, rounds the score function's result.
        """
        values = self._indices(queries, keys)
        with np.errstate(all="ignore"):  # a masked element may well overflow
            if self.problem.spec.score is not None:
                scores = self._evaluate(self.problem.spec.score.expression, {**values, SCORE: scores}, scores.shape)
                scores = scores if rounding is None else rounding(scores)
            allowed = self._evaluate(self.problem.spec.mask.expression, values, scores.shape)
        return np.where(allowed, scores, -np.inf)

    def drop(self, probabilities: Array, queries: range, keys: range) -> Array:
        """Probabilities (queries, keys), normalised or not, after dropout: 0 where dropped, scaled up where kept."""
        problem = self.problem
        if problem.spec.dropout == 0:
            return probabilities
        keep = keep_tile(problem.seed, problem.offset, self.b, self.h, queries, keys, problem.spec.dropout)
        return np.where(keep, probabilities * problem.keep_scale, 0.0)

    def _indices(self, queries: range, keys: range) -> dict[sympy.Basic, Any]:
        return {
            BATCH: np.asarray(self.b, dtype=np.int64),
            HEAD: np.asarray(self.h, dtype=np.int64),
            QUERY: np.arange(queries.start, queries.stop, dtype=np.int64)[:, None],
            KEY: np.arange(keys.start, keys.stop, dtype=np.int64)[None, :],
            LEN_Q: np.asarray(self.problem.len_q, dtype=np.int64),
            LEN_K: np.asarray(self.problem.len_k, dtype=np.int64),
        }

    def _evaluate(self, node: sympy.Basic, values: dict[sympy.Basic, Any], shape: tuple[int, ...]) -> Any:
        if 0 in shape:
            return np.zeros(shape)
        return np.broadcast_to(evaluate(node, values, self.problem.captures), shape)
