"""The random problems of a case: as many as it takes to judge each of its gradients fairly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashgen.verify.gradients import random_gradients
from flashgen.verify.problems import ENOUGH, Array, Inputs, random_inputs
from flashgen.verify.variants import Case


@dataclass(frozen=True, eq=False)
class Sample:
    """One random problem: the inputs, the gradients of both outputs, and in `options` captures and dropout's seed."""

    inputs: Inputs
    d_out: Array
    d_lse: Array | None
    options: dict[str, Any]

    @property
    def qkv(self) -> tuple[Array, Array, Array]:
        return self.inputs.q, self.inputs.k, self.inputs.v


def samples(case: Case, seed: int, backward: bool) -> tuple[Sample, ...]:
    """One problem for a forward, `samples_needed` for a backward, from seed, seed + 1 and so on."""
    first = _sample(case, seed)
    count = samples_needed(case, first.inputs) if backward else 1
    return (first, *(_sample(case, (seed + number) % 2**64) for number in range(1, count)))


def samples_needed(case: Case, inputs: Inputs) -> int:
    """How many problems together give at least ENOUGH numbers of each gradient, to be judged as one array.

    The rule compares a kernel's largest error with that of standard attention in the input dtype. In an array of two
    numbers, such as two slopes, each a sum over all scores of a head, the latter is small by luck now and then, and a
    kernel with a quarter of its mean error fails; in one of sixteen it is not. The numbers in a row of dq or dk share
    their row's D, so that rows are counted there; a learned array counts for no more than a batch's scores, as batches
    may share what they read of it.
    """
    shape = case.shape
    scores = shape.heads_q * shape.len_q * shape.len_k
    rows = (shape.batch * shape.heads_q * shape.len_q, shape.batch * shape.heads_kv * shape.len_k)
    learned = (min(np.size(inputs.captures[capture.name]), scores) for capture in case.spec.captures if capture.grad)
    fewest = min(*rows, *learned)
    return -(-ENOUGH // fewest) if fewest else 1


def together(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Arrays of several problems by name, put one behind the other; those of one problem as they are."""
    if len(each) == 1:
        return dict(each[0])
    return {name: np.concatenate([np.ravel(arrays[name]) for arrays in each]) for name in each[0]}


def _sample(case: Case, seed: int) -> Sample:
    inputs = random_inputs(case.spec, case.shape, seed, case.captures)
    d_out, d_lse = random_gradients(case.spec, case.shape, seed, case.lse_gradient)
    dropout = {"seed": seed} if case.spec.dropout else {}
    return Sample(inputs, d_out, d_lse, {**dropout, **inputs.ragged, **inputs.captures})
