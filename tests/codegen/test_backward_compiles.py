"""Emitted backward kernels compile without warnings for every GPU, fit it, and hardly spill."""

from __future__ import annotations

import pytest

import flashgen.language as fg
from flashgen.build import nvrtc
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import kernels_of
from flashgen.codegen.targets import TARGETS
from flashgen.language import AttentionSpec
from flashgen.verify import learned, spec_of, variants
from flashgen.verify.variants import Variant

ISSUE_TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_120")
DIMS = (128, 64, 96, 8, 32, 80, 40, 112)
VARIANTS = variants()
MODES = (False, True)
MOST_SPILLED = 96  # bytes per thread at head dims up to 128: one access per step, cached
MOST_SPILLED_OF_LARGE = 192

pytestmark = pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")


def parts(spec: AttentionSpec, target: str, deterministic: bool) -> dict[str, RenderedKernel]:
    return dict(kernels_of(spec, TARGETS[target], ("backward",), deterministic=deterministic))


def assert_fits(kernel: RenderedKernel, most_spilled: int = MOST_SPILLED) -> None:
    """Asserts that a kernel compiles without warnings and fits the registers and memory of a multiprocessor."""
    compiled = nvrtc.compile(kernel.source, kernel.target.architecture, kernel.name)
    used, target = compiled.resources, kernel.target
    assert "warning" not in compiled.log.lower(), compiled.log
    assert used.registers * kernel.threads <= 65536, f"{kernel.name}: {used}"
    assert kernel.shared_bytes + used.static_shared <= target.shared_per_block, f"{kernel.name}: {used}"
    assert max(used.spill_stores, used.spill_loads) <= most_spilled, f"{kernel.name} for {target.name}: {used}"
    assert compiled.cubin[:4] == b"\x7fELF"


def dtype_of(target: str, number: int) -> str:
    return "float16" if target == "sm_75" or number % 2 else "bfloat16"


# Each variant once per mode, with targets and dims that are selected by coprime steps.
COVERING = [
    (variant, ISSUE_TARGETS[number % 7], DIMS[(3 + number // 2 * 5) % 8], bool((number + number // 7) % 2), number)
    for number, variant in enumerate([*VARIANTS, *VARIANTS])
]


@pytest.mark.parametrize(("variant", "target", "dim", "deterministic", "number"), COVERING)
@pytest.mark.rotated(36)
def test_every_variant_compiles(variant: Variant, target: str, dim: int, deterministic: bool, number: int) -> None:
    spec = spec_of(variant, dim, dtype_of(target, number))
    for part, kernel in parts(spec, target, deterministic).items():
        if part not in ("preprocess", "postprocess"):  # the same except for dims, which are tested below
            assert_fits(kernel)


@pytest.mark.parametrize("target", ISSUE_TARGETS)
@pytest.mark.parametrize("mask", [fg.full(), fg.causal()], ids=str)
@pytest.mark.rotated(36)
def test_common_kernels_compile_for_every_target(mask: fg.Mask, target: str) -> None:
    spec = AttentionSpec(128, dtype_of(target, 0), mask=mask)
    for deterministic in MODES:
        for kernel in parts(spec, target, deterministic).values():
            assert_fits(kernel)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.rotated(3)
def test_scores_with_dropout_and_learned_tables_hardly_spill(target: str) -> None:
    """They once spilled 168 bytes per thread: sums need the registers of scores and of loads of a learned table.

    Sums along diagonals, which are faster, leave fewer registers than additions score by score, which did not spill.
    """
    table = fg.Tensor("table", "float16", 2, grad=True)
    score = fg.softcap(20)(fg.relative_bias(table, 12))
    spec = AttentionSpec(128, "float16", mask=fg.document("ids"), score=score, dropout=0.17)
    assert_fits(parts(spec, target, deterministic=False)["dkdv"], most_spilled=24)


# Three blocks with small heads share the registers of a multiprocessor, 168 per thread. In the deterministic mode one
# or two are spilled before the loop and loaded once per step.
@pytest.mark.parametrize("mask", [fg.full(), fg.causal()], ids=str)
@pytest.mark.rotated(3)
def test_small_heads_on_tuned_targets_hardly_spill(mask: fg.Mask) -> None:
    for deterministic in MODES:
        for kernel in parts(AttentionSpec(64, "bfloat16", mask=mask), "sm_90a", deterministic).values():
            assert_fits(kernel, 16 if deterministic else 0)


@pytest.mark.parametrize(("dim", "target"), list(zip((256, 192, 160, 256, 160, 256, 192), ISSUE_TARGETS, strict=True)))
@pytest.mark.rotated(36)
def test_the_largest_head_dims_compile(dim: int, target: str) -> None:
    spec = AttentionSpec(dim, dtype_of(target, 1), mask=fg.causal())
    for deterministic in MODES:
        for kernel in parts(spec, target, deterministic).values():
            assert_fits(kernel, MOST_SPILLED_OF_LARGE)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("target", ["sm_75", "sm_80"])
def test_gradients_of_captures_of_every_dtype_compile(dtype: str, target: str) -> None:
    """Turing has no instruction that rounds to bfloat16."""
    table = fg.Tensor("table", dtype, 1)
    spec = AttentionSpec(64, score=learned(fg.trace_score(lambda s, b, h, q, k: s + table[h], "table")))
    for deterministic in MODES:
        found = parts(spec, target, deterministic)
        if "d_table" in found:
            assert_fits(found["d_table"], 0)
        assert deterministic or ("d_table" in found) == (dtype != "float32")
