"""Creates the inputs of backward passes, and compares their gradients with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen import reference
from flashgen.dtypes import numpy_dtype
from flashgen.reference import Verdict, judge
from flashgen.verify.problems import Array, Inputs, Shape, rows_of

if TYPE_CHECKING:
    from flashgen.language import AttentionSpec

_STREAM = 1  # second component of the seed, so that gradients differ from the inputs of the same seed


def random_gradients(
    spec: AttentionSpec, shape: Shape, seed: int = 0, of_lse: bool = False
) -> tuple[Array, Array | None]:
    """Returns a standard normal dO in the spec's dtype and layout, and if `of_lse` a dLSE in float32, else None.

    Equal seeds give equal gradients. A fully masked row gets a dLSE too, which must not affect any gradient.

    Args:
        spec: the spec of the call.
        shape: its sizes.
        seed: the seed of the random numbers.
        of_lse: whether to return a dLSE.
    """
    random = np.random.default_rng((seed, _STREAM))
    out_shape = (*rows_of(spec, shape, seed), spec.value_dim)
    rows = spec.batch_layout.lse_shape(out_shape)
    d_out = random.standard_normal(out_shape, dtype=np.float32).astype(numpy_dtype(spec.dtype))
    return d_out, random.standard_normal(rows, dtype=np.float32) if of_lse else None


def poisoned_gradients(spec: AttentionSpec, inputs: Inputs) -> tuple[Array, ...]:
    """Returns arrays for the gradients, full of NaN, so that an element that is not written is detected."""
    learned = [inputs.captures[capture.name] for capture in spec.captures if capture.grad]
    rows = [np.full(array.shape, np.nan, spec.grad_element.numpy) for array in inputs.rows]
    return (*rows, *(np.full(array.shape, np.nan, array.dtype) for array in learned))


def gradients_by_name(gradients: Any) -> dict[str, Any]:
    """Returns the gradients of a kernel or of the oracle by name: dq, dk, dv, and d_<name> for each capture.

    Args:
        gradients: the result of `attention.backward` or `reference.backward`.
    """
    captures = {f"d_{name}": gradient for name, gradient in gradients.captures.items()}
    rows = {"dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
    return {name: gradient for name, gradient in rows.items() if gradient is not None} | captures


def judged_gradients(
    spec: AttentionSpec,
    q: Any,
    k: Any,
    v: Any,
    d_out: Any,
    found: Mapping[str, Any],
    **given: Any,
) -> dict[str, Verdict]:
    """Compares each gradient with the backward of standard attention in float64 and in the spec's dtype.

    Args:
        spec: the spec that was run.
        q, k, v, d_out: the inputs of the backward, NumPy arrays.
        found: the gradients by name, as `gradients_by_name` returns them.
        given: d_lse, seed, offset and the captures, as `flashgen.reference.backward` takes them.
    """
    expected, low = expected_gradients(spec, q, k, v, d_out, **given)
    return judged_by_name(found, expected, low, lambda: gradients_of_rounded_output(spec, q, k, v, d_out, **given))


def expected_gradients(
    spec: AttentionSpec, q: Any, k: Any, v: Any, d_out: Any, **given: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the gradients by name in float64, and those of standard attention in the spec's dtype."""
    expected = reference.backward(spec, q, k, v, d_out, **given)
    low = reference.low_precision_backward(spec, q, k, v, d_out, **given)
    return gradients_by_name(expected), gradients_by_name(low)


def gradients_of_rounded_output(
    spec: AttentionSpec, q: Any, k: Any, v: Any, d_out: Any, **given: Any
) -> dict[str, Any]:
    """Returns the gradients by name in float64, computed from an output that is rounded to the spec's dtype."""
    return gradients_by_name(reference.backward_of_rounded_output(spec, q, k, v, d_out, **given))


def judged_by_name(
    found: Mapping[str, Any],
    expected: Mapping[str, Any],
    low: Mapping[str, Any],
    of_rounded_output: Callable[[], Mapping[str, Any]] | None = None,
) -> dict[str, Verdict]:
    """Judges each array by the rule of `flashgen.reference.numerics`.

    If an array fails, all are judged again with the gradients that `of_rounded_output` returns, because a kernel only
    has the rounded output.
    """
    verdicts = {name: judge(found[name], expected[name], low[name]) for name in expected}
    if of_rounded_output is None or all(verdict.ok for verdict in verdicts.values()):
        return verdicts
    given = of_rounded_output()
    return {name: judge(found[name], expected[name], low[name], given=given[name]) for name in expected}


def same_bits(one: Array, other: Array) -> bool:
    """Returns whether two arrays have the same bits. NaNs of different bits differ, as do zeros of different sign."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
