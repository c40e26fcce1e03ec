"""Captures: arrays (`Tensor`) and numbers (`Scalar`) that a traced function reads and the call supplies by name."""

from __future__ import annotations

from typing import Any

from flashgen.errors import SpecError
from flashgen.language.declarations import array_capture, number_capture
from flashgen.language.expression_json import ARRAY, canonical, node_to_data
from flashgen.language.operations import Kind
from flashgen.language.rows import LONGEST_ROW, Row
from flashgen.language.trace import Traced, lift, number_of, of_node
from flashgen.language.well_formed import declared


class Tensor:
    """An array given at the call by name: `attention(q, k, v, slopes=array)`.

    Args:
        name: the keyword of the call.
        dtype: bool, int8, uint8, int16, int32, int64, float16, bfloat16 or float32 (a name, NumPy or torch dtype).
        ndim: number of dimensions, 1 to 8.
        grad: whether the backward pass returns its gradient (floating dtypes only).

    Index it inside a traced function: `slopes[h]`, `table[h, q - k]` or `table[h][q - k]`. Each index is clamped to
    its dimension, so a leading dimension of size 1 broadcasts, and nothing counts from the end. All 64 bits of an
    int64 count: ids 1 and 1 + 2**32 differ. Arithmetic that needs them costs a kernel more than int32's.
    """

    def __init__(self, name: str, dtype: Any = "float32", ndim: int = 1, grad: bool = False) -> None:
        self.capture = array_capture(name, dtype, ndim, grad)

    @property
    def name(self) -> str:
        return self.capture.name

    @property
    def ndim(self) -> int:
        return self.capture.ndim

    def __getitem__(self, index: Any) -> Any:
        capture = self.capture
        leaf = Leaf(canonical(node_to_data(capture)), capture.kind, capture.ndim, declared(capture))
        return element(leaf, None, index if isinstance(index, tuple) else (index,))

    def __iter__(self) -> Any:
        raise SpecError(
            f"{self!r} cannot be iterated: its size is known only at the call; index it with traced indices"
        )

    def __repr__(self) -> str:
        return declared(self.capture)


class Scalar(Traced):
    """A number given at the call by name, `attention(q, k, v, window=512)`; dtype "int32" or "float32"."""

    def __init__(self, name: str, dtype: Any = "int32") -> None:
        of = of_node(number_capture(name, dtype))
        super().__init__(of.text, of.kind)

    def __repr__(self) -> str:
        return declared(self.node)


class Leaf:
    """What elements are loaded of: a declared capture, or arrays of one dtype and number of dimensions.

    Attributes:
        text: the leaf in the trace's JSON; kind: of an element; ndim: the number of indices.
        shown: how messages call it.
    """

    __slots__ = ("kind", "load", "ndim", "shown", "text")

    def __init__(self, text: str, kind: Kind, ndim: int, shown: str) -> None:
        self.text, self.kind, self.ndim, self.shown = text, kind, ndim, shown
        self.load = f'["Load",{text}'


def array_leaf(dtype: str, ndim: int, grad: bool, name: str = "table") -> Leaf:
    """The leaf of arrays that a function holds; dtype: NumPy's name of what kernels read."""
    kind: Kind = "float" if "float" in dtype else "bool" if dtype == "bool" else "int"
    text = f'["{ARRAY}","{dtype}",{ndim or 1},{"true" if grad else "false"}]'
    return Leaf(text, kind, ndim or 1, f"Tensor({name!r}, {dtype!r}, ndim={ndim or 1}{', grad=True' if grad else ''})")


class PartlyIndexed(Row):
    """`table[h]` of a table with more dimensions, waiting for the rest: `table[h][d]`.

    With one index missing, of an array whose size is known, it is a row of elements.
    """

    def __init__(self, leaf: Leaf, array: Any, indices: tuple[Any, ...]) -> None:
        self.leaf, self.array, self.indices = leaf, array, indices

    def __getitem__(self, index: Any) -> Any:
        return element(self.leaf, self.array, self.indices + (index if isinstance(index, tuple) else (index,)))

    def elements(self) -> tuple[Traced, ...]:
        leaf = self.leaf
        if self.array is None or len(self.indices) != leaf.ndim - 1:
            raise SpecError(
                f"{self!r} is a whole row, and functions compute of single elements: give one index a dimension. A "
                "product of rows, as of rotary parts, is what q and k are for: append the rows to them, and leave v "
                "(value_dim)"
            )
        columns = self.array.shape[-1]
        if not 1 <= columns <= LONGEST_ROW:
            raise SpecError(
                f"a computation on rows of {columns}: give 1 to {LONGEST_ROW} columns, or append them to q and k"
            )
        return tuple([element(leaf, self.array, (*self.indices, column)) for column in range(columns)])

    def __repr__(self) -> str:
        return f"{self.leaf.shown} indexed with {len(self.indices)} of {self.leaf.ndim} indices"


def element(leaf: Leaf, array: Any, indices: tuple[Any, ...]) -> Any:
    """The element of an array, or of a declared capture (None), at these indices; with fewer, what waits for more."""
    if len(indices) != leaf.ndim:
        return _of_other_indices(leaf, array, indices)
    text = leaf.load
    arrays: tuple[Any, ...] = () if array is None else (array,)
    numbers: tuple[Any, ...] = ()
    if len(indices) == 1 and isinstance(indices[0], Traced) and indices[0].kind == "int":  # the most common one
        (only,) = indices
        return Traced(f"{text},{only.text}]", leaf.kind, arrays + only.arrays, only.numbers)
    for item in indices:
        value = item if isinstance(item, Traced) else _index(leaf, array, indices, item)
        if value.kind != "int":
            raise SpecError(
                f"{leaf.shown}: index {_place(indices, item)} must be an integer, got {value.kind}: use // instead of "
                "/, or to_int(x)"
            )
        text, arrays, numbers = f"{text},{value.text}", arrays + value.arrays, numbers + value.numbers
    return Traced(text + "]", leaf.kind, arrays, numbers)


def _of_other_indices(leaf: Leaf, array: Any, indices: tuple[Any, ...]) -> PartlyIndexed:
    for item in indices:
        _refuse_slices(leaf, item)
    if len(indices) > leaf.ndim:
        raise SpecError(f"{leaf.shown} has ndim={leaf.ndim}, indexed with {len(indices)} indices")
    return PartlyIndexed(leaf, array, indices)


def _refuse_slices(leaf: Leaf, item: Any) -> None:
    if isinstance(item, slice) or item is None or item is Ellipsis:
        raise SpecError(
            f"{leaf.shown}: slices, None and ... are not traced; give one integer index a dimension, of an array that "
            "is cut outside of the function"
        )


def _index(leaf: Leaf, array: Any, indices: tuple[Any, ...], item: Any) -> Traced:
    """An index that is no traced value; one below 0 counts from the end, where the size is known."""
    _refuse_slices(leaf, item)
    value = lift(item)
    number = number_of(value)
    if number is None or number >= 0:
        return value
    place = _place(indices, item)
    if array is None:
        raise SpecError(
            f"{leaf.shown}: index {place} is {number}; an index is clamped to its dimension, and does not count from "
            "the end: use an index >= 0"
        )
    return lift(number + array.shape[place])


def _place(indices: tuple[Any, ...], item: Any) -> int:
    return next(place for place, other in enumerate(indices) if other is item)
