"""Bits for a tree of drafted tokens, from the parent of each token: the input of the mask `tree`."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashgen.errors import SpecError

__all__ = ["tree_bits"]

_WORD = 32


def tree_bits(parents: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Returns bits that let each drafted token attend to itself and to its ancestors in the draft.

    Args:
        parents: Integers of shape (tokens,) or (batch, tokens): the number of each token's parent, which must be
            smaller than its own, or -1 if the token follows the keys before the draft.

    Returns:
        A NumPy array of int32 of shape (tokens, words) or (batch, tokens, words), with words = ceil(tokens / 32). Bit j
        % 32 of word j // 32 of a token is set if it attends to token j. Copy it to the device of the call.

    Raises:
        SpecError: A parent does not precede its token, or `parents` has another shape or dtype.
    """
    try:
        given = np.asarray(parents)
    except ValueError as error:  # rows of different lengths
        raise SpecError(
            "tree_bits: every sequence must have the same number of parents: pad shorter drafts with -1, tokens "
            "without children"
        ) from error
    if given.dtype.kind not in "iu" or not 1 <= given.ndim <= 2:
        what = f"tree_bits: parents of {given.dtype} {given.shape}"
        raise SpecError(f"{what} must be integers, (tokens,) or (batch, tokens)")
    tokens = given.shape[-1]
    if (given >= np.arange(tokens)).any() or (given < -1).any():
        raise SpecError("tree_bits: a parent must precede its token: numbers from -1 to the token's own minus 1")
    rows = np.atleast_2d(given)
    attends = np.zeros((len(rows), tokens, -(-tokens // _WORD) * _WORD), bool)
    for token in range(tokens):
        parent = rows[:, token]
        attends[:, token] = attends[np.arange(len(rows)), parent] & (parent >= 0)[:, None]
        attends[:, token, token] = True
    bytes_of_bits = np.packbits(attends, axis=-1, bitorder="little")
    words = bytes_of_bits.view("<i4").astype(np.int32)
    return words[0] if given.ndim == 1 else words
