"""Captures: arrays (`Tensor`) and numbers (`Scalar`) that a traced function reads and each call supplies by name."""

from __future__ import annotations

from typing import Any

from flashgen.errors import SpecError
from flashgen.language.declarations import array_capture, number_capture
from flashgen.language.expression_json import ARRAY, canonical, node_to_data
from flashgen.language.operations import Kind
from flashgen.language.rows import MAX_COLUMNS, Row
from flashgen.language.trace import Traced, lift, number_of, traced_node
from flashgen.language.well_formed import declaration_text


class Tensor:
    """An array that each call supplies by name: `attention(q, k, v, slopes=array)`.

    Args:
        name: The keyword of the call.
        dtype: bool, int8, uint8, int16, int32, int64, float16, bfloat16 or float32, as a name, a NumPy or a torch
            dtype.
        ndim: The number of dimensions, 1 to 8.
        grad: Whether the backward pass returns a gradient for the array (floating dtypes only).

    Index it inside a traced function: `slopes[h]`, `table[h, q - k]` or `table[h][q - k]`. Each index is clamped to its
    dimension, so a leading dimension of size 1 broadcasts, and negative indices do not count from the end. All 64 bits
    of an int64 element are used: the ids 1 and 1 + 2**32 differ. A kernel spends more instructions on 64-bit than on
    32-bit arithmetic.
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
        leaf = Leaf(canonical(node_to_data(capture)), capture.kind, capture.ndim, declaration_text(capture))
        return element(leaf, None, index if isinstance(index, tuple) else (index,))

    def __iter__(self) -> Any:
        raise SpecError(
            f"{self!r} cannot be iterated: its size is known only at the call; index it with traced indices"
        )

    def __repr__(self) -> str:
        return declaration_text(self.capture)


class Scalar(Traced):
    """A number that each call supplies by name: `attention(q, k, v, window=512)`.

    Args:
        name: The keyword of the call.
        dtype: "int32" or "float32".
    """

    def __init__(self, name: str, dtype: Any = "int32") -> None:
        traced = traced_node(number_capture(name, dtype))
        super().__init__(traced.text, traced.kind)

    def __repr__(self) -> str:
        return declaration_text(self.node)


class Leaf:
    """The source of a load: a declared capture, or arrays of one dtype and number of dimensions.

    Attributes:
        text: The leaf in the JSON of the trace.
        kind: The kind of an element.
        ndim: The number of indices.
        shown: The name in error messages.
    """

    __slots__ = ("kind", "load", "ndim", "shown", "text")

    def __init__(self, text: str, kind: Kind, ndim: int, shown: str) -> None:
        self.text, self.kind, self.ndim, self.shown = text, kind, ndim, shown
        self.load = f'["Load",{text}'


def array_leaf(dtype: str, ndim: int, grad: bool, name: str = "table") -> Leaf:
    """Returns the leaf of arrays that a function holds. `dtype` is NumPy's name of the dtype that kernels read."""
    kind: Kind = "float" if "float" in dtype else "bool" if dtype == "bool" else "int"
    text = f'["{ARRAY}","{dtype}",{ndim or 1},{"true" if grad else "false"}]'
    return Leaf(text, kind, ndim or 1, f"Tensor({name!r}, {dtype!r}, ndim={ndim or 1}{', grad=True' if grad else ''})")


class PartlyIndexed(Row):
    """A Tensor with some of its indices, such as `table[h]`, which waits for the rest: `table[h][d]`.

    If one index is missing and the size of the array is known, it is a row of elements.
    """

    def __init__(self, leaf: Leaf, array: Any, indices: tuple[Any, ...]) -> None:
        self.leaf, self.array, self.indices = leaf, array, indices

    def __getitem__(self, index: Any) -> Any:
        return element(self.leaf, self.array, self.indices + (index if isinstance(index, tuple) else (index,)))

    def elements(self) -> tuple[Traced, ...]:
        leaf = self.leaf
        if self.array is None or len(self.indices) != leaf.ndim - 1:
            raise SpecError(
                f"{self!r} is a row, and functions compute with single elements: give one index per dimension. A "
                "product of rows, such as of rotary parts, is what q and k are for: append the rows to them, and leave "
                "v (value_dim)"
            )
        columns = self.array.shape[-1]
        if not 1 <= columns <= MAX_COLUMNS:
            raise SpecError(
                f"a computation on rows of {columns}: give 1 to {MAX_COLUMNS} columns, or append them to q and k"
            )
        return tuple([element(leaf, self.array, (*self.indices, column)) for column in range(columns)])

    def __repr__(self) -> str:
        return f"{self.leaf.shown} indexed with {len(self.indices)} of {self.leaf.ndim} indices"


def element(leaf: Leaf, array: Any, indices: tuple[Any, ...]) -> Any:
    """Returns the element of `array` at these indices, or of a declared capture if `array` is None.

    With fewer indices than dimensions it returns a `PartlyIndexed`.
    """
    if len(indices) != leaf.ndim:
        return _partly_indexed(leaf, array, indices)
    text = leaf.load
    arrays: tuple[Any, ...] = () if array is None else (array,)
    numbers: tuple[Any, ...] = ()
    for item in indices:
        value = item if type(item) is Traced else _index(leaf, array, indices, item)
        if value.kind != "int":
            raise SpecError(
                f"{leaf.shown}: index {_position(indices, item)} must be an integer, got {value.kind}: use // instead "
                "of /, or to_int(x)"
            )
        text = f"{text},{value.text}"
        arrays += value.arrays
        numbers += value.numbers
    return Traced(text + "]", leaf.kind, arrays, numbers)


def _partly_indexed(leaf: Leaf, array: Any, indices: tuple[Any, ...]) -> PartlyIndexed:
    for item in indices:
        _refuse_slices(leaf, item)
    if len(indices) > leaf.ndim:
        raise SpecError(f"{leaf.shown} has ndim={leaf.ndim}, indexed with {len(indices)} indices")
    return PartlyIndexed(leaf, array, indices)


def _refuse_slices(leaf: Leaf, item: Any) -> None:
    if isinstance(item, slice) or item is None or item is Ellipsis:
        raise SpecError(
            f"{leaf.shown}: slices, None and ... are not traced; give one integer index per dimension, and slice the "
            "array outside of the function"
        )


def _index(leaf: Leaf, array: Any, indices: tuple[Any, ...], item: Any) -> Traced:
    """Lifts an index that is not traced. A negative one counts from the end if the size is known."""
    _refuse_slices(leaf, item)
    value = lift(item)
    number = number_of(value)
    if number is None or number >= 0:
        return value
    position = _position(indices, item)
    if array is None:
        raise SpecError(
            f"{leaf.shown}: index {position} is {number}; an index is clamped to its dimension, and does not count "
            "from the end: use an index >= 0"
        )
    return lift(number + array.shape[position])


def _position(indices: tuple[Any, ...], item: Any) -> int:
    return next(position for position, other in enumerate(indices) if other is item)
