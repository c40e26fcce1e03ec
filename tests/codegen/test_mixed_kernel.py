"""The kernel of mixed batches: text, plans for every target, work units, no spills."""

from __future__ import annotations

from dataclasses import replace

import pytest

import flashgen.language as fg
from emitted_text import all_called, all_used, functions, members_read, tidy, unconditional, without_comments
from flashgen.build import nvrtc
from flashgen.codegen.mma_sync.decode_plans import DecodePlan
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.mma_sync.mixed import choose_mixed_work_units
from flashgen.codegen.mma_sync.mixed_plans import MixedPlan, choose_mixed_plan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.sizes import Sizes
from flashgen.codegen.stages import kernels_of
from flashgen.codegen.targets import TARGETS, target_named
from flashgen.errors import UnsupportedError
from flashgen.language import AttentionSpec
from flashgen.verify import variants
from flashgen.verify.variants import spec_of

SM_90 = target_named("sm_90")
MIXED = AttentionSpec(128, "bfloat16", mask=fg.causal(), page_size=16, layout="thd")
LONGEST_FUNCTION, LONGEST_FILE = 75, 920  # lines of a function; of the file, lines of code without primitives
MOST_BESIDE_DROPOUT = 64  # bytes: where lanes hold dropout bits and scores, no registers are left
DIMS = (64, 128, 96, 256, 40, 192)
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")


def variant(number: int, dtype: str = "bfloat16") -> AttentionSpec:
    """Returns each variant, cycling through head dims and page sizes."""
    spec = spec_of(variants()[number], DIMS[number % 6], dtype, "thd")
    return replace(spec, page_size=(16, 64, 1, 256)[number % 4])


def rendered(spec: AttentionSpec, target: str) -> RenderedKernel:
    (kernel,) = kernels_of(spec, TARGETS[target]).values()
    return kernel


@pytest.mark.rotated(3)
@pytest.mark.parametrize("number", range(len(variants())))
def test_text_follows_the_conventions_of_all_kernels(number: int) -> None:
    for target in ("sm_80", "sm_90"):
        kernel = rendered(variant(number), target)
        _is_text(kernel)
        assert "namespace decode {" in kernel.source and "namespace prefill {" in kernel.source


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_text_with_8_bit_keys_has_no_prompts(kv_dtype: str) -> None:
    kernel = rendered(replace(MIXED, kv_dtype=kv_dtype), "sm_90")
    _is_text(kernel)
    assert "prompt" not in without_comments(kernel.source).split("#endif\n", 1)[1]


def _is_text(kernel: RenderedKernel) -> None:
    tidy(kernel.source)
    unconditional(kernel.source)
    all_used(kernel)
    all_called(kernel)
    members_read(replace(kernel, source=kernel.source.replace("launched.", "arguments.")))
    for name, text in functions(kernel.source).items():
        assert text.count("\n") < LONGEST_FUNCTION, f"{name} has {text.count(chr(10)) + 1} lines"
    body = without_comments(kernel.source).split("#endif\n", 1)[1]
    assert sum(bool(line.strip()) for line in body.splitlines()) <= LONGEST_FILE


# ---- plans


@pytest.mark.rotated(3)
@pytest.mark.parametrize("name", TARGETS)
def test_every_target_has_plans_that_fit(name: str) -> None:
    target = TARGETS[name]
    for dim in range(8, 257, 8):
        for how in ({}, {"kv_dtype": "int8"}):
            spec = AttentionSpec(dim - dim % 32 or 32 if how else dim, page_size=16, layout="thd", **how)
            plan = choose_mixed_plan(spec, target)
            assert plan.problem(spec, target) is None and (plan.prompt is None) == bool(how)
            reserved = target.reserved_shared_per_block
            assert plan.blocks * (plan.shared_bytes(spec) + reserved) <= target.shared_per_multiprocessor


def test_both_kinds_of_blocks_fit_a_multiprocessor_together() -> None:
    """On an H200, where the plan was measured: 3 stages of 16 keys per warp, and tiles of 128 queries and 64 keys."""
    few, prompt = DecodePlan(16, 16, 4, 3, 2, scheduled=True), ForwardPlan(128, 64, 4, 2, 2)
    assert choose_mixed_plan(MIXED, SM_90) == MixedPlan(few, prompt)
    assert MixedPlan(few, prompt).prefill_queries == 64


def test_a_launch_depends_on_tokens_and_sequences() -> None:
    plan, kernel = choose_mixed_plan(MIXED, SM_90), rendered(MIXED, "sm_90")
    sizes = Sizes(64, 32, 8, 2111, 8192, multiprocessors=132, total_q=2111)
    assert choose_mixed_work_units(MIXED, plan, sizes) == 33, "8 groups of heads, 264 resident blocks"
    sizes = replace(sizes, splits=33)
    assert kernel.grid(sizes) == (2111 // 64 * 32 + 33 * 8, 1, 1)
    assert kernel.counts is not None and kernel.counts(sizes) == 33 * 8
    alone = replace(sizes, total_q=63)
    assert kernel.grid(alone) == (33 * 8, 1, 1), "no token belongs to a prompt"
    short = replace(sizes, batch=1, len_k=64, total_q=1, splits=1)
    assert choose_mixed_work_units(MIXED, plan, short) == 6, "3 sequences of 4 tiles plus the setup cost, 4 warps"


def test_numbers_of_tiles_beyond_int32() -> None:
    plan = choose_mixed_plan(MIXED, SM_90)
    for sizes in (
        Sizes(65535, 8, 8, 1, 10**9, multiprocessors=132, total_q=65535),
        Sizes(1, 65535, 65535, 10**9, 16, multiprocessors=132, total_q=10**9),
    ):
        with pytest.raises(UnsupportedError, match=r"tiles than MixedPlan\(.*split the batch, or give max_seqlen_k="):
            choose_mixed_work_units(MIXED, plan, sizes)


# ---- assembled code


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.rotated(36)
@pytest.mark.parametrize("number", range(len(variants())))
def test_no_spills(number: int) -> None:
    for target in ("sm_90", ("sm_80", "sm_86", "sm_120")[number % 3]):
        _does_not_spill(rendered(variant(number), target), MOST_BESIDE_DROPOUT if variant(number).dropout else 0)


@needs_nvrtc
@pytest.mark.rotated(9)
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_masks_scores_and_8_bit_keys_do_not_spill(target: str) -> None:
    dtype = "float16" if target == "sm_75" else "bfloat16"
    for dim, how in ((128, {}), (64, {"score": fg.softcap(20.0)}), (128, {"kv_dtype": "int8"})):
        spec = AttentionSpec(dim, dtype, mask=fg.causal(), page_size=16, layout="thd", **how)
        _does_not_spill(rendered(spec, target), 0)


def _does_not_spill(kernel: RenderedKernel, most: int) -> None:
    used = nvrtc.compile(kernel.source, kernel.target.architecture, kernel.name).resources
    assert used.spills <= most, f"{kernel.name}: {used}"
    assert used.registers * kernel.threads * kernel.plan.blocks <= 65536, f"{kernel.name}: {used}"
