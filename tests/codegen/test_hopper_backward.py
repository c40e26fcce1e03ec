"""Hopper's backward kernels without a GPU: text and assembled code."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import cycle

import pytest

import flashgen.language as fg
from emitted_text import all_called, all_used, functions, members_read, tidy, unconditional, without_comments
from flashgen.build import nvrtc
from flashgen.build.inspect import sass
from flashgen.codegen.demand import Weight, demand_of
from flashgen.codegen.dispatch import render_backward_kernels
from flashgen.codegen.hopper.backward_plans import (
    HopperBackwardPlan,
    choose_hopper_backward_plan,
    depends_on_p_alone,
    takes_two_steps,
)
from flashgen.codegen.hopper.cluster_plans import HopperClusterPlan, HopperClusterQueriesPlan
from flashgen.codegen.hopper.queries_plans import HopperQueriesPlan
from flashgen.codegen.hopper.wide_plans import HopperWidePlan, exchanged
from flashgen.codegen.mma_sync.backward_plans import BackwardPlan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import backward_kernels
from flashgen.codegen.targets import target_named
from flashgen.errors import BuildError, UnsupportedError
from flashgen.language import AttentionSpec
from flashgen.verify import learned, spec_of, variants
from flashgen.verify.variants import Variant

SM_90A = target_named("sm_90a")
OWN = (HopperBackwardPlan, HopperWidePlan, HopperQueriesPlan)
DIMS = (128, 64, 256, 40, 96, 192, 8, 112, 72, 80, 144, 32, 16, 224)
# Lines of a function; of a file, lines of code without primitives. Kernels that determine which tiles read one element
# of an array, that sum gradients of captures, or that draw dropout have more.
LONGEST_FUNCTION, MOST_CODE, MOST_CODE_OF_ONE_ELEMENT, MOST_CODE_OF_SUMS = 75, 454, 471, 492
MOST_SPILLED_OF_LOADS = (
    64  # bytes per thread: elements for each score are loaded as early as registers allow, and spilled beyond
)
IN_CHUNKS = HopperBackwardPlan(64, early_scores=False, finish_apart=True)  # dQ is computed in chunks of columns
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")
modes = pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])

# Each variant once, cycling through head dims.
CASES = list(zip(variants(), cycle(DIMS), cycle(("float16", "bfloat16"))))

WIDE_CASES = [
    case
    for case in zip(variants(), cycle((256, 136, 192, 232)), cycle(("bfloat16", "float16", "float16")))
    if exchanged(spec_of(case[0], 256, case[2])) != "probabilities"
]


def own_kernels(spec: AttentionSpec, deterministic: bool) -> dict[str, RenderedKernel]:
    """Returns the kernels with Hopper's own instructions."""
    found = backward_kernels(spec, SM_90A, deterministic)
    return {role: kernel for role, kernel in found.items() if role in ("dkdv", "dq") and isinstance(kernel.plan, OWN)}


def taking_turns(spec: AttentionSpec) -> list[RenderedKernel]:
    """Returns the kernels whose CTAs order their additions to dQ by a semaphore, where the default plan can."""
    plan = choose_hopper_backward_plan(spec, SM_90A)
    if plan is None or (plan := replace(plan, in_turns=True)).problem(spec, SM_90A):
        return []
    return [backward_kernels(spec, SM_90A, True, plan=plan)[role] for role in ("preprocess", "dkdv")]


def compiled(kernel: RenderedKernel, most_spilled: int = 0) -> nvrtc.Compiled:
    result = nvrtc.compile(kernel.source, "sm_90a", kernel.name)
    used = result.resources
    assert max(used.spill_stores, used.spill_loads) <= most_spilled, f"{kernel.name}, {kernel.plan}: {used}"
    # C7510 and similar: products that wait for each other; C7508: setmaxnreg without effect.
    assert not re.search(r"\(C75\d\d\)", result.log), f"{kernel.name}, {kernel.plan}: {result.log}"
    assert used.registers * kernel.threads <= 65536
    return result


