"""The elementwise steps of a spec on a tile (score function, mask, dropout), and their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
from numpy.typing import NDArray

from flashgen.language.evaluate import evaluate
from flashgen.language.operations import BATCH, HEAD, KEY, LEN_K, LEN_Q, QUERY, SCORE, Load
from flashgen.reference.dropout import keep_tile
from flashgen.reference.inputs import Array, Problem
from flashgen.reference.tangents import Duals, Rounding, gathers


@dataclass(frozen=True, eq=False)
class HeadTiles:
    """The elementwise steps of one head. A tile is given by a range of queries and a range of keys."""

    problem: Problem
    b: int
    h: int

    @property
    def sink(self) -> float | None:
        """The sink of the head (a score without a value), or None if the spec has no sink."""
        sink = self.problem.spec.sink
        return None if sink is None else float(self.problem.captures[sink.name][self.h])

    def modify(self, scores: Array, queries: range, keys: range, rounding: Rounding | None = None) -> Array:
        """Applies the score function and the mask to scaled scores (queries, keys); masked scores become -inf.

        `rounding`, if given, rounds each step of the score function that depends on the score.
        """
        if rounding is not None or self.problem.spec.score is None or 0 in scores.shape:
            return self.modified(scores, queries, keys, rounding).scores
        values = {**self._indices(queries, keys), SCORE: scores}  # `evaluate` frees each value after its last use
        scores = evaluate(self.problem.spec.score.expression, values, self.problem.captures)
        return self._masked(scores, queries, keys)

    def modified(self, scores: Array, queries: range, keys: range, rounding: Rounding | None = None) -> ModifiedScores:
        """Returns the scores of `modify` together with what their gradient needs."""
        spec, captures, shape = self.problem.spec, self.problem.captures, scores.shape
        if spec.score is None or 0 in shape:
            return ModifiedScores(self._masked(scores, queries, keys), None, None, rounding)
        duals = Duals({**self._indices(queries, keys), SCORE: scores}, captures, rounding)
        expression = spec.score.expression
        return ModifiedScores(self._masked(duals.value(expression), queries, keys), expression, duals, rounding)

    def _masked(self, scores: Array, queries: range, keys: range) -> Array:
        if not queries or not keys:
            return scores
        shape = (len(queries), len(keys))  # scores and mask may have size 1 along an index they do not depend on
        allowed = evaluate(self.problem.spec.mask.expression, self._indices(queries, keys), self.problem.captures)
        return np.where(np.broadcast_to(allowed, shape), scores, -np.inf)

    def drop(self, probabilities: Array, queries: range, keys: range) -> Array:
        """Applies dropout to probabilities (queries, keys), normalised or not: 0 where dropped, scaled where kept."""
        problem = self.problem
        if problem.spec.dropout == 0:
            return probabilities
        b, h, shift_q, shift_k = (problem.shard_start(name) for name in ("shard_b", "shard_h", "shard_q", "shard_k"))
        b, h = b + problem.first_batch + self.b, h + self.h
        queries = range(queries.start + shift_q, queries.stop + shift_q)
        keys = range(keys.start + shift_k, keys.stop + shift_k)
        keep = keep_tile(problem.seed, problem.offset, b, h, queries, keys, problem.spec.dropout)
        return np.where(keep, probabilities * problem.keep_scale, 0.0)

    def _indices(self, queries: range, keys: range) -> dict[sympy.Basic, Any]:
        return {
            BATCH: np.asarray(self.problem.first_batch + self.b, dtype=np.int64),
            HEAD: np.asarray(self.h, dtype=np.int64),
            QUERY: np.arange(queries.start, queries.stop, dtype=np.int64)[:, None],
            KEY: np.arange(keys.start, keys.stop, dtype=np.int64)[None, :],
            LEN_Q: np.asarray(self.problem.len_q, dtype=np.int64),
            LEN_K: np.asarray(self.problem.len_k, dtype=np.int64),
        }


@dataclass(frozen=True, eq=False)
class ModifiedScores:
    """Scores of a tile (queries, keys) after score function and mask. expression: the score function, or None."""

    scores: Array
    expression: sympy.Basic | None
    duals: Duals | None
    rounding: Rounding | None

    def pull_back(self, d_scores: Array, captures: Mapping[str, Array]) -> Array:
        """Returns the gradient of the scores, given that of the modified scores; adds those of captures to `captures`.

        A score that the mask or the score function set to -inf contributes exactly 0 to all gradients, whatever its
        derivative is.
        """
        live = self.scores != -np.inf
        d_scores = np.where(live, d_scores, 0.0)
        if self.expression is None or self.duals is None:
            return d_scores
        for gather in gathers(self.expression):
            indices = [self.duals.value(index) for index in gather.indices]
            _scatter_add(captures[gather.capture.name], indices, self._apply_chain_rule(gather, d_scores, live))
        return self._apply_chain_rule(SCORE, d_scores, live)

    def _apply_chain_rule(self, seed: Load | sympy.Symbol, d_scores: Array, live: NDArray[np.bool_]) -> Array:
        """Returns d_scores times the derivative of the score function with respect to the seed."""
        assert self.duals is not None
        tangent = self.duals.tangent(self.expression, seed)
        if tangent is None:
            return np.zeros_like(d_scores)
        product = d_scores * np.where(live, tangent, 0.0)
        return product if self.rounding is None else self.rounding(product)


def _scatter_add(gradient: Array, indices: list[NDArray[np.int64]], added: Array) -> None:
    """Computes gradient[indices] += added, with each index clamped to its dimension as in the load."""
    clamped = [np.clip(index, 0, size - 1) for index, size in zip(indices, gradient.shape, strict=True)]
    shape = np.broadcast_shapes((1,) * added.ndim, *(index.shape for index in clamped))
    shared = tuple(axis for axis, size in enumerate(shape) if size == 1)
    added = added.sum(axis=shared, keepdims=True)  # sums first over axes that share one element
    np.add.at(gradient, tuple(np.broadcast_to(index, added.shape) for index in clamped), added)
