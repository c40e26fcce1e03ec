"""Parses a kernel's text for its launch: entry points, members of the argument struct, integer constants.

It recognises the style of emitted kernels, possibly edited by hand. Other ways of writing the same are not recognised.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# `__global__ void __launch_bounds__(kThreads, 2) name(parameters)`; the bounds, and the dimensions of a cluster, may
# precede `void` or be absent.
_KERNEL = re.compile(
    r"__global__\s+(?:void\s+|__(?:launch_bounds|cluster_dims)__\s*\((?:[^()]|\([^()]*\))*\)\s*)+"
    r"(?P<name>\w+)\s*\((?P<parameters>[^)]*)\)"
)
_CONSTANT = re.compile(r"^\s*constexpr\s+(?:unsigned|int)\s+(?P<name>\w+)\s*=\s*(?P<value>[^;]+);", re.MULTILINE)
_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # sizes are not negative, so that this rounds as C++ does
    ast.Mod: operator.mod,
}


def without_comments(source: str) -> str:
    """Returns the text with comments replaced by spaces."""
    return _COMMENT.sub(" ", source)


def entry_points(code: str) -> dict[str, str]:
    """Returns kernel name -> type of the struct that it takes ("" if unclear), for a text without comments."""
    return {match["name"]: _parameter_type(match["parameters"]) for match in _KERNEL.finditer(code)}


def _parameter_type(parameters: str) -> str:
    words = re.findall(r"\w+", parameters)
    return "" if "," in parameters or "*" in parameters or len(words) < 2 else words[-2]


def struct_members(code: str, struct: str) -> tuple[str, ...] | None:
    """Returns the declarations in a struct, with single spaces, for a text without comments; None if not found."""
    found = re.search(rf"\bstruct\s+{re.escape(struct)}\s*\{{(?P<body>[^{{}}]*)\}}", code)
    if found is None:
        return None
    return tuple(" ".join(part.split()) for part in found["body"].split(";") if part.strip())


def constants(code: str) -> dict[str, int]:
    """Returns the integer constants of a text without comments: literals, and arithmetic on earlier constants."""
    known: dict[str, int] = {}
    for match in _CONSTANT.finditer(code):
        value = _value(match["value"], known)
        if value is not None:
            known.setdefault(match["name"], value)
    return known


def _value(text: str, known: Mapping[str, int]) -> int | None:
    """Returns the value of an expression of integers, known names and + - * / %; None for any other."""
    try:
        return _computed(ast.parse(" ".join(text.split()), mode="eval").body, known)
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _computed(node: ast.expr, known: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return known[node.id]
    if isinstance(node, ast.BinOp):
        return _OPERATIONS[type(node.op)](_computed(node.left, known), _computed(node.right, known))
    raise ValueError(node)