@needs_nvrtc
@modes
@pytest.mark.parametrize(("variant", "dim", "dtype"), CASES)
@pytest.mark.rotated(72)
def test_every_variant_compiles_without_spills_or_serialized_products(
    variant: Variant, dim: int, dtype: str, deterministic: bool
) -> None:
    spec = spec_of(variant, dim, dtype)
    for kernel in own_kernels(spec, deterministic).values():
        compiled(kernel, MOST_SPILLED_OF_LOADS if demand_of(spec).weight in (Weight.LOADING, Weight.HEAVY) else 0)


@needs_nvrtc
@modes
@pytest.mark.parametrize("dim", range(8, 257, 8))
@pytest.mark.rotated(72)
def test_every_dim_compiles_without_spills_or_serialized_products(dim: int, deterministic: bool) -> None:
    for mask in (fg.full(), fg.causal(), *([fg.document("ids")] if deterministic else [])):
        kernels = own_kernels(AttentionSpec(dim, "bfloat16", mask=mask), deterministic)
        one_kernel = not mask.name.startswith("document") and dim <= (128 if deterministic else 160)
        assert list(kernels) == (["dkdv"] if one_kernel else ["dkdv", "dq"])
        for kernel in kernels.values():
            compiled(kernel)


@needs_nvrtc
@modes
@pytest.mark.parametrize(("variant", "dim", "dtype"), WIDE_CASES)
@pytest.mark.rotated(36)
def test_large_heads_of_variants_that_need_more_than_p(
    variant: Variant, dim: int, dtype: str, deterministic: bool
) -> None:
    spec = spec_of(variant, dim, dtype)
    kernels = own_kernels(spec, deterministic)
    assert [type(kernel.plan) for kernel in kernels.values()] == [HopperWidePlan, HopperQueriesPlan]
    for kernel in kernels.values():
        compiled(kernel, MOST_SPILLED_OF_LOADS if demand_of(spec).weight in (Weight.LOADING, Weight.HEAVY) else 0)


@needs_nvrtc
@pytest.mark.parametrize("dims", [(8, 128), (128, 8), (64, 128), (192, 128), (96, 40), (40, 256), (256, 16)], ids=str)
@pytest.mark.rotated(3)
def test_unequal_value_dims_compile(dims: tuple[int, int]) -> None:
    for kernel in own_kernels(AttentionSpec(dims[0], value_dim=dims[1], mask=fg.causal()), False).values():
        compiled(kernel)


# Variants whose gradients follow from P alone.
IN_CHUNKS_CASES = [
    spec
    for variant, dims, dtype in zip(
        variants(), cycle([(192, 128), (144, 144), (192, 64)]), cycle(("bfloat16", "float16")), strict=False
    )
    if depends_on_p_alone(spec := replace(spec_of(variant, dims[0], dtype), value_dim=dims[1]))
]


@needs_nvrtc
@pytest.mark.parametrize("spec", IN_CHUNKS_CASES, ids=lambda spec: spec.name)
@pytest.mark.rotated(36)
def test_dq_in_chunks_compiles_without_spills_or_serialized_products(spec: AttentionSpec) -> None:
    kernel = own_kernels(spec, False)["dkdv"]
    light = demand_of(spec).weight not in (Weight.LOADING, Weight.HEAVY) or demand_of(spec).mask_axes == 1
    assert isinstance(kernel.plan, HopperBackwardPlan) == light
    compiled(kernel)
    assert_tidy_small_and_all_used(kernel)


@needs_nvrtc
def test_machine_code_uses_hoppers_instructions() -> None:
    spec = AttentionSpec(128, "bfloat16", mask=fg.causal())
    try:
        text = sass(compiled(own_kernels(spec, False)["dkdv"]).cubin)
    except BuildError:
        pytest.skip("no disassembler here")
    for instruction in ("HGMMA.64x64x16", "HGMMA.64x128x16.*tnspB", "UTMALDG.4D", "UBLKCP", "UBLKRED", "STSM.*MT88"):
        assert re.search(instruction, text), instruction
    assert "HMMA" not in text.replace("HGMMA", "") and "STL" not in text


