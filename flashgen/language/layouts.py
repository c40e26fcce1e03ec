"""Block-sparse layouts: a boolean array, CSR or BSR, or lists of blocks, all converted to a boolean array."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from flashgen.errors import ArgumentError

_Array = np.ndarray[Any, Any]
_MAX_DIMENSIONS = 4  # (batch, heads, blocks_q, blocks_k)


class BlockLayout:
    """The blocks of queries × keys that are attended to: the value for a layout that `fg.block_sparse` captures.

        attention(q, k, v, layout=BlockLayout.from_bsr(indptr, indices, shape))

    The shape is (blocks_q, blocks_k), (heads, blocks_q, blocks_k) or (batch, heads, blocks_q, blocks_k), with as many
    dimensions as the Tensor of the mask. `from_dense`, `from_bsr` and `from_lists` create a layout. It copies their
    arguments, and is immutable.

    Args:
        dense: a boolean array of one of these shapes.
    """

    def __init__(self, dense: _Array) -> None:
        self._dense = dense
        self._dense.flags.writeable = False
        self._moved: dict[Hashable, Any] = {}

    @classmethod
    def from_dense(cls, blocks: Any) -> BlockLayout:
        """Creates a layout from an array of booleans, or of the integers 0 and 1, of shape (…, blocks_q, blocks_k).

        Args:
            blocks: the array; 1 and True are blocks that are attended to.
        """
        array = _host(blocks, "blocks")
        if not 2 <= array.ndim <= _MAX_DIMENSIONS:
            raise ArgumentError(f"blocks has shape {array.shape}; give 2 to 4 dimensions (…, blocks_q, blocks_k)")
        if array.dtype != np.bool_ and (array.dtype.kind not in "iu" or not np.isin(array, (0, 1)).all()):
            raise ArgumentError(f"blocks is {array.dtype}; give booleans, or integers that are 0 or 1")
        return cls(array.astype(np.bool_))

    @classmethod
    def from_bsr(cls, indptr: Any, indices: Any = None, shape: tuple[int, int] | None = None) -> BlockLayout:
        """Creates a layout from compressed rows of blocks, in the format of SciPy and FlashInfer.

        Args:
            indptr: Integers of shape (blocks_q + 1,). Row i has the blocks indices[indptr[i]:indptr[i + 1]]. Or, as the
                only argument, a scipy.sparse matrix in BSR or CSR format: every stored block (or element, for CSR) is
                kept.
            indices: Integers of shape (stored blocks,): the column of each block, in any order, without repetition in a
                row.
            shape: (blocks_q, blocks_k).
        """
        if indices is None and shape is None and hasattr(indptr, "indptr"):
            matrix = indptr
            block = getattr(matrix, "blocksize", (1, 1))
            indptr, indices = matrix.indptr, matrix.indices
            shape = (matrix.shape[0] // block[0], matrix.shape[1] // block[1])
        if indices is None or shape is None:
            raise ArgumentError("from_bsr takes indptr, indices and shape=(blocks_q, blocks_k), or only a scipy matrix")
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
        """Creates a layout from lists of blocks, as in FlexAttention's block masks.

        Args:
            counts: Integers of shape (…, blocks_q): the number of blocks of each row.
            indices: Integers of shape (…, blocks_q, capacity). Row i has the blocks indices[…, i, :counts[…, i]], in
                any order. Entries after the count are ignored.
            blocks_k: The number of blocks of keys.
        """
        lengths = _integers(counts, "counts")
        found = _integers(indices, "indices")
        if not 1 <= lengths.ndim < _MAX_DIMENSIONS or found.shape[:-1] != lengths.shape:
            raise ArgumentError(
                f"counts {lengths.shape} and indices {found.shape}: give (…, blocks_q) and (…, blocks_q, capacity)"
            )
        capacity = found.shape[-1]
        if lengths.size and not 0 <= lengths.min() <= lengths.max() <= capacity:
            raise ArgumentError(f"counts go from {lengths.min()} to {lengths.max()}; indices has room for {capacity}")
        rows, slots = np.nonzero(np.arange(capacity) < lengths.reshape(-1, 1))
        dense = np.zeros((lengths.size, _shape((1, blocks_k))[1]), np.bool_)
        _mark(dense, rows, found.reshape(-1, capacity)[rows, slots], "indices")
        return cls(dense.reshape(*lengths.shape, -1) if dense.size else np.zeros((*lengths.shape, blocks_k), np.bool_))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (…, blocks_q, blocks_k)."""
        return self._dense.shape

    @property
    def density(self) -> float:
        """The fraction of blocks that are kept."""
        return float(self._dense.mean()) if self._dense.size else 0.0

    def to_dense(self) -> _Array:
        """Returns the layout as a boolean array, which is read-only."""
        return self._dense

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> _Array:
        return np.array(self._dense, dtype=dtype, copy=copy)

    def moved(self, device: Hashable, copy: Callable[[_Array], Any]) -> Any:
        """Returns the copy of the array that `copy` makes for a device, made once per device.

        Args:
            device: the device, as a key.
            copy: returns a copy of a NumPy array on the device.
        """
        if device not in self._moved:
            self._moved[device] = copy(self._dense)
        return self._moved[device]

    def __repr__(self) -> str:
        return f"BlockLayout({' x '.join(map(str, self.shape))}, {self.density:.1%} kept)"


def _mark(dense: _Array, rows: _Array, columns: _Array, argument: str) -> None:
    """Sets dense[rows, columns]. Raises ArgumentError for a column that does not exist or occurs twice in a row."""
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
    """Returns the array in host memory: CuPy's by get(), torch's by cpu()."""
    for fetch in ("get", "cpu"):
        if not isinstance(value, np.ndarray) and hasattr(value, "shape") and hasattr(value, fetch):
            value = getattr(value, fetch)()
    array = np.asarray(value)
    if array.dtype == object:
        raise ArgumentError(f"{argument} of type {type(value).__name__} is not an array of numbers")
    return array
