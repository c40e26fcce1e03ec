"""Bulk copies of bytes, and transposing stmatrix, compared with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.errors import LaunchError
from flashgen.runtime.schedule import COPIES, Schedule
from hopper_kernels import kernel_source

BYTES = 1040
SOURCE = kernel_source("runs.cu", {"kRunBytes": BYTES})


def arguments() -> tuple[Any, Any, Any]:
    random = np.random.default_rng(0)
    source, sums = (random.standard_normal(BYTES // 4).astype(np.float32) for _ in range(2))
    return source, sums, np.zeros((32, 4), np.uint32)


@pytest.mark.parametrize("copies", COPIES)
def test_a_bulk_copy_loads_and_adds(run: Any, copies: Any) -> None:
    source, sums, stored = arguments()
    want = sums + 2 * source
    how = {"block": (64, 1, 1), "shared": BYTES + 8, "schedule": Schedule("random", copies, seed=3)}
    run(SOURCE, "add_run", source, sums, stored, **how)
    np.testing.assert_array_equal(sums, want)


@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_bulk_copies_are_clean_under_sanitizers_and_blocks_may_add_to_one_range(run: Any, sanitize: str) -> None:
    source, sums, stored = arguments()
    want = sums + 3 * (2 * source)
    how = {"block": (64, 1, 1), "grid": (3, 1, 1), "shared": BYTES + 8, "sanitize": sanitize}
    run(SOURCE, "add_run", source, sums, stored, **how)
    np.testing.assert_allclose(sums, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("before", "after", "finding"),
    [
        ("bulk_load(run, arguments.source,", "bulk_load(run, arguments.source + 1,", "must be multiples of 16"),
        (
            "bulk_reduce_add(arguments.sums, run, kRunBytes)",
            "bulk_reduce_add(arguments.sums, run, 24)",
            "multiples of 16",
        ),
        (
            "bulk_reduce_add(arguments.sums, run,",
            "bulk_reduce_add(arguments.sums, run + 4,",
            "misaligned shared address",
        ),
        ("  mbarrier_wait(barrier, 0);\n", "", "may still write|nothing has been written"),
        ("  fence_async_shared();\n", "", r"reads .*fence_async_shared\(\) is missing"),
        ("    bulk_wait_read<0>();\n", "", "bulk_wait_read is missing"),
        ("kRunBytes);\n    bulk_load", "kRunBytes + 16);\n    bulk_load", "deadlock"),
    ],
)
def test_invalid_bulk_copies_are_reported_by_line(run: Any, before: str, after: str, finding: str) -> None:
    source, sums, stored = arguments()
    assert SOURCE.count(before) == 1
    with pytest.raises(LaunchError, match=rf"(?s)kernel\.cu:\d+: .*({finding})"):
        text = SOURCE.replace(before, after)
        run(text, "add_run", source, sums, stored, block=(64, 1, 1), shared=BYTES + 8)


def test_a_bulk_copy_outside_an_array_is_caught_by_address_sanitizer(run: Any) -> None:
    source, sums, stored = arguments()
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*heap-buffer-overflow"):
        how = {"block": (64, 1, 1), "shared": BYTES + 8, "sanitize": "address"}
        run(SOURCE, "add_run", source, sums[:-4].copy(), stored, **how)


def test_a_transposing_store(run: Any) -> None:
    source, sums, stored = arguments()
    run(SOURCE, "store_transposed", source, sums, stored, block=(32, 1, 1), shared=512)
    matrices = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    np.testing.assert_array_equal(stored.view(np.uint16).reshape(4, 8, 8), matrices.transpose(0, 2, 1))
