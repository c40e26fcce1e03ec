"""Translates expressions of the language to torch operations, so that FlexAttention can run any spec."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy

from flashgen.language import operations as ops
from flashgen.language.operations import Capture, Load

_OPERATORS: dict[type, Callable[..., Any]] = {
    ops.Add: operator.add,
    ops.Sub: operator.sub,
    ops.Mul: operator.mul,
    ops.Neg: operator.neg,
    ops.Abs: abs,
    ops.FloorDiv: operator.floordiv,
    ops.FloorMod: operator.mod,
    ops.ShiftLeft: operator.lshift,
    ops.ShiftRight: operator.rshift,
    ops.BitAnd: operator.and_,
    ops.BitOr: operator.or_,
    ops.BitXor: operator.xor,
    ops.Divide: operator.truediv,
    ops.Equal: operator.eq,
    ops.NotEqual: operator.ne,
    ops.Less: operator.lt,
    ops.LessEqual: operator.le,
    ops.Greater: operator.gt,
    ops.GreaterEqual: operator.ge,
    ops.And: operator.and_,
    ops.Or: operator.or_,
    ops.Xor: operator.xor,
}
_FUNCTIONS = {
    ops.Floor: "floor",
    ops.Exp: "exp",
    ops.Exp2: "exp2",
    ops.Log: "log",
    ops.Log2: "log2",
    ops.Tanh: "tanh",
    ops.FastTanh: "tanh",
    ops.Sigmoid: "sigmoid",
    ops.Sqrt: "sqrt",
    ops.Sin: "sin",
    ops.Cos: "cos",
    ops.Detach: "detach",
    ops.Not: "logical_not",
    ops.Where: "where",
}
_BOUNDS = (ops.Minimum, ops.Maximum)
_CASTS = {ops.ToFloat: "float", ops.ToInt: "int"}


Term = Callable[[dict[str, Any]], Any]


def _term(node: sympy.Basic, constants: Mapping[sympy.Basic, Any], captures: Mapping[str, Any]) -> Term:
    """Returns a function from indices by name to the value of the node.

    The function consists of plain closures without SymPy objects, so that torch.compile can trace it.
    """
    if node in constants:
        constant = constants[node]
        return lambda _: constant
    if isinstance(node, sympy.Symbol):
        name = node.name
        return lambda indices: indices[name]
    if isinstance(node, Capture):
        captured = captures[node.name]
        return lambda _: captured
    if node in (sympy.true, sympy.false) or isinstance(node, (sympy.Integer, sympy.Float)):
        literal = _literal(node)
        return lambda _: literal
    if isinstance(node, Load):
        array = captures[node.capture.name]
        terms = [_term(index, constants, captures) for index in node.indices]
        return lambda indices: array[tuple(term(indices) for term in terms)]
    operands = [_term(operand, constants, captures) for operand in node.args]
    apply = _function(node)
    return lambda indices: apply(*[operand(indices) for operand in operands])


def _literal(node: sympy.Basic) -> Any:
    if node in (sympy.true, sympy.false):
        return node == sympy.true
    return int(node) if isinstance(node, sympy.Integer) else float(node)


def _function(node: sympy.Basic) -> Callable[..., Any]:
    import torch

    kind = type(node)
    if kind in _OPERATORS:
        return _OPERATORS[kind]
    if kind in _CASTS:
        return operator.methodcaller(_CASTS[kind])
    if kind is ops.Surrogate:
        return lambda value, of, factor: value + factor.detach() * (of - of.detach())
    if kind in _BOUNDS:
        return _minimum if kind is ops.Minimum else _maximum
    return getattr(torch, _FUNCTIONS[kind])


def _minimum(left: Any, right: Any) -> Any:
    import torch

    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.minimum(left, right)
    return left.clamp(max=right) if isinstance(left, torch.Tensor) else right.clamp(max=left)


def _maximum(left: Any, right: Any) -> Any:
    import torch

    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.maximum(left, right)
    return left.clamp(min=right) if isinstance(left, torch.Tensor) else right.clamp(min=left)


def mask_function(spec: Any, len_q: int, len_k: int, captures: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the mask_mod of FlexAttention for a spec."""
    term = _term(spec.mask.expression, {ops.LEN_Q: len_q, ops.LEN_K: len_k}, captures)

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return term({"b": b, "h": h, "q": q, "k": k})

    return mask


def score_function(spec: Any, len_q: int, len_k: int, captures: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the score_mod of FlexAttention for a spec."""
    term = _term(spec.score.expression, {ops.LEN_Q: len_q, ops.LEN_K: len_k}, captures)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return term({"score": s, "b": b, "h": h, "q": q, "k": k})

    return score
