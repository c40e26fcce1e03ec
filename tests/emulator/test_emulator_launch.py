"""Launches: refusals before anything runs, and how arrays are passed to a kernel and returned."""

from __future__ import annotations

import subprocess
from typing import Any

import numpy as np
import pytest

from flashgen.build.host import compile_host
from flashgen.errors import LaunchError
from flashgen.runtime.emulator import launch
from flashgen.runtime.schedule import COPIES, ORDERS, Schedule, schedules

ADD = """
struct Arguments { const float* in; float* out; long long in_stride, out_stride; int rows; float added; };
extern "C" __global__ void add(const __grid_constant__ Arguments a) {
  const int x = threadIdx.x;
  for (int y = 0; y < a.rows; ++y) a.out[y * a.out_stride + x] = a.in[y * a.in_stride + x] + a.added;
}
"""
MODES = [None, "address", "thread"]


def add(run: Any, source: np.ndarray[Any, Any], target: np.ndarray[Any, Any], sanitize: Any) -> None:
    strides = (np.int64(source.strides[0] // 4), np.int64(target.strides[0] // 4))
    run(ADD, "add", source, target, *strides, source.shape[0], 0.5, block=(source.shape[1], 1, 1), sanitize=sanitize)


@pytest.mark.parametrize("sanitize", MODES)
def test_views_of_one_array_stay_views(run: Any, sanitize: Any) -> None:
    packed = np.zeros((4, 3, 8), np.float32)
    packed[:, 0] = np.arange(32).reshape(4, 8)
    add(run, packed[:, 0], packed[:, 2], sanitize)
    np.testing.assert_array_equal(packed[:, 2], packed[:, 0] + 0.5)
    assert (packed[:, 1] == 0).all()


@pytest.mark.parametrize("sanitize", MODES)
def test_reversed_and_misaligned_views(run: Any, sanitize: Any) -> None:
    source = np.arange(33, dtype=np.float32)[1:].reshape(4, 8)[::-1]
    target = np.zeros((9, 8), np.float32)[1::2]
    add(run, source, target, sanitize)
    np.testing.assert_array_equal(target, source + 0.5)


@pytest.mark.parametrize("sanitize", MODES)
def test_empty_arrays_may_be_passed(run: Any, sanitize: Any) -> None:
    empty = np.zeros((0, 8), np.float32)
    run(ADD, "add", empty, empty, np.int64(8), np.int64(8), 0, 0.5, block=(8, 1, 1), sanitize=sanitize)


def test_an_overrun_into_a_neighbouring_array_is_reported(run: Any) -> None:
    source, target = np.zeros((4, 8), np.float32), np.zeros((3, 8), np.float32)
    with pytest.raises(LaunchError, match=r"(?s)kernel\.cu:5: .*overflow.*write of size 4 .*at kernel\.cu:5"):
        add(run, source, target, "address")


def test_a_read_only_array_is_not_written_back(run: Any) -> None:
    source, target = np.zeros((2, 8), np.float32), np.zeros((2, 8), np.float32)
    target.flags.writeable = False
    add(run, source, target, "address")
    assert (target == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": (0, 1, 1)}, "grid must be three positive numbers"),
        ({"grid": (1, 70000, 1)}, "grid: y or z is 70000; at most 65535"),
        ({"block": (33, 32, 1)}, "block: 1056 threads; at most 1024"),
        ({"block": (32, 1)}, "block must be three positive numbers"),
        ({"shared_bytes": -1}, "shared_bytes must be from 0"),
        ({"arguments": bytes(36)}, "36 bytes were passed, but the kernel's argument struct has 40"),
        ({"pointers": [(36, np.zeros(1))]}, "pointer at byte 36 is outside"),
        ({"pointers": [(0, [1.0])]}, "a NumPy array is needed"),
    ],
)
@pytest.mark.parametrize("sanitize", [None, "address"])
def test_a_wrong_launch_is_refused(sanitize: Any, change: dict[str, Any], message: str) -> None:
    given = {"grid": (1, 1, 1), "block": (8, 1, 1), "shared_bytes": 0, "arguments": bytes(40), "pointers": []}
    with pytest.raises(LaunchError, match=message):
        launch(compile_host(ADD, "add", sanitize), **{**given, **change})


@pytest.mark.parametrize(
    "change", [{"order": "sideways"}, {"copies": "never"}, {"seed": -1}, {"seed": 2**64}, {"workers": 0}]
)
def test_a_wrong_schedule_is_refused(change: dict[str, Any]) -> None:
    name, value = next(iter(change.items()))
    with pytest.raises(LaunchError, match=f"schedule {name} must be .*{value}"):
        Schedule(**change)


def test_thread_orders_are_many_and_different() -> None:
    many = list(schedules(20))
    assert len(set(many)) == 20
    assert {(s.order, s.copies) for s in many[:12]} == {(o, c) for o in ORDERS for c in COPIES}


def test_sanitized_programs_do_not_affect_this_process(run: Any) -> None:
    before = subprocess.run(["/bin/cat", "/proc/self/personality"], capture_output=True, check=False).stdout
    add(run, np.zeros((2, 8), np.float32), np.zeros((2, 8), np.float32), "thread")
    assert subprocess.run(["/bin/cat", "/proc/self/personality"], capture_output=True, check=False).stdout == before
