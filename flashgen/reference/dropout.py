"""The dropout mask: one byte of Philox4x32-7 for each (batch, head, query, key) decides whether it is kept.

The byte of an element depends on (seed, offset, b, h, i, j) alone. No tile size, kernel family, batch layout or grid
changes it, so the forward and the backward agree. One Philox call gives the bytes of 16 elements: rows i and i + 8 and
columns j and j + 1, in four neighbouring groups of 8 columns. One lane holds these as accumulators of four m16n8 matrix
products, so the 32 lanes of a warp cover a block of 16 queries x 32 keys.

    key = (seed mod 2**32, seed div 2**32)
    counter = (b << 16 | h, j >> 5, offset, (i >> 4) << 5 | lane),  lane = (i & 7) * 4 + ((j & 7) >> 1)
    bit n of the byte = bit (n >> 2) * 16 + e of output word n & 3
    e = ((j >> 3) & 3) * 4 + ((i >> 3) & 1) * 2 + (j & 1)

The order of the counter words lets lanes share three of the seven rounds of Philox, because only an XOR combines j and
i into one word before that. The bits of a byte are spread over the words: half a word holds one bit of each of the 16
bytes, so that a few logical instructions compare all 16 bytes with a threshold at once.

Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Dropout on attention probabilities:
Dao et al., "FlashAttention", 2022, appendix B.3 (there with a saved generator state instead of a mapping).
"""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import NDArray

from flashgen.errors import ArgumentError, SpecError
from flashgen.reference.philox import philox4x32

_BLOCK_Q, _BLOCK_K = 16, 32  # covered by the 32 lanes of a warp with one Philox call each
_LIMITS = {"seed": 2**64, "offset": 2**32, "batch": 2**16 + 1, "heads": 2**16 + 1}


def threshold(probability: float) -> int:
    """Returns T = round(256 (1 - p)), halves rounded to even. An element is kept iff its byte is below T.

    Raises SpecError unless 1 <= T <= 256, that is, unless 0 <= p <= 0.998.

    Args:
        probability: p, that of dropping an element.
    """
    kept = 256 * (1 - probability)
    if not 0 <= probability <= 1 or not 1 <= (rounded := round(kept)) <= 256:
        raise SpecError(
            f"dropout={probability!r} does not keep between 1 and 256 of 256 elements; give 0 <= dropout <= 0.998"
        )
    return rounded


def check_counter(seed: int, offset: int, batch: int, heads: int) -> tuple[int, int]:
    """Returns seed and offset as Python ints. Raises ArgumentError for a value that does not fit the Philox counter."""
    given = {"seed": seed, "offset": offset, "batch": batch, "heads": heads}
    for name, value in given.items():
        try:
            given[name] = operator.index(value)
        except TypeError:
            raise ArgumentError(
                f"{name}={value!r} is not an integer; dropout needs 0 <= {name} < {_LIMITS[name]}"
            ) from None
        if not 0 <= given[name] < _LIMITS[name]:
            raise ArgumentError(f"{name}={value!r} is out of range; dropout needs 0 <= {name} < {_LIMITS[name]}")
    return given["seed"], given["offset"]


def keep_tile(
    seed: int, offset: int, b: int, h: int, queries: range, keys: range, probability: float
) -> NDArray[np.bool_]:
    """Returns which elements of a tile are kept: bool (len(queries), len(keys)). Ranges step by 1; h: a query head."""
    limit = threshold(probability)
    if not queries or not keys:
        return np.zeros((len(queries), len(keys)), dtype=bool)
    first_q, first_k = queries.start // _BLOCK_Q, keys.start // _BLOCK_K
    blocks_q = np.arange(first_q, -(-queries.stop // _BLOCK_Q), dtype=np.uint64)
    blocks_k = np.arange(first_k, -(-keys.stop // _BLOCK_K), dtype=np.uint64)
    lanes = np.arange(32, dtype=np.uint64).reshape(8, 4)  # row in a group of 8, pair of columns in a group of 8

    row_words = (blocks_q[:, None, None] << np.uint64(5)) | lanes
    words = philox4x32(
        ((b << 16) | h, blocks_k, offset, row_words[..., None]),
        (seed & 0xFFFFFFFF, seed >> 32),
    )  # (block of 16 queries, row of 8, pair of columns, block of 32 keys, word)
    values = _bytes(words).reshape(
        len(blocks_q), 8, 4, len(blocks_k), 4, 2, 2
    )  # ..., group of 8 keys, half of 16 rows, column
    values = values.transpose(0, 5, 1, 3, 4, 2, 6).reshape(len(blocks_q) * _BLOCK_Q, len(blocks_k) * _BLOCK_K)
    row, column = queries.start - first_q * _BLOCK_Q, keys.start - first_k * _BLOCK_K
    return np.asarray(values[row : row + len(queries), column : column + len(keys)] < limit)


def _bytes(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Returns the 16 bytes of four words, (..., 4) -> (..., 16): the module docstring gives the order of the bits."""
    bits = np.unpackbits(words.astype("<u4").view(np.uint8), axis=-1, bitorder="little")
    planes = bits.reshape(*words.shape, 2, 16).swapaxes(-3, -2)  # ..., half of the bits, word, byte
    return np.packbits(planes.reshape(*words.shape[:-1], 8, 16), axis=-2, bitorder="little")[..., 0, :]


def dropout_keep(
    seed: int, offset: int, batch: int, heads: int, len_q: int, len_k: int, probability: float
) -> NDArray[np.bool_]:
    """Returns which elements dropout keeps: bool (batch, heads, len_q, len_k), where heads are query heads.

    The caller scales kept probabilities by 256 / threshold(probability), which makes the expectation exact.
    Raises ArgumentError for a seed outside [0, 2**64), an offset outside [0, 2**32), a batch or number of heads above
    65536, or a negative length, and SpecError for a probability that `threshold` rejects.

    Args:
        seed: the seed, an integer.
        offset: the offset, an integer.
        batch: the number of sequences.
        heads: the number of query heads.
        len_q: the number of queries.
        len_k: the number of keys.
        probability: that of dropping an element.
    """
    seed, offset = check_counter(seed, offset, batch, heads)
    for name, length in (("len_q", len_q), ("len_k", len_k)):
        if length < 0:
            raise ArgumentError(f"{name}={length} is negative; give a length of 0 or more")
    threshold(probability)  # raises also when there is nothing to drop
    kept = np.empty((batch, heads, len_q, len_k), dtype=bool)
    for b, h in np.ndindex(batch, heads):
        kept[b, h] = keep_tile(seed, offset, b, h, range(len_q), range(len_k), probability)
    return kept
