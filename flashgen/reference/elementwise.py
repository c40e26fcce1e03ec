"""What a spec does to the scores and probabilities of a tile: score function, mask and dropout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from flashgen.language.evaluate import MEANINGS, evaluate
from flashgen.language.operations import BATCH, HEAD, KEY, LEN_K, LEN_Q, QUERY, SCORE, kind_of
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

        `rounding`, if given, rounds each step of the score function that depends on the score.
        """
        spec, captures, shape = self.problem.spec, self.problem.captures, scores.shape
        if 0 in shape:
            return scores
        values = self._indices(queries, keys)
        if spec.score is not None:
            values_and_score = {**values, SCORE: scores}
            if rounding is None:
                scores = evaluate(spec.score.expression, values_and_score, captures)
            else:
                scores = evaluate_rounded(spec.score.expression, values_and_score, captures, rounding)
        allowed = evaluate(spec.mask.expression, values, captures)
        return np.where(
            np.broadcast_to(allowed, shape), scores, -np.inf
        )  # a score need not depend on all indices either

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


def evaluate_rounded(
    node: sympy.Basic, values: Mapping[sympy.Basic, Any], captures: Mapping[str, Any], rounding: Rounding
) -> Array:
    """As `evaluate`, with the result of every operation on the score rounded, if it is a float.

    What depends on indices and captures alone is exact: a plain implementation may well hold it in float32 or integers.
    """
    known: dict[sympy.Basic, Any] = {}

    def of(node: sympy.Basic) -> Any:
        if node in known:
            return known[node]
        if SCORE not in node.free_symbols or node == SCORE:
            result = evaluate(node, values, captures)
        else:
            exact = MEANINGS[type(node)](*(of(operand) for operand in node.args))
            result = rounding(exact) if kind_of(node) == "float" else exact
        known[node] = result
        return result

    with np.errstate(all="ignore"):  # both sides of a Where are computed, also where they are not wanted
        return np.asarray(of(node))
