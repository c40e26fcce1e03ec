"""The gradients of standard attention in NumPy, for every spec.

In float64 they are the reference. Rounded at every step, they give the tolerance.

Forward, with X = scale Q K^T and the dropout factors Z (0 where dropped, 256 / T where kept):

    S = score(X), -inf where masked;  P = softmax(S);  O = (P ∘ Z) V;  LSE = log sum exp S

Backward, given the gradients dO and dLSE of both outputs:

    dV = (P ∘ Z)^T dO;  dP = (dO V^T) ∘ Z;  D = rowsum(dO ∘ O) - dLSE;  dS = P ∘ (dP - D);  dX = dS ∘ dscore/dX
    dsink = -sum(exp(sink - LSE) D), because a sink has no value and therefore no dP
    dQ = scale dX K;    dK = scale dX^T Q;  each gather from a capture adds dS ∘ dscore/dgather to the gathered element

In exact arithmetic D also equals rowsum(P ∘ dP). A backward that reads a rounded O carries the rounding error of O,
multiplied by P, into all gradients of the row. `backward_of_rounded_output` measures this error.
The derivatives of the score function come from flashgen.reference.tangents.
Source: Dao et al., "FlashAttention", 2022, appendix B.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from flashgen.dtypes import numpy_dtype
from flashgen.reference.elementwise import HeadTiles
from flashgen.reference.gradients import Cotangents, Gradients, GradientSums, prepare_cotangents
from flashgen.reference.inputs import Array, Problem, prepare, with_values
from flashgen.reference.oracle import round_to, row_blocks, softmax
from flashgen.reference.pages import Cache
from flashgen.reference.varlen import varlen_gradients, varlen_sequences

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec


def backward(
    spec: AttentionSpec,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike | None,
    d_out: ArrayLike,
    *,
    d_lse: ArrayLike | None = None,
    seed: int | None = None,
    offset: int = 0,
    **captures: Any,
) -> Gradients:
    """Returns the gradients of sum(out * d_out) + sum(lse * d_lse), computed in float64.

    q, k, v, seed, offset and captures are the arguments of `attention`. d_out has the shape and layout of out. d_lse
    has the shape (batch, heads_q, len_q); None stands for 0.
    Returns (dq, dk, dv, captures) in float64, each in the layout and shape of its input. dk and dv are summed over
    the query heads that share a key head. With `shared_kv` v is None, and dk is the gradient of the array that holds K
    and V. captures maps the names of captures declared with grad=True to gradients.
    A masked score contributes exactly 0, whatever its derivative is. A score of -inf counts as masked. A row with
    nothing to attend to has zero gradients.
    Raises ArgumentError for arguments that do not fit the spec or each other.

    Args:
        spec, q, k, v, seed, offset, captures: as in `attention`.
        d_out: the gradient of the output, with its shape.
        d_lse: the gradient of the LSE, (batch, heads_q, len_q); None for 0.
    """

    def exact(problem: Problem, cotangents: Cotangents) -> Gradients:
        return _run(problem, cotangents, Arithmetic(np.float64)).gradients()

    return _call_gradients(exact, spec, (q, k, v), (d_out, d_lse), seed, offset, captures)


def _call_gradients(
    for_problem: Callable[[Problem, Cotangents], Gradients],
    spec: AttentionSpec,
    given: tuple[Any, Any, Any],
    cotangents: tuple[Any, Any],
    *options: Any,
) -> Gradients:
    """Returns the gradients of a call. for_problem computes those of one problem; options: seed, offset, captures."""
    qkv = with_values(spec, *given)
    if spec.is_varlen:
        return varlen_gradients(qkv, varlen_sequences(spec, qkv, Cache(), *options), *cotangents, for_problem)
    problem = prepare(spec, *qkv, *options)
    return for_problem(problem, prepare_cotangents(problem, *cotangents))


def backward_of_rounded_output(
    spec: AttentionSpec,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike | None,
    d_out: ArrayLike,
    *,
    d_lse: ArrayLike | None = None,
    seed: int | None = None,
    offset: int = 0,
    **captures: Any,
) -> Gradients:
    """Returns the gradients in float64, except that D is computed from O rounded to spec.out_dtype.

    They are the `given` argument of `judge`. Arguments, results and errors are the same as in `backward`.
    """
    arithmetic = Arithmetic(np.float64, output_rounding=lambda array: round_to(spec.out_element.name, array))

    def with_rounded_output(problem: Problem, cotangents: Cotangents) -> Gradients:
        return _run(problem, cotangents, arithmetic).gradients()

    return _call_gradients(with_rounded_output, spec, (q, k, v), (d_out, d_lse), seed, offset, captures)


def low_precision_backward(
    spec: AttentionSpec,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike | None,
    d_out: ArrayLike,
    *,
    d_lse: ArrayLike | None = None,
    seed: int | None = None,
    offset: int = 0,
    **captures: Any,
) -> Gradients:
    """Returns the gradients as an unfused library computes them on arrays of spec.dtype.

    They are the `low` argument of `judge`. The forward is `low_precision`, which gives O. The result of each step of
    the backward is rounded to spec.dtype: d_out; dO V^T; dO V^T after dropout; dO ∘ O; D; dP - D; dS; each operation
    of the derivative of the score function; dX; dX K; scale dX K; dK and dV of each query head and their sums over a
    group; each contribution to the gradient of a capture and the sum of these.
    Within a step, products accumulate in float32 and other sums in float64. d_lse is not rounded. The gradient of a
    capture is rounded once more, to the dtype of the capture. Arguments, results and errors are the same as in
    `backward`. Numbers that overflow float16 become infinity or NaN, as they do in such a library.
    """

    def rounding(array: Any) -> Array:
        return round_to(spec.dtype, array)

    def rounded(problem: Problem, cotangents: Cotangents) -> Gradients:
        sums = _run(problem, cotangents, Arithmetic(np.float32, rounding))
        sums.dk, sums.dv = rounding(sums.dk), rounding(sums.dv)
        dq, dk, dv, gradients = sums.gradients()
        return Gradients(dq, rounding(dk), None if dv is None else rounding(dv), gradients)

    with np.errstate(over="ignore", invalid="ignore"):
        found = _call_gradients(rounded, spec, (q, k, v), (d_out, d_lse), seed, offset, captures)
        for capture in spec.captures:
            if capture.grad:  # sums over the sequences of a varlen batch too
                rounded_sum = rounding(found.captures[capture.name]).astype(numpy_dtype(capture.dtype))
                found.captures[capture.name] = rounded_sum.astype(np.float64)
    return found


@dataclass(frozen=True)
class Arithmetic:
    """The precision of each step: computed in `wide`, then rounded by `rounding`, or for O by `output_rounding`.

    A rounding function of None leaves the result unrounded.
    """

    wide: type[np.floating[Any]]
    rounding: Callable[[Any], Array] | None = None
    output_rounding: Callable[[Any], Array] | None = None

    def rounded(self, array: Any) -> Array:
        return np.asarray(array, np.float64) if self.rounding is None else self.rounding(array)

    def rounded_output(self, array: Any) -> Array:
        return self.rounded(array) if self.output_rounding is None else self.output_rounding(array)

    def product(self, a: Array, b: Array) -> Any:
        return a.astype(self.wide) @ b.astype(self.wide)


def _run(problem: Problem, cotangents: Cotangents, arithmetic: Arithmetic) -> GradientSums:
    """Computes all gradients in blocks of rows. The sums over blocks (dk, dv, captures) are not rounded here."""
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
                sink_probability = np.where(lse == -np.inf, 0.0, np.exp(tiles.sink - lse))
            sums.captures[sink.name][h] -= rounded(rounded(sink_probability) * d).sum()
        d_x = modified.pull_back(d_s, sums.captures)
        sums.dq[b, h, rows] = rounded(scale * rounded(product(d_x, k)))
        sums.dk[b, h] += product(d_x.T, q)
        sums.dv[b, h] += product(dropped.T, d_out)
    return sums
