"""Philox4x32, the counter-based random number generator of dropout, vectorised over counters.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3 and table 2.
Seven is the smallest number of rounds that passes BigCrush (same paper, table 2); most libraries run ten.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # for counter words 0 and 2
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key words between rounds: golden ratio, sqrt(3) - 1
ROUNDS = 7

_WORD = 0xFFFFFFFF


def philox4x32(counter: tuple[ArrayLike, ...], key: tuple[int, int], rounds: int = ROUNDS) -> NDArray[np.uint32]:
    """Returns the four random words of each counter.

    Args:
        counter: four arrays of words in [0, 2**32), which are broadcast together.
        key: two words.
        rounds: the number of rounds.

    Returns:
        uint32 of the broadcast shape with a last dimension of 4 appended.
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, dtype=np.uint64) for word in counter))
    k0, k1 = key
    for _ in range(rounds):
        product0 = c0 * np.uint64(MULTIPLIERS[0])  # 32 x 32 -> 64 bits never overflows uint64
        product1 = c2 * np.uint64(MULTIPLIERS[1])
        c0 = (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0)
        c2 = (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1)
        c1 = product1 & np.uint64(_WORD)
        c3 = product0 & np.uint64(_WORD)
        k0, k1 = (k0 + WEYL[0]) & _WORD, (k1 + WEYL[1]) & _WORD
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)
