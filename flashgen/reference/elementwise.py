"""What a spec does to a tile's scores and probabilities (score function, mask, dropout), and their gradients."""

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
    """The elementwise steps of one head. A range of queries and a range of keys name a tile."""

    problem: Problem
    b: int
    h: int

    @property
    def sink(self) -> float | None:
        """The head's score without a value, where the spec has one."""
        sink = self.problem.spec.sink
        return None if sink is None else float(self.problem.captures[sink.name][self.h])

    def modify(self, scores: Array, queries: range, keys: range, rounding: Rounding | None = None) -> Array:
        """Scores (queries, keys), already scaled, after the score function and with -inf where the mask forbids.

        `rounding`, if given, rounds each step of the score function that depends on the score.
        """
        if rounding is not None or self.problem.spec.score is None or 0 in scores.shape:
            return self.modified(scores, queries, keys, rounding).scores
        values = {**self._indices(queries, keys), SCORE: scores}  # `evaluate` drops values once they are used
        scores = evaluate(self.problem.spec.score.expression, values, self.problem.captures)
        return self._masked(scores, queries, keys)

    def modified(self, scores: Array, queries: range, keys: range, rounding: Rounding | None = None) -> ModifiedScores:
        """The scores of `modify`, and the way back to their gradients."""
        spec, captures, shape = self.problem.spec, self.problem.captures, scores.shape
        if spec.score is None or 0 in shape:
            return ModifiedScores(self._masked(scores, queries, keys), None, None, rounding)
        duals = Duals({**self._indices(queries, keys), SCORE: scores}, captures, rounding)
        expression = spec.score.expression
        return ModifiedScores(self._masked(duals.value(expression), queries, keys), expression, duals, rounding)

    def _masked(self, scores: Array, queries: range, keys: range) -> Array:
        if not queries or not keys:
            return scores
        shape = (len(queries), len(keys))  # a score need not depend on all indices, nor a mask
        allowed = evaluate(self.problem.spec.mask.expression, self._indices(queries, keys), self.problem.captures)
        return np.where(np.broadcast_to(allowed, shape), scores, -np.inf)

    def drop(self, probabilities: Array, queries: range, keys: range) -> Array:
        """Probabilities (queries, keys), normalised or not, after dropout: 0 where dropped, scaled up where kept."""
        problem = self.problem
        if problem.spec.dropout == 0:
            return probabilities
        b, h, shift_q, shift_k = (problem.place(name) for name in ("shard_b", "shard_h", "shard_q", "shard_k"))
        b, h = b + problem.number + self.b, h + self.h
        queries = range(queries.start + shift_q, queries.stop + shift_q)
        keys = range(keys.start + shift_k, keys.stop + shift_k)
        keep = keep_tile(problem.seed, problem.offset, b, h, queries, keys, problem.spec.dropout)
        return np.where(keep, probabilities * problem.keep_scale, 0.0)

    def _indices(self, queries: range, keys: range) -> dict[sympy.Basic, Any]:
        return {
            BATCH: np.asarray(self.problem.number + self.b, dtype=np.int64),
            HEAD: np.asarray(self.h, dtype=np.int64),
            QUERY: np.arange(queries.start, queries.stop, dtype=np.int64)[:, None],
            KEY: np.arange(keys.start, keys.stop, dtype=np.int64)[None, :],
            LEN_Q: np.asarray(self.problem.len_q, dtype=np.int64),
            LEN_K: np.asarray(self.problem.len_k, dtype=np.int64),
        }


@dataclass(frozen=True, eq=False)
class ModifiedScores:
    """Scores of a tile (queries, keys) after score function and mask. The score function is as traced, or None."""

    scores: Array
    expression: sympy.Basic | None
    duals: Duals | None
    rounding: Rounding | None

    def pull_back(self, d_scores: Array, captures: Mapping[str, Array]) -> Array:
        """The scores' gradient, from that of the modified ones; captures' gradients are added to `captures`.

        A score that the mask or the score function made -inf contributes exactly 0 to all of them, whatever its
        derivative.
        """
        live = self.scores != -np.inf
        d_scores = np.where(live, d_scores, 0.0)
        if self.expression is None or self.duals is None:
            return d_scores
        for gather in gathers(self.expression):
            indices = [self.duals.value(index) for index in gather.indices]
            _scatter_add(captures[gather.capture.name], indices, self._through(gather, d_scores, live))
        return self._through(SCORE, d_scores, live)

    def _through(self, seed: Load | sympy.Symbol, d_scores: Array, live: NDArray[np.bool_]) -> Array:
        """d_scores times the score function's derivative by the seed."""
        assert self.duals is not None
        tangent = self.duals.tangent(self.expression, seed)
        if tangent is None:
            return np.zeros_like(d_scores)
        product = d_scores * np.where(live, tangent, 0.0)
        return product if self.rounding is None else self.rounding(product)


def _scatter_add(gradient: Array, indices: list[NDArray[np.int64]], added: Array) -> None:
    """gradient[indices] += added, where each index is clamped to its dimension as the load clamps it."""
    clamped = [np.clip(index, 0, size - 1) for index, size in zip(indices, gradient.shape, strict=True)]
    shape = np.broadcast_shapes((1,) * added.ndim, *(index.shape for index in clamped))
    shared = tuple(axis for axis, size in enumerate(shape) if size == 1)
    added = added.sum(axis=shared, keepdims=True)  # first the sums that go to one place
    np.add.at(gradient, tuple(np.broadcast_to(index, added.shape) for index in clamped), added)
