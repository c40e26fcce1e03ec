"""Kernels that combine Hopper's instructions: correct in every thread order and sanitizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.runtime.schedule import Schedule, schedules
from hopper_kernels import Pipeline, WrittenOperands

KERNELS = [Pipeline(), Pipeline(stages=1), Pipeline(1, 7, 4), WrittenOperands()]


def check(run: Any, kernel: Any, **how: Any) -> None:
    arguments, got, want = kernel.arguments()
    run(kernel.source, kernel.name, *arguments, block=kernel.block, shared=kernel.shared_bytes, **how)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("schedule", list(schedules(16)), ids=str)
def test_every_thread_order(run: Any, schedule: Schedule) -> None:
    for kernel in KERNELS:
        check(run, kernel, schedule=schedule)


@pytest.mark.rotated(3)
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_sanitizers_find_nothing(run: Any, kernel: Any, sanitize: str) -> None:
    for schedule in schedules(3):
        check(run, kernel, sanitize=sanitize, schedule=schedule)


def test_consecutive_blocks(run: Any) -> None:
    # Every block does the same work: state that one leaves in the engines must not affect the next.
    kernel = Pipeline(2, 2)
    for schedule in schedules(4):
        check(run, kernel, schedule=schedule, grid=(3, 1, 1))


def test_workers_have_separate_engines(run: Any) -> None:
    for seed in range(3):
        check(run, Pipeline(2, 2), schedule=Schedule("random", "random", seed, workers=2), grid=(6, 1, 1))
