"""Philox4x32 against the known answers of Random123 (kat_vectors of its distribution, version 1.14)."""

import numpy as np
import pytest

from flashgen.reference.philox import philox4x32

ZEROS = ((0,) * 4, (0,) * 2)
ONES = ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2)
PI = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))


@pytest.mark.parametrize(
    ("rounds", "given", "expected"),
    [
        (7, ZEROS, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (7, ONES, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (7, PI, "4dfccaba 190a87f0 c47362ba b6b5242a"),
        (10, ZEROS, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (10, ONES, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (10, PI, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(rounds, given, expected):
    words = philox4x32(*given, rounds=rounds)
    assert " ".join(f"{word:08x}" for word in words) == expected


def test_counters_broadcast_and_are_independent():
    rows, columns = np.arange(5)[:, None], np.arange(7)
    words = philox4x32((rows, columns, 3, 4), (5, 6))
    assert words.shape == (5, 7, 4) and words.dtype == np.uint32
    for i, j in np.ndindex(5, 7):
        np.testing.assert_array_equal(words[i, j], philox4x32((i, j, 3, 4), (5, 6)))


def test_counters_and_key_are_not_modified():
    counter = np.arange(4, dtype=np.uint64)
    philox4x32((counter, counter, counter, counter), (1, 2))
    np.testing.assert_array_equal(counter, np.arange(4))
