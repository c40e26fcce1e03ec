"""Sums that no order of additions changes: exact, of any floats, by `add_exactly` and the kernel of captures."""

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
    """One that adds floats, one a thread, by the primitive and the function that the emitted kernels have."""
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
    """From the least denormal to the largest number, whatever cancels in between."""
    exact = math.fsum(values)
    with np.errstate(over="ignore"):
        rounded = np.float32(exact)
    if np.isinf(rounded):
        assert summed(kernel, values) == rounded
    else:  # to the nearest float, but for what float64 rounds before
        spacing = max(math.ulp(float(rounded)) * 2.0**29, 2.0**-149)  # NumPy's overflows at the largest float
        assert abs(float(summed(kernel, values)) - exact) <= 0.500001 * spacing


@pytest.mark.parametrize("value", [1e30, 3.4e38, 1.2e-38, 1e-40, 1e-45, 1.0, -1e-45, -3.4e38])
def test_one_float_of_any_size_is_its_own_sum(kernel: HostKernel, value: float) -> None:
    assert summed(kernel, [value]) == np.float32(value)
    assert summed(kernel, [value, 1e30, -1e30, 1e-45, -1e-45]) == np.float32(value)


@pytest.mark.parametrize("mark", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_marks_the_sum_however_often_it_comes(kernel: HostKernel, mark: float) -> None:
    for count in (1, 2, 4, 64):  # 64 marks of 2^58 were 2^64, which is 0
        values = np.full(THREADS, -3.4e38)
        values[:count] = mark
        assert np.isnan(summed(kernel, values))
