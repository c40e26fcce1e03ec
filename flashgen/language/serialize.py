"""Canonical JSON of expressions, masks, scores and specs' fields, and back. The same text in every process and machine.

A node is a list, ["Add", a, b]; leaves are integers, {"float": "0x1.8p+1"}, true, false, the names of the symbols, and
{"capture": "slopes", "dtype": "float32", "grad": false, "ndim": 1}. Loading checks everything: unknown operations,
arity, kinds, names and sizes raise SpecError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import sympy

from flashgen.errors import SpecError
from flashgen.language.captures import Scalar, Tensor
from flashgen.language.modifiers import Mask, Score
from flashgen.language.operations import OPERATIONS, Capture, Operation
from flashgen.language.parse import parse_mask, parse_score
from flashgen.language.shards import PLACES
from flashgen.language.well_formed import MAX_DEPTH, MAX_NODES, SYMBOLS, build, literal
from flashgen.strict_json import parse_json

VERSION = 1
MAX_TEXT = 1_000_000

_SYMBOLS = {symbol.name: symbol for symbol in SYMBOLS}
_FIELDS = (
    *("head_dim", "dtype", "value_dim", "scale", "layout", "dropout", "score", "mask"),
    *("page_size", "kv_dtype", "sink", "sharded"),
)


def canonical(value: Any) -> str:
    """JSON text with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


# Expressions ---------------------------------------------------------------------------------------------------------


def node_to_data(node: sympy.Basic) -> Any:
    """The node as what `json` writes."""
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
    """The node of `node_to_data`'s result, checked: SpecError for anything that tracing could not have made."""
    return _Loader().node(data, 1)


class _Loader:
    """Loads one expression, and counts what it has seen."""

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
            f"JSON expression: {data!r} is no leaf; floats are {{'float': hex}}, names {', '.join(_SYMBOLS)}"
        )

    def _operation(self, data: list[Any], depth: int) -> sympy.Basic:
        if not data or not isinstance(data[0], str) or data[0] not in OPERATIONS:
            raise SpecError(f"JSON expression: unknown operation {data[:1]}; known: {', '.join(OPERATIONS)}")
        return build(OPERATIONS[data[0]], *(self.node(item, depth + 1) for item in data[1:]))


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
    place = PLACES.get(data["capture"]) if isinstance(data["capture"], str) else None
    if place is not None and (data["dtype"], data["ndim"], data["grad"]) == (place.dtype, 0, False):
        return place
    if data["ndim"] == 0 and not data["grad"]:
        return Scalar(data["capture"], data["dtype"]).node
    return Tensor(data["capture"], data["dtype"], data["ndim"], data["grad"]).capture


# Masks, scores, specs ------------------------------------------------------------------------------------------------


def modifier_to_data(modifier: Mask | Score) -> dict[str, Any]:
    """A mask or score as {"name": ..., "expression": ...}."""
    return {"name": modifier.name, "expression": node_to_data(modifier.expression)}


def mask_from_data(data: Any) -> Mask:
    """A mask from its data, or from an expression of named masks."""
    if isinstance(data, str):
        return parse_mask(data)
    return Mask(*_named(data, "mask"))


def score_from_data(data: Any) -> Score:
    """A score from its data, or from an expression of named scores."""
    if isinstance(data, str):
        return parse_score(data)
    return Score(*_named(data, "score"))


def _named(data: Any, what: str) -> tuple[Any, sympy.Basic]:
    if not isinstance(data, dict) or set(data) != {"name", "expression"}:
        raise SpecError(f'JSON {what} must be {{"name": ..., "expression": ...}} or a text such as "causal()"')
    return data["name"], node_from_data(data["expression"])


def fields_to_json(fields: Mapping[str, Any]) -> str:
    """The canonical JSON of a spec, from its fields by name."""
    data = dict(fields)
    data["mask"] = modifier_to_data(data["mask"])
    data["score"] = modifier_to_data(data["score"]) if data["score"] else None
    sink = data.pop("sink")
    data["sink"] = node_to_data(sink) if sink else None
    for name in ("page_size", "kv_dtype", "sink"):
        if data.get(name) is None:
            data.pop(name, None)  # so that specs without it have the text that they always had
    if not data.get("sharded"):
        data.pop("sharded", None)
    return canonical({**data, "version": VERSION})


def fields_from_json(text: str) -> dict[str, Any]:
    """The arguments that make a JSON text's `AttentionSpec`; see its `from_json`."""
    data = _parsed(text)
    version = data.pop("version", VERSION)
    if version != VERSION or isinstance(version, bool):
        raise SpecError(f"spec JSON: version={version!r} is not known; this flashgen reads {VERSION}")
    unknown = sorted(set(data) - set(_FIELDS))
    if unknown:
        raise SpecError(f"spec JSON: unknown {', '.join(unknown)}; known: {', '.join(_FIELDS)}")
    if "head_dim" not in data:
        raise SpecError("spec JSON: head_dim is missing")
    if data.get("mask") is not None:
        data["mask"] = mask_from_data(data["mask"])
    if data.get("score") is not None:
        data["score"] = score_from_data(data["score"])
    if data.get("sink") is not None:
        data["sink"] = _sink_from_data(data["sink"])
    if not isinstance(data.get("dtype", ""), str):
        raise SpecError(f"spec JSON: dtype={data['dtype']!r} must be a text such as 'float16'")
    return data


def _sink_from_data(data: Any) -> Tensor:
    if not isinstance(data, dict) or "capture" not in data:
        raise SpecError(f"spec JSON: sink={data!r} must be a captured array, as to_json writes it")
    capture = _capture(data)
    return Tensor(capture.name, capture.dtype, capture.ndim, capture.grad)


def _parsed(text: Any) -> dict[str, Any]:
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise SpecError(f"spec JSON must be a text of at most {MAX_TEXT} characters, got {type(text).__name__}")
    try:
        data = parse_json(text)
    except ValueError as error:
        raise SpecError(f"spec JSON cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise SpecError(f"spec JSON must be an object, got {type(data).__name__}")
    return data
