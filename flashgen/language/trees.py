"""The bits of drafted tokens that branch, of each token's parent: what the mask `tree` reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashgen.errors import SpecError

__all__ = ["tree_bits"]

_WORD = 32


def tree_bits(parents: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Whom each drafted token attends to: itself, its parent, the parent of that, and so on.

    Args:
        parents: integers, (tokens,) or (batch, tokens): of each token the number of its parent, which stands before it,
            or -1 where it follows the keys before the draft.

    Returns:
        int32 (tokens, words) or (batch, tokens, words), words = ceil(tokens / 32): bit j % 32 of word j // 32 of a
        token is set where it attends to token j. A NumPy array: copy it to the device of the call.

    Raises SpecError where a parent does not stand before its token.
    """
    try:
        given = np.asarray(parents)
    except ValueError as error:  # rows of different lengths
        raise SpecError(
            "tree_bits: parents must be as many for each sequence: fill shorter drafts up with -1, tokens that nobody "
            "follows"
        ) from error
    if given.dtype.kind not in "iu" or not 1 <= given.ndim <= 2:
        what = f"tree_bits: parents of {given.dtype} {given.shape}"
        raise SpecError(f"{what} must be integers, (tokens,) or (batch, tokens)")
    tokens = given.shape[-1]
    if (given >= np.arange(tokens)).any() or (given < -1).any():
        raise SpecError("tree_bits: parents must stand before their tokens: numbers from -1 to the token's own less 1")
    rows = np.atleast_2d(given)
    attends = np.zeros((len(rows), tokens, -(-tokens // _WORD) * _WORD), bool)
    for token in range(tokens):
        parent = rows[:, token]
        attends[:, token] = attends[np.arange(len(rows)), parent] & (parent >= 0)[:, None]
        attends[:, token, token] = True
    bytes_of_bits = np.packbits(attends, axis=-1, bitorder="little")
    words = bytes_of_bits.view("<i4").astype(np.int32)
    return words[0] if given.ndim == 1 else words
