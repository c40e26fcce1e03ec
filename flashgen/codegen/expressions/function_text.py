"""A traced function as the text of a device function: what it takes, computes and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from flashgen.codegen.expressions.printer import references
from flashgen.language.operations import BATCH, HEAD, INDICES, KEY, QUERY

Names = Mapping[sympy.Basic, str]

DEVICE_NAMES: Names = {BATCH: "position.batch", HEAD: "position.head", QUERY: "q", KEY: "k"}


@dataclass(frozen=True)
class FunctionText:
    """A traced function as a device function: the declarations and the value it returns; how it is called.

    operand: what a score function takes: the "score", or the "product" q·k if its constants have the scale in them.
    """

    name: str
    declarations: tuple[str, ...]
    text: str
    used: tuple[sympy.Symbol, ...]
    operand: str = "score"

    def parameters(self, leading: bool = False) -> str:
        """Declarations of the indices it takes, with a comma before each (`leading`) or after each."""
        return parameters_of(self.used, leading)

    def call(self, names: Names = DEVICE_NAMES) -> str:
        """Arguments of a call, given what the indices are called where it stands."""
        return ", ".join([*(names[symbol] for symbol in self.used), "arguments"])

    def operand_text(self, product: str) -> str:
        """The operand that a call of a score function takes, given the text of the product q·k."""
        return scaled(self.operand, product)


def scaled(operand: str, product: str) -> str:
    """What a function of the "score" or the "product" is called with, given the text of the product q·k."""
    return product if operand == "product" else f"{product} * kScale"


def parameters_of(used: tuple[sympy.Symbol, ...], leading: bool = False) -> str:
    """Declarations of indices, with a comma before each (`leading`) or after each."""
    return "".join(f", int {symbol}" if leading else f"int {symbol}, " for symbol in used)


def symbols_in(*nodes: sympy.Basic) -> set[sympy.Basic]:
    """The leaves that expressions read. A derivative is walked as a graph: as a tree it may be exponentially larger."""
    operations = references(nodes)
    return {leaf for node in (*operations, *nodes) for leaf in (node, *node.args) if not leaf.args}


def indices_in(*nodes: sympy.Basic) -> tuple[sympy.Symbol, ...]:
    """The indices that expressions read, in the order in which functions take them."""
    found = symbols_in(*nodes)
    return tuple(symbol for symbol in INDICES if symbol in found)
