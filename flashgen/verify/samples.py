"""The random problems of a case, enough of them to judge each of its gradients reliably."""

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
    """One random problem: its inputs, the gradients of the output and LSE, and in `options` the keyword arguments."""

    inputs: Inputs
    d_out: Array
    d_lse: Array | None
    options: dict[str, Any]

    @property
    def qkv(self) -> tuple[Array, Array, Array | None]:
        return self.inputs.q, self.inputs.k, self.inputs.v


def samples(case: Case, seed: int, backward: bool) -> tuple[Sample, ...]:
    """Returns one problem for a forward, or `samples_needed` for a backward, with seeds from `seed` upwards."""
    first = _sample(case, seed)
    count = samples_needed(case, first.inputs) if backward else 1
    return (first, *(_sample(case, (seed + number) % 2**64) for number in range(1, count)))


def samples_needed(case: Case, inputs: Inputs) -> int:
    """Returns the number of problems that together have at least ENOUGH elements of each gradient.

    The elements of all problems are judged as one array. The rule compares the largest error of a kernel with that of
    standard attention in the input dtype. For an array of two elements, such as the gradients of two slopes, which are
    sums over all scores of a head, the error of standard attention is sometimes small by chance, and a kernel fails
    even if its mean error is only a quarter of that of standard attention. With sixteen elements this does not happen.
    The elements of a row of dq or dk share the D of that row, so rows are counted there instead of elements. The
    elements of a learned array are counted up to the number of scores of a sequence, because sequences may read the
    same elements.
    """
    shape = case.shape
    scores = shape.heads_q * shape.len_q * shape.len_k
    rows = (shape.batch * shape.heads_q * shape.len_q, shape.batch * shape.heads_kv * shape.len_k)
    learned = (min(np.size(inputs.captures[capture.name]), scores) for capture in case.spec.captures if capture.grad)
    fewest = min(*rows, *learned)
    return -(-ENOUGH // fewest) if fewest else 1


def together(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenates the flattened arrays of several problems by name; the arrays of a single problem stay unchanged."""
    if len(each) == 1:
        return dict(each[0])
    return {name: np.concatenate([np.ravel(arrays[name]) for arrays in each]) for name in each[0]}


def _sample(case: Case, seed: int) -> Sample:
    inputs = random_inputs(case.spec, case.shape, seed, case.captures)
    d_out, d_lse = random_gradients(case.spec, case.shape, seed, case.lse_gradient)
    dropout = {"seed": seed} if case.spec.dropout else {}
    return Sample(inputs, d_out, d_lse, {**dropout, **inputs.ragged, **inputs.captures})
