"""A score function with its derivatives, as device functions for the backward kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import sympy

from flashgen.analysis.closed_forms.distances import depends_on_difference
from flashgen.analysis.derivative_algebra import ONE, ZERO, Algebra, Node
from flashgen.analysis.derivatives import derivative, gathers
from flashgen.analysis.expression_text import to_text
from flashgen.codegen.arguments import member_name
from flashgen.codegen.expressions.function_text import (
    DEVICE_NAMES,
    FunctionText,
    Names,
    indices_in,
    parameters_of,
    scaled,
    symbols_in,
)
from flashgen.codegen.expressions.operation_text import clamped_index
from flashgen.codegen.expressions.printer import statements
from flashgen.codegen.expressions.row_elements import RowElement, dense_loads, with_parameters
from flashgen.codegen.expressions.scale_folding import folded_products
from flashgen.language.operations import KEY, QUERY, SCORE, Load, Mul
from flashgen.language.spec import AttentionSpec

# Which scores of a block (one head of one sequence) read the same element: all; those of a query; those of a key; those
# of equal distance q - k; some, often neighbours; none.
Shared = Literal["block", "query", "key", "distance", "some", "none"]
Base = Literal["ds", "dx"]


@dataclass(frozen=True)
class GatherFunction:
    """A device function of a gather: common subexpressions, values, and the parameters: `takes`, then indices."""

    declarations: tuple[str, ...]
    texts: tuple[str, ...]
    used: tuple[sympy.Symbol, ...]
    takes: str  # "score", "product" or "" (none)

    @property
    def parameters(self) -> str:
        """Declarations of its parameters, with a comma after each."""
        return (f"float {self.takes}, " if self.takes else "") + parameters_of(self.used)

    def arguments(self, product: str, names: Names) -> str:
        """Returns the arguments of a call, given the text of the product q·k and the names of the indices."""
        operand = [scaled(self.takes, product)] if self.takes else []
        return ", ".join([*operand, *(names[symbol] for symbol in self.used), "arguments"])


@dataclass(frozen=True)
class GatherText:
    """An element that the score function reads from a captured array with grad=True.

    The gradient of the element is the sum of `base` * `factor` over the scores that read it.

    Attributes:
        number: Number of the gather, from which its functions are named: `gather0_offset` and `gather0_factor`.
        capture, member: Name of the array, and of its member in the argument struct.
        shown: The element in readable notation.
        shared: Which scores of a block read the same element. "distance" is used only if the element's gradient is a
            plain sum of dX.
        offset: The function that returns the element's row-major offset in an array of the capture's shape.
        base: The gradient with respect to the modified score ("ds"), or to scale * q·k ("dx").
        factor: The function that returns the factor; None if the factor is 1.
    """

    number: int
    capture: str
    member: str
    shown: str
    shared: Shared
    offset: GatherFunction
    base: Base
    factor: GatherFunction | None

    def offset_call(self, product: str, names: Names = DEVICE_NAMES) -> str:
        """Returns a call of the offset function (a long long), given the text of the product q·k."""
        return f"gather{self.number}_offset({self.offset.arguments(product, names)})"

    def addend(self, ds: str, dx: str, product: str, names: Names = DEVICE_NAMES) -> str:
        """Returns the addend of one score to the element's gradient, given the texts of dS, dX and q·k."""
        base = ds if self.base == "ds" else dx
        return f"{base} * gather{self.number}_factor({self.factor.arguments(product, names)})" if self.factor else base


@dataclass(frozen=True)
class ScoreGradient:
    """A score function and its derivatives.

    Attributes:
        function: score_mod, which also computes the slope.
        slope: Text of the derivative with respect to the score, in terms of the function's declarations; None if it
            is 1.
        gathers: The elements with a gradient that the kernel sums, without those on which the score does not depend.
        elements: The elements that score_mod takes as parameters, instead of loading them.
        by_tiles: Whether the kernel owns tiles of the array that is gathered, and so needs no offsets of elements.
    """

    function: FunctionText
    slope: str | None
    gathers: tuple[GatherText, ...]
    elements: tuple[RowElement, ...] = ()
    by_tiles: bool = False

    def loads(self, capture: str) -> bool:
        """Whether the functions of the gathers load elements of a captured array, given by name."""
        functions = [function for gather in self.gathers for function in (gather.offset, gather.factor) if function]
        texts = [text for function in functions for text in (*function.declarations, *function.texts)]
        return any(f"load_{capture}(" in text for text in texts)

    def call(self, product: str, slope: str, names: Names = DEVICE_NAMES) -> str:
        """Returns a call that gives the modified score and sets the variable `slope`, unless the slope is 1."""
        into = f", {slope}" if self.slope else ""
        elements = (each.of_pair for each in self.elements)
        return f"score_mod({self.function.operand_text(product)}, {self.function.call(names, elements)}{into})"


