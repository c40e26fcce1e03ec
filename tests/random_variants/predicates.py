"""Compares the mask of a case, evaluated by brute force, with what the oracle and the analysis say of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.language import operations as ops
from flashgen.language.evaluate import evaluate
from random_variants.captures import materialized
from random_variants.cases import SINKS, Case, Problem
from random_variants.covers import mistake_in_analysis
from random_variants.meaning import Array, Meaning, Sizes

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec

_SINKS = 3  # a stream of random numbers of its own


class Found(AssertionError):
    """A mistake was found; the message begins with its kind: wrong, tiles, oracle or not deterministic."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")


@dataclass(frozen=True)
class Checked:
    """A call, and what its mask allows: bool, broadcastable to (batch, heads_q, len_q, len_k)."""

    problem: Problem
    captures: dict[str, Any]
    allowed: Array

    @cached_property
    def sizes(self) -> Sizes:
        return sizes_of(self.problem)


def sizes_of(problem: Problem) -> Sizes:
    shape = problem.shape
    return Sizes(shape.batch, shape.heads_q, shape.len_q, shape.len_k)


def check_predicates(case: Case, spec: AttentionSpec, counts: Counter[str]) -> list[Checked]:
    """The calls, with what their masks mean. Raises Found where the oracle or the analysis differs from it."""
    checked = []
    for problem in case.problems:
        captures = materialized(problem.values, case.declared)
        if case.sink:
            random = np.random.default_rng((problem.seed, _SINKS))
            captures[SINKS] = 2 * random.standard_normal(problem.shape.heads_q, np.float32)
        sizes = sizes_of(problem)
        allowed = in_four(Meaning(sizes, captures).of(case.mask))
        counts["predicates"] += 1
        checked.append(Checked(problem, captures, allowed))
        if 0 in sizes:
            continue
        own = {capture.name: captures[capture.name] for capture in spec.mask.captures}
        _check_oracle(spec, allowed, sizes, own)
        mistake = mistake_in_analysis(spec.mask.expression, allowed, sizes, own, turn=problem.seed)
        if mistake:
            raise Found("tiles", f"{problem.shape}: {mistake}")
    return checked


def in_four(allowed: Array) -> Array:
    """The array with four axes."""
    return allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape)


def _check_oracle(spec: AttentionSpec, allowed: Array, sizes: Sizes, captures: dict[str, Any]) -> None:
    values: dict[Any, Any] = dict(zip(ops.INDICES, np.ogrid[tuple(map(slice, sizes))], strict=True))
    values |= {ops.LEN_Q: sizes.len_q, ops.LEN_K: sizes.len_k}
    theirs, ours = np.broadcast_arrays(in_four(evaluate(spec.mask.expression, values, captures)), allowed)
    if (theirs != ours).any():
        place = tuple(map(int, np.argwhere(theirs != ours)[0]))
        count = f"{int((theirs != ours).sum())} of {ours.size}"
        raise Found("oracle", f"{tuple(sizes)}: mask differs at {count}: {place}, {bool(ours[place])} is right")
