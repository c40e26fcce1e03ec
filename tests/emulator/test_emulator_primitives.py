"""The host implementation of each primitive, compared with NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashgen.runtime.schedule import COPIES, Schedule

SOURCE = (Path(__file__).parent / "kernels" / "primitives.cu").read_text()


def interesting_floats() -> np.ndarray[Any, Any]:
    """Floats at and around every rounding boundary of both formats: an even number of them."""
    all_bits = np.arange(65536, dtype=np.uint16)
    with np.errstate(all="ignore"):
        halves = all_bits.view(np.float16).astype(np.float32)
    brains = (all_bits.astype(np.uint32) << 16).view(np.float32)
    parts = [np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32).view(np.float32)]
    for values, tie in ((halves, 0x1000), (brains, 0x8000)):
        bits = values.view(np.uint32)
        parts += [(bits + np.uint32(tie + d & 0xFFFFFFFF)).view(np.float32) for d in (-1, 0, 1)] + [values]
    subnormal_ties = (np.arange(2048, dtype=np.float32) + 0.5) * np.float32(2.0**-24)
    extremes = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 3.4e38, 1e-45, 2**-25, -(2**-24)])
    return np.concatenate([*parts, subnormal_ties, np.nextafter(subnormal_ties, np.float32(np.inf)), extremes])


def halves_of(packed: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    return packed.view(np.uint16).view(dtype)


def test_packing_rounds_to_nearest_even(run: Any) -> None:
    floats = interesting_floats()
    count = floats.size // 2
    packed = np.zeros(2 * count, np.uint32)
    bits = np.zeros(count, np.uint16)
    run(SOURCE, "convert", floats, packed, bits, np.zeros(2 * count, np.float32), count)
    with np.errstate(all="ignore"):
        for part, dtype in ((packed[:count], np.float16), (packed[count:], ml_dtypes.bfloat16)):
            want, got = floats.astype(dtype), halves_of(part, dtype)
            nan = np.isnan(floats)
            assert np.array_equal(got[~nan].view(np.uint16), want[~nan].view(np.uint16))
            assert (got[nan].view(np.uint16) == 0x7FFF).all(), "cvt gives the canonical NaN"


def test_unpacking_is_exact_for_every_pattern(run: Any) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    out = np.zeros(2 * 65536, np.float32)
    run(SOURCE, "convert", np.zeros(2 * 65536, np.float32), np.zeros(2 * 65536, np.uint32), bits, out, 65536)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(out[:65536], bits.view(np.float16).astype(np.float32))
        np.testing.assert_array_equal(out[65536:], bits.view(ml_dtypes.bfloat16).astype(np.float32))
        assert np.array_equal(np.signbit(out[:65536]), np.signbit(bits.view(np.float16)))


def test_approximations_are_close(run: Any) -> None:
    x = np.concatenate([np.linspace(-140, 130, 2000), [-np.inf, np.inf, np.nan, 0.0, 1.0]]).astype(np.float32)
    out = np.zeros((3, x.size), np.float32)
    run(SOURCE, "approximate", x, out, x.size)
    with np.errstate(all="ignore"):
        for got, function in zip(out, (np.exp2, np.log2, np.tanh), strict=True):
            np.testing.assert_allclose(got, function(x.astype(np.float64)).astype(np.float32), rtol=2e-7, atol=1e-44)


@pytest.mark.parametrize(("kind", "dtype"), [(0, np.float16), (1, ml_dtypes.bfloat16), (2, np.float16)])
def test_mma_accumulates_a_matrix_product(run: Any, kind: int, dtype: Any) -> None:
    random = np.random.default_rng(kind)
    a = random.standard_normal((16, 16)).astype(dtype)
    b = random.standard_normal((16, 8)).astype(dtype)
    d = random.standard_normal((16, 8)).astype(np.float32)
    want = d + a.astype(np.float64) @ b.astype(np.float64)
    run(SOURCE, "multiply", a.view(np.uint16), b.view(np.uint16), d, kind)
    np.testing.assert_allclose(d, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "dtype"), [(0, np.float16), (1, ml_dtypes.bfloat16), (2, np.float16)])
def test_mma_positions(run: Any, kind: int, dtype: Any) -> None:
    # Distinct powers of two: every d[i, j] identifies its row and its column exactly.
    a = np.zeros((16, 16), dtype)
    a[np.arange(16), np.random.default_rng(1).permutation(16)] = 1
    b = (np.arange(16)[:, None] * 8 + np.arange(8)).astype(dtype)
    d = np.zeros((16, 8), np.float32)
    run(SOURCE, "multiply", a.view(np.uint16), b.view(np.uint16), d, kind)
    np.testing.assert_array_equal(d, a.astype(np.float32) @ b.astype(np.float32))


def test_ldmatrix_with_and_without_transposition(run: Any) -> None:
    matrices = np.random.default_rng(0).permutation(256).astype(np.uint16).reshape(4, 8, 8)
    fragments = np.zeros((2, 32, 4), np.uint32)
    run(SOURCE, "load_matrices", matrices, fragments, shared=512)
    for kind, source in enumerate((matrices, matrices.transpose(0, 2, 1))):
        # Lane l holds row l / 4 of each matrix, columns 2 (l % 4) and the next.
        pairs = np.ascontiguousarray(source).reshape(4, 32, 2)
        np.testing.assert_array_equal(fragments[kind].view(np.uint16).reshape(32, 4, 2), pairs.transpose(1, 0, 2))


def test_movmatrix_transposes(run: Any) -> None:
    matrix = np.random.default_rng(0).permutation(64).astype(np.uint16).reshape(8, 8)
    pairs = matrix.view(np.uint32).reshape(32).copy()
    run(SOURCE, "transpose", pairs)
    np.testing.assert_array_equal(pairs.view(np.uint16).reshape(8, 8), matrix.T)


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("valid", [0, 5, 32])
def test_copies_fill_with_zeros_where_not_valid(run: Any, valid: int, copies: Any) -> None:
    data = np.random.default_rng(0).integers(1, 2**32, (32, 4), dtype=np.uint32)
    out = np.ones((2, 32, 4), np.uint32)
    run(SOURCE, "copy", data, out, valid, shared=1024, schedule=Schedule(copies=copies))
    want = np.where(np.arange(32)[:, None] < valid, data, 0)
    np.testing.assert_array_equal(out, [want, want])


def test_a_wait_covers_only_the_oldest_groups(run: Any) -> None:
    data = np.random.default_rng(0).integers(1, 2**31, (3, 32, 4), dtype=np.uint32)
    nan = np.full((32, 4), 0xFFFFFFFF, np.uint32)
    out = np.zeros((3, 3, 32, 4), np.uint32)
    run(SOURCE, "wait_in_steps", data, out, shared=1536, schedule=Schedule(copies="late"))
    np.testing.assert_array_equal(out, [[data[0], nan, nan], [data[0], data[1], nan], data])
    run(SOURCE, "wait_in_steps", data, out, shared=1536, schedule=Schedule(copies="early"))
    np.testing.assert_array_equal(out, [data, data, data])


@pytest.mark.parametrize("seed", range(3))
def test_random_copies_land_between_issue_and_wait(run: Any, seed: int) -> None:
    data = np.random.default_rng(0).integers(1, 2**31, (3, 32, 4), dtype=np.uint32)
    out = np.zeros((3, 3, 32, 4), np.uint32)
    run(SOURCE, "wait_in_steps", data, out, shared=1536, schedule=Schedule("random", "random", seed))
    landed = (out == data).all(-1)
    assert landed[0, 0].all()
    assert landed[1, :2].all()
    assert landed[2].all()
    assert landed[0, 1:].any()
    assert not landed[0, 1:].all()


@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_the_primitives_are_clean_under_sanitizers(run: Any, sanitize: str) -> None:
    data = np.ones((32, 4), np.uint32)
    run(SOURCE, "copy", data, np.ones((2, 32, 4), np.uint32), 5, shared=1024, sanitize=sanitize)
    run(SOURCE, "load_matrices", np.zeros(256, np.uint16), np.zeros(256, np.uint32), shared=512, sanitize=sanitize)


def test_a_counter_wraps_after_its_last_number(run: Any) -> None:
    counter, before = np.zeros(1, np.uint32), np.full(64, 99, np.uint32)
    run(SOURCE, "count", counter, before, 4, block=(64, 1, 1))
    np.testing.assert_array_equal(np.bincount(before), [13, 13, 13, 13, 12])
    assert counter[0] == 4
