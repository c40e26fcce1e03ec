"""Elements of captured arrays that the scores of a row read side by side, such as those of a bias of every score.

If the last index of an array is the key, and its other indices do not depend on the key, the two adjacent scores that a
lane holds read adjacent elements. A kernel loads these together, and computes the other indices once per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.analysis.derivatives import gathers
from flashgen.codegen.arguments import member_name
from flashgen.codegen.expressions.function_text import DEVICE_NAMES, Names
from flashgen.codegen.expressions.printer import C_TYPES, Printer
from flashgen.dtypes import DTYPES
from flashgen.language.operations import BATCH, HEAD, KEY, QUERY, SCORE, Capture, Load
from flashgen.language.spec import AttentionSpec

_MAX_BYTES = 4  # of an element
_TRANSPOSED_BYTES = 2  # of an element of matrices that warps transpose
_NARROW = 128  # columns
_PAIRS = {1: "unsigned short", 2: "unsigned"}  # types of two elements, by the bytes of one


@dataclass(frozen=True)
class RowElement:
    """An element that each score reads, as a parameter of the score function.

    Attributes:
        name: The parameter.
        load: The expression of the element.
    """

    name: str
    load: Load

    @property
    def capture(self) -> Capture:
        return self.load.args[0]

    @property
    def member(self) -> str:
        """The member of the argument struct that points to the array."""
        return member_name(self.capture)

    @property
    def type(self) -> str:
        return C_TYPES[self.capture.kind]

    @property
    def bytes(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.capture.dtype].bytes

    @property
    def pair(self) -> str:
        """The C++ type of a load of two adjacent elements."""
        return _PAIRS.get(self.bytes, f"{DTYPES[self.capture.dtype].c_type}2")

    @property
    def element(self) -> str:
        """The C++ type of the element in memory."""
        return DTYPES[self.capture.dtype].c_type

    @property
    def unsigned_element(self) -> str:
        """The unsigned C++ type of the bits of an element of one or two bytes."""
        return "unsigned char" if self.bytes == 1 else "unsigned"

    @property
    def of_pair(self) -> str:
        """The text of the element of score n, which was loaded with that of its neighbour."""
        return f"{self.capture.name}_of(pairs.{self.name}[n / 2], n % 2)"

    def loaded(self, names: Names) -> str:
        """Returns the text that loads the element alone, given the names of the indices."""
        return Printer(names=names).text(self.load)

    def address(self, names: Names) -> str:
        """Returns the text of its address, given the names of the indices."""
        return f"address_of_{self.loaded(names).removeprefix('load_')}"


def with_parameters(
    expressions: tuple[sympy.Basic, ...], elements: tuple[RowElement, ...]
) -> tuple[tuple[sympy.Basic, ...], Names]:
    """Returns the expressions with a leaf in place of each element, and the names of these leaves."""
    leaves: dict[sympy.Basic, Capture] = {each.load: Capture(each.name, each.capture.dtype, 0) for each in elements}
    names = {leaf: leaf.name for leaf in leaves.values()}
    replaced: dict[sympy.Basic, sympy.Basic] = dict(leaves)
    return tuple(_replaced(each, replaced) for each in expressions) if elements else expressions, names


def _replaced(node: sympy.Basic, known: dict[sympy.Basic, sympy.Basic]) -> sympy.Basic:
    """Returns a node with its leaves replaced. Each node is visited once, as derivatives share subexpressions."""
    if node not in known:
        operands = [_replaced(operand, known) for operand in node.args]
        same = all(new is old for new, old in zip(operands, node.args, strict=True))
        known[node] = node if same else node.func(*operands)
    return known[node]


def row_elements(expression: sympy.Basic | None) -> tuple[RowElement, ...]:
    """Returns the elements that the scores of a row read side by side."""
    loads = sorted(expression.atoms(Load), key=str) if expression is not None else []
    found = [load for load in loads if _is_by_rows(load)]
    return tuple(RowElement(f"element{number}", load) for number, load in enumerate(found))


def paired_elements(spec: AttentionSpec) -> tuple[RowElement, ...]:
    """Returns the elements that forward kernels load in pairs, before the products: of one array, or none.

    The elements of a tile take registers. There are enough if nothing else is loaded or drawn for each score, and for
    elements of more than 16 bits if rows have at most 128 columns.
    """
    if spec.score is None or spec.dropout or spec.mask.expression.has(Load):
        return ()
    elements = row_elements(spec.score.expression)
    limit = _MAX_BYTES if spec.max_dim <= _NARROW else 2
    fits = len(elements) == 1 and elements[0].bytes <= limit
    return elements if fits and {elements[0].load} == spec.score.expression.atoms(Load) else ()


def paired_mask_elements(spec: AttentionSpec) -> tuple[RowElement, ...]:
    """Returns the elements of a mask that kernels load in pairs, before the products: of one array, or none.

    They are those of an array of booleans or small integers by query and key, if nothing else is loaded or drawn for
    each score.
    """
    if spec.dropout or (spec.score is not None and spec.score.expression.has(Load)):
        return ()
    elements, loads = row_elements(spec.mask.expression), spec.mask.expression.atoms(Load)
    return elements if len(loads) == len(elements) == 1 and elements[0].bytes <= _TRANSPOSED_BYTES else ()


def element_context(elements: tuple[RowElement, ...]) -> dict[str, Any]:
    """Returns the template context of the loads of elements in backward kernels."""
    return {"pair_elements": elements, "element_addresses": [each.address(DEVICE_NAMES) for each in elements]}


def transposed_elements(spec: AttentionSpec) -> tuple[RowElement, ...]:
    """Returns the elements that kernels with a row of scores for each key load in pairs: of 16 bits at most."""
    elements = paired_elements(spec)
    return elements if all(each.bytes <= _TRANSPOSED_BYTES for each in elements) else ()


def dense_loads(spec: AttentionSpec) -> tuple[Load, ...]:
    """Returns the loads of arrays with gradients from which each query and key reads an element of its own.

    Their indices are the key, as the last one, the query, and possibly the head and the batch, each at most once. The
    scores of one element are therefore those of a query and a key in several heads and sequences, and a kernel that
    owns a tile of the array sums them without atomic additions.
    """
    if spec.shared_kv or not spec.batch_layout.supports("tiles of gradients"):
        return ()
    loads = gathers(spec)
    alone = [load for load in loads if sum(other.capture == load.capture for other in loads) == 1]
    return tuple(load for load in alone if _is_dense(load.indices))


def _is_dense(indices: tuple[sympy.Basic, ...]) -> bool:
    distinct = len(set(indices)) == len(indices) and set(indices) <= {BATCH, HEAD, QUERY, KEY}
    return distinct and QUERY in indices and indices[-1] == KEY


def _is_by_rows(load: Load) -> bool:
    *leading, last = load.indices
    by_key = last == KEY and not any(index.has(KEY, SCORE) for index in leading)
    return by_key and any(index.has(QUERY) for index in leading) and DTYPES[load.args[0].dtype].bytes <= _MAX_BYTES
