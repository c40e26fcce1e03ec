"""Compares a case's mask by brute force with what the oracle and the analysis say of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.language import operations as ops
from flashgen.language.evaluate import evaluate
from flashgen.verify.random.covers import lie_of_analysis
from flashgen.verify.random.meaning import Array, Meaning, Sizes
from flashgen.verify.random.outcome import Counts, Found
from flashgen.verify.random.recipe import SINKS, Problem, Recipe
from flashgen.verify.random.values import materialised

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec


_SINKS = 3  # a stream of random numbers of its own


@dataclass(frozen=True)
class Checked:
    """A call, and what its mask allows:  bool, broadcastable to (batch, heads_q, len_q, len_k)."""

    problem: Problem
    captures: dict[str, Any]
    allowed: Array

    @cached_property
    def sizes(self) -> Sizes:
        return sizes_of(self.problem)


def sizes_of(problem: Problem) -> Sizes:
    shape = problem.shape
    return Sizes(shape.batch, shape.heads_q, shape.len_q, shape.len_k)


def check_predicates(recipe: Recipe, spec: AttentionSpec, counts: Counts) -> list[Checked]:
    """The calls, with what their masks mean. Raises Found where the oracle or the analysis differs from it."""
    checked = []
    for problem in recipe.problems:
        captures = materialised(problem.values, recipe.declared)
        if recipe.sink:
            random = np.random.default_rng((problem.seed, _SINKS))
            captures[SINKS] = 2 * random.standard_normal(problem.shape.heads_q, np.float32)
        sizes = sizes_of(problem)
        allowed = _in_four(Meaning(sizes, captures).of(recipe.mask))
        counts["predicates"] += 1
        checked.append(Checked(problem, captures, allowed))
        if 0 in sizes:
            continue
        own = {capture.name: captures[capture.name] for capture in spec.mask.captures}
        _check_oracle(spec, allowed, sizes, own)
        lie = lie_of_analysis(spec.mask.expression, allowed, sizes, own, turn=problem.seed)
        if lie:
            raise Found("tiles", f"{problem.shape}: {lie}")
    return checked


def _in_four(allowed: Array) -> Array:
    return allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape)


def _check_oracle(spec: AttentionSpec, allowed: Array, sizes: Sizes, captures: dict[str, Any]) -> None:
    def along(axis: int) -> Array:
        return np.arange(sizes[axis]).reshape([-1 if own == axis else 1 for own in range(4)])

    values = {symbol: along(axis) for axis, symbol in enumerate(ops.INDICES)}
    lengths: dict[Any, Any] = {ops.LEN_Q: sizes.len_q, ops.LEN_K: sizes.len_k}
    ours = _in_four(evaluate(spec.mask.expression, values | lengths, captures))
    shape = np.broadcast_shapes(ours.shape, allowed.shape)
    differ = np.broadcast_to(ours, shape) != np.broadcast_to(allowed, shape)
    if differ.any():
        place = tuple(int(index) for index in np.argwhere(differ)[0])
        right = bool(np.broadcast_to(allowed, shape)[place])
        raise Found(
            "oracle", f"{tuple(sizes)}: mask differs at {int(differ.sum())} of {differ.size}: {place}, {right} is right"
        )