VARIANTS = variants()


def kernels_of_variant(number: int, mode: str) -> list[RenderedKernel]:
    """Returns the kernels of a variant in one of the modes, with one of the head dims."""
    if mode == "in turns":
        return taking_turns(spec_of(VARIANTS[number], (128, 64, 40)[number % 3], "float16"))
    spec = spec_of(VARIANTS[number], DIMS[number % len(DIMS)], "float16")
    return list(own_kernels(spec, mode == "deterministic").values())


@pytest.mark.parametrize("mode", ["default", "deterministic", "in turns"])
@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=lambda number: f"{VARIANTS[number].name}-{number}")
@pytest.mark.rotated(36)
def test_text_is_tidy_short_and_fully_used(number: int, mode: str) -> None:
    for kernel in kernels_of_variant(number, mode):
        assert_tidy_small_and_all_used(kernel)


def assert_tidy_small_and_all_used(kernel: RenderedKernel) -> None:
    tidy(kernel.source)
    unconditional(kernel.source)
    all_used(kernel)
    all_called(kernel)
    members_read(kernel)
    for name, text in functions(kernel.source).items():
        assert text.count("\n") < LONGEST_FUNCTION, f"{name} has {text.count(chr(10)) + 1} lines"
    body = without_comments(kernel.source.split("// ---- The variant", 1)[-1])
    lines = sum(bool(line.strip()) for line in body.splitlines())
    more = any(each in body for each in ("d_score ==", "add_to_gradient", "philox"))
    most = MOST_CODE_OF_SUMS if more else MOST_CODE_OF_ONE_ELEMENT if "reads_uniform" in body else MOST_CODE
    assert lines <= most, f"{lines} lines of code"


OF_CLUSTERS = [
    AttentionSpec(512, "bfloat16"),
    AttentionSpec(512, "bfloat16", mask=fg.causal(), layout="thd"),
    AttentionSpec(320, mask=fg.document("ids"), score=fg.alibi("slopes")),
    AttentionSpec(448, mask=fg.sliding_window(100, 50), score=fg.relative_bias("table", 24)),
]


@needs_nvrtc
@pytest.mark.parametrize("spec", OF_CLUSTERS, ids=lambda spec: spec.name)
@pytest.mark.rotated(3)
def test_clusters_compile_without_spills_or_serialized_products(spec: AttentionSpec) -> None:
    kernels = {role: kernel for role, kernel in backward_kernels(spec, SM_90A).items() if role in ("dkdv", "dq")}
    assert [type(kernel.plan) for kernel in kernels.values()] == [HopperClusterPlan, HopperClusterQueriesPlan]
    for kernel in kernels.values():
        compiled(kernel)
        if not spec.is_varlen:  # whose members are those of `launched`
            assert_tidy_small_and_all_used(kernel)


def test_which_kernels_a_spec_uses() -> None:
    """One kernel if registers of a warpgroup hold both gradients of 64 keys, of more columns if they follow from P."""

    def plans(dim: int, deterministic: bool = False, mask: fg.Mask | None = None, **more: object) -> list[type]:
        spec = AttentionSpec(dim, mask=fg.causal() if mask is None else mask, **more)  # type: ignore[arg-type]
        found = backward_kernels(spec, SM_90A, deterministic)
        return [type(kernel.plan) for role, kernel in found.items() if role in ("dkdv", "dq")]

    assert (
        plans(64) == plans(128) == plans(128, score=fg.softcap(30.0)) == plans(128, dropout=0.1) == [HopperBackwardPlan]
    )
    assert plans(128, True) == [HopperBackwardPlan]
    assert plans(128, True, fg.document("ids")) == plans(128, True, layout="thd")
    assert plans(128, True, fg.document("ids")) == [HopperBackwardPlan, HopperQueriesPlan]
    assert plans(192, value_dim=128) == plans(192, value_dim=128, layout="thd") == plans(160) == [HopperBackwardPlan]
    assert plans(192, True, value_dim=128) == plans(256, True) == [HopperWidePlan, HopperQueriesPlan]
    assert plans(192) == plans(256) == plans(256, layout="thd") == [HopperWidePlan, HopperQueriesPlan]
    assert plans(256, score=fg.softcap(30.0)) == plans(256, True, dropout=0.1) == [HopperWidePlan, HopperQueriesPlan]


