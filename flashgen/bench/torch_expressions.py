"""The language's expressions as torch operations, so that FlexAttention can be measured on any spec."""

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
    ops.Not: "logical_not",
    ops.Where: "where",
}
_BOUNDS = {ops.Minimum: "max", ops.Maximum: "min"}  # torch.clamp's own names for them
_CASTS = {ops.ToFloat: "float", ops.ToInt: "int"}


def evaluate(node: sympy.Basic, values: Mapping[sympy.Basic, Any], captures: Mapping[str, Any]) -> Any:
    """The value of a node, given tensors (or numbers) for its symbols and its captures."""
    import torch

    if node in values:
        return values[node]
    if isinstance(node, Capture):
        return captures[node.name]
    if isinstance(node, (sympy.Integer, sympy.Float)):
        return int(node) if isinstance(node, sympy.Integer) else float(node)
    if node in (sympy.true, sympy.false):
        return node == sympy.true
    if isinstance(node, Load):
        return captures[node.capture.name][tuple(evaluate(index, values, captures) for index in node.indices)]
    operands = [evaluate(operand, values, captures) for operand in node.args]
    if type(node) in _OPERATORS:
        return _OPERATORS[type(node)](*operands)
    if type(node) in _CASTS:
        return getattr(operands[0], _CASTS[type(node)])()
    if type(node) in _BOUNDS:
        return _bounded(node, operands)
    return getattr(torch, _FUNCTIONS[type(node)])(*operands)


def _bounded(node: sympy.Basic, operands: list[Any]) -> Any:
    import torch

    left, right = operands
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return (torch.minimum if isinstance(node, ops.Minimum) else torch.maximum)(left, right)
    tensor, bound = (left, right) if isinstance(left, torch.Tensor) else (right, left)
    return torch.clamp(tensor, **{_BOUNDS[type(node)]: bound})


def mask_function(spec: Any, len_q: int, len_k: int, captures: Mapping[str, Any]) -> Callable[..., Any]:
    """FlexAttention's mask_mod of a spec."""

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return evaluate(spec.mask.expression, _indices(b, h, q, k, len_q, len_k), captures)

    return mask


def score_function(spec: Any, len_q: int, len_k: int, captures: Mapping[str, Any]) -> Callable[..., Any]:
    """FlexAttention's score_mod of a spec."""

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return evaluate(spec.score.expression, _indices(b, h, q, k, len_q, len_k) | {ops.SCORE: s}, captures)

    return score


def _indices(b: Any, h: Any, q: Any, k: Any, len_q: int, len_k: int) -> dict[sympy.Basic, Any]:
    values = (b, h, q, k, len_q, len_k)
    return dict(zip((*ops.INDICES, ops.LEN_Q, ops.LEN_K), values, strict=True))
