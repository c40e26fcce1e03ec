"""What a spec declares, as text for the templates: its score function, its mask, its captured arrays."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from flashgen.codegen.arguments import ELEMENT_TYPES, member_name
from flashgen.codegen.folding import folded_products
from flashgen.codegen.printer import statements
from flashgen.language.operations import BATCH, HEAD, INDICES, KEY, QUERY, Capture
from flashgen.language.spec import AttentionSpec

_DEVICE_NAMES = {BATCH: "position.batch", HEAD: "position.head", QUERY: "q", KEY: "k"}


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

    def of(self, product: str) -> str:
        """The operand that a call of a score function takes, given the text of the product q·k."""
        return product if self.operand == "product" else f"{product} * kScale"

    def parameters(self, leading: bool = False) -> str:
        """Declarations of the indices it takes, with a comma before each (`leading`) or after each."""
        return "".join(f", int {symbol}" if leading else f"int {symbol}, " for symbol in self.used)

    def call(self, names: dict[sympy.Symbol, str] = _DEVICE_NAMES) -> str:
        """Arguments of a call, given what the indices are called where it stands."""
        return ", ".join([*(names[symbol] for symbol in self.used), "arguments"])


@dataclass(frozen=True)
class ArrayText:
    """A captured array: what its load function takes, converts by, and gives."""

    name: str
    member: str
    indices: tuple[str, ...]
    element: str
    result: str
    convert: str


@dataclass(frozen=True)
class Variant:
    """The variable part of a kernel."""

    score: FunctionText | None
    mask: FunctionText | None
    arrays: tuple[ArrayText, ...]


def _mask(name: str, expression: sympy.Basic) -> FunctionText:
    declarations, (text,) = statements(expression)
    return FunctionText(name, tuple(declarations), text, _indices_of(expression))


def _score(name: str, expression: sympy.Basic, scale: float) -> FunctionText:
    products = folded_products(scale, expression)
    declarations, (text,) = statements(expression, products=products)
    operand = "product" if products else "score"
    return FunctionText(name, tuple(declarations), text, _indices_of(expression), operand)


def _indices_of(expression: sympy.Basic) -> tuple[sympy.Symbol, ...]:
    return tuple(symbol for symbol in INDICES if expression.has(symbol))


def _array(capture: Capture) -> ArrayText:
    converts = {"float16": "unpack_f16", "bfloat16": "unpack_bf16"}
    result = {"bool": "bool", "int": "int", "float": "float"}[capture.kind]
    indices = tuple(f"i{axis}" for axis in range(capture.ndim))
    convert = converts.get(capture.dtype, f"static_cast<{result}>")
    return ArrayText(capture.name, member_name(capture), indices, ELEMENT_TYPES[capture.dtype], result, convert)


def variant_of(spec: AttentionSpec, score: bool = True) -> Variant:
    """The texts of a spec; without the score function, and the arrays only it reads, where `score` is false."""
    score_text = _score(spec.score.name, spec.score.expression, spec.scale) if spec.score and score else None
    mask_text = _mask(spec.mask.name, spec.mask.expression) if spec.mask.expression != sympy.true else None
    return Variant(
        score_text, mask_text, tuple(_array(capture) for capture in captures_read(spec, score) if capture.ndim)
    )


def captures_read(spec: AttentionSpec, score: bool = True) -> tuple[Capture, ...]:
    """The captures that a kernel of the spec reads, by name."""
    read = set(spec.mask.expression.atoms(Capture))
    if score and spec.score:
        read |= spec.score.expression.atoms(Capture)
    return tuple(capture for capture in spec.captures if capture in read)
