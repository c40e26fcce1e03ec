"""Emitted kernels compile for every GPU, without one, and no thread of theirs spills up to head dim 128."""

from __future__ import annotations

import re
from itertools import cycle, islice

import pytest

import flashgen.language as fg
from flashgen.build import nvrtc
from flashgen.codegen.forward import render_forward
from flashgen.codegen.kernel import RenderedKernel
from flashgen.codegen.lists import render_lists
from flashgen.codegen.targets import TARGETS, Target
from flashgen.language import AttentionSpec
from flashgen.verify import variants
from flashgen.verify.variants import Variant, spec_of

ISSUE_TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
DIMS = (128, 64, 96, 8, 32, 80, 40, 112)
VARIANTS = variants()

pytestmark = pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install 'flashgen[cuda13]'")


def kernels_of(spec: AttentionSpec, target: Target) -> list[RenderedKernel]:
    forward = render_forward(spec, target)
    return [forward, *([render_lists(spec, target, forward.plan)] if forward.uses_lists else [])]


def assert_no_spills(spec: AttentionSpec, name: str) -> None:
    for kernel in kernels_of(spec, TARGETS[name]):
        assert_kernel_does_not_spill(kernel)


def assert_kernel_does_not_spill(kernel: RenderedKernel) -> None:
    compiled = nvrtc.compile(kernel.source, kernel.target.architecture, kernel.name)
    used = compiled.resources
    assert used.spill_stores == used.spill_loads == 0, f"{kernel.name} for {kernel.target.name}: {used}"
    assert used.registers * kernel.threads <= 65536, f"{kernel.name} for {kernel.target.name}: {used}"
    assert compiled.cubin[:4] == b"\x7fELF"


def dtype_of(target: str, number: int) -> str:
    return "float16" if target == "sm_75" or number % 2 else "bfloat16"


# Each variant once with each neighbour of targets and dims that a walk of coprime steps meets.
COVERING = [
    (variant, target, dim, dtype_of(target, number))
    for number, (variant, target, dim) in enumerate(
        zip(VARIANTS * 2, cycle(ISSUE_TARGETS), islice(cycle(DIMS), 3, None), strict=False)
    )
]


@pytest.mark.parametrize(("variant", "target", "dim", "dtype"), COVERING)
def test_every_variant_compiles_without_spills(variant: Variant, target: str, dim: int, dtype: str) -> None:
    assert_no_spills(spec_of(variant, dim, dtype), target)


@pytest.mark.parametrize("target", ISSUE_TARGETS)
@pytest.mark.parametrize("mask", [fg.full(), fg.causal()], ids=str)
def test_the_common_ones_compile_without_spills_everywhere(mask: fg.Mask, target: str) -> None:
    assert_no_spills(AttentionSpec(128, dtype_of(target, 0), mask=mask), target)


@pytest.mark.parametrize("target", ISSUE_TARGETS)
def test_the_largest_head_dims_compile(target: str) -> None:
    for kernel in kernels_of(AttentionSpec(256, dtype_of(target, 1), mask=fg.causal()), TARGETS[target]):
        nvrtc.compile(kernel.source, target, kernel.name)


# Each dim meets three of the six targets, to keep the suite short; a variant whose captures are learned is no other
# kernel in the forward. Where targets get the same text, as many do whose memory is alike, it is compiled for one of
# them, each in turn.
GIVEN = [variant for variant in VARIANTS if not any(c.grad for c in spec_of(variant, 64, "float16").captures)]
EVERY_DIM = (8, 16, 32, 40, 64, 72, 80, 96, 112, 128)


def name_of(variant: Variant) -> str:
    return f"{variant.mask}-{variant.score}-{variant.dropout}"


def text_without_names(kernel: RenderedKernel) -> str:
    return re.sub(r"//[^\n]*", "", kernel.source).replace(kernel.entry, "")


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("number", range(len(GIVEN)), ids=lambda number: name_of(GIVEN[number]))
def test_every_variant_compiles_without_spills_everywhere(number: int, half: int) -> None:
    variant, targets, seen = GIVEN[number], ISSUE_TARGETS[half::2], set()
    for turn, dim in enumerate(EVERY_DIM[half::2], number):
        for target in targets[turn % 3 :] + targets[: turn % 3]:
            dtype = dtype_of(target, half)
            spec = AttentionSpec(dim, dtype, dropout=variant.dropout, score=variant.score, mask=variant.mask)
            for kernel in kernels_of(spec, TARGETS[target]):
                text = text_without_names(kernel)
                if text not in seen:
                    seen.add(text)
                    assert_kernel_does_not_spill(kernel)


@pytest.mark.slow
@pytest.mark.parametrize("target", ISSUE_TARGETS)
def test_unequal_value_dims_compile_without_spills(target: str) -> None:
    for head_dim, value_dim in ((8, 128), (128, 8), (64, 128), (128, 64), (96, 40)):
        for mask in (fg.full(), fg.causal()):
            assert_no_spills(AttentionSpec(head_dim, dtype_of(target, 0), value_dim=value_dim, mask=mask), target)


def test_every_target_that_is_offered_can_be_compiled_for() -> None:
    supported = nvrtc.supported_architectures()
    assert set(ISSUE_TARGETS) <= set(TARGETS) and {name.removesuffix("a") for name in TARGETS} <= set(supported)
