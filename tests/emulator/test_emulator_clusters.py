"""Clusters of two blocks that pass numbers to each other: right in every order, and misuse is an error."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from flashgen.errors import LaunchError
from flashgen.runtime.schedule import COPIES, ORDERS, Schedule
from hopper_kernels import kernel_source

STAGES, STEPS = 2, 7
SOURCE = kernel_source("clusters.cu", {"kStages": STAGES, "kSteps": STEPS})


def pass_numbers(run: Any, source: str = SOURCE, blocks: int = 4, **how: Any) -> None:
    received = np.zeros((blocks, STEPS, 64, 4), np.uint32)
    how = {"grid": (blocks, 1, 1), "block": (64, 1, 1), "shared": STAGES * (1024 + 16), **how}
    run(source, "pass", received, **how)
    block, step, thread, word = np.ogrid[:blocks, :STEPS, :64, :4]
    np.testing.assert_array_equal(received, (block ^ 1) * 100000 + step * 1000 + thread * 10 + word)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("copies", COPIES)
def test_numbers_are_passed(run: Any, order: Any, copies: Any) -> None:
    for seed in range(2):
        pass_numbers(run, schedule=Schedule(order, copies, seed=seed))


@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_sanitizers_find_nothing(run: Any, sanitize: str) -> None:
    for order in ORDERS:
        pass_numbers(run, sanitize=sanitize, schedule=Schedule(order, "random", seed=2))


def test_workers_have_separate_clusters(run: Any) -> None:
    pass_numbers(run, blocks=8, schedule=Schedule("random", "random", seed=3, workers=2))


FAULTS = [
    # (text, replacement, report)
    ("mbarrier_wait(empty, parity ^ 1);", "", "over-arrival|wrong byte count"),
    ("mbarrier_wait(full, parity);", "", "over-arrival|wrong byte count|deadlock"),
    ("remote_arrive(remote_address(empty, peer))", "", "(?s)deadlock: .*block 1 of the cluster"),
    ("mbarrier_arrive_expect_bytes(full, 1024);", "mbarrier_arrive(full);", "byte count"),
    ("remote_store_16(remote_address(slot, peer)", "remote_store_16(slot", "is not one of another block"),
    ("remote_address(slot, peer)", "remote_address(slot, 2)", "a block of rank 2 was addressed in a cluster of 2"),
    ("remote_address(slot, peer)", "remote_address(remote_address(slot, peer), peer)", "is remote already"),
    ("  cluster_sync();\n  for", "  __syncthreads();\n  for", "no mbarrier was initialised"),
    ("  cluster_sync();\n}", "}", "has ended: a cluster_sync"),
    ("remote_address(slot, peer)", "remote_address(slot, peer) + 8", "misaligned remote address"),
    ("remote_address(slot, peer)", "remote_address(slot, peer) + 4096", "of the cluster out of bounds"),
]


@pytest.mark.parametrize(("text", "replacement", "report"), FAULTS)
def test_faults_are_reported(run: Any, text: str, replacement: str, report: str) -> None:
    """In at least one order, whose results are otherwise right: a fault may show in some orders only."""
    assert SOURCE.count(text) == 1
    reports = [reported(run, SOURCE.replace(text, replacement), order) for order in ORDERS]
    assert any(re.search(report, each) for each in reports), reports


def reported(run: Any, source: str, order: Any) -> str:
    """Returns the error of a launch; "" if it reports none, or its numbers are wrong."""
    try:
        pass_numbers(run, source, schedule=Schedule(order, "late", seed=1))
    except LaunchError as error:
        return str(error)
    except AssertionError:
        pass
    return ""


def test_a_grid_of_half_a_cluster_is_refused(run: Any) -> None:
    with pytest.raises(LaunchError, match="x is 3, which is not a multiple of the 2 blocks of a cluster"):
        pass_numbers(run, blocks=3)
