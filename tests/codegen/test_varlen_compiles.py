"""Varlen kernels compile; Hopper's do not spill, and those of mma.sync spill no more than others."""

from __future__ import annotations

import pytest

from flashgen.build import nvrtc
from flashgen.codegen.stages import kernels_of
from flashgen.codegen.targets import TARGETS
from flashgen.verify import variants
from flashgen.verify.variants import spec_of

MOST_BESIDE_DROPOUT = 64  # bytes: where lanes hold dropout bits and scores, no registers are left for a sequence
MOST_OF_KEYS = 72  # where a block has tiles of several sequences and 128 columns of dK and dV
MOST_LEARNED = 24  # with sums of gradients of captures: registers for the lengths and first rows of a sequence
HOPPER_DIMS, MMA_SYNC_DIMS = (64, 128, 192, 256), (64, 128, 96)

pytestmark = pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(variants())))
@pytest.mark.rotated(36)
def test_a_forward_compiles_without_spills(number: int) -> None:
    for target, dims in (("sm_90a", HOPPER_DIMS), ("sm_80", MMA_SYNC_DIMS)):
        spec = spec_of(variants()[number], dims[number % len(dims)], "bfloat16", "thd")
        for kernel in kernels_of(spec, TARGETS[target]).values():
            used = nvrtc.compile(kernel.source, kernel.target.architecture, kernel.name).resources
            most = MOST_BESIDE_DROPOUT if spec.dropout and target == "sm_80" else 0
            assert used.spills <= most, f"{kernel.name} for {target}: {used}"
            assert used.registers * kernel.threads <= 65536


@pytest.mark.slow
@pytest.mark.parametrize("number", range(0, len(variants()), 2))
@pytest.mark.rotated(36)
def test_hoppers_backward_compiles_without_spills(number: int) -> None:
    dim = (64, 128)[number // 2 % 2]
    spec = spec_of(variants()[number], dim, "bfloat16", "thd")
    for kernel in kernels_of(spec, TARGETS["sm_90a"], ("backward",), deterministic=number % 4 == 0).values():
        used = nvrtc.compile(kernel.source, kernel.target.architecture, kernel.name).resources
        learned = any(capture.grad for capture in spec.captures)
        most = MOST_BESIDE_DROPOUT if any(capture.ndim > 1 for capture in spec.captures) else MOST_LEARNED * learned
        most = MOST_OF_KEYS if kernel.role == "dkdv" and dim == 128 else most
        assert max(used.spill_stores, used.spill_loads) <= most, f"{kernel.name}: {used}"
