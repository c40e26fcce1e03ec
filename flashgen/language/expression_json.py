"""Converts expressions to canonical JSON and back: the same text in every process and on every machine.

A node is a list, ["Add", a, b]. Leaves are integers, {"float": "0x1.8p+1"}, true, false, the names of the symbols, and
{"capture": "slopes", "dtype": "float32", "grad": false, "ndim": 1}. Loading raises SpecError for unknown operations and
for wrong arity, kinds, names and sizes.

The text that tracing records (`trace.Traced`) has four more forms, for values that are kept beside the text: "#i" and
"#f" stand for an integer and a float, ["T", dtype, ndim, grad] for an array, and ["At", expression, operands] for the
expression of a mask or score with the operands in place of its indices.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import sympy

from flashgen.errors import SpecError
from flashgen.language import operations as ops
from flashgen.language.declarations import array_capture, number_capture
from flashgen.language.operations import OPERATIONS, Capture, Operation
from flashgen.language.well_formed import MAX_DEPTH, MAX_NODES, SYMBOLS, build, literal
from flashgen.strict_json import parse_json

SHARD_B, SHARD_H, SHARD_Q, SHARD_K = (Capture(f"shard_{index}", "int32", 0) for index in "bhqk")
WHOLE_Q, WHOLE_K = (Capture(f"whole_{index}", "int32", 0) for index in "qk")
SHARD_NUMBERS = {capture.name: capture for capture in (SHARD_B, SHARD_H, SHARD_Q, SHARD_K, WHOLE_Q, WHOLE_K)}
"""The positions and lengths that a sharded call supplies, by name. Users may not declare captures of these names."""

INTEGER, FLOAT, ARRAY, AT = "#i", "#f", "T", "At"
_SYMBOLS = {symbol.name: symbol for symbol in SYMBOLS}


def canonical(value: Any) -> str:
    """Returns JSON text with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def node_to_data(node: sympy.Basic) -> Any:
    """Returns the node as lists, dicts and scalars that `json` can write."""
    if isinstance(node, Operation):
        return [type(node).__name__, *(node_to_data(operand) for operand in node.args)]
    if isinstance(node, Capture):
        return {"capture": node.name, "dtype": node.dtype, "ndim": node.ndim, "grad": node.grad}
    if isinstance(node, sympy.Symbol):
        return node.name
    if node in (sympy.true, sympy.false):
        return bool(node)
    return int(node) if isinstance(node, sympy.Integer) else {"float": float(node).hex()}


def node_from_data(data: Any) -> sympy.Basic:
    """Returns the node for the result of `node_to_data`. Raises SpecError for data that tracing could not produce."""
    return _Loader().node(data, 1)


def node_from_trace(text: str, numbers: Iterable[sympy.Basic], arrays: Iterable[Capture]) -> sympy.Basic:
    """Returns the node of a traced text, with its numbers and the captures of its arrays in the order of the text."""
    try:
        data = parse_json(text)
    except ValueError:  # nested deeper than parse_json accepts
        raise SpecError(f"the expression is too large: more than {MAX_DEPTH} levels; unroll less") from None
    return _TraceLoader(numbers, arrays).node(data, 1)


class _Loader:
    """Loads one expression, and counts its nodes."""

    def __init__(self) -> None:
        self.count = 0

    def node(self, data: Any, depth: int) -> sympy.Basic:
        self.count += 1
        if depth > MAX_DEPTH or self.count > MAX_NODES:
            raise SpecError(f"JSON expression too large: more than {MAX_DEPTH} levels or {MAX_NODES} operations")
        if isinstance(data, list):
            return self._operation(data, depth)
        if isinstance(data, dict):
            return _float(data) if "float" in data else _capture(data)
        if isinstance(data, (bool, int)):
            return literal(data)
        if isinstance(data, str) and data in _SYMBOLS:
            return _SYMBOLS[data]
        raise SpecError(
            f"JSON expression: {data!r} is not a leaf; floats are {{'float': hex}}, names {', '.join(_SYMBOLS)}"
        )

    def _operation(self, data: list[Any], depth: int) -> sympy.Basic:
        if not data or not isinstance(data[0], str) or data[0] not in OPERATIONS:
            raise SpecError(f"JSON expression: unknown operation {data[:1]}; known: {', '.join(OPERATIONS)}")
        return build(OPERATIONS[data[0]], *(self.node(item, depth + 1) for item in data[1:]))


class _TraceLoader(_Loader):
    """Loads an expression that tracing recorded."""

    def __init__(self, numbers: Iterable[sympy.Basic], arrays: Iterable[Capture]) -> None:
        super().__init__()
        self._numbers, self._arrays = iter(numbers), iter(arrays)

    def node(self, data: Any, depth: int) -> sympy.Basic:
        return next(self._numbers) if data in (INTEGER, FLOAT) else super().node(data, depth)

    def _operation(self, data: list[Any], depth: int) -> sympy.Basic:
        if data[0] == ARRAY:
            return next(self._arrays)
        if data[0] == AT:
            return self._at(data[1], data[2], depth)
        return super()._operation(data, depth)

    def _at(self, expression: Any, operands: Sequence[Any], depth: int) -> sympy.Basic:
        node = self.node(expression, depth + 1)
        symbols = ops.INDICES if len(operands) == len(ops.INDICES) else (ops.SCORE, *ops.INDICES)
        values = [self.node(operand, depth + 1) for operand in operands]
        return node.xreplace({symbol: value for symbol, value in zip(symbols, values, strict=True) if symbol != value})


def _float(data: dict[str, Any]) -> sympy.Basic:
    text = data["float"]
    if set(data) != {"float"} or not isinstance(text, str):
        raise SpecError(f"JSON expression: {data!r} must be {{'float': '0x1.8p+1'}}")
    try:
        number = float.fromhex(text)
    except (ValueError, OverflowError):
        raise SpecError(f"JSON expression: {text!r} is not a hexadecimal float such as '0x1.8p+1'") from None
    return literal(number)


def _capture(data: dict[str, Any]) -> Capture:
    if set(data) != {"capture", "dtype", "ndim", "grad"} or not isinstance(data["grad"], bool):
        raise SpecError(
            f"JSON expression: {data!r} must be {{'capture': name, 'dtype': ..., 'ndim': ..., 'grad': ...}}"
        )
    shard_number = SHARD_NUMBERS.get(data["capture"]) if isinstance(data["capture"], str) else None
    if shard_number is not None and (data["dtype"], data["ndim"], data["grad"]) == (shard_number.dtype, 0, False):
        return shard_number
    if data["ndim"] == 0 and not data["grad"]:
        return number_capture(data["capture"], data["dtype"])
    return array_capture(data["capture"], data["dtype"], data["ndim"], data["grad"])


def capture_from_data(data: Any, what: str) -> Capture:
    """Returns the capture of an array, from its JSON."""
    if not isinstance(data, dict) or "capture" not in data:
        raise SpecError(f"{what}={data!r} must be a captured array, as to_json writes it")
    return _capture(data)
