"""Misuse that no GPU reports is an error that names the line, the block and the thread."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from flashgen.errors import LaunchError
from flashgen.runtime.schedule import ORDERS, Schedule

KERNEL = """
struct Arguments { float* out; int n; };
extern "C" __global__ void kernel(const __grid_constant__ Arguments arguments) {
  const int t = threadIdx.x, lane = t % 32;
  float value = t;
  unsigned fragment[4] = {};
  %s
  arguments.out[t] = value + fragment[0] + lane * 0;
}
"""
LINE = 1 + KERNEL.splitlines().index("  %s")


def misuse(run: Any, body: str, finding: str, **how: Any) -> str:
    """Runs a kernel with the body; its error must name the body's first line (or the one that is marked)."""
    how.setdefault("shared", 1024)
    with pytest.raises(LaunchError) as error:
        run(KERNEL.replace("%s", body), "kernel", np.zeros(64, np.float32), 7, **how)
    text = str(error.value)
    place = "" if finding.startswith("kernel") else rf"kernel\.cu:{LINE}: .*"
    assert re.search(place + finding, text, re.DOTALL), text
    return text


MISUSES = [
    # (code, report)
    ("if (lane % 2) value = __shfl_xor_sync(~0u, value, 1); else __syncwarp();", "divergent warp collective"),
    ("if (lane < 8) value = __shfl_xor_sync(0x1ffu, value, 1); else __syncwarp();", "divergent warp collective"),
    ("__syncwarp(0xfffffffeu);", "calling lane is not in mask fffffffe"),
    ("if (lane) __syncwarp(); else return;", "one of them has ended|lanes that have ended"),
    ("fragment[0] = shared_address(arguments.out);", "not in shared memory"),
    (
        "load_matrix_x4(fragment, shared_address(shared_memory) + lane * 8);",
        r"misaligned shared address: offset \d+ is not a multiple of 16",
    ),
    (
        "load_matrix_x4(fragment, shared_address(shared_memory) + lane * 48);",
        "out of bounds: 16 bytes at offset 1[0-9]+ of 1024",
    ),
    ("load_matrix_x4(fragment, lane * 16);", r"out of bounds: 16 bytes at offset -\d+ of 1024"),
    ("copy_async_16(shared_address(shared_memory) + 8, arguments.out, true);", "misaligned shared address"),
    ("copy_async_16(shared_address(shared_memory), arguments.out + 1, true);", "misaligned global address"),
    (
        "copy_sync_16(shared_address(shared_memory) + 1020, arguments.out, true);",
        "out of bounds: 16 bytes at offset 1020",
    ),
    ("copy_async_16(shared_address(shared_memory), arguments.out, true);", "ends with 1 of its .* still in flight"),
    ("if (t == 40) __trap();", r"__trap\(\) \[block \(0, 0, 0\), thread \(40, 0, 0\), warp 1, lane 8\]"),
    (
        "if (t % 2) __syncthreads();\n else __syncthreads();",
        r"kernel\.cu:\d+: barrier misuse: other lanes of this warp wait at the barrier of kernel\.cu:\d+",
    ),
    ("if (t < 32) __syncthreads(); else __syncthreads_or(1);", "barrier misuse: another kind of __syncthreads"),
]


@pytest.mark.parametrize(("body", "finding"), MISUSES, ids=[finding[:40] for _, finding in MISUSES])
def test_misuse_is_reported_by_line(run: Any, body: str, finding: str) -> None:
    for order in ORDERS:
        text = misuse(run, body, finding, block=(64, 1, 1), schedule=Schedule(order))
        assert "block (0, 0, 0)" in text


def test_a_deadlock_lists_where_threads_wait(run: Any) -> None:
    body = "if (lane < 16) __syncwarp();\n  else __syncthreads();"
    text = misuse(run, body, r"kernel\.cu:\d+: deadlock: no thread can go on \[block \(0, 0, 0\)\]", block=(64, 1, 1))
    for first, last, place in (
        (0, 15, f"wait for their warp at kernel.cu:{LINE}"),
        (16, 31, f"wait at barrier 0, kernel.cu:{LINE + 1} (32 of 64 have arrived)"),
        (32, 47, f"wait for their warp at kernel.cu:{LINE}"),
        (48, 63, "wait at barrier 0"),
    ):
        assert f"threads {first} to {last} {place}" in text


