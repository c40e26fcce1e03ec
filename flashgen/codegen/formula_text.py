"""Prints formulas of a call's sizes: as C++ for releases, and in English for headers and reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from flashgen.codegen.sizes import Formula, Sizes

MEANINGS = {
    "batch": "sequences",
    "heads_q": "query heads",
    "heads_kv": "KV heads",
    "heads_per_kv": "query heads per KV head",
    "len_q": "queries",
    "len_k": "keys",
    "total_q": "rows of q of a varlen batch",
    "total_k": "rows of k of a varlen batch",
    "multiprocessors": "SMs of the GPU",
    "count": "elements of the captured array",
    "splits": "KV splits, chosen by the caller",
    "pairs": "sum of len_q * len_k over the sequences",
    "visited": "share of tiles visited",
}
"""What each size of a call is, in English."""

_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_SPELLED = {name: f"({MEANINGS[name]})" for name in ("pairs", "visited")}  # sizes that no argument of a call gives

_Call = Callable[[str, str, str], str]


def described(sizes: Sizes) -> str:
    """Returns the names of sizes with their meanings, as a list in words."""
    return ", ".join(f"{each.name} ({MEANINGS[each.name]})" for each in fields(sizes))


def cpp(value: Any) -> str:
    """Returns a formula or a number as a C++ integer expression of +, -, *, /, min, max and ceil_div."""
    return _text(value, "{0}({1}, {2})".format, {})


def english(value: Any, words: Mapping[str, str] | None = None) -> str:
    """Returns a formula or a number in English. `words` replace names of sizes."""
    return _text(value, _english_call, _SPELLED | dict(words or {}))


def _english_call(operation: str, first: str, second: str) -> str:
    return f"ceil({first} / {second})" if operation == "ceil_div" else f"{operation}({first}, {second})"


def _text(value: Any, call: _Call, words: Mapping[str, str]) -> str:
    if not isinstance(value, Formula):
        return str(value)
    if not value.operands:
        return words.get(value.operation, value.operation)
    first, second = (_text(operand, call, words) for operand in value.operands)
    if value.operation not in _PRECEDENCE:
        return call(value.operation, first, second)
    left, right = value.operands
    first = f"({first})" if _precedence(left) < _PRECEDENCE[value.operation] else first
    second = f"({second})" if _is_grouped(value.operation, right) else second
    return f"{first} {value.operation} {second}"


def _precedence(value: Any) -> int:
    """Returns the precedence of the outermost operation; that of numbers, names and calls is the highest."""
    return _PRECEDENCE.get(value.operation, 3) if isinstance(value, Formula) else 3


def _is_grouped(operation: str, right: Any) -> bool:
    """Whether a right operand needs parentheses. Sums and products are associative, unless a division rounds."""
    outer, inner = _PRECEDENCE[operation], _precedence(right)
    return inner < outer or (inner == outer and (operation in "-/" or (operation == "*" and _divides(right))))


def _divides(product: Any) -> bool:
    """Whether a product of several factors begins with a quotient."""
    if _precedence(product) != _PRECEDENCE["*"]:
        return False
    return product.operation == "/" or _divides(product.operands[0])
