"""Evaluates expressions in NumPy, on arrays of indices, scores and captures: the meaning of every operation.

Integers are int64 and wrap, as in kernels. Floats are float64, so that float32 kernels can be judged by this reference.
The exception is decisive floats (language/decisive.py), which include all floats of a mask: they are float32 as in
kernels, bit for bit where they consist of + - * /, sqrt, floor and conversions. Shapes broadcast lazily: a mask that
reads only q and k stays (len_q, len_k) whatever the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
import sympy

from flashgen.dtypes import numpy_dtype
from flashgen.errors import ArgumentError
from flashgen.language import operations as ops
from flashgen.language.decisive import deciding_steps
from flashgen.language.operations import Capture, Operation, kind_of

Array = np.ndarray[Any, Any]

_WIDE = {"bool": np.bool_, "int": np.int64, "float": np.float64}
_INT32 = np.iinfo(np.int32)
# Functions that IEEE 754 requires to be correctly rounded: they have the same float32 value on every machine.
_ROUNDED = (ops.Divide, ops.ToFloat, ops.Floor, ops.Sqrt)


def evaluate(node: sympy.Basic, values: Mapping[sympy.Basic, Any], captures: Mapping[str, Any] | None = None) -> Array:
    """Returns the value of an expression.

    Args:
        node: An expression of the language.
        values: An array or number for each symbol that the expression reads (BATCH, ..., LEN_K, SCORE). They must
            broadcast with each other.
        captures: An array or number for each capture, by name. It is converted to the dtype of the capture.

    Returns:
        A bool, int64 or float64 array of the broadcast shape of everything that the expression reads; () for a
        constant.

    Raises:
        ArgumentError: A capture or value is missing, or a capture has the wrong number of dimensions.
    """
    evaluation = _Evaluation(values, captures or {}, _shared(node), deciding_steps(node))
    with np.errstate(all="ignore"):  # both branches of a Where are computed, also for elements that do not select them
        value = np.asarray(evaluation.value(node))
    return value.astype(np.float64) if value.dtype == np.float32 else value


def evaluate_operation(
    node: Operation, single: bool, value_of: Callable[[sympy.Basic, bool], Any], steps: Container[sympy.Basic]
) -> Any:
    """Returns the value of an operation.

    Args:
        node: The operation.
        single: Whether to compute in float32.
        value_of: Returns the value of an operand, in float32 if its second argument is true.
        steps: The deciding steps of the expression, which are always computed in float32.
    """
    if node in steps and not single and isinstance(node, ops.FloorMod):
        # Only the floor is discontinuous; the rest is ordinary arithmetic.
        a, b = (np.asarray(value_of(operand, False)).astype(np.float64) for operand in node.args)
        quotient = _in_single(ops.FloorDiv(*node.args), [value_of(operand, True) for operand in node.args])
        return a - b * np.float64(quotient)
    single = single or node in steps
    operands = [value_of(operand, single) for operand in node.args]
    if single:
        return _in_single(node, operands)
    if isinstance(node, (ops.Arithmetic, ops.Transcendental)):
        # Booleans count as 0 and 1: NumPy's own rules for them (True + True is True) do not apply.
        wide = np.float64 if "float" in map(kind_of, node.args) else np.int64
        operands = [np.asarray(operand).astype(wide, copy=False) for operand in operands]
    return MEANINGS[type(node)](*operands)


def _in_single(node: Operation, operands: Sequence[Any]) -> Any:
    if isinstance(node, ops.Load):
        return MEANINGS[ops.Load](*operands)  # float32 represents any float of a capture
    singles = [np.asarray(operand).astype(np.float32, copy=False) for operand in operands]
    if isinstance(node, ops.Where):
        return np.where(operands[0], *singles[1:])
    if isinstance(node, ops.Transcendental) and not isinstance(node, _ROUNDED):
        # NumPy's own float32 functions differ between machines in the last bits.
        return np.float32(MEANINGS[type(node)](*map(np.float64, singles)))
    return MEANINGS[type(node)](*singles)


def _shared(node: sympy.Basic) -> frozenset[sympy.Basic]:
    """Returns the operations that occur more than once. Their values are cached; all others are freed after use."""
    counts: Counter[sympy.Basic] = Counter()
    stack = [node]
    while stack:
        current = stack.pop()
        counts[current] += 1
        if counts[current] == 1 and isinstance(current, Operation):
            stack.extend(current.args)
    return frozenset(item for item, count in counts.items() if count > 1)


class _Evaluation:
    def __init__(
        self,
        values: Mapping[sympy.Basic, Any],
        captures: Mapping[str, Any],
        shared: frozenset[sympy.Basic],
        steps: frozenset[sympy.Basic],
    ) -> None:
        self.values, self.captures, self.shared, self.steps = values, captures, shared, steps
        self.cache: dict[tuple[sympy.Basic, bool], Any] = {}

    def value(self, node: sympy.Basic, single: bool = False) -> Any:
        """Returns the value of a node. With `single`, floats are float32, because a deciding step reads them."""
        key = node, single and kind_of(node) == "float"
        if key in self.cache:
            return self.cache[key]
        result = evaluate_operation(*key, self.value, self.steps) if isinstance(node, Operation) else self._leaf(node)
        if node in self.shared:
            self.cache[key] = result
        return result

    def _leaf(self, node: sympy.Basic) -> Any:
        if isinstance(node, Capture):
            return self._capture(node)
        if isinstance(node, sympy.Symbol):
            if node not in self.values:
                raise ArgumentError(f"the expression reads {node}, and no value was given for it")
            return np.asarray(self.values[node]).astype(_WIDE[kind_of(node)], copy=False)
        if kind_of(node) == "bool":
            return np.bool_(node == sympy.true)
        return np.int64(int(node)) if kind_of(node) == "int" else np.float64(float(node))

    def _capture(self, capture: Capture) -> Array:
        if capture.name not in self.captures:
            raise ArgumentError(f"capture {capture.name!r} is missing: give {capture.name}=... at the call")
        array = np.asarray(self.captures[capture.name])
        if array.ndim != capture.ndim:
            raise ArgumentError(
                f"capture {capture.name!r} has {array.ndim} dimensions, declared with ndim={capture.ndim}"
            )
        rounded = array.astype(numpy_dtype(capture.dtype), copy=False)
        return rounded if capture.ndim else rounded.astype(_WIDE[capture.kind])


def _load(array: Array, *indices: Any) -> Array:
    clamped = np.broadcast_arrays(
        *(np.clip(index, 0, size - 1) for index, size in zip(indices, array.shape, strict=True))
    )
    if clamped[0].size and not array.size:
        raise ArgumentError(f"a captured array has shape {array.shape}: nothing can be read from it")
    loaded = array[tuple(clamped)]
    kind = "bool" if array.dtype == np.bool_ else "int" if np.issubdtype(array.dtype, np.integer) else "float"
    return np.asarray(loaded).astype(_WIDE[kind], copy=False)


def _maximum(a: Any, b: Any) -> Any:
    """Returns the larger value. Of two zeros that differ in sign it is +0.0; of NaN and a number it is the number.

    This is maximumNumber of IEEE 754-2019, and PTX's max. NumPy's fmax may return either zero.
    """
    larger = np.fmax(a, b)
    return larger if larger.dtype.kind != "f" else np.where((a == 0) & (b == 0), a + b, larger)


def _minimum(a: Any, b: Any) -> Any:
    """Returns the smaller value, the counterpart of `_maximum`: -0.0 for two zeros that differ in sign."""
    smaller = np.fmin(a, b)
    return smaller if smaller.dtype.kind != "f" else np.where((a == 0) & (b == 0), -(-a - b), smaller)


def _floor_divide(a: Any, b: Any) -> Any:
    """Floored division. An integer divided by 0 gives 0; floats give floor(a / b)."""
    if a.dtype == np.int64:
        return np.where(b == 0, 0, np.floor_divide(a, np.where(b == 0, 1, b)))
    return np.floor(np.divide(a, b))


def _floor_modulo(a: Any, b: Any) -> Any:
    """Returns a - b·floor(a / b). An integer modulo 0 gives 0."""
    if a.dtype == np.int64:
        return np.where(b == 0, 0, np.mod(a, np.where(b == 0, 1, b)))
    return a - b * np.floor(np.divide(a, b))


def _shift(shift: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, amount: shift(a, np.clip(amount, 0, 31))


def _to_int(a: Any) -> Any:
    """Rounds towards zero and saturates to int32; NaN gives 0. These are the rules of a GPU's conversion."""
    a = np.asarray(a)
    if a.dtype.kind != "f":
        return a.astype(np.int64)
    a = a.astype(np.float64)  # unlike float32, float64 represents both limits of int32 exactly
    rounded = np.trunc(np.clip(np.nan_to_num(a, nan=0.0, posinf=np.inf, neginf=-np.inf), _INT32.min, _INT32.max))
    return rounded.astype(np.int64)


