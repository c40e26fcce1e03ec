"""Converts masks, scores and the fields of specs to canonical JSON and back. `expression_json` converts expressions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy

from flashgen.errors import SpecError
from flashgen.language.captures import Tensor
from flashgen.language.expression_json import canonical, capture_from_data, node_from_data, node_to_data
from flashgen.language.modifiers import Mask, Score
from flashgen.language.parse import parse_mask, parse_score
from flashgen.strict_json import parse_json

VERSION = 1
MAX_TEXT = 1_000_000

_FIELDS = (
    *("head_dim", "dtype", "value_dim", "scale", "layout", "dropout", "score", "mask"),
    *("page_size", "kv_dtype", "sink", "sharded", "out_dtype", "grad_dtype", "shared_kv"),
)


def modifier_to_data(modifier: Mask | Score) -> dict[str, Any]:
    """Returns a mask or score as {"name": ..., "expression": ...}."""
    return {"name": modifier.name, "expression": node_to_data(modifier.expression)}


def mask_from_data(data: Any) -> Mask:
    """Returns a mask from its data, or from an expression of named masks."""
    if isinstance(data, str):
        return parse_mask(data)
    return Mask(*_name_and_expression(data, "mask"))


def score_from_data(data: Any) -> Score:
    """Returns a score from its data, or from an expression of named scores."""
    if isinstance(data, str):
        return parse_score(data)
    return Score(*_name_and_expression(data, "score"))


def _name_and_expression(data: Any, what: str) -> tuple[Any, sympy.Basic]:
    if not isinstance(data, dict) or set(data) != {"name", "expression"}:
        raise SpecError(f'JSON {what} must be {{"name": ..., "expression": ...}} or a text such as "causal()"')
    return data["name"], node_from_data(data["expression"])


def fields_to_json(fields: Mapping[str, Any]) -> str:
    """Returns the canonical JSON of a spec, from its fields by name."""
    data = dict(fields)
    data["mask"] = modifier_to_data(data["mask"])
    data["score"] = modifier_to_data(data["score"]) if data["score"] else None
    sink = data.pop("sink")
    data["sink"] = node_to_data(sink) if sink else None
    for name in ("page_size", "kv_dtype", "sink", "out_dtype", "grad_dtype"):
        if data.get(name) is None:
            data.pop(name, None)  # leaves the JSON, and so the digest, of other specs unchanged
    for name in ("sharded", "shared_kv"):
        if not data.get(name):
            data.pop(name, None)
    return canonical({**data, "version": VERSION})


def fields_from_json(text: str) -> dict[str, Any]:
    """Returns the arguments of `AttentionSpec` that a JSON text describes. See `AttentionSpec.from_json`."""
    data = _parsed(text)
    version = data.pop("version", VERSION)
    if version != VERSION or isinstance(version, bool):
        raise SpecError(f"spec JSON: version={version!r} is not supported; this version of flashgen reads {VERSION}")
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
        sink = capture_from_data(data["sink"], "spec JSON: sink")
        data["sink"] = Tensor(sink.name, sink.dtype, sink.ndim, sink.grad)
    if not isinstance(data.get("dtype", ""), str):
        raise SpecError(f"spec JSON: dtype={data['dtype']!r} must be a text such as 'float16'")
    return data


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
