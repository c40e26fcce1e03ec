"""Evaluates terms by the documentation of the language, and shares no code with the evaluation of the oracle.

Integers are exact to 64 bits, and wrap beyond. Floats decide in masks, and where a comparison, a floor or a conversion
of a score function reads them: those are float32's, one rounding an operation. The others are exact up to float64's
rounding, or complex numbers whose imaginary part carries a derivative (a complex step).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from random_variants.definitions import definition
from random_variants.terms import ARITHMETIC, BITS, COMPARISONS, INDICES, LITERALS, LOGIC, SYMBOLS, Kind, Term

Array = np.ndarray[Any, Any]

_LEAST, _MOST = -(2**31), 2**31 - 1  # the ends of a conversion to int
_STEPS = (*COMPARISONS, "floor", "//", "to_int")
# What a kernel computes exactly of its operands. Everything else it rounds to float32, by instructions that are off by
# an ulp or two; some functions have an absolute error besides.
_EXACT = ("score", "min", "max", "abs", "neg", "where")
_RELATIVE = 2.0**-22
_TANH = 1e-6  # as the accurate one is documented
_ABSOLUTE = {"tanh": _TANH, "log": 2.0**-21, "log2": 2.0**-21}
_STEP = 1e-30  # the complex step: its square is lost in any sum, so that the derivative has no error of its own


class Value(NamedTuple):
    """Elements of one kind: bool, int64 or the floats of the evaluation, broadcast to (batch, heads, len_q, len_k)."""

    kind: Kind
    data: Array


class Sizes(NamedTuple):
    """What a call is evaluated over."""

    batch: int
    heads: int
    len_q: int
    len_k: int


def _reads_score(term: Term) -> bool:
    return any(part.op == "score" for part in term.walk())


class Meaning:
    """Evaluates terms over all elements of a call.

    Args:
        sizes: the call's; heads are query heads.
        captures: a number or array for each capture, by name.
        real: np.float32 for masks, np.float64 for scores.
        score: scores (batch, heads, len_q, len_k), for the terms that read them.
        error: 1 or -1 for an evaluation in which each operation on the score is off by what a kernel's may be, upwards
            or downwards.
    """

    def __init__(
        self,
        sizes: Sizes,
        captures: Mapping[str, Any],
        real: Any = np.float32,
        score: Array | None = None,
        error: float = 0.0,
    ) -> None:
        self.sizes, self.captures, self.real, self.score, self.error = sizes, captures, real, score, error
        self.largest = 0.0  # the largest finite magnitude among what depends on the score
        self.seed: Term | None = None
        self._known: dict[Term, Value] = {}

    def of(self, term: Term) -> Array:
        """The elements, not broadcast further than they depend on the indices."""
        with np.errstate(all="ignore"):
            return self._value(term).data

    def derivative(self, term: Term, seed: Term, error: float = 0.0) -> Array:
        """The derivative of a float term by a seed: Term("score"), or a load taken for a variable of its own."""
        tangent = Meaning(self.sizes, self.captures, np.complex128, self.score, error)
        tangent.seed = seed
        return np.asarray(tangent.of(term)).imag / _STEP

    def _value(self, term: Term) -> Value:
        defined = None if term in self._known else definition(term, lambda name: np.ndim(self.captures[name]))
        if defined:
            self._known[term] = self._value(defined)
        elif term not in self._known:
            value = self._erring(term, self._operation(term))
            if term == self.seed:
                value = Value("float", value.data + 1j * _STEP)
            self._known[term] = value
            self._watch(term, value)
        return self._known[term]

    def _erring(self, term: Term, value: Value) -> Value:
        """The value with the evaluation's error, if the term is an operation on the score."""
        if not self.error or term.op in _EXACT or value.kind != "float" or not _reads_score(term):
            return value
        absolute = _ABSOLUTE.get(term.op, 0.0)
        if term.op == "softcap" and "accurate" in term.args:
            absolute = _TANH * np.abs(np.real(self._value(term.args[1]).data))
        magnitude = np.abs(np.real(value.data))
        off = np.where(np.isfinite(magnitude), _RELATIVE * magnitude + absolute, 0.0)
        return Value("float", value.data + self.error * off)

    def _watch(self, term: Term, value: Value) -> None:
        if value.kind == "float" and value.data.size and _reads_score(term):
            finite = np.abs(value.data[np.isfinite(value.data)])
            self.largest = max(self.largest, float(finite.max(initial=0)))

    def _operation(self, term: Term) -> Value:
        op = term.op
        if op in LITERALS:
            return self._literal(term)
        if op in SYMBOLS:
            return self._symbol(op)
        if op == "scalar":
            return self._captured(self.captures[term.args[0]])
        if op == "load":
            return self._loaded(term.args[0], *(self._value(index).data for index in term.args[1:]))
        if op == "softcap":
            inner, cap = self.of(term.args[0]), self.of(term.args[1])
            return Value("float", cap * np.tanh(inner / cap))
        if self._decides(term):
            decided = self._deciding._value(term)
            return Value(decided.kind, self._as("float", decided) if decided.kind == "float" else decided.data)
        operands = [self._value(operand) for operand in term.terms]
        if op == "%" and "float" in (operand.kind for operand in operands):
            a, b = (self._as("float", operand) for operand in operands)
            return Value("float", a - b * self._as("float", self._value(Term("//", *term.args))))
        return self._computed(op, operands)

    def _decides(self, term: Term) -> bool:
        """Whether the term is a step that reads floats which do not depend on the score."""
        if self.real == np.float32 or term.op not in _STEPS or _reads_score(term):
            return False
        return "float" in (self._value(operand).kind for operand in term.terms)

    @cached_property
    def _deciding(self) -> Meaning:
        """The evaluation that computes deciding floats."""
        return Meaning(self.sizes, self.captures, np.float32)

    def _literal(self, term: Term) -> Value:
        kind, value = term.op, term.args[0]
        if kind == "float":
            return self._float(np.float64(value))
        return Value(kind, np.asarray(value, np.bool_ if kind == "bool" else np.int64))

    def _symbol(self, name: str) -> Value:
        if name == "score":
            assert self.score is not None, "a mask reads no score"
            return Value("float", self.score.astype(self.real))
        if name not in INDICES:
            return Value("int", np.asarray(getattr(self.sizes, name), np.int64))
        axis = INDICES.index(name)
        shape = [-1 if own == axis else 1 for own in range(4)]
        return Value("int", np.arange(self.sizes[axis], dtype=np.int64).reshape(shape))

    def _float(self, data: Any) -> Value:
        """A float, rounded to float32 first where the evaluation computes in that."""
        return Value("float", np.asarray(data).astype(self.real))

    def _captured(self, value: Any) -> Value:
        data = np.asarray(value)
        if data.dtype == np.bool_:
            return Value("bool", data)
        if data.dtype.kind in "iu":
            return Value("int", data.astype(np.int64))
        return self._float(data.astype(np.float32))

    def _loaded(self, name: str, *indices: Array) -> Value:
        """A load, with each index clamped to its dimension."""
        array = np.asarray(self.captures[name])
        places = tuple(
            np.minimum(np.maximum(index, 0), size - 1) for index, size in zip(indices, array.shape, strict=True)
        )
        return self._captured(array[places])

    def _computed(self, op: str, operands: list[Value]) -> Value:
        if op == "where":
            return self._where(*operands)
        if op in LOGIC or op == "not":
            return Value("bool", _LOGIC[op](*(operand.data for operand in operands)))
        kind: Kind = "float" if any(operand.kind == "float" for operand in operands) else "int"
        if op in COMPARISONS:
            left, right = (self._as(kind, operand) for operand in operands)
            return Value("bool", _COMPARE[op](np.real(left), np.real(right)))
        if op == "to_int":
            return self._to_int(operands[0])
        if op in BITS or (kind == "int" and op in (*ARITHMETIC, "neg", "abs")):
            return Value("int", _INTEGERS[op](*(self._as("int", operand) for operand in operands)))
        return Value("float", _FLOATS[op](*(self._as("float", operand) for operand in operands)))

    def _where(self, condition: Value, then: Value, otherwise: Value) -> Value:
        kinds = {then.kind, otherwise.kind}
        kind: Kind = "float" if "float" in kinds else "int" if "int" in kinds else "bool"
        return Value(kind, np.where(condition.data, self._as(kind, then), self._as(kind, otherwise)))

    def _as(self, kind: Kind, value: Value) -> Array:
        """A value converted to another kind: a boolean becomes 0 or 1, an integer the nearest float."""
        kinds = {"bool": np.bool_, "int": np.int64, "float": self.real}
        return value.data.astype(kinds[kind], copy=False)

    def _to_int(self, value: Value) -> Value:
        """Rounds towards zero, saturates beyond int32, and makes 0 of NaN."""
        if value.kind != "float":
            return Value("int", value.data.astype(np.int64))
        number = np.where(np.isnan(np.real(value.data)), 0, np.real(value.data)).astype(np.float64)
        return Value("int", np.trunc(np.clip(number, _LEAST, _MOST)).astype(np.int64))


