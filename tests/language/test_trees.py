"""Trees of drafted tokens: bits from parents, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen.language as fg
from flashgen.errors import SpecError


def ancestors(parents: list[int], token: int) -> set[int]:
    found = set()
    while token >= 0:
        found.add(token)
        token = parents[token]
    return found


@pytest.mark.parametrize("tokens", [0, 1, 2, 31, 32, 33, 64, 100, 128])
def test_bits_include_a_token_and_its_ancestors(tokens: int) -> None:
    parents = np.random.default_rng(tokens).integers(-1, np.maximum(np.arange(tokens), 0), (3, tokens))
    bits = fg.tree_bits(parents)
    assert bits.shape == (3, tokens, -(-tokens // 32)) and bits.dtype == np.int32
    for row in range(3):
        np.testing.assert_array_equal(fg.tree_bits(parents[row]), bits[row])
        for token in range(tokens):
            attends = {j for j in range(tokens) if bits[row, token, j // 32] >> j % 32 & 1}
            assert attends == ancestors(parents[row].tolist(), token)


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-2], [-1, 0, 5], [[-1, 0], [-1, 2]]], ids=str)
def test_parents_precede_their_tokens(parents: Any) -> None:
    with pytest.raises(SpecError, match="a parent must precede its token"):
        fg.tree_bits(parents)


@pytest.mark.parametrize("parents", [[-1.0], -1, [[[-1]]]], ids=str)
def test_parents_are_indices_of_tokens(parents: Any) -> None:
    with pytest.raises(SpecError, match="must be integers"):
        fg.tree_bits(parents)


@pytest.mark.parametrize("bits", [fg.Tensor("bits", "int64", 3), fg.Tensor("bits", "int32", 1)], ids=str)
def test_bits_are_words_per_query(bits: fg.Tensor) -> None:
    with pytest.raises(SpecError, match="must be an int32 Tensor of ndim 2"):
        fg.tree(bits)


def test_shorter_drafts_are_padded() -> None:
    with pytest.raises(SpecError, match="every sequence must have the same number of parents"):
        fg.tree_bits([[-1, 0], [-1]])
