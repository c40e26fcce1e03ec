"""A complete kernel on the emulator: correct in every thread order and sanitizer, and wrong with a planted fault."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashgen.errors import LaunchError
from flashgen.runtime.schedule import COPIES, ORDERS, Schedule

SOURCE = (Path(__file__).parent / "kernels" / "attention.cu").read_text()
HEADS, LEN_Q, LEN_K, DIM, TILE = 2, 70, 100, 32, 32
SHARED = 5 * TILE * DIM * 2
SCALE = 1.4426950408889634 / DIM**0.5


@functools.cache
def inputs() -> tuple[np.ndarray[Any, Any], ...]:
    random = np.random.default_rng(0)
    return tuple(random.standard_normal((HEADS, LEN_K, DIM)).astype(np.float16) for _ in range(3))


@functools.cache
def expected() -> np.ndarray[Any, Any]:
    q, k, v = (x.astype(np.float64) for x in inputs())
    scores = np.exp2(q[:, :LEN_Q] @ k.transpose(0, 2, 1) * SCALE)
    return np.asarray(scores / scores.sum(-1, keepdims=True) @ v)


def attend(run: Any, source: str = SOURCE, **how: Any) -> np.ndarray[Any, Any]:
    """Returns the kernel's output, poisoned before; one stride serves all arrays, so q and out have len_k rows, too."""
    out = np.full((HEADS, LEN_K, DIM), np.nan, np.float16)
    values = (*inputs(), out, np.int64(LEN_K * DIM), np.int64(DIM), LEN_Q, LEN_K, SCALE)
    grid = (-(-LEN_Q // TILE), HEADS, 1)
    run(source, "attention", *values, grid=grid, block=(64, 1, 1), shared=SHARED, **how)
    return out


def check(out: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(out[:, :LEN_Q].astype(np.float64), expected(), atol=2e-3)
    assert np.isnan(out[:, LEN_Q:]).all(), "rows beyond len_q were written"


def planted(mark: str, replacement: str = "") -> tuple[str, int]:
    """Returns (the source with the marked line replaced, that line's number)."""
    lines = SOURCE.splitlines()
    number = next(i for i, line in enumerate(lines) if f"MARK: {mark}" in line)
    lines[number] = replacement
    return "\n".join(lines), number + 1


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("order", ORDERS)
def test_every_thread_order_gives_the_same_right_output(run: Any, order: Any, copies: Any) -> None:
    check(attend(run, schedule=Schedule(order, copies, seed=3)))


@pytest.mark.parametrize("order", ["in_order", "greedy_warp"])
@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_sanitizers_find_nothing(run: Any, sanitize: str, order: Any) -> None:
    for copies in COPIES:
        check(attend(run, sanitize=sanitize, schedule=Schedule(order, copies)))


def test_workers_divide_the_blocks(run: Any) -> None:
    check(attend(run, schedule=Schedule(workers=3)))


def test_a_seed_is_reproducible(run: Any) -> None:
    report = functools.partial(run, SOURCE, "attention")
    q, k, v = inputs()
    values = (q, k, v, np.empty_like(q), np.int64(LEN_K * DIM), np.int64(DIM), LEN_Q, LEN_K, SCALE)
    how = {"grid": (3, HEADS, 1), "block": (64, 1, 1), "shared": SHARED}
    first, again, other = (report(*values, **how, schedule=Schedule("random", "random", seed=s)) for s in (1, 1, 2))
    assert first.switches == again.switches
    assert first.blocks == other.blocks == 6
    assert first.async_copies == other.async_copies > 0


def test_a_missing_wait_gives_nan_when_copies_land_late(run: Any) -> None:
    source, _ = planted("tiles have landed")
    assert np.isnan(attend(run, source, schedule=Schedule(copies="late"))[:, :LEN_Q]).any()
    check(attend(run, source, schedule=Schedule(copies="early")))  # right by chance


def test_a_missing_wait_is_reported_as_a_race(run: Any) -> None:
    source, _ = planted("tiles have landed")
    with pytest.raises(LaunchError, match=r"(?s)kernel\.cu:\d+: .*data race.*write of size 8 by cp\.async T\d+ at"):
        attend(run, source, sanitize="thread", schedule=Schedule(copies="early"))


def test_a_missing_barrier_gives_nan_when_copies_land_late(run: Any) -> None:
    source, _ = planted("for every thread")
    assert np.isnan(attend(run, source, schedule=Schedule("greedy_warp", "late"))[:, :LEN_Q]).any()


@pytest.mark.parametrize("copies", COPIES)
def test_a_missing_barrier_is_reported_as_a_race(run: Any, copies: Any) -> None:
    source, _ = planted("for every thread")
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*data race") as error:
        attend(run, source, sanitize="thread", schedule=Schedule(copies=copies))
    named = [SOURCE.splitlines()[int(n) - 1] for n in re.findall(r" at kernel\.cu:(\d+)", str(error.value))]
    assert any("copy_async_16(" in line for line in named)
    assert any("load_matrix_x4" in line for line in named)


def test_a_misplaced_barrier_is_a_race_though_the_numbers_are_right(run: Any) -> None:
    # The next copies are issued before the barrier, so they may overwrite data that a slower warp still reads.
    barrier, _ = planted("for every thread")
    source = barrier.replace("    float scores[4][4] = {};", "    __syncthreads();\n    float scores[4][4] = {};")
    check(attend(run, source, schedule=Schedule()))
    with pytest.raises(LaunchError, match="data race"):
        attend(run, source, sanitize="thread", schedule=Schedule())


def test_a_missing_syncwarp_is_a_race(run: Any) -> None:
    source, _ = planted("rows are staged")
    with pytest.raises(LaunchError, match="data race"):
        attend(run, source, sanitize="thread", schedule=Schedule())


def test_one_byte_beyond_shared_memory_is_reported(run: Any) -> None:
    source, line = planted("rows are staged", f"  __syncwarp(); if (threadIdx.x == 7) shared_memory[{SHARED}] = 1;")
    check(attend(run, source))  # no effect on the output
    with pytest.raises(LaunchError, match=rf"kernel\.cu:{line}: .*heap-buffer-overflow") as error:
        attend(run, source, sanitize="address")
    assert "shared memory: is located 0 bytes" in str(error.value)
    assert f"{line} |" in str(error.value), "the line itself is quoted"


def test_a_missing_row_bound_overflows_the_output(run: Any) -> None:
    source, line = planted("rows that exist")
    out = np.full((1, LEN_Q, DIM), np.nan, np.float16)
    q, k, v = (x[:1] for x in inputs())
    values = (q, k, v, out, np.int64(0), np.int64(DIM), LEN_Q, LEN_K, SCALE)
    with pytest.raises(LaunchError, match=rf"kernel\.cu:{line + 1}: .*heap-buffer-overflow"):
        run(source, "attention", *values, grid=(3, 1, 1), block=(64, 1, 1), shared=SHARED, sanitize="address")


def test_too_few_input_rows_are_reported_at_the_copy(run: Any) -> None:
    source = SOURCE.replace("const bool valid = first + row < rows;", "const bool valid = true;")
    line = next(i for i, text in enumerate(SOURCE.splitlines(), 1) if "copy_async_16(" in text)
    with pytest.raises(LaunchError, match=rf"kernel\.cu:{line}: .*heap-buffer-overflow"):
        attend(run, source, sanitize="address")


def test_copies_in_flight_at_the_end_are_reported(run: Any) -> None:
    source, _ = planted("tiles have landed", "    copy_async_wait<1>();")
    source = source.replace("  copy_async_wait<0>();\n  for (int half", "  for (int half")
    line = next(i for i, text in enumerate(SOURCE.splitlines(), 1) if "copy_async_16(" in text)
    for copies in COPIES:
        with pytest.raises(LaunchError, match=rf"kernel\.cu:{line}: .*in flight"):
            attend(run, source, schedule=Schedule(copies=copies))
