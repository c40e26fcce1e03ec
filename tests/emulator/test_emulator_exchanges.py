"""stmatrix, named barriers, setmaxnreg and elect: correct in every thread order and sanitizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.runtime.schedule import ORDERS, Schedule
from hopper_kernels import kernel_source

SOURCE = kernel_source("exchanges.cu", {})


def exchange(run: Any, **how: Any) -> None:
    stored, received, elected = np.zeros((32, 4), np.uint32), np.zeros((4, 128), np.uint32), np.zeros(12, np.int32)
    run(SOURCE, "exchange", stored, received, elected, block=(384, 1, 1), shared=1024, **how)
    np.testing.assert_array_equal(received, np.arange(4)[:, None] * 1000 + np.arange(127, -1, -1))
    np.testing.assert_array_equal(elected, 1)
    # Row r of matrix m is at 16-byte chunk 8 m + r; the kernel stores numbers whose 16 bits are an element.
    rows = stored.view(np.uint16).reshape(4, 8, 4, 2)
    matrix, row, pair = np.ogrid[:4, :8, :4]
    np.testing.assert_array_equal(rows[..., 0], 100 * matrix + 8 * row + pair)
    np.testing.assert_array_equal(rows[..., 1], 0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(3))
def test_an_exchange(run: Any, order: Any, seed: int) -> None:
    exchange(run, schedule=Schedule(order, seed=seed))


@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_an_exchange_is_clean_under_sanitizers(run: Any, sanitize: str) -> None:
    exchange(run, sanitize=sanitize)
