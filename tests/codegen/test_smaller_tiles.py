"""Smaller tiles of queries on Hopper: dispatch and assembled code."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.attention import forward_dispatch
from flashgen.attention.forward_dispatch import ForwardKernels
from flashgen.build import nvrtc
from flashgen.codegen.demand import demand_of
from flashgen.codegen.dispatch import default_plan, plan_with, refine, render_forward
from flashgen.codegen.header import show_command
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.hopper.smaller_tiles import smaller_option, smaller_plan
from flashgen.codegen.stages import kernels_of
from flashgen.codegen.targets import target_named
from flashgen.codegen.workload import Workload
from flashgen.errors import BuildError, FlashgenWarning, UnsupportedError
from flashgen.language import AttentionSpec
from flashgen.verify import variants
from flashgen.verify.variants import spec_of

SM_90A = target_named("sm_90a")
CAUSAL = AttentionSpec(128, "bfloat16", mask=fg.causal())
PAGED = replace(CAUSAL, page_size=16)
FULL = AttentionSpec(128, "bfloat16")
LARGER, SMALLER = HopperPlan(3, 80), HopperPlan(2, 128)
OTHERS = [
    replace(FULL, head_dim=64, value_dim=64),
    replace(FULL, dropout=0.1),
    replace(FULL, page_size=64),
    replace(FULL, kv_dtype="int8"),
    replace(CAUSAL, head_dim=64, value_dim=64),
    replace(CAUSAL, head_dim=192, value_dim=192),
    replace(CAUSAL, dropout=0.1),
    replace(CAUSAL, page_size=64),
    replace(CAUSAL, layout="thd"),
]
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")


def chosen(spec: AttentionSpec, batch: int, heads: int, heads_kv: int, len_q: int, len_k: int) -> HopperPlan | None:
    """Returns the plan that calls use instead of the default on a GPU with 132 multiprocessors."""
    workload = Workload(len_q, len_k, batch * heads, 132, heads // heads_kv, batch)
    found = refine(default_plan(spec, SM_90A), spec, SM_90A, workload)
    assert found is None or isinstance(found, HopperPlan)
    return found


@pytest.mark.parametrize(
    "spec", [CAUSAL, PAGED, replace(CAUSAL, mask=fg.sliding_window(1024)), CAUSAL.shard(), FULL], ids=str
)
def test_calls_with_few_tiles_use_smaller_ones(spec: AttentionSpec) -> None:
    larger, smaller = LARGER, SMALLER
    if spec is FULL:
        larger, smaller = HopperPlan(3, 64, takes_turns=True), HopperPlan(2, 128, takes_turns=True)
    assert default_plan(spec, SM_90A) == larger
    assert chosen(spec, 1, 32, 8, 512, 8192) == smaller  # 128 tiles for 132 multiprocessors instead of 96
    assert chosen(spec, 1, 16, 16, 1024, 1024) == smaller
    assert chosen(spec, 1, 32, 32, 2048, 8192) is None  # three waves of 192 rows take as long as four of 128
    assert chosen(spec, 16, 16, 16, 2048, 2048) is None  # 21 waves
    assert chosen(spec, 1, 132, 132, 192, 8192) is None  # each multiprocessor has a full tile


def test_smaller_tiles_are_not_used_if_they_add_waves() -> None:
    sizes = (1, 32, 32, 768, 8192)  # 128 tiles or 192: one wave of 192 rows, or two of 128
    assert chosen(CAUSAL, *sizes) is chosen(PAGED, *sizes) is None
    sizes = (1, 33, 33, 1536, 8192)  # two waves or three
    assert chosen(CAUSAL, *sizes) is None
    sizes = (1, 44, 44, 300, 8192)  # 300 queries waste 84 rows in two tiles of 192, and as many in three of 128
    assert chosen(CAUSAL, *sizes) == SMALLER


def test_pages_of_16_keys_lose_more_with_smaller_tiles() -> None:
    sizes = (1, 130, 130, 331, 331)  # 0.8 of the work, times the loss
    assert chosen(CAUSAL, *sizes) == SMALLER and chosen(PAGED, *sizes) is None


def test_listed_masks_have_no_smaller_tiles() -> None:
    """Lists are built in advance for the tiles of the default plan."""
    for variant in variants():
        spec = spec_of(variant, 128, "bfloat16")
        assert smaller_plan(spec, SM_90A) is None or not demand_of(spec).listed, spec.name


@pytest.mark.parametrize("spec", OTHERS, ids=str)
def test_specs_without_smaller_tiles(spec: AttentionSpec) -> None:
    assert smaller_plan(spec, SM_90A) is None
    with pytest.raises(UnsupportedError, match=r"smaller_tiles=True: .* has none beside"):
        plan_with(spec, SM_90A, smaller_tiles=True)


def test_targets_without_smaller_tiles() -> None:
    with pytest.raises(UnsupportedError, match="on sm_80"):
        kernels_of(CAUSAL, target_named("sm_80"), smaller_tiles=True)


def test_other_plans_keep_their_tiles() -> None:
    workload = Workload(512, 8192, 32, 132, 1)
    assert refine(replace(LARGER, tile_k=64), CAUSAL, SM_90A, workload) is None


def test_plan_for_returns_the_plan_of_a_call() -> None:
    """Also on the emulator, which has fewer multiprocessors."""
    compiled = attention.compile(CAUSAL, target="sm_90a", emulate=True)
    assert compiled.plan == LARGER
    assert compiled.plan_for(128, 512, 1, 2, 2) == SMALLER
    assert compiled.plan_for(4096, 4096, 4, 16, 16) == LARGER
    fixed = attention.compile(CAUSAL, target="sm_90a", emulate=True, plan=LARGER)
    assert fixed.plan_for(128, 512, 1, 2, 2) == LARGER


def test_the_text_has_the_command_that_shows_it() -> None:
    for packed_heads, said in ((1, "--smaller-tiles"), (4, "--packed-heads 4 --smaller-tiles")):
        (kernel,) = kernels_of(CAUSAL, SM_90A, smaller_tiles=True, packed_heads=packed_heads).values()
        assert f"//   flashgen show {said} --target sm_90a '" in kernel.source
    (kernel,) = kernels_of(CAUSAL, SM_90A).values()
    assert "--smaller-tiles" not in kernel.source


def test_the_error_has_the_command_that_builds_it() -> None:
    for plan, said in (
        (SMALLER, "flashgen show --smaller-tiles"),
        (replace(SMALLER, packed_heads=4), "flashgen show --packed-heads 4 --smaller-tiles"),
        (replace(LARGER, packed_heads=4), "flashgen show --packed-heads 4"),
    ):
        assert show_command(plan, CAUSAL) + smaller_option(plan, CAUSAL, SM_90A) == said


def test_an_unavailable_kernel_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = attention.compile(replace(CAUSAL, scale=0.21), target="sm_90a", emulate=True)

    def refuse(*how: object) -> ForwardKernels:
        raise BuildError(f"`{how[-1]}` would build it")

    monkeypatch.setattr(
        forward_dispatch, "ForwardKernels", type("Refused", (ForwardKernels,), {"build": staticmethod(refuse)})
    )
    said = r"would fill the card better .*`flashgen show --smaller-tiles --what resources --target sm_90a '"
    with pytest.warns(FlashgenWarning, match=said):
        assert compiled.plan_for(128, 512, 1, 2, 2) == compiled.plan == LARGER


RANGES = [
    (variant, dim, page_size)
    for number, variant in enumerate(variants())
    for dim, page_size in [((128, 96, 80)[number % 3], (None, 16)[number % 2])]
    if smaller_plan(replace(spec_of(variant, dim, "bfloat16"), page_size=page_size), SM_90A)
]


@needs_nvrtc
@pytest.mark.rotated(9)
@pytest.mark.parametrize(("variant", "dim", "page_size"), RANGES, ids=str)
def test_they_compile_without_spills(variant: object, dim: int, page_size: int | None) -> None:
    spec = replace(spec_of(variant, dim, "bfloat16"), page_size=page_size)
    kernel = render_forward(spec, SM_90A, smaller_plan(spec, SM_90A))
    result = nvrtc.compile(kernel.source, "sm_90a", kernel.name)
    assert result.resources.spills == 0, kernel.name
    assert not re.search(r"\(C75\d\d\)", result.log), result.log
