"""The meaning of every operation in NumPy: what an expression is on arrays of indices, scores and captures.

Integers are int64 and wrap, as a kernel's do. Floats are float64, so that this is the oracle that float32 kernels are
judged by; but those that decide (language/decisive.py: all of a mask's) are float32 like the kernel's, bit by bit as
far as they are made of + - * /, sqrt, floor and conversions. Shapes broadcast lazily: a mask of q and k alone stays
(len_q, len_k) whatever the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
import sympy

from flashgen.errors import ArgumentError
from flashgen.language import operations as ops
from flashgen.language.decisive import deciding_steps
from flashgen.language.operations import Capture, Operation, kind_of

Array = np.ndarray[Any, Any]

_WIDE = {"bool": np.bool_, "int": np.int64, "float": np.float64}
_INT32 = np.iinfo(np.int32)
# Functions that IEEE 754 rounds correctly: they have the same float32 value on every machine.
_ROUNDED = (ops.Divide, ops.ToFloat, ops.Floor, ops.Sqrt)


def evaluate(node: sympy.Basic, values: Mapping[sympy.Basic, Any], captures: Mapping[str, Any] | None = None) -> Array:
    """The value of an expression.

    Args:
        node: an expression of the language.
        values: an array or number for each symbol that the expression reads (BATCH, ..., LEN_K, SCORE), broadcastable
            with each other.
        captures: an array or number for each capture, by name; converted to the capture's dtype.

    Returns a bool, int64 or float64 array of the broadcast shape of what the expression reads; () for a constant.
    Raises ArgumentError for a missing capture or value, or a capture of the wrong dimensions.
    """
    evaluation = _Evaluation(values, captures or {}, _shared(node), deciding_steps(node))
    with np.errstate(all="ignore"):  # both sides of a Where are computed, also where they are not wanted
        value = np.asarray(evaluation.of(node))
    return value.astype(np.float64) if value.dtype == np.float32 else value


def computed(
    node: Operation, single: bool, of: Callable[[sympy.Basic, bool], Any], steps: Container[sympy.Basic]
) -> Any:
    """The value of an operation, in float32 if `single`, given what its operands are and which steps decide."""
    if node in steps and not single and isinstance(node, ops.FloorMod):
        # The floor alone steps; the rest is ordinary arithmetic.
        a, b = (np.asarray(of(operand, False)).astype(np.float64) for operand in node.args)
        return a - b * np.float64(_in_single(ops.FloorDiv(*node.args), [of(operand, True) for operand in node.args]))
    single = single or node in steps
    operands = [of(operand, single) for operand in node.args]
    if single:
        return _in_single(node, operands)
    if isinstance(node, (ops.Arithmetic, ops.Transcendental)):
        # Booleans count as 0 and 1, and NumPy's own rules for them (True + True is True) do not apply.
        wide = np.float64 if "float" in map(kind_of, node.args) else np.int64
        operands = [np.asarray(operand).astype(wide, copy=False) for operand in operands]
    return MEANINGS[type(node)](*operands)


def _in_single(node: Operation, operands: Sequence[Any]) -> Any:
    if isinstance(node, ops.Load):
        return MEANINGS[ops.Load](*operands)  # float32 holds any float that a capture may hold
    singles = [np.asarray(operand).astype(np.float32, copy=False) for operand in operands]
    if isinstance(node, ops.Where):
        return np.where(operands[0], *singles[1:])
    if isinstance(node, ops.Transcendental) and not isinstance(node, _ROUNDED):
        # NumPy's own float32 functions differ from machine to machine in the last bits.
        return np.float32(MEANINGS[type(node)](*map(np.float64, singles)))
    return MEANINGS[type(node)](*singles)


def _shared(node: sympy.Basic) -> frozenset[sympy.Basic]:
    """Operations that occur more than once: their values are kept, all others freed as soon as they are used."""
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
        self.known: dict[tuple[sympy.Basic, bool], Any] = {}

    def of(self, node: sympy.Basic, single: bool = False) -> Any:
        """The value of a node; `single`: a step reads it, so that a float is computed in float32."""
        place = node, single and kind_of(node) == "float"
        if place in self.known:
            return self.known[place]
        result = computed(*place, self.of, self.steps) if isinstance(node, Operation) else self._leaf(node)
        if node in self.shared:
            self.known[place] = result
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
        rounded = array.astype(_dtype(capture.dtype), copy=False)
        return rounded if capture.ndim else rounded.astype(_WIDE[capture.kind])


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


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
    """The larger: +0.0 of two zeros that differ in their sign, and the number where the other operand is NaN.

    That is IEEE 754-2019's maximumNumber, and PTX's max; NumPy's fmax gives either zero.
    """
    larger = np.fmax(a, b)
    return larger if larger.dtype.kind != "f" else np.where((a == 0) & (b == 0), a + b, larger)


def _minimum(a: Any, b: Any) -> Any:
    """The smaller, as `_maximum` is the larger: -0.0 of two zeros that differ in their sign."""
    smaller = np.fmin(a, b)
    return smaller if smaller.dtype.kind != "f" else np.where((a == 0) & (b == 0), -(-a - b), smaller)


def _floor_divide(a: Any, b: Any) -> Any:
    """Floored division: of integers by 0 it is 0; of floats it is floor(a / b)."""
    if a.dtype == np.int64:
        return np.where(b == 0, 0, np.floor_divide(a, np.where(b == 0, 1, b)))
    return np.floor(np.divide(a, b))


def _floor_modulo(a: Any, b: Any) -> Any:
    """a - b·floor(a / b): of integers by 0 it is 0."""
    if a.dtype == np.int64:
        return np.where(b == 0, 0, np.mod(a, np.where(b == 0, 1, b)))
    return a - b * np.floor(np.divide(a, b))


def _shift(shift: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, amount: shift(a, np.clip(amount, 0, 31))


def _to_int(a: Any) -> Any:
    """Towards zero, saturating to int32; NaN is 0: what a GPU's conversion gives."""
    a = np.asarray(a)
    if a.dtype.kind != "f":
        return a.astype(np.int64)
    a = a.astype(np.float64)  # which, unlike float32, holds the ends of int32
    whole = np.trunc(np.clip(np.nan_to_num(a, nan=0.0, posinf=np.inf, neginf=-np.inf), _INT32.min, _INT32.max))
    return whole.astype(np.int64)


def _to_float(a: Any) -> Any:
    return a if np.asarray(a).dtype.kind == "f" else np.float64(a)


def _comparison(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: compare(_counted(a), _counted(b))


def _counted(a: Any) -> Any:
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