def test_a_failure_names_block_thread_source_line_and_schedule(run: Any) -> None:
    body = "if (blockIdx.y == 2 && t == 3) __trap();"
    text = misuse(
        run, body, r"__trap\(\) \[block \(1, 2, 0\)|\(0, 2, 0\)", grid=(2, 3, 1), schedule=Schedule("random", seed=9)
    )
    assert f"{LINE} |   {body}" in text
    assert "schedule: random, copies late, seed 9" in text
    assert text.rstrip().endswith("kernel.cu")


def test_the_process_continues_after_a_failure(run: Any) -> None:
    for _ in range(3):
        misuse(run, "if (t == 3) __trap();", "__trap", block=(64, 1, 1))
        out = np.zeros(64, np.float32)
        run(KERNEL.replace("%s", ""), "kernel", out, 7, block=(64, 1, 1))
        np.testing.assert_array_equal(out, np.arange(64))


@pytest.mark.parametrize(
    ("body", "finding"),
    [
        ("value = 1 << (arguments.n * 5);", "runtime error: shift exponent 35 is too large"),
        ("value = arguments.n * 1000000000;", "runtime error: signed integer overflow"),
        (
            "value = *reinterpret_cast<float*>(reinterpret_cast<char*>(arguments.out) + arguments.n);",
            "misaligned address",
        ),
        ("int list[4] = {}; value = list[arguments.n + t * 0];", "index 7 out of bounds"),
        ("value = __ldg(arguments.out + 64);", "heap-buffer-overflow"),
        ("value = arguments.out[-1];", "heap-buffer-overflow"),
        ("value = reinterpret_cast<float*>(shared_memory)[256];", "heap-buffer-overflow"),
    ],
)
def test_address_and_undefined_behaviour_sanitizers(run: Any, body: str, finding: str) -> None:
    misuse(run, body, finding, sanitize="address")


def test_misuse_is_reported_in_sanitized_programs_too(run: Any) -> None:
    for sanitize in ("address", "thread"):
        misuse(run, "if (t == 3) __trap();", "__trap", sanitize=sanitize)


RACES = [
    ("reinterpret_cast<float*>(shared_memory)[t % 32] = t;", "data race"),
    ("atomicAdd(arguments.out + 5, 1.0f); value = arguments.out[5];", "data race"),
]


@pytest.mark.parametrize(("body", "finding"), RACES)
def test_races_of_one_block(run: Any, body: str, finding: str) -> None:
    misuse(run, body, finding, sanitize="thread", block=(64, 1, 1))


def test_blocks_of_a_grid_race_although_they_run_sequentially(run: Any) -> None:
    source = """
    struct Arguments { float* out; };
    extern "C" __global__ void kernel(const __grid_constant__ Arguments arguments) {
      if (threadIdx.x == 3) arguments.out[0] = blockIdx.x;
    }
    """
    with pytest.raises(LaunchError, match=r"kernel\.cu:4: .*data race"):
        run(source, "kernel", np.zeros(1, np.float32), grid=(2, 1, 1), sanitize="thread")


def test_blocks_share_nothing_but_reuse_memory(run: Any) -> None:
    # The next block reuses shared memory, stacks and barriers: no race, and no value remains.
    source = """
    struct Arguments { float* out; };
    extern "C" __global__ void kernel(const __grid_constant__ Arguments arguments) {
      float* cells = reinterpret_cast<float*>(shared_memory);
      const float before = cells[threadIdx.x];
      cells[threadIdx.x] = threadIdx.x;
      __syncthreads();
      arguments.out[blockIdx.x * 64 + threadIdx.x] = before == before ? -1 : cells[63 - threadIdx.x];
    }
    """
    for sanitize in (None, "address", "thread"):
        out = np.zeros((5, 64), np.float32)
        run(source, "kernel", out, grid=(5, 1, 1), block=(64, 1, 1), shared=256, sanitize=sanitize)
        np.testing.assert_array_equal(out, np.tile(np.arange(63, -1, -1), (5, 1)))
