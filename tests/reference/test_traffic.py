"""The closed forms of HBM traffic: block sizes, growth, and figures of real sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.errors import ArgumentError
from flashgen.reference import (
    Blocks,
    HbmTraffic,
    flash1_blocks,
    flash2_blocks,
    traffic_flash1,
    traffic_flash2,
    traffic_standard,
)

A100 = 100 * 1024 // 2  # 100 KB of float16, as in the FlashAttention paper


def test_block_sizes_of_the_papers():
    assert flash1_blocks(A100, 64) == Blocks(rows=64, columns=200)
    assert flash2_blocks(A100, 64) == Blocks(rows=200, columns=64)
    assert flash1_blocks(1000, 64) == Blocks(rows=4, columns=4)  # ceil(1000 / 256)
    assert flash1_blocks(64 * 40, 32, 96) == Blocks(rows=10, columns=10)  # the four blocks hold 2 (32 + 96) per row


@given(st.integers(1, 1 << 20), st.integers(1, 256), st.integers(1, 256))
def test_blocks_fit_the_chip(on_chip, d, dv):
    if on_chip < max(d, dv):
        with pytest.raises(ArgumentError, match=f"on_chip={on_chip}"):
            flash1_blocks(on_chip, d, dv)
        return
    for blocks in (flash1_blocks(on_chip, d, dv), flash2_blocks(on_chip, d, dv)):
        assert blocks.rows >= 1 and blocks.columns >= 1
        one_row = 2 * (d + dv)  # sizes are rounded up, as in the paper
        assert (blocks.rows + blocks.columns) * (d + dv) <= on_chip + one_row
        assert blocks.rows * blocks.columns <= on_chip + one_row  # the tile of scores is O(M) as well


def test_standard_is_4_n_squared_plus_4_n_d():
    for n, d in [(1, 1), (128, 64), (1024, 64), (16384, 128)]:
        assert traffic_standard(n, n, d).total == 4 * n * n + 4 * n * d


def test_flash_is_n_squared_d_squared_over_m():
    """Doubling N or d quadruples the traffic, doubling M halves it; the rest are lower-order terms."""
    for traffic, factor in ((traffic_flash1, 12), (traffic_flash2, 8)):
        n, d, m = 1 << 17, 64, 1 << 15
        base = traffic(n, n, d, on_chip=m).total
        assert base == pytest.approx(factor * n * n * d * d / m, rel=0.03)
        assert traffic(2 * n, 2 * n, d, on_chip=m).total == pytest.approx(4 * base, rel=0.01)
        assert traffic(n, n, 2 * d, on_chip=m).total == pytest.approx(4 * base, rel=0.03)
        assert traffic(n, n, d, on_chip=2 * m).total == pytest.approx(base / 2, rel=0.01)


@pytest.mark.parametrize(
    ("n", "first", "second"),
    [(1024, 3.18, 4.85), (2048, 3.59, 5.5), (4096, 3.9, 5.9), (16384, 4.1, 6.2), (65536, 4.1, 6.2)],
)
def test_flash_moves_less_at_real_sizes(n, first, second):
    """d = 64 and 100 KB: reduction compared with standard attention, which writes and reads S and P."""
    plain = traffic_standard(n, n, 64).total
    assert plain / traffic_flash1(n, n, 64, on_chip=A100).total == pytest.approx(first, abs=0.06)
    assert plain / traffic_flash2(n, n, 64, on_chip=A100).total == pytest.approx(second, abs=0.06)


def test_flash_needs_d_squared_below_m():
    """If on-chip memory is small compared with d squared, tiling loses: the other side of theorem 2."""
    assert traffic_flash1(4096, 4096, 256, on_chip=256 * 16).total > traffic_standard(4096, 4096, 256).total


def test_flash2_writes_each_output_once():
    assert traffic_flash2(1000, 3000, 64, 32, on_chip=A100).writes == 1000 * 32 + 1000


def test_lengths_of_zero():
    assert traffic_standard(0, 7, 8) == HbmTraffic(reads=7 * 16, writes=0)
    assert traffic_flash1(7, 0, 8, on_chip=64) == HbmTraffic(reads=0, writes=7 * 10)
    assert traffic_flash2(0, 7, 8, on_chip=64) == HbmTraffic(reads=0, writes=0)


def test_traffic_adds_and_multiplies():
    one = HbmTraffic(reads=3, writes=4)
    assert one.total == 7
    assert one + one == 2 * one == one * 2 == HbmTraffic(6, 8)