# The operations, by their docstrings ---------------------------------------------------------------------------------


def _integer_division(a: Array, b: Array) -> Array:
    """A floored division that gives 0 where the divisor is 0."""
    return np.where(b == 0, 0, a // np.where(b == 0, 1, b))


def _chosen(condition: Array, a: Array, b: Array) -> Array:
    return np.where(condition, a, b)


def _larger(a: Array, b: Array) -> Array:
    """The larger, -0.0 being less than 0.0; the other where one is NaN. Where both are equal, each has half of the
    slope."""
    left, right = np.real(a), np.real(b)
    first = (left > right) | np.isnan(right) | ((left == right) & ~np.signbit(left))
    larger = np.array(np.where(first, a, b))
    if larger.dtype.kind == "c":
        larger.imag = np.where(left == right, 0.5 * np.imag(a) + 0.5 * np.imag(b), larger.imag)
    return larger


def _smaller(a: Array, b: Array) -> Array:
    return -_larger(-a, -b)


def _magnitude(a: Array) -> Array:
    return np.where(np.real(a) < 0, -a, np.where(np.real(a) == 0, np.abs(np.real(a)), a)).astype(a.dtype)


def _floored(a: Array) -> Array:
    return np.floor(np.real(a)).astype(a.dtype)


def _shifted_by(amount: Array) -> Array:
    return np.minimum(np.maximum(amount, 0), 31)


_LN2 = float(np.log(2))
_LOGIC: dict[str, Callable[..., Array]] = {
    "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not,
}  # fmt: skip
_COMPARE: dict[str, Callable[..., Array]] = {
    "==": np.equal, "!=": np.not_equal, "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
}  # fmt: skip
_INTEGERS: dict[str, Callable[..., Array]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "neg": lambda a: -a,
    "abs": lambda a: np.where(a < 0, -a, a), "min": lambda a, b: _chosen(a <= b, a, b),
    "max": lambda a, b: _chosen(a >= b, a, b), "//": _integer_division,
    "%": lambda a, b: np.where(b == 0, 0, a - b * _integer_division(a, b)),
    "<<": lambda a, amount: a * 2 ** _shifted_by(amount), ">>": lambda a, amount: a // 2 ** _shifted_by(amount),
    "&": lambda a, b: a & b, "|": lambda a, b: a | b, "^": lambda a, b: a ^ b,
}  # fmt: skip
_FLOATS: dict[str, Callable[..., Array]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b,
    "neg": lambda a: -a, "abs": _magnitude, "min": _smaller, "max": _larger, "//": lambda a, b: _floored(a / b),
    "floor": _floored, "to_float": lambda a: a, "sqrt": np.sqrt,
    "exp": np.exp, "exp2": lambda a: np.exp(a * _LN2), "log": np.log, "log2": lambda a: np.log(a) / _LN2,
    "tanh": np.tanh, "fast_tanh": np.tanh, "sigmoid": lambda a: 0.5 + 0.5 * np.tanh(0.5 * a),
    "sin": np.sin, "cos": np.cos,
}  # fmt: skip
