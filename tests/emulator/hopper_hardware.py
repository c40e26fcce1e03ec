"""Compares the emulator's Hopper instructions with the hardware: the same small kernels on an H100 or H200.

test_hopper_on_a_gpu.py runs it in separate processes, because a wrong descriptor destroys the context of a process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.runtime.gpu import compute_capability
from gpu_launch import run_on_gpu
from hopper_kernels import COPIES_OF_BOXES, PRODUCTS, Box, Pipeline, ProductCase, WrittenOperands, kernel_source


@pytest.fixture(scope="module")
def hopper() -> None:
    if compute_capability() != (9, 0):
        pytest.skip(f"needs a GPU of compute capability 9.0, this one has {compute_capability()}")


def tensor_and_raw(box: Box, kernel: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns a tensor, and the contents of shared memory before a store (or after a load)."""
    if kernel == "load_box":
        return box.tensor(), np.full(box.bytes // 4, 7, np.uint32)
    return box.tensor(), box.in_shared_memory(box.tensor(seed=1)).view(np.uint32).copy()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_operand_layouts(run: Any, case: ProductCase, accumulate: bool) -> None:
    a, b, d = case.inputs()
    emulated = d.copy()
    how = {"block": (128, 1, 1), "shared": case.shared_bytes}
    run(case.source, "product", *case.maps(a, b), a, emulated, int(accumulate), **how)
    run_on_gpu(case.source, "product", *case.maps(a, b), a, d, int(accumulate), **how)
    np.testing.assert_array_equal(d, emulated)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("box", "kernel"), COPIES_OF_BOXES, ids=str)
def test_box_copies(run: Any, box: Box, kernel: str) -> None:
    source, seen = kernel_source("boxes.cu", {"kBoxBytes": box.bytes}), []
    for launch in (run, run_on_gpu):
        tensor, raw = tensor_and_raw(box, kernel)
        launch(source, kernel, box.map(tensor), raw, *box.start, block=(64, 1, 1), shared=box.bytes + 8)
        seen.append((tensor, raw))
    for emulated, real in zip(*seen, strict=True):
        np.testing.assert_array_equal(real.view(np.uint8), emulated.view(np.uint8))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_stmatrix_named_barriers_registers_and_elections(run: Any) -> None:
    source, seen = kernel_source("exchanges.cu", {}), []
    for launch in (run, run_on_gpu):
        outputs = np.zeros((32, 4), np.uint32), np.zeros((4, 128), np.uint32), np.zeros(12, np.int32)
        launch(source, "exchange", *outputs, block=(384, 1, 1), shared=1024)
        seen.append(outputs)
    for emulated, real in zip(*seen, strict=True):
        np.testing.assert_array_equal(real, emulated)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_clusters(run: Any) -> None:
    source, seen = kernel_source("clusters.cu", {"kStages": 2, "kSteps": 50}), []
    for launch in (run, run_on_gpu):
        received = np.zeros((4, 50, 64, 4), np.uint32)
        launch(source, "pass", received, grid=(4, 1, 1), block=(64, 1, 1), shared=2 * (1024 + 16))
        seen.append(received)
    np.testing.assert_array_equal(seen[1], seen[0])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kernel", [Pipeline(), Pipeline(5, 9, 4), WrittenOperands()], ids=str)
def test_all_together(kernel: Any) -> None:
    arguments, got, want = kernel.arguments()
    run_on_gpu(kernel.source, kernel.name, *arguments, block=kernel.block, shared=kernel.shared_bytes)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=2e-3, atol=2e-3)
