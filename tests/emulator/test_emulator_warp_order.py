"""Warp-wide operations that order memory: __syncwarp and ldmatrix do; mma, shuffles, votes and stmatrix do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.errors import LaunchError

# Each lane reads its own row of shared memory, executes the operation, and writes a neighbour's row.
SOURCE = """struct Rows {
  unsigned* seen;
};
extern "C" __global__ void meet(const __grid_constant__ Rows arguments) {
  unsigned* rows = reinterpret_cast<unsigned*>(shared_memory);
  const int lane = threadIdx.x;
  unsigned fragment[4] = {};
  float d[4] = {};
  rows[4 * lane] = 100 + lane;
  const unsigned own = rows[4 * lane];
  MEETING
  rows[4 * (lane ^ 1)] = own;
  __syncwarp();
  arguments.seen[lane] = rows[4 * lane];
}
"""
ORDERING = ("__syncwarp();", "load_matrix_x4(fragment, shared_address(rows + 4 * lane));")
NOT_ORDERING = (
    "mma_m16n8k16_f16(d, fragment, fragment[0], fragment[1]);",
    "fragment[0] = __shfl_xor_sync(~0u, own, 1);",
    "fragment[0] = __any_sync(~0u, own);",
    "store_matrix_x4(shared_address(rows + 128 + 4 * lane), own, own, own, own);",
)


def meet(run: Any, meeting: str, sanitize: str | None) -> None:
    seen = np.zeros(32, np.uint32)
    run(SOURCE.replace("MEETING", meeting), "meet", seen, shared=1024, sanitize=sanitize)
    np.testing.assert_array_equal(seen, 100 + (np.arange(32) ^ 1))


@pytest.mark.parametrize("meeting", ORDERING)
def test_a_write_after_an_ordered_read(run: Any, meeting: str) -> None:
    meet(run, meeting, "thread")


@pytest.mark.parametrize("meeting", NOT_ORDERING)
def test_a_write_after_another_lanes_unordered_read_is_a_race(run: Any, meeting: str) -> None:
    meet(run, meeting, None)  # no effect on the output
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*data race"):
        meet(run, meeting, "thread")