@pytest.mark.parametrize(
    ("spec", "plan", "why"),
    [
        (AttentionSpec(128), HopperBackwardPlan(128), "takes 320 registers of a thread"),
        (AttentionSpec(64), HopperBackwardPlan(96), "tile_q=96 must be 64 or 128"),
        (AttentionSpec(64), HopperBackwardPlan(64, stages=1), "stages=1 at least 2"),
        (AttentionSpec(256), HopperWidePlan(32, stages=1), "stages=1 at least 2"),
        (AttentionSpec(128), HopperBackwardPlan(64, stages=4), "bytes of shared memory"),
        (AttentionSpec(192, value_dim=16), HopperBackwardPlan(64), "registers for 64 of 96 columns of dQ: take more"),
        (AttentionSpec(192, value_dim=16, dropout=0.1), IN_CHUNKS, "none for dropout"),
        (AttentionSpec(192, value_dim=16, score=fg.softcap(30.0)), IN_CHUNKS, "none for dropout, derivatives"),
        (AttentionSpec(192, value_dim=16), replace(IN_CHUNKS, in_turns=True), "add chunks of 96 columns to dQ"),
        (AttentionSpec(256, value_dim=64), IN_CHUNKS, "takes 224 registers"),
        (AttentionSpec(256), HopperWidePlan(80), "registers of a thread|bytes of shared memory"),
        (
            AttentionSpec(64),
            BackwardPlan(64, 64, 4),
            "sm_90a takes a HopperBackwardPlan or a HopperWidePlan; target='sm_90'",
        ),
    ],
    ids=str,
)
def test_a_plan_that_does_not_fit_is_refused(spec: AttentionSpec, plan: object, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        render_backward_kernels(spec, SM_90A, plan)


def test_hopper_plans_are_refused_on_other_targets() -> None:
    with pytest.raises(UnsupportedError, match="sm_90 takes a BackwardPlan; target='sm_90a' takes this one"):
        render_backward_kernels(AttentionSpec(64), target_named("sm_90"), HopperBackwardPlan(64))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_short_slope_with_the_largest_accumulators_uses_a_postprocess_kernel(deterministic: bool) -> None:
    def finishes_apart(head_dim: int, score: fg.Score | None) -> bool:
        plan = choose_hopper_backward_plan(AttentionSpec(head_dim, score=score), SM_90A, deterministic)
        assert plan is not None
        return plan.finish_apart

    assert finishes_apart(128, fg.softcap(20)) and finishes_apart(128, fg.softcap(20)(fg.alibi(8)))
    assert not finishes_apart(96, fg.softcap(20)) and not finishes_apart(128, fg.softcap(20, precision="accurate"))
    assert not finishes_apart(128, fg.alibi(8)) and not finishes_apart(128, None)


def test_two_step_plans_are_for_scores_whose_ds_follows_from_p() -> None:
    assert takes_two_steps(AttentionSpec(64, mask=fg.causal())) and takes_two_steps(
        AttentionSpec(64, score=fg.alibi(8))
    )
    distances, slopes = learned(fg.relative_bias("table", 8)), learned(fg.alibi("slopes"))
    assert takes_two_steps(AttentionSpec(64, score=distances)) and not takes_two_steps(AttentionSpec(64, score=slopes))
    for more in ({"dropout": 0.1}, {"score": fg.softcap(30.0)}):
        assert not takes_two_steps(AttentionSpec(64, **more))  # type: ignore[arg-type]
