"""`BatchLayout`: how the sequences of a batch lie in the arrays of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

Sizes4 = tuple[int, int, int, int]
"""Sizes or strides of the axes (batch, heads, length, dim), the order "bhsd"."""

Feature = Literal[
    "plans by sizes", "kept tile lists", "shards", "decode kernels", "contiguous 8-bit keys", "tiles of gradients"
]
"""What some batch layouts do not support:

plans by sizes         kernels that are selected or tuned for the lengths of a call
kept tile lists        tile lists of a call that later calls of the same lengths use again
shards                 `AttentionSpec.shard`
decode kernels         the kernels of few queries over many keys, whose blocks have sequences of equal length
contiguous 8-bit keys  a kv_dtype without pages
tiles of gradients     kernels whose blocks own tiles of the gradient of an array with an element per query and key
"""


@dataclass(frozen=True)
class BatchLayout:
    """The order of the axes of q, k, v and the output, and what a call says about its sequences.

    An instance of this class describes a dense batch: all sequences have the length of the arrays.

    Attributes:
        name: The value of `AttentionSpec.layout`.
        axes: The names of the axes.
        heads_axis, rows_axis: The positions of the heads and of the rows (the length, or the tokens) in `axes`.
        swap_advice: What to do with arrays whose heads and rows are swapped.
        is_varlen: Whether sequences of different lengths are packed along one axis. Only the device knows the lengths.
        sequence_arrays: The arrays of a call that locate the sequences.
        max_lengths: The numbers of a call that bound the lengths.
        unsupported: The features that a batch of this layout does not have.
    """

    name: str
    axes: tuple[str, ...]
    heads_axis: int
    rows_axis: int
    swap_advice: str
    is_varlen: ClassVar[bool] = False
    sequence_arrays: ClassVar[tuple[str, ...]] = ()
    max_lengths: ClassVar[tuple[str, ...]] = ()
    unsupported: ClassVar[frozenset[Feature]] = frozenset()

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of a call beside q, k and v. Captures of such a spec may not have these names."""
        return self.sequence_arrays + self.max_lengths

    def supports(self, feature: Feature) -> bool:
        """Returns whether batches of this layout have a feature."""
        return feature not in self.unsupported

    def rows(self, length: Any, total: Any) -> Any:
        """Returns the rows of an array: the length of its sequences, or the total length of packed sequences."""
        return length

    def to_bhsd(self, values: tuple[int, ...], batch: int = 0) -> Sizes4:
        """Converts sizes or strides in the order of the layout; `batch` is used where there is no batch axis."""
        return values[0], values[self.heads_axis], values[self.rows_axis], values[-1]

    def from_bhsd(self, values: Sizes4) -> tuple[int, ...]:
        """Converts sizes or strides to the order of the layout."""
        batch, *inner, dim = values
        return (batch, *(inner if self.heads_axis < self.rows_axis else inner[::-1]), dim)

    def rows_shape(self, batch: int, heads: int, rows: int) -> tuple[int, ...]:
        """Returns the shape of the LSE, which has a number for each row of each head: heads before rows."""
        return batch, heads, rows

    def lse_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the LSE of a q or an output of this shape."""
        return self.rows_shape(shape[0], shape[self.heads_axis], shape[self.rows_axis])

    def swap_heads(self, array: Any) -> Any:
        """Returns a view with heads before rows of an array in this layout, and the reverse: the swap is its inverse.

        The last three axes of the array, of NumPy or torch, are those of heads, rows and dim.
        """
        return array if self.heads_axis < self.rows_axis else array.swapaxes(-3, -2)


@dataclass(frozen=True)
class VarlenLayout(BatchLayout):
    """A varlen batch: its sequences are packed along the axis of rows, and only the device knows their lengths."""

    is_varlen: ClassVar[bool] = True
    sequence_arrays: ClassVar[tuple[str, ...]] = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
    max_lengths: ClassVar[tuple[str, ...]] = ("max_seqlen_q", "max_seqlen_k")
    unsupported: ClassVar[frozenset[Feature]] = frozenset(get_args(Feature))

    def rows(self, length: Any, total: Any) -> Any:
        return total

    def to_bhsd(self, values: tuple[int, ...], batch: int = 0) -> Sizes4:
        return batch, values[self.heads_axis], values[self.rows_axis], values[-1]

    def from_bhsd(self, values: Sizes4) -> tuple[int, ...]:
        return super().from_bhsd(values)[1:]

    def rows_shape(self, batch: int, heads: int, rows: int) -> tuple[int, ...]:
        return heads, rows


_SWAP = "declare layout={!r}, or swap the axes, for example array.swapaxes(1, 2)"
BATCH_LAYOUTS: dict[str, BatchLayout] = {
    layout.name: layout
    for layout in (
        BatchLayout("bhsd", ("batch", "heads", "length", "dim"), 1, 2, _SWAP.format("bshd")),
        BatchLayout("bshd", ("batch", "length", "heads", "dim"), 2, 1, _SWAP.format("bhsd")),
        VarlenLayout(
            "thd", ("tokens", "heads", "dim"), 1, 0, "give (tokens, heads, dim), for example array.swapaxes(0, 1)"
        ),
    )
}
PAGES = BatchLayout("pages", ("pages", "page_size", "heads", "dim"), 2, 1, "swap the axes of heads and rows of a page")
"""The layout of K and V in pages, for every layout of q."""
