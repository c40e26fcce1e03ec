"""Hopper's decode kernel and the kernel that merges its splits: plans, splits, text and assembled code."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

import flashgen.language as fg
from emitted_text import all_called, all_used, functions_fit, members_read, tidy, unconditional
from flashgen.build import nvrtc
from flashgen.codegen.decode_candidates import decode_candidates
from flashgen.codegen.dispatch import num_splits, render_forward_kernels
from flashgen.codegen.hopper.decode_family import HopperDecode
from flashgen.codegen.hopper.decode_plans import HopperDecodePlan, choose_hopper_decode_plan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.sizes import Sizes
from flashgen.codegen.stages import decode_kernels
from flashgen.codegen.targets import target_named
from flashgen.codegen.workload import Workload
from flashgen.language import AttentionSpec

SM_90A = target_named("sm_90a")
WIDE: dict[str, dict[str, Any]] = {
    "latent": {"head_dim": 576, "value_dim": 512, "shared_kv": True},
    "K = V": {"head_dim": 512, "shared_kv": True},
    "512": {"head_dim": 512},
    "320": {"head_dim": 320},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": fg.causal()},
    "window": {"mask": fg.sliding_window(100), "score": fg.softcap(20.0)},
    "alibi": {"mask": fg.causal(), "score": fg.alibi("slopes")},
    "sink": {"sink": fg.Tensor("sinks", "float32", 1)},
    "padding": {"mask": fg.padding("lengths"), "out_dtype": "float32"},
    "bias": {"score": fg.relative_bias(fg.Tensor("table", "float32", 2), 30)},
}
PAGES = (None, 16, 64)
MOST_CODE = {(False, False): 550, (True, False): 600, (True, True): 710}  # lines, by pages and stream-K work units
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")


def kernels(dims: str, variant: str, page_size: int | None, scheduled: bool) -> tuple[RenderedKernel, ...]:
    spec = AttentionSpec(**WIDE[dims], **VARIANTS[variant], dtype="bfloat16", page_size=page_size)
    plan = choose_hopper_decode_plan(spec, SM_90A, scheduled)
    assert plan
    return render_forward_kernels(spec, SM_90A, plan)


def cases() -> list[Any]:
    every = itertools.product(WIDE, VARIANTS, PAGES, (False, True))
    return [each for each in every if each[2] or not each[3]]


@pytest.mark.rotated(9)
@pytest.mark.parametrize(("dims", "variant", "page_size", "scheduled"), cases())
def test_texts(dims: str, variant: str, page_size: int | None, scheduled: bool) -> None:
    for kernel in kernels(dims, variant, page_size, scheduled):
        tidy(kernel.source)
        unconditional(kernel.source)
        all_used(kernel)
        all_called(kernel)
        members_read(replace(kernel, source=kernel.source.replace("launched.", "arguments.")))
        functions_fit(kernel, longest_file=MOST_CODE[page_size is not None, scheduled])


@needs_nvrtc
@pytest.mark.rotated(72)
@pytest.mark.parametrize(("dims", "variant", "page_size", "scheduled"), cases())
def test_default_plans_do_not_spill_or_serialize_products(
    dims: str, variant: str, page_size: int | None, scheduled: bool
) -> None:
    for kernel in kernels(dims, variant, page_size, scheduled):
        compiled = nvrtc.compile(kernel.source, "sm_90a", kernel.name)
        assert compiled.resources.spill_stores == 0, (kernel.name, compiled.resources)
        assert "C75" not in compiled.log, compiled.log  # C7510 and similar: products that wait for each other


@pytest.mark.parametrize("kv_dtype", [None, "fp8_ds_mla"])
def test_register_counts_of_warpgroups_fit_the_launch(kv_dtype: str | None) -> None:
    """setmaxnreg waits forever for registers that the launch does not have."""
    spec = AttentionSpec(**WIDE["latent"], dtype="bfloat16", kv_dtype=kv_dtype, page_size=64)
    plan = choose_hopper_decode_plan(spec, SM_90A)
    assert plan
    counts, threads = plan.warpgroup_registers(spec), plan.launched_threads(spec)
    launched = 65536 // threads // 8 * 8
    total = sum(count * (plan.split if kind == "value" else 1) for kind, count in counts.items())
    assert all(count % 8 == 0 for count in counts.values())
    assert total <= launched * threads // 128
    source = render_forward_kernels(spec, SM_90A, plan)[0].source
    for count in counts.values():
        assert f"registers_{'increase' if count > launched else 'decrease'}<{count}>();" in source


def splits(batch: int, heads: int, len_k: int, len_q: int = 1, page_size: int | None = None) -> int:
    spec = AttentionSpec(**WIDE["latent"], page_size=page_size)
    plan = choose_hopper_decode_plan(spec, SM_90A, page_size is not None)
    assert plan
    return num_splits(plan, spec, Sizes(batch, heads, 1, len_q, len_k, multiprocessors=132))


def test_splits_fill_the_gpu_once() -> None:
    assert splits(64, 128, 4096) == 1
    assert splits(16, 128, 32768) == 4
    assert splits(1, 128, 131072) == 64
    assert splits(64, 64, 8192) == 2
    assert splits(32, 128, 8192, 2) == 1
    assert splits(1, 128, 256) <= 4


def test_work_units_end_where_equal_sequences_end() -> None:
    assert splits(16, 128, 32768, page_size=64) == 128
    assert splits(64, 64, 8192, page_size=64) == 128


def test_calls_with_one_split_launch_no_merge() -> None:
    decode, merge = kernels("latent", "full", None, False)
    assert (decode.role, merge.role) == ("forward", "merge")
    sizes = Sizes(64, 128, 1, 1, 4096, multiprocessors=132)
    assert decode.grid(sizes) == (2, 1, 64) and not all(merge.grid(sizes))
    split = Sizes(16, 128, 1, 1, 32768, multiprocessors=132, splits=4)
    assert decode.grid(split) == (8, 1, 16) and merge.grid(split) == (32, 1, 16)
    assert merge.grid(replace(split, splits=5)) == (128, 1, 16), "one group of columns for each thread"


def test_default_kernels() -> None:
    spec = AttentionSpec(**WIDE["latent"], page_size=64)
    assert list(decode_kernels(spec, SM_90A)) == [
        "decode_rows64",
        "decode_merge_rows64",
        "decode_schedule_rows64",
        "decode_scheduled_rows64",
        "decode_merge_scheduled_rows64",
    ]
    costly = {**WIDE["latent"], "score": fg.softcap(30.0)}
    for options in (WIDE["512"], {**WIDE["latent"], "dtype": "bfloat16", "kv_dtype": "fp8_ds_mla"}, costly):
        assert "decode" in decode_kernels(AttentionSpec(**options, page_size=64), SM_90A), "few rows by mma.sync"


@pytest.mark.parametrize(
    ("dims", "batch", "by_wgmma"), [("latent", 1, True), ("latent", 64, True), ("512", 33, True), ("512", 34, False)]
)
def test_few_rows_are_by_wgmma_if_v_is_a_part_of_k_or_there_are_many_splits(
    dims: str, batch: int, by_wgmma: bool
) -> None:
    workload = Workload(1, 8192, 16 * batch, multiprocessors=132, heads_per_kv=16, batch=batch)
    for page_size in (None, 64):
        plan = HopperDecode().choose(AttentionSpec(**WIDE[dims], page_size=page_size), SM_90A, workload)
        assert isinstance(plan, HopperDecodePlan) == by_wgmma, plan
        assert plan and plan.scheduled == (page_size is not None and batch > 1)


def test_what_passes_through_a_stage_of_keys_fits_it() -> None:
    for dims in WIDE.values():
        spec = AttentionSpec(**dims)
        for tile_k in range(16, 129, 16):
            plan = HopperDecodePlan(tile_k)
            layout = plan.shared_memory(spec)
            stage = next(each.copy_bytes for each in layout.buffers if each.name == "Key")
            assert 64 * plan.held_columns(spec) * 2 <= stage, plan


@pytest.mark.parametrize(("target", "programmatic"), [("sm_90a", True), ("sm_90", True), ("sm_80", False)])
def test_a_merge_starts_early_where_the_target_can_and_waits_itself(target: str, programmatic: bool) -> None:
    spec = AttentionSpec(**WIDE["latent"], dtype="bfloat16", page_size=64, kv_dtype="fp8_ds_mla")
    kernels = decode_kernels(spec, target_named(target))
    merges = [kernel for part, kernel in kernels.items() if "merge" in part]
    decodes = [kernel for part, kernel in kernels.items() if "merge" not in part and "schedule_" not in part]
    assert merges and decodes
    for kernel in merges:
        body = kernel.source.rpartition('extern "C"')[2]
        assert kernel.programmatic_launch == ("grid_dependency_synchronize();" in body) == programmatic
        assert not programmatic or body.index("grid_dependency_synchronize();") < body.index("merge_splits(work")
        if "work.splits == 1" in body and programmatic:
            assert body.index("grid_dependency_synchronize();") < body.index("return;"), "in stream order in any case"
    for kernel in decodes:
        if kernel.role == "forward":
            assert not kernel.programmatic_launch
            assert ("trigger_programmatic_launch();" in kernel.source.rpartition('extern "C"')[2]) == programmatic
    names = [kernel.name for kernel in decode_kernels(spec, SM_90A, unique_names=True).values()]
    assert len(set(names)) == len(names)


def test_candidates_have_the_schedule_of_the_default() -> None:
    spec = AttentionSpec(**WIDE["latent"], page_size=64)
    default = HopperDecodePlan(64, 2, scheduled=True)
    found = decode_candidates(spec, SM_90A, default)
    assert found[0] == default and len(found) > 2
    assert all(plan.scheduled and plan.problem(spec, SM_90A) is None for plan in found)
