"""What a kernel's text says of its launch: its entry points, the struct that it takes, its integer constants.

Made for texts as they are emitted and then edited by hand; what is written in another way is not seen.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# `__global__ void __launch_bounds__(kThreads, 2) name(parameters)`, the bounds before or after `void`, or left out.
_KERNEL = re.compile(
    r"__global__\s+(?:void\s+|__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*)+(?P<name>\w+)\s*\((?P<parameters>[^)]*)\)"
)
_CONSTANT = re.compile(r"^\s*constexpr\s+(?:unsigned|int)\s+(?P<name>\w+)\s*=\s*(?P<value>[^;]+);", re.MULTILINE)
_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # of numbers that are not negative, as sizes are
    ast.Mod: operator.mod,
}


def without_comments(source: str) -> str:
    return _COMMENT.sub(" ", source)


def entry_points(code: str) -> dict[str, str]:
    """The kernels of a text without comments: by name, the type of the one struct that each takes, "" where unclear."""
    return {match["name"]: _parameter_type(match["parameters"]) for match in _KERNEL.finditer(code)}


def _parameter_type(parameters: str) -> str:
    words = re.findall(r"\w+", parameters)
    return "" if "," in parameters or "*" in parameters or len(words) < 2 else words[-2]


def struct_members(code: str, struct: str) -> tuple[str, ...] | None:
    """The declarations in a struct of a text without comments, spaces made one; None where it is not seen."""
    found = re.search(rf"\bstruct\s+{re.escape(struct)}\s*\{{(?P<body>[^{{}}]*)\}}", code)
    if found is None:
        return None
    return tuple(" ".join(part.split()) for part in found["body"].split(";") if part.strip())


def constants(code: str) -> dict[str, int]:
    """The integer constants of a text without comments, by name: those that are sums and products of earlier ones."""
    known: dict[str, int] = {}
    for match in _CONSTANT.finditer(code):
        value = _value(match["value"], known)
        if value is not None:
            known.setdefault(match["name"], value)
    return known


def _value(text: str, known: Mapping[str, int]) -> int | None:
    """The value of an expression of numbers, names and + - * / %; None where it is another."""
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
