"""Block-sparse layouts as users have them, a boolean array, CSR/BSR or lists of blocks: all become a boolean array."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from flashgen.errors import ArgumentError

_Array = np.ndarray[Any, Any]
_MOST_DIMENSIONS = 4  # (batch, heads, blocks_q, blocks_k)


class BlockLayout:
    """Which blocks of queries × keys are attended to: the value of a layout that `fg.block_sparse` captures.

    `attention(q, k, v, layout=BlockLayout.from_bsr(indptr, indices, shape))`. Its shape is (blocks_q, blocks_k),
    (heads, blocks_q, blocks_k) or (batch, heads, blocks_q, blocks_k), with as many dimensions as the mask's Tensor has.
    `from_dense`, `from_bsr` and `from_lists` make it; it copies what it is given, and does not change afterwards.
    """

    def __init__(self, dense: _Array) -> None:
        self._dense = dense
        self._dense.flags.writeable = False
        self._moved: dict[Hashable, Any] = {}

    @classmethod
    def from_dense(cls, blocks: Any) -> BlockLayout:
        """From an array of booleans, or of the integers 0 and 1, of shape (…, blocks_q, blocks_k)."""
        array = _host(blocks, "blocks")
        if not 2 <= array.ndim <= _MOST_DIMENSIONS:
            raise ArgumentError(f"blocks has shape {array.shape}; give 2 to 4 dimensions (…, blocks_q, blocks_k)")
        if array.dtype != np.bool_ and (array.dtype.kind not in "iu" or not np.isin(array, (0, 1)).all()):
            raise ArgumentError(f"blocks is {array.dtype}; give booleans, or integers that are 0 or 1")
        return cls(array.astype(np.bool_))

    @classmethod
    def from_bsr(cls, indptr: Any, indices: Any = None, shape: tuple[int, int] | None = None) -> BlockLayout:
        """From compressed rows of blocks, as SciPy's and FlashInfer's.

        Args:
            indptr: integers (blocks_q + 1,): the blocks of row i are indices[indptr[i]:indptr[i + 1]]. Or a matrix of
                scipy.sparse, bsr or csr, alone: every block (element, if csr) that it stores is kept.
            indices: integers (stored blocks,): the column of each, in any order, each at most once in a row.
            shape: (blocks_q, blocks_k).
        """
        if indices is None and shape is None and hasattr(indptr, "indptr"):
            matrix = indptr
            block = getattr(matrix, "blocksize", (1, 1))
            indptr, indices = matrix.indptr, matrix.indices
            shape = (matrix.shape[0] // block[0], matrix.shape[1] // block[1])
        if indices is None or shape is None:
            raise ArgumentError(
                "from_bsr takes indptr, indices and shape=(blocks_q, blocks_k), or a scipy matrix alone"
            )
        rows, columns = _shape(shape)
        starts, found = _integers(indptr, "indptr", 1), _integers(indices, "indices", 1)
        if starts.shape != (rows + 1,):
            raise ArgumentError(f"indptr has {starts.size} elements; {rows} rows of blocks need {rows + 1}")
        if starts[0] != 0 or starts[-1] != found.size or (np.diff(starts) < 0).any():
            raise ArgumentError(f"indptr must rise from 0 to the {found.size} indices; it goes from {starts[0]} "
                                f"to {starts[-1]}")  # fmt: skip
        dense = np.zeros((rows, columns), np.bool_)
        _mark(dense, np.repeat(np.arange(rows), np.diff(starts)), found, "indices")
        return cls(dense)

    @classmethod
    def from_lists(cls, counts: Any, indices: Any, blocks_k: int) -> BlockLayout:
        """From lists, as FlexAttention's block masks: the blocks of row i are indices[…, i, :counts[…, i]].

        Args:
            counts: integers (…, blocks_q).
            indices: integers (…, blocks_q, room), in any order; what stands behind the count is not read.
            blocks_k: how many blocks of keys there are.
        """
        lengths = _integers(counts, "counts")
        found = _integers(indices, "indices")
        if not 1 <= lengths.ndim < _MOST_DIMENSIONS or found.shape[:-1] != lengths.shape:
            raise ArgumentError(
                f"counts {lengths.shape} and indices {found.shape}: give (…, blocks_q) and (…, blocks_q, room)"
            )
        room = found.shape[-1]
        if lengths.size and not 0 <= lengths.min() <= lengths.max() <= room:
            raise ArgumentError(f"counts go from {lengths.min()} to {lengths.max()}; indices has room for {room}")
        rows, places = np.nonzero(np.arange(room) < lengths.reshape(-1, 1))
        dense = np.zeros((lengths.size, _shape((1, blocks_k))[1]), np.bool_)
        _mark(dense, rows, found.reshape(-1, room)[rows, places], "indices")
        return cls(dense.reshape(*lengths.shape, -1) if dense.size else np.zeros((*lengths.shape, blocks_k), np.bool_))

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, blocks_q, blocks_k)."""
        return self._dense.shape

    @property
    def density(self) -> float:
        """The fraction of blocks that are kept."""
        return float(self._dense.mean()) if self._dense.size else 0.0

    def to_dense(self) -> _Array:
        """The layout as a boolean array, which must not be written to."""
        return self._dense

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> _Array:
        return np.array(self._dense, dtype=dtype, copy=copy)

    def moved(self, place: Hashable, move: Callable[[_Array], Any]) -> Any:
        """The array where `move` puts it, moved once for each place."""
        if place not in self._moved:
            self._moved[place] = move(self._dense)
        return self._moved[place]

    def __repr__(self) -> str:
        return f"BlockLayout({' x '.join(map(str, self.shape))}, {self.density:.1%} kept)"


def _mark(dense: _Array, rows: _Array, columns: _Array, argument: str) -> None:
    """Sets dense[rows, columns]; ArgumentError for a column that does not exist, or is given twice in a row."""
    outside = (columns < 0) | (columns >= dense.shape[1])
    if outside.any():
        raise ArgumentError(f"{argument} holds {columns[outside][0]}; there are blocks 0 to {dense.shape[1] - 1}")
    dense[rows, columns] = True
    if int(dense.sum()) != rows.size:
        raise ArgumentError(f"{argument} names a block of a row twice; give each once")


def _shape(shape: Any) -> tuple[int, int]:
    try:
        rows, columns = (int(size.__index__()) for size in shape)
    except (TypeError, ValueError, AttributeError):
        raise ArgumentError(f"shape={shape!r} must be two integers (blocks_q, blocks_k)") from None
    if min(rows, columns) < 1:
        raise ArgumentError(f"shape=({rows}, {columns}) must be positive: at least one block of queries and of keys")
    return rows, columns


def _integers(value: Any, argument: str, ndim: int | None = None) -> _Array:
    array = _host(value, argument)
    if array.dtype.kind not in "iu" and array.size:
        raise ArgumentError(f"{argument} is {array.dtype}; give integers")
    if ndim is not None and array.ndim != ndim:
        raise ArgumentError(f"{argument} has shape {array.shape}; give {ndim} dimension(s)")
    return array.astype(np.int64)


def _host(value: Any, argument: str) -> _Array:
    """The array in host memory: CuPy's by get(), torch's by cpu()."""
    for fetch in ("get", "cpu"):
        if not isinstance(value, np.ndarray) and hasattr(value, "shape") and hasattr(value, fetch):
            value = getattr(value, fetch)()
    array = np.asarray(value)
    if array.dtype == object:
        raise ArgumentError(f"{argument} of type {type(value).__name__} is no array of numbers")
    return array