def score_gradient(
    spec: AttentionSpec, with_gathers: bool = True, elements: tuple[RowElement, ...] = ()
) -> ScoreGradient | None:
    """Returns the texts of a spec's score function and its derivatives; None without a score function.

    Args:
        with_gathers: Whether to include the gradients of captured arrays, without those that `dense_gradient` has.
        elements: The elements that the score function takes as parameters, instead of loading them.
    """
    dense = dense_loads(spec)
    return _score_gradient(
        spec, [each for each in gathers(spec) if each not in dense] if with_gathers else [], elements
    )


def dense_gradient(spec: AttentionSpec, load: Load, elements: tuple[RowElement, ...] = ()) -> ScoreGradient:
    """Returns the texts for the kernel of the gradient of one of `dense_loads`."""
    gradient = _score_gradient(spec, [load], elements)
    assert gradient, "only a score function has dense loads"
    return replace(gradient, by_tiles=True)


def _score_gradient(
    spec: AttentionSpec, loads: Iterable[Load], elements: tuple[RowElement, ...]
) -> ScoreGradient | None:
    if spec.score is None:
        return None
    value, algebra = spec.score.expression, Algebra()
    slope = derivative(value, SCORE, algebra)
    by_gather = {gather: derivative(value, gather, algebra) for gather in loads}
    factors = {gather: _factor(change, slope) for gather, change in by_gather.items() if change is not ZERO}
    indices = [index for gather in factors for index in gather.indices]
    products = folded_products(spec.scale, value, slope, *(factor for _, factor in factors.values()), *indices)
    computed, names = with_parameters((value,) if slope is ONE else (value, _float(slope)), elements)
    declarations, texts = statements(*computed, products=products, names=names)
    operand, parameters = "product" if products else "score", tuple((each.type, each.name) for each in elements)
    return ScoreGradient(
        FunctionText(spec.score.name, tuple(declarations), texts[0], indices_in(*computed), operand, parameters),
        texts[1] if slope is not ONE else None,
        tuple(_gather(i, gather, *factors[gather], slope, products) for i, gather in enumerate(factors)),
        elements,
    )


def _factor(change: Node, slope: Node) -> tuple[Base, Node]:
    """Splits the derivative by an element into a base and a factor: a multiple of the slope if possible, else of 1."""
    if change is slope:
        return ("ds" if slope is ONE else "dx"), ONE
    if isinstance(change, Mul):
        for one, other in (change.args, change.args[::-1]):
            if one is slope:
                return "dx", other
    return "ds", change


def _gather(number: int, gather: Load, base: Base, factor: Node, slope: Node, products: dict[Node, str]) -> GatherText:
    sums_ds = factor is ONE and (base == "dx" or slope is ONE)
    return GatherText(
        number,
        gather.capture.name,
        member_name(gather.capture),
        to_text(gather),
        "distance" if sums_ds and _depends_on_distance(gather) else _shared(gather),
        _function(tuple(map(clamped_index, gather.indices)), products),
        base,
        _function((_float(factor),), products) if factor is not ONE else None,
    )


def _function(results: tuple[Node, ...], products: dict[Node, str]) -> GatherFunction:
    declarations, texts = statements(*results, products=products)
    takes = ("product" if products else "score") if SCORE in symbols_in(*results) else ""
    return GatherFunction(tuple(declarations), tuple(texts), indices_in(*results), takes)


def _depends_on_distance(gather: Load) -> bool:
    read = symbols_in(*gather.indices)
    return {QUERY, KEY} <= read and SCORE not in read and all(map(depends_on_difference, gather.indices))


def _shared(gather: Load) -> Shared:
    read = symbols_in(*gather.indices)
    if {QUERY, KEY} <= set(gather.indices):
        return "none"
    if SCORE in read or {QUERY, KEY} <= read:
        return "some"
    return "query" if QUERY in read else "key" if KEY in read else "block"


def _float(node: Node) -> Node:
    return sympy.Float(0.0) if node is ZERO else node
