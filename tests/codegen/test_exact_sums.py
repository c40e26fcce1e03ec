"""Exact sums, independent of the order of additions: `add_exactly` and the kernel of captures."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen.language as fg
from flashgen.build.host import HostKernel, compile_host
from flashgen.codegen.backward_kernels import EXACT_LIMBS
from flashgen.codegen.environment import primitives_for
from flashgen.codegen.stages import backward_kernels
from flashgen.codegen.targets import TARGETS
from flashgen.runtime import emulator

THREADS = 64
KERNEL = """
struct Arguments {
  const float* values;
  long long* limbs;
  float* sum;
  int count;
};

extern "C" __global__ void sums(const __grid_constant__ Arguments arguments) {
  if (threadIdx.x < arguments.count) add_exactly(arguments.limbs, arguments.values[threadIdx.x]);
  __syncthreads();
  if (threadIdx.x == 0) *arguments.sum = float_from_limbs(arguments.limbs);
}
"""


@pytest.fixture(scope="module")
def kernel() -> HostKernel:
    """A kernel that adds one float per thread, with the primitive and the function of emitted kernels."""
    table = fg.Tensor("table", "float32", 1, grad=True)
    spec = fg.AttentionSpec(16, score=fg.trace_score(lambda s, b, h, q, k: s + table[h], "table"))
    source = backward_kernels(spec, TARGETS["sm_80"], deterministic=True)["d_table"].source
    function = re.search(r"__device__ __forceinline__ float float_from_limbs.*?^}", source, re.DOTALL | re.MULTILINE)
    assert function
    _, shared = primitives_for("add_exactly(", TARGETS["sm_80"])
    return compile_host("\n".join([*shared, function[0], KERNEL]), "sums")


def summed(kernel: HostKernel, values: Any) -> np.float32:
    values = np.ascontiguousarray(values, np.float32)
    limbs, out = np.zeros(EXACT_LIMBS, np.int64), np.full(1, -1, np.float32)
    arguments = bytes(24) + np.int32(values.size).tobytes() + bytes(4)
    emulator.launch(kernel, (1, 1, 1), (THREADS, 1, 1), 0, arguments, [(0, values), (8, limbs), (16, out)])
    return np.float32(out[0])


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=150, deadline=None)
@given(st.lists(FLOATS, max_size=THREADS))
def test_any_floats_are_summed_exactly(kernel: HostKernel, values: list[float]) -> None:
    """From the smallest denormal to the largest number, with any cancellation in between."""
    exact = math.fsum(values)
    with np.errstate(over="ignore"):
        rounded = np.float32(exact)
    if np.isinf(rounded):
        assert summed(kernel, values) == rounded
    else:  # to the nearest float, except for earlier rounding in float64
        spacing = max(math.ulp(float(rounded)) * 2.0**29, 2.0**-149)  # NumPy overflows at the largest float
        assert abs(float(summed(kernel, values)) - exact) <= 0.500001 * spacing


@pytest.mark.parametrize("value", [1e30, 3.4e38, 1.2e-38, 1e-40, 1e-45, 1.0, -1e-45, -3.4e38])
def test_a_single_float_is_its_own_sum(kernel: HostKernel, value: float) -> None:
    assert summed(kernel, [value]) == np.float32(value)
    assert summed(kernel, [value, 1e30, -1e30, 1e-45, -1e-45]) == np.float32(value)


@pytest.mark.parametrize("mark", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_mark_the_sum(kernel: HostKernel, mark: float) -> None:
    for count in (1, 2, 4, 64):  # 64 marks of 2^58 would add up to 2^64, which is 0
        values = np.full(THREADS, -3.4e38)
        values[:count] = mark
        assert np.isnan(summed(kernel, values))
