"""The variant of a spec as text for the templates: its score function, mask and captured arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import sympy

from flashgen.codegen.arguments import (
    DROPOUT_FIELDS,
    LIST_FIELDS,
    ArgumentLayout,
    Field,
    capture_fields,
    member_name,
    ordered,
)
from flashgen.codegen.expressions.derivative_text import ScoreGradient, score_gradient
from flashgen.codegen.expressions.function_text import FunctionText, indices_in
from flashgen.codegen.expressions.printer import C_TYPES, statements
from flashgen.codegen.expressions.row_elements import (
    RowElement,
    element_context,
    paired_mask_elements,
    transposed_elements,
    with_parameters,
)
from flashgen.codegen.expressions.scale_folding import folded_products
from flashgen.dtypes import DTYPES
from flashgen.language.operations import Capture
from flashgen.language.shards import SHARD_B, SHARD_H, SHARD_K, SHARD_Q
from flashgen.language.spec import AttentionSpec


@dataclass(frozen=True)
class ArrayText:
    """The load function of a captured array: its parameters, the C types of elements and results, the conversion."""

    name: str
    member: str
    indices: tuple[str, ...]
    element: str
    result: str
    convert: str


@dataclass(frozen=True)
class Variant:
    """The text that varies between specs. Backward kernels have `gradient` instead of `score`.

    Attributes:
        elements: The elements that are loaded in pairs.
        in_pairs_alone: Whether their arrays are read in no other way.
    """

    score: FunctionText | None
    mask: FunctionText | None
    arrays: tuple[ArrayText, ...]
    gradient: ScoreGradient | None = None
    elements: tuple[RowElement, ...] = ()
    in_pairs_alone: bool = False

    @property
    def paired(self) -> tuple[RowElement, ...]:
        """One element of each array of which two elements are loaded at once."""
        return tuple({each.member: each for each in self.elements}.values())


def _mask(name: str, given: sympy.Basic, elements: tuple[RowElement, ...]) -> FunctionText:
    (expression,), names = with_parameters((given,), elements)
    declarations, (text,) = statements(expression, names=names)
    parameters = _parameters(elements)
    return FunctionText(name, tuple(declarations), text, indices_in(expression), elements=parameters)


def _parameters(elements: tuple[RowElement, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((each.type, each.name) for each in elements)


def _score(name: str, given: sympy.Basic, scale: float, elements: tuple[RowElement, ...]) -> FunctionText:
    (expression,), names = with_parameters((given,), elements)
    products = folded_products(scale, expression)
    declarations, (text,) = statements(expression, products=products, names=names)
    operand = "product" if products else "score"
    return FunctionText(name, tuple(declarations), text, indices_in(expression), operand, _parameters(elements))


def _array(capture: Capture) -> ArrayText:
    result = "long long" if capture.dtype == "int64" else C_TYPES[capture.kind]
    indices = tuple(f"i{axis}" for axis in range(capture.ndim))
    dtype = DTYPES[capture.dtype]
    convert = dtype.unpack if dtype.suffix else f"static_cast<{result}>"
    return ArrayText(capture.name, member_name(capture), indices, dtype.c_type, result, convert)


def arrays_of(captures: Iterable[Capture]) -> tuple[ArrayText, ...]:
    """Returns the load functions of the arrays among captures."""
    return tuple(_array(capture) for capture in captures if capture.ndim)


def variant_of(
    spec: AttentionSpec,
    score: bool = True,
    sink: bool = False,
    elements: tuple[RowElement, ...] = (),
    mask_elements: tuple[RowElement, ...] = (),
) -> Variant:
    """Returns the texts of a spec.

    Args:
        score: Whether to include the score function, and the arrays that only it reads.
        sink: Whether to include the array of sinks, which the softmax normalisation reads.
        elements: The elements that the score function takes as parameters, instead of loading them.
        mask_elements: The elements that the mask function takes as parameters.
    """
    score_text = _score(spec.score.name, spec.score.expression, spec.scale, elements) if spec.score and score else None
    masked = spec.mask.expression != sympy.true
    mask_text = _mask(spec.mask.name, spec.mask.expression, mask_elements) if masked else None
    arrays = arrays_of(captures_read(spec, score, sink))
    return Variant(score_text, mask_text, arrays, elements=elements + mask_elements)


def with_pairs(
    spec: AttentionSpec,
    gradient: ScoreGradient | None,
    elements: tuple[RowElement, ...],
    mask_elements: tuple[RowElement, ...] = (),
) -> Variant:
    """Returns the texts of a backward kernel that loads elements in pairs."""
    paired = elements + mask_elements
    alone = not any(gradient and gradient.loads(each.capture.name) for each in paired)
    return replace(variant_of(spec, elements=elements, mask_elements=mask_elements), in_pairs_alone=alone)


def with_transposed_pairs(spec: AttentionSpec) -> tuple[Variant, dict[str, Any]]:
    """Returns the texts of a kernel with a row of scores for each key, and the template context of the loaded pairs."""
    of_score, of_mask = transposed_elements(spec), paired_mask_elements(spec)
    gradient = score_gradient(spec, elements=of_score)
    variant = with_pairs(spec, gradient, of_score, of_mask)
    context = element_context(of_score + of_mask) | {"gradient": gradient}
    if variant.mask:
        context["mask_call"] = variant.mask.call(elements=(each.of_pair for each in of_mask))
    return variant, context


def captures_read(spec: AttentionSpec, score: bool = True, sink: bool = False) -> tuple[Capture, ...]:
    """Returns the captures that the mask and, if included, the score function and the sink read, in spec order."""
    read = set(spec.mask.expression.atoms(Capture))
    if score and spec.score:
        read |= spec.score.expression.atoms(Capture)
    if sink and spec.sink:
        read.add(spec.sink)
    return tuple(capture for capture in spec.captures if capture in read)


def layout_of(spec: AttentionSpec, fields: list[Field], lists: bool, sink: bool = False) -> ArgumentLayout:
    """Returns the struct of a kernel: its own fields, and those for tile lists, dropout, captures and sinks."""
    fields = [*fields, *(LIST_FIELDS if lists else ()), *(DROPOUT_FIELDS if spec.dropout else ())]
    read = set(captures_read(spec, sink=sink))
    if spec.sharded and spec.dropout:
        read |= {SHARD_B, SHARD_H, SHARD_Q, SHARD_K}  # dropout draws by positions in the unsharded arrays
    return ordered(fields + capture_fields(tuple(capture for capture in spec.captures if capture in read)))
