"""TMA compared with NumPy: layout of a box in shared memory, parts outside the tensor, stores and additions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.errors import LaunchError
from flashgen.runtime.schedule import COPIES, Schedule
from hopper_kernels import BOXES, COPIES_OF_BOXES, Box, kernel_source


def source(box: Box) -> str:
    return kernel_source("boxes.cu", {"kBoxBytes": box.bytes})


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("box", BOXES, ids=str)
def test_loads(run: Any, box: Box, copies: Any) -> None:
    tensor, raw = box.tensor(), np.full(box.bytes // 4, 7, np.uint32)
    how = {"block": (64, 1, 1), "shared": box.bytes + 8, "schedule": Schedule("random", copies, seed=3)}
    run(source(box), "load_box", box.map(tensor), raw, *box.start, **how)
    np.testing.assert_array_equal(raw.view(np.uint16), box.in_shared_memory(tensor).view(np.uint16))


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize(("box", "kernel"), [pair for pair in COPIES_OF_BOXES if pair[1] != "load_box"], ids=str)
def test_stores_and_additions(run: Any, box: Box, kernel: str, copies: Any) -> None:
    tensor, data = box.tensor(), box.tensor(seed=1)
    raw = box.in_shared_memory(data).view(np.uint32).copy()
    want = box.stored(tensor, data, add=kernel == "add_box")
    how = {"block": (64, 1, 1), "shared": box.bytes, "schedule": Schedule("random", copies, seed=3)}
    run(source(box), kernel, box.map(tensor), raw, *box.start, **how)
    np.testing.assert_array_equal(tensor.view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize("kernel", ["store_box", "add_box"])
def test_a_store_may_not_begin_before_the_tensor(run: Any, kernel: str) -> None:
    """On an H200 it is an illegal instruction."""
    box = next(box for box in BOXES if min(box.start) < 0)
    raw = np.zeros(box.bytes // 4, np.uint32)
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*may not begin before the tensor, and coordinate 1 is -5"):
        run(source(box), kernel, box.map(box.tensor()), raw, *box.start, block=(64, 1, 1), shared=box.bytes)


@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_copies_are_clean_under_sanitizers(run: Any, sanitize: str) -> None:
    for box in BOXES[:2]:
        for kernel in ("load_box", "store_box", "add_box"):
            tensor, raw = box.tensor(), np.zeros(box.bytes // 4, np.uint32)
            how = {"block": (64, 1, 1), "shared": box.bytes + 8, "sanitize": sanitize}
            run(source(box), kernel, box.map(tensor), raw, *box.start, **how)


def test_blocks_may_add_to_the_same_elements_but_not_store_to_them(run: Any) -> None:
    box = BOXES[0]
    how = {"block": (64, 1, 1), "grid": (2, 1, 1), "shared": box.bytes, "sanitize": "thread"}
    tensor, raw = box.tensor(), np.zeros(box.bytes // 4, np.uint32)
    run(source(box), "add_box", box.map(tensor), raw, *box.start, **how)
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*data race"):
        run(source(box), "store_box", box.map(tensor), raw, *box.start, **how)
