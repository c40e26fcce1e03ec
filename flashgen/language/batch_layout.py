"""`BatchLayout`: how the sequences of a batch lie in the arrays of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Sizes4 = tuple[int, int, int, int]
"""Sizes or strides of the axes (batch, heads, length, dim), the order "bhsd"."""


@dataclass(frozen=True)
class BatchLayout:
    """The order of the axes of q, k, v and the output, and what a call says about its sequences.

    Attributes:
        name: The value of `AttentionSpec.layout`.
        axes: The names of the axes.
        heads_axis, rows_axis: The positions of the heads and of the rows (the length, or the tokens) in `axes`.
        is_varlen: Whether sequences of different lengths are packed along one axis. Only the device knows the lengths.
        sequence_arrays: The arrays of a call that locate the sequences.
        max_lengths: The numbers of a call that bound the lengths.
    """

    name: str
    axes: tuple[str, ...]
    heads_axis: int
    rows_axis: int
    is_varlen: bool = False
    sequence_arrays: tuple[str, ...] = ()
    max_lengths: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of a call beside q, k and v. Captures of such a spec may not have these names."""
        return self.sequence_arrays + self.max_lengths

    def to_bhsd(self, values: tuple[int, ...], batch: int = 0) -> Sizes4:
        """Converts sizes or strides in the order of the layout; `batch` is used where there is no batch axis."""
        return (batch if self.is_varlen else values[0], values[self.heads_axis], values[self.rows_axis], values[-1])

    def from_bhsd(self, values: Sizes4) -> tuple[int, ...]:
        """Converts sizes or strides to the order of the layout."""
        batch, *inner, dim = values
        inner = inner if self.heads_axis < self.rows_axis else inner[::-1]
        return (*inner, dim) if self.is_varlen else (batch, *inner, dim)

    def rows_shape(self, batch: int, heads: int, rows: int) -> tuple[int, ...]:
        """Returns the shape of the LSE, which has a number for each row of each head: heads before rows."""
        return (heads, rows) if self.is_varlen else (batch, heads, rows)

    def lse_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the LSE of a q or an output of this shape."""
        return self.rows_shape(shape[0], shape[self.heads_axis], shape[self.rows_axis])

    def swap_heads(self, array: Any) -> Any:
        """Returns a view with heads before rows of an array in this layout, and the reverse: the swap is its inverse.

        The last three axes of the array, of NumPy or torch, are those of heads, rows and dim.
        """
        return array if self.heads_axis < self.rows_axis else array.swapaxes(-3, -2)


_SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
_MAX_LENGTHS = ("max_seqlen_q", "max_seqlen_k")
BATCH_LAYOUTS = {
    layout.name: layout
    for layout in (
        BatchLayout("bhsd", ("batch", "heads", "length", "dim"), heads_axis=1, rows_axis=2),
        BatchLayout("bshd", ("batch", "length", "heads", "dim"), heads_axis=2, rows_axis=1),
        BatchLayout("thd", ("tokens", "heads", "dim"), 1, 0, True, _SEQUENCES, _MAX_LENGTHS),
    )
}
PAGES = BatchLayout("pages", ("pages", "page_size", "heads", "dim"), heads_axis=2, rows_axis=1)
"""The layout of K and V in pages, for every layout of q."""
