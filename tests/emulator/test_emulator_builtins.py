"""CUDA's built-in functions on the emulator, compared with NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashgen.runtime.schedule import ORDERS, Schedule

SOURCE = (Path(__file__).parent / "kernels" / "builtins.cu").read_text()
LANE = np.arange(32)


@pytest.mark.parametrize("width", [4, 8, 32])
@pytest.mark.parametrize("by", [1, 2, 5])
def test_shuffles_stay_in_their_segment(run: Any, width: int, by: int) -> None:
    out = np.zeros((6, 32), np.int32)
    run(SOURCE, "shuffles", out, width, by)
    segment, within = LANE // width * width, LANE % width
    # A butterfly may reach into an earlier segment, never into a later one.
    butterfly = np.where((LANE ^ by) < segment + width, LANE ^ by, LANE)
    up, down = np.where(within >= by, LANE - by, LANE), np.where(within + by < width, LANE + by, LANE)
    sources = [segment + by % width, butterfly, up, down, butterfly, butterfly]
    np.testing.assert_array_equal(out, 100 + np.array(sources))


@pytest.mark.parametrize("order", ORDERS)
def test_votes_of_a_warp_and_of_a_block(run: Any, order: Any) -> None:
    for votes in (np.arange(64) % 3 == 0, np.arange(64) >= 0, np.arange(64) < 0, np.arange(64) >= 32):
        out = np.zeros((6, 64), np.uint32)
        run(SOURCE, "votes", votes.astype(np.int32), out, block=(64, 1, 1), schedule=Schedule(order))
        warps = votes.reshape(2, 32)
        ballots = (warps.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1)
        by_warp = [np.repeat(x, 32) for x in (ballots, warps.any(1), warps.all(1))]
        by_block = [np.full(64, x) for x in (votes.any(), votes.all(), votes.sum())]
        np.testing.assert_array_equal(out, [*by_warp, *by_block])


@pytest.mark.parametrize("order", ORDERS)
def test_two_groups_of_lanes_are_independent(run: Any, order: Any) -> None:
    out = np.zeros(32, np.int32)
    run(SOURCE, "half_warps", out, 0, 0, schedule=Schedule(order, seed=5))
    np.testing.assert_array_equal(out, [sum(range(16))] * 16 + [31] * 16)


def test_integer_functions(run: Any) -> None:
    random = np.random.default_rng(0)
    edges = np.array([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7F800000], np.uint32)
    a = np.concatenate([edges, random.integers(0, 2**32, 100, dtype=np.uint32)])
    b = np.concatenate([edges[::-1], random.integers(0, 2**32, 100, dtype=np.uint32)])
    out = np.zeros((10, a.size), np.int32)
    run(SOURCE, "integers", a, b, out, a.size)
    bits = (a[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    signed_a, signed_b = a.view(np.int32).astype(np.int64), b.view(np.int32).astype(np.int64)
    bytes_a, bytes_b = a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)
    want = [
        bits.sum(1),
        np.where(a == 0, 0, bits.argmax(1) + 1),
        np.where(a == 0, 32, bits[:, ::-1].argmax(1)),
        ((a.astype(np.uint64) * b) >> np.uint64(32)).astype(np.uint32).view(np.int32),
        (signed_a * signed_b) >> 32,
        (bits[:, ::-1].astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32).view(np.int32),
        np.minimum(signed_a, signed_b),
        np.maximum(a, b).view(np.int32),
        np.stack([bytes_a[:, 0], bytes_b[:, 0], bytes_a[:, 1], bytes_b[:, 1]], 1).copy().view(np.int32)[:, 0],
        a.view(np.int32),
    ]
    for got, expected in zip(out, want, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("sanitize", "workers"), [(None, 1), (None, 4), ("thread", 1)])
def test_atomics_lose_nothing(run: Any, sanitize: Any, workers: int) -> None:
    total, highest, following = np.zeros(1, np.float32), np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    counted, tickets, wrapping = np.zeros(1, np.int32), np.zeros(32 * 20, np.uint32), np.full(1, 99, np.uint32)
    how = {"grid": (20, 1, 1), "sanitize": sanitize, "schedule": Schedule("random", workers=workers)}
    run(SOURCE, "atomics", counted, total, highest, tickets, following, wrapping, **how)
    assert (counted[0], total[0], highest[0], wrapping[0]) == (-2 * 640, 320, 639, 39)
    np.testing.assert_array_equal(np.sort(tickets), np.arange(640))


@pytest.mark.parametrize("sanitize", [None, "address"])
def test_loads_of_every_width(run: Any, sanitize: Any) -> None:
    random = np.random.default_rng(0)
    wide = random.integers(-(2**62), 2**62, 32)
    small = random.integers(0, 256, 32, dtype=np.uint8)
    four = random.standard_normal((32, 4)).astype(np.float32)
    outs = [np.zeros_like(x) for x in (four, wide, small)]
    run(SOURCE, "vectors", four, outs[0], wide, outs[1], small, outs[2], sanitize=sanitize)
    np.testing.assert_array_equal(outs[0], four[:, ::-1])
    np.testing.assert_array_equal(outs[1], wide)
    np.testing.assert_array_equal(outs[2], small)


@pytest.mark.parametrize("order", ORDERS)
def test_every_thread_of_a_grid_runs_once(run: Any, order: Any) -> None:
    out = np.full(24 * 30, -1, np.int32)
    report = run(SOURCE, "places", out, grid=(4, 3, 2), block=(5, 3, 2), schedule=Schedule(order))
    np.testing.assert_array_equal(out.reshape(24, 30), np.arange(24)[:, None] * 1000 + np.arange(30))
    assert report.blocks == 24


def test_exited_threads_do_not_count_at_a_barrier(run: Any) -> None:
    for order in ORDERS:
        out = np.zeros(32, np.int32)
        run(SOURCE, "early_exit", out, block=(96, 1, 1), schedule=Schedule(order))
        assert (out == 32).all()
