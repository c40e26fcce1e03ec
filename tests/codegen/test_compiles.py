"""Emitted kernels compile for every GPU, without having one, and do not spill up to head dim 128."""

from __future__ import annotations

from itertools import chain, product

import pytest

import flashgen.language as fg
from flashgen.build import nvrtc
from flashgen.codegen.dispatch import render_forward
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.targets import TARGETS, Target
from flashgen.codegen.tile_list_kernel import render_lists
from flashgen.language import AttentionSpec
from flashgen.verify import variants
from flashgen.verify.variants import DTYPES, near_or_global, spec_of

ISSUE_TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120")

pytestmark = pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")


def kernels_of(spec: AttentionSpec, target: Target) -> list[RenderedKernel]:
    forward = render_forward(spec, target)
    return [forward, *([render_lists(spec, target, forward.plan)] if forward.reads else [])]


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


@pytest.mark.rotated(3)
@pytest.mark.parametrize("target", ISSUE_TARGETS)
@pytest.mark.parametrize("mask", [fg.full(), fg.causal()], ids=str)
def test_common_kernels_compile_without_spills_for_every_target(mask: fg.Mask, target: str) -> None:
    assert_no_spills(AttentionSpec(128, dtype_of(target, 0), mask=mask), target)


@pytest.mark.parametrize("target", ISSUE_TARGETS)
@pytest.mark.rotated(3)
def test_the_largest_head_dims_compile(target: str) -> None:
    for kernel in kernels_of(AttentionSpec(256, dtype_of(target, 1), mask=fg.causal()), TARGETS[target]):
        nvrtc.compile(kernel.source, target, kernel.name)


# Every variant is compiled for every target, both dtypes and every dim (of dims with equal padding one at a time);
# every dim for every target in each dtype. Learned captures do not change the forward kernel.
GIVEN = [variant for variant in variants() if not any(c.grad for c in spec_of(variant, 64, "float16").captures)]
DIMS = ((8, 16), (40,), (32,), (64,), (72, 80), (96,), (112,), (128,))


def met_by(number: int) -> list[tuple[int, str, str]]:
    """Returns the dims, targets and dtypes for which a variant is compiled."""
    dims = [alike[number // 6 % len(alike)] for alike in DIMS]
    targets = [ISSUE_TARGETS[(number + turn) % len(ISSUE_TARGETS)] for turn in range(len(dims))]
    return [
        (dim, target, dtype_of(target, number // 12 + turn // 6))
        for turn, (dim, target) in enumerate(zip(dims, targets, strict=True))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(GIVEN)), ids=lambda number: GIVEN[number].name)
@pytest.mark.rotated(36)
def test_every_variant_compiles_without_spills(number: int) -> None:
    variant = GIVEN[number]
    for dim, target, dtype in met_by(number):
        spec = AttentionSpec(dim, dtype, dropout=variant.dropout, score=variant.score, mask=variant.mask)
        assert_no_spills(spec, target)


def test_variants_dims_targets_and_dtypes_are_combined() -> None:
    each = [met_by(number) for number in range(len(GIVEN))]
    for met in each:
        dims, targets, dtypes = zip(*met, strict=True)
        assert all(dim in alike for dim, alike in zip(dims, DIMS, strict=True))
        assert (set(targets), set(dtypes)) == (set(ISSUE_TARGETS), set(DTYPES))
    possible = {
        choice for choice in product(chain(*DIMS), ISSUE_TARGETS, DTYPES) if choice[1:] != ("sm_75", "bfloat16")
    }
    assert {options for met in each for options in met} == possible


_WINDOW = fg.Scalar("window")
OF_64_BITS = (
    fg.document(fg.Tensor("ids", "int64", 1)) & fg.causal(),
    fg.trace_mask(lambda b, h, q, k: (q - _WINDOW <= k) & (k <= q + _WINDOW)),
    fg.trace_mask(lambda b, h, q, k: (q * 7919 + k * 104729) % 97 < 50),
)


@pytest.mark.parametrize("target", ISSUE_TARGETS)
@pytest.mark.rotated(3)
def test_integers_of_64_bits_compile_without_spills(target: str) -> None:
    """In attention kernels and in list kernels; each mask is compiled for each target at one of two head dims."""
    for number, mask in enumerate(OF_64_BITS):
        dim = (64, 96)[(number + ISSUE_TARGETS.index(target)) % 2]
        assert_no_spills(AttentionSpec(dim, dtype_of(target, number), mask=mask), target)


BESIDE_DROPOUT = (
    {"mask": fg.causal()},
    {"mask": fg.sliding_window(30, 20)},
    {"mask": fg.document("ids") & fg.causal()},
    {"mask": fg.causal() & fg.trace_mask(near_or_global)},
    {"score": fg.softcap(fg.Scalar("cap", "float32"))},
    {"mask": fg.causal(), "score": fg.alibi("slopes")},
    {"mask": fg.sliding_window(30, 20), "score": fg.softcap(20)(fg.alibi(8))},
)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(2))
@pytest.mark.parametrize("target", ISSUE_TARGETS)
@pytest.mark.rotated(36)
def test_dropout_with_masks_and_scores_does_not_spill(target: str, turn: int) -> None:
    for number, options in enumerate(BESIDE_DROPOUT, ISSUE_TARGETS.index(target)):
        dim = (96, 64, 128, 80, 112)[(number + 2 * turn) % 5]
        spec = AttentionSpec(dim, dtype_of(target, number), dropout=0.1, **options)
        assert_kernel_does_not_spill(render_forward(spec, TARGETS[target]))  # lists do not depend on dropout


@pytest.mark.slow
@pytest.mark.parametrize("target", ISSUE_TARGETS)
@pytest.mark.rotated(36)
def test_unequal_value_dims_compile_without_spills(target: str) -> None:
    for head_dim, value_dim in ((8, 128), (128, 8), (64, 128), (128, 64), (96, 40)):
        for mask in (fg.full(), fg.causal()):
            assert_no_spills(AttentionSpec(head_dim, dtype_of(target, 0), value_dim=value_dim, mask=mask), target)


def test_nvrtc_supports_every_target() -> None:
    supported = nvrtc.supported_architectures()
    assert set(ISSUE_TARGETS) <= set(TARGETS)
    assert {target.base_architecture for target in TARGETS.values()} <= set(supported)
