"""Dropout bytes: the mapping against a scalar implementation, the kept fraction, and invariances."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.errors import ArgumentError, SpecError
from flashgen.language import AttentionSpec
from flashgen.reference.dropout import dropout_keep, keep_tile, threshold

WORD = 0xFFFFFFFF


def scalar_byte(seed, offset, b, h, i, j):
    """Returns one element's byte in plain integers, written from the definition and not from the code."""
    lane = (i % 8) * 4 + (j % 8) // 2
    c = [b * 65536 + h, j // 32, offset, (i // 16) * 32 + lane]
    key = [seed % 2**32, seed // 2**32]
    for _ in range(7):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ key[0], second & WORD, (first >> 32) ^ c[3] ^ key[1], first & WORD]
        key = [(key[0] + 0x9E3779B9) & WORD, (key[1] + 0xBB67AE85) & WORD]
    element = (j // 8) % 4 * 4 + (i // 8) % 2 * 2 + j % 2
    return sum((c[n % 4] >> (n // 4 * 16 + element) & 1) << n for n in range(8))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    offset=st.integers(0, 2**32 - 1),
    b=st.integers(0, 65535),
    h=st.integers(0, 65535),
    i=st.integers(0, 2**26),
    j=st.integers(0, 2**30),
    rows=st.integers(1, 20),
    columns=st.integers(1, 40),
    p=st.floats(0, 0.99),
)
def test_any_tile_equals_the_scalar_implementation(seed, offset, b, h, i, j, rows, columns, p):
    kept = keep_tile(seed, offset, b, h, range(i, i + rows), range(j, j + columns), p)
    assert kept.shape == (rows, columns) and kept.dtype == bool
    for row, column in {(0, 0), (rows - 1, columns - 1), (rows // 2, columns // 3), (0, columns - 1)}:
        assert kept[row, column] == (scalar_byte(seed, offset, b, h, i + row, j + column) < threshold(p))


def test_every_element_of_a_block_equals_the_scalar_implementation():
    kept = dropout_keep(seed=2**63 + 12345, offset=9, batch=2, heads=2, len_q=35, len_k=67, probability=0.4)
    for (b, h, i, j), value in np.ndenumerate(kept):
        assert value == (scalar_byte(2**63 + 12345, 9, b, h, i, j) < threshold(0.4))


def test_first_elements_never_change():
    """Seed 0, offset 0, b = h = i = 0: the known answer of zeros, whose 16-bit halves have the bits below."""
    words = [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    low = [f"{word & 0xFFFF:016b}" for word in words]
    assert low == ["1011011100001001", "0011111101100100", "0001111110000001", "0000101001001000"]
    high = [f"{word >> 16:016b}" for word in words]
    assert high == ["0101111101101111", "0000110110001001", "0100111100010010", "0100111101110011"]
    # Element 0 uses the last bit of each, lowest first: 1, 0, 1, 0 of the low halves, 1, 1, 0, 1 of the high ones.
    assert [scalar_byte(0, 0, 0, 0, 0, j) for j in (0, 1, 8, 9)] == [0xB5, 0xD0, 0xC0, 0x92]
    assert [scalar_byte(0, 0, 0, 0, 8, j) for j in (0, 1)] == [0x12, 0x39]
    kept = keep_tile(0, 0, 0, 0, range(16), range(32), 1 - 0xB5 / 256)  # T = 0xb5
    assert kept[0, [0, 1, 8, 9]].tolist() == [False, False, False, True]
    assert kept[8, [0, 1]].tolist() == [True, True]


def test_the_512_bytes_of_a_block_are_distinct():
    """16 x 32 elements use the 16 bytes of 32 calls, each once: a bijection, observed through the counters."""
    places = {
        ((i & 7) * 4 + ((j & 7) >> 1), (j >> 3) & 3, ((i >> 3) & 1) * 2 + (j & 1)) for i in range(16) for j in range(32)
    }
    assert len(places) == 512


@pytest.mark.parametrize("p", [0.1, 0.17, 0.5, 0.9])
def test_kept_fraction(p):
    kept = dropout_keep(seed=7, offset=0, batch=1, heads=4, len_q=256, len_k=512, probability=p)
    expected = threshold(p) / 256
    deviation = np.sqrt(expected * (1 - expected) / kept.size)
    assert abs(kept.mean() - expected) < 4 * deviation
    assert np.abs(kept.mean(axis=(2, 3)) - expected).max() < 5 * deviation * 2
    assert abs(kept.mean() - (1 - p)) < 1 / 512 + 4 * deviation


def test_neighbours_heads_seeds_and_offsets_are_uncorrelated():
    base = {"seed": 7, "offset": 0, "batch": 2, "heads": 2, "len_q": 256, "len_k": 256, "probability": 0.5}
    kept = dropout_keep(**base) - 0.5
    others = [dropout_keep(**{**base, "seed": 8}), dropout_keep(**{**base, "offset": 1})]
    pairs = [(kept[0], kept[1]), (kept[:, 0], kept[:, 1]), *((kept, other - 0.5) for other in others)]
    pairs += [(kept[..., :-step], kept[..., step:]) for step in (1, 2, 8, 32)]
    pairs += [(kept[..., :-step, :], kept[..., step:, :]) for step in (1, 8, 16)]
    for a, b in pairs:
        assert abs((a * b).mean() * 4) < 5 / np.sqrt(a.size)


@settings(max_examples=30, deadline=None)
@given(i0=st.integers(0, 60), i1=st.integers(0, 60), j0=st.integers(0, 90), j1=st.integers(0, 90))
def test_a_tile_is_a_slice_of_the_full_array(i0, i1, j0, j1):
    whole = dropout_keep(seed=3, offset=5, batch=2, heads=3, len_q=60, len_k=90, probability=0.3)
    tile = keep_tile(3, 5, 1, 2, range(i0, i1), range(j0, j1), 0.3)
    np.testing.assert_array_equal(tile, whole[1, 2, i0:i1, j0:j1])


def test_batch_heads_and_lengths_change_no_element():
    whole = dropout_keep(seed=1, offset=2, batch=3, heads=4, len_q=40, len_k=50, probability=0.17)
    part = dropout_keep(seed=1, offset=2, batch=2, heads=3, len_q=17, len_k=33, probability=0.17)
    np.testing.assert_array_equal(part, whole[:2, :3, :17, :33])


def test_no_dropout_keeps_all_and_empty_shapes_are_empty():
    assert dropout_keep(0, 0, 1, 1, 64, 64, 0.0).all()
    assert dropout_keep(0, 0, 0, 2, 3, 4, 0.5).shape == (0, 2, 3, 4)
    assert dropout_keep(0, 0, 1, 2, 0, 4, 0.5).shape == (1, 2, 0, 4)
    assert dropout_keep(0, 0, 1, 2, 3, 0, 0.5).shape == (1, 2, 3, 0)


@pytest.mark.parametrize(
    ("p", "expected"), [(0.0, 256), (0.1, 230), (0.17, 212), (0.5, 128), (0.997, 1), (1 / 512, 256)]
)
def test_threshold(p, expected):
    assert threshold(p) == expected


@given(st.floats(0, 0.998))
def test_threshold_of_a_spec(p):
    if p and threshold(p) == 256:
        with pytest.raises(SpecError, match="would drop nothing"):
            AttentionSpec(head_dim=8, dropout=p)
    else:
        assert threshold(p) == AttentionSpec(head_dim=8, dropout=p).keep_threshold


@pytest.mark.parametrize("p", [-0.01, 0.999, 1.0, 1.5, float("nan"), float("inf")])
def test_invalid_thresholds(p):
    with pytest.raises(SpecError, match="dropout="):
        threshold(p)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("seed", -1), ("seed", 2**64), ("seed", 1.5), ("seed", None), ("offset", 2**32), ("offset", -1)),
        *(("batch", 65537), ("heads", 65537), ("heads", -1), ("len_q", -1), ("len_k", -3)),
    ],
)
def test_arguments_out_of_range_are_named(name, value):
    arguments = {"seed": 0, "offset": 0, "batch": 1, "heads": 1, "len_q": 1, "len_k": 1, "probability": 0.5}
    with pytest.raises(ArgumentError, match=name):
        dropout_keep(**{**arguments, name: value})


def test_the_largest_arguments_are_accepted():
    assert keep_tile(2**64 - 1, 2**32 - 1, 65535, 65535, range(5), range(6), 0.5).shape == (5, 6)
    assert dropout_keep(np.uint64(2**64 - 1), np.uint32(2**32 - 1), 1, 1, 1, 1, 0.5).size == 1
