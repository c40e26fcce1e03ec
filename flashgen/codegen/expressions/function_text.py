"""The text of device functions for traced masks and score functions: parameters, body and calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sympy

from flashgen.codegen.expressions.printer import references
from flashgen.language.operations import BATCH, HEAD, INDICES, KEY, QUERY

Names = Mapping[sympy.Basic, str]

DEVICE_NAMES: Names = {BATCH: "position.batch", HEAD: "position.head", QUERY: "q", KEY: "k"}


@dataclass(frozen=True)
class FunctionText:
    """A traced function as a device function.

    Attributes:
        declarations: Declarations of common subexpressions.
        text: The returned value.
        used: The indices that it takes.
        operand: What a score function takes: the "score", or the "product" q·k if the scale is folded into its
            constants.
        elements: Elements of captured arrays that it takes, each as (type, name).
    """

    name: str
    declarations: tuple[str, ...]
    text: str
    used: tuple[sympy.Symbol, ...]
    operand: str = "score"
    elements: tuple[tuple[str, str], ...] = ()

    def parameters(self, leading: bool = False) -> str:
        """Returns declarations of its indices and elements, with a comma before each (`leading`) or after each."""
        elements = "".join(f", {kind} {name}" if leading else f"{kind} {name}, " for kind, name in self.elements)
        return parameters_of(self.used, leading) + elements

    def call(self, names: Names = DEVICE_NAMES, elements: Iterable[str] = ()) -> str:
        """Returns the arguments of a call, given the names of the indices and the elements at the call."""
        return ", ".join([*(names[symbol] for symbol in self.used), *elements, "arguments"])

    def operand_text(self, product: str) -> str:
        """Returns the operand for a call of a score function, given the text of the product q·k."""
        return scaled(self.operand, product)


def scaled(operand: str, product: str) -> str:
    """Returns the argument for an operand "score" or "product", given the text of the product q·k."""
    return product if operand == "product" else f"{product} * kScale"


def parameters_of(used: tuple[sympy.Symbol, ...], leading: bool = False) -> str:
    """Returns declarations of indices, with a comma before each (`leading`) or after each."""
    return "".join(f", int {symbol}" if leading else f"int {symbol}, " for symbol in used)


def symbols_in(*nodes: sympy.Basic) -> set[sympy.Basic]:
    """Returns the leaves that expressions read. Traverses them as graphs: as trees derivatives may be huge."""
    operations = references(nodes)
    return {leaf for node in (*operations, *nodes) for leaf in (node, *node.args) if not leaf.args}


def indices_in(*nodes: sympy.Basic) -> tuple[sympy.Symbol, ...]:
    """Returns the indices that expressions read, in the order of function parameters."""
    found = symbols_in(*nodes)
    return tuple(symbol for symbol in INDICES if symbol in found)