def _to_float(a: Any) -> Any:
    return a if np.asarray(a).dtype.kind == "f" else np.float64(a)


def _comparison(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: compare(_as_number(a), _as_number(b))


def _as_number(a: Any) -> Any:
    a = np.asarray(a)
    return a.astype(np.int64) if a.dtype == np.bool_ else a


# fmt: off
MEANINGS: dict[type[Operation], Callable[..., Any]] = {
    ops.Add: np.add, ops.Sub: np.subtract, ops.Mul: np.multiply, ops.Neg: np.negative, ops.Abs: np.abs,
    ops.Minimum: _minimum, ops.Maximum: _maximum, ops.FloorDiv: _floor_divide, ops.FloorMod: _floor_modulo,
    ops.ShiftLeft: _shift(np.left_shift), ops.ShiftRight: _shift(np.right_shift),
    ops.BitAnd: np.bitwise_and, ops.BitOr: np.bitwise_or, ops.BitXor: np.bitwise_xor,
    ops.Divide: np.divide, ops.ToFloat: _to_float, ops.ToInt: _to_int, ops.Floor: np.floor,
    ops.Exp: np.exp, ops.Exp2: np.exp2, ops.Log: np.log, ops.Log2: np.log2, ops.Tanh: np.tanh,
    ops.FastTanh: np.tanh,
    ops.Sigmoid: lambda a: 1 / (1 + np.exp(-a)), ops.Sqrt: np.sqrt, ops.Sin: np.sin, ops.Cos: np.cos,
    ops.Detach: lambda a: a, ops.Surrogate: lambda a, b, c: a,
    ops.Equal: _comparison(np.equal), ops.NotEqual: _comparison(np.not_equal), ops.Less: _comparison(np.less),
    ops.LessEqual: _comparison(np.less_equal), ops.Greater: _comparison(np.greater),
    ops.GreaterEqual: _comparison(np.greater_equal), ops.And: np.logical_and, ops.Or: np.logical_or,
    ops.Xor: np.logical_xor, ops.Not: np.logical_not, ops.Where: np.where, ops.Load: _load,
}
# fmt: on
