"""The gradients of standard attention in NumPy, for every spec: in float64, the truth; rounded, the tolerance.

Forward, with X = scale Q K^T and dropout's Z (0 where dropped, 256 / T where kept):

    S = score(X), -inf where masked;  P = softmax(S);  O = (P ∘ Z) V;  LSE = log sum exp S

Backward, of the gradients dO and dLSE of both outputs:

    dV = (P ∘ Z)^T dO;  dP = (dO V^T) ∘ Z;  D = rowsum(dO ∘ O) - dLSE;  dS = P ∘ (dP - D);  dX = dS ∘ dscore/dX
    dsink = -sum(exp(sink - LSE) D), as its score has no value, and so no dP
    dQ = scale dX K;    dK = scale dX^T Q;  each gather of a capture adds dS ∘ dscore/dgather where it gathered

In exact arithmetic D is rowsum(P ∘ dP) too. A backward that is given O rounded has that rounding, times P, in all
gradients of its rows: `backward_of_rounded_output` says how much it is.
dscore comes from flashgen.reference.tangents. Source: Dao et al., "FlashAttention", 2022, appendix B.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike

from flashgen.reference.elementwise import HeadTiles
from flashgen.reference.gradients import Cotangents, Gradients, GradientSums, prepare_cotangents
from flashgen.reference.inputs import Array, Problem, prepare
from flashgen.reference.oracle import round_to, row_blocks, softmax
from flashgen.reference.ragged import gradients_of, sequences

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec


def backward(
    spec: AttentionSpec,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    d_out: ArrayLike,
    *,
    d_lse: ArrayLike | None = None,
    seed: int | None = None,
    offset: int = 0,
    **captures: Any,
) -> Gradients:
    """The gradients of sum(out * d_out) + sum(lse * d_lse) in float64, on the values given.

    q, k, v, seed, offset and captures are those of `attention`; d_out has the shape and layout of out; d_lse is
    (batch, heads_q, len_q), None for 0. Returns (dq, dk, dv, captures), float64, each in the layout and shape of its
    input; dk and dv are summed over the query heads that share a key head. captures holds, by name, those declared
    with grad=True. A masked score contributes exactly 0 whatever its derivative; a row with nothing to attend to has
    zero gradients. A score of -inf counts as masked.
    Raises ArgumentError for arguments that do not fit the spec or each other.
    """

    def exact(problem: Problem, cotangents: Cotangents) -> Gradients:
        return _run(problem, cotangents, Arithmetic(np.float64)).gradients()

    return _gradients(exact, spec, (q, k, v), (d_out, d_lse), seed, offset, captures)


def _gradients(
    of_problem: Callable[[Problem, Cotangents], Gradients],
    spec: AttentionSpec,
    qkv: tuple[Any, Any, Any],
    cotangents: tuple[Any, Any],
    *given: Any,
) -> Gradients:
    """The gradients of a call, from what gives those of a problem; given: seed, offset, captures."""
    if spec.is_ragged:
        return gradients_of(qkv, sequences(spec, *qkv, *given), *cotangents, of_problem)
    problem = prepare(spec, *qkv, *given)
    return of_problem(problem, prepare_cotangents(problem, *cotangents))


def backward_of_rounded_output(
    spec: AttentionSpec,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    d_out: ArrayLike,
    *,
    d_lse: ArrayLike | None = None,
    seed: int | None = None,
    offset: int = 0,
    **captures: Any,
) -> Gradients:
    """The gradients in float64 with D from O rounded to spec.dtype: the `given` of flashgen.reference.numerics.

    Arguments, results and errors are those of `backward`; only that rounding differs.
    """
    arithmetic = Arithmetic(np.float64, of_output=lambda array: round_to(spec.dtype, array))

    def of_rounded(problem: Problem, cotangents: Cotangents) -> Gradients:
        return _run(problem, cotangents, arithmetic).gradients()

    return _gradients(of_rounded, spec, (q, k, v), (d_out, d_lse), seed, offset, captures)


def low_precision_backward(
    spec: AttentionSpec,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    d_out: ArrayLike,
    *,
    d_lse: ArrayLike | None = None,
    seed: int | None = None,
    offset: int = 0,
    **captures: Any,
) -> Gradients:
    """The gradients as a plain library computes them on arrays of spec.dtype: `low` of flashgen.reference.numerics.

    The forward is `low_precision`, which gives O. Each step of the backward is rounded to spec.dtype:
    d_out, dO V^T, its dropout, dO ∘ O, D, dP - D, dS, each operation of the score's derivative, dX, dX K and that times
    scale, dK and dV of each query head and their sum over a group, each element's part in the gradient of a capture and
    their sum.
    Within a step, products accumulate in float32 and other sums in float64; d_lse is not rounded. A capture's gradient
    is rounded once more, to the capture's dtype. Arguments, results and errors are those of `backward`. Numbers that
    overflow float16 become infinity or NaN, as they do there.
    """

    def rounding(array: Any) -> Array:
        return round_to(spec.dtype, array)

    def rounded(problem: Problem, cotangents: Cotangents) -> Gradients:
        sums = _run(problem, cotangents, Arithmetic(np.float32, rounding))
        sums.dk, sums.dv = rounding(sums.dk), rounding(sums.dv)
        dq, dk, dv, gradients = sums.gradients()
        return Gradients(dq, rounding(dk), rounding(dv), gradients)

    with np.errstate(over="ignore", invalid="ignore"):
        found = _gradients(rounded, spec, (q, k, v), (d_out, d_lse), seed, offset, captures)
        for capture in spec.captures:
            if capture.grad:  # sums over the sequences of a ragged batch, too
                kept = ml_dtypes.bfloat16 if capture.dtype == "bfloat16" else capture.dtype
                found.captures[capture.name] = rounding(found.captures[capture.name]).astype(kept).astype(np.float64)
    return found


@dataclass(frozen=True)
class Arithmetic:
    """Computes each step in `wide`, and rounds its result by `rounding`, O by `of_output` (None: not at all)."""

    wide: type[np.floating[Any]]
    rounding: Callable[[Any], Array] | None = None
    of_output: Callable[[Any], Array] | None = None

    def rounded(self, array: Any) -> Array:
        return np.asarray(array, np.float64) if self.rounding is None else self.rounding(array)

    def rounded_output(self, array: Any) -> Array:
        return self.rounded(array) if self.of_output is None else self.of_output(array)

    def product(self, a: Array, b: Array) -> Any:
        return a.astype(self.wide) @ b.astype(self.wide)


def _run(problem: Problem, cotangents: Cotangents, arithmetic: Arithmetic) -> GradientSums:
    """All gradients, in blocks of rows. dk, dv and captures' gradients are sums over blocks, not rounded here."""
    rounded, product, scale = arithmetic.rounded, arithmetic.product, problem.spec.scale
    sums, keys = GradientSums(problem), range(problem.len_k)
    for b, h, queries in row_blocks(problem):
        tiles, rows = HeadTiles(problem, b, h), slice(queries.start, queries.stop)
        q, k, v = (rounded(array) for array in problem.head(b, h))
        d_out, d_lse = rounded(cotangents.d_out[b, h, rows]), cotangents.d_lse[b, h, rows]
        q = rounded(scale * q[rows])
        modified = tiles.modified(rounded(product(q, k.T)), queries, keys, arithmetic.rounding)
        p, lse = softmax(modified.scores.astype(arithmetic.wide), tiles.sink)
        p = rounded(p)
        z = tiles.drop(np.ones_like(p), queries, keys)
        dropped = rounded(p * z)
        out = arithmetic.rounded_output(product(dropped, v))
        d_p = rounded(rounded(product(d_out, v.T)) * z)
        d = rounded(rounded(d_out * out).sum(axis=-1) - d_lse)
        d_s = rounded(p * rounded(d_p - d[:, None]))
        sink = problem.spec.sink
        if sink is not None and sink.grad and tiles.sink is not None:
            with np.errstate(invalid="ignore"):
                of_sink = np.where(lse == -np.inf, 0.0, np.exp(tiles.sink - lse))
            sums.captures[sink.name][h] -= rounded(rounded(of_sink) * d).sum()
        d_x = modified.pull_back(d_s, sums.captures)
        sums.dq[b, h, rows] = rounded(scale * rounded(product(d_x, k)))
        sums.dk[b, h] += product(d_x.T, q)
        sums.dv[b, h] += product(dropped.T, d_out)
    return sums
