"""The decode kernels of records of keys, kv_dtype="fp8_ds_mla": text, plans and assembled code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import flashgen.language as fg
from emitted_text import all_called, all_used, functions_fit, members_read, tidy, unconditional
from flashgen.build import nvrtc
from flashgen.codegen.append_kernel import render_append_records
from flashgen.codegen.decode_candidates import decode_candidates
from flashgen.codegen.hopper.decode_plans import HopperDecodePlan
from flashgen.codegen.mma_sync.decode_plans import DecodePlan, choose_decode_plan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import kernels_of
from flashgen.codegen.targets import TARGETS, target_named
from flashgen.errors import UnsupportedError
from flashgen.language import AttentionSpec
from flashgen.language.kv_records import KV_RECORDS

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"mask": fg.sliding_window(100), "score": fg.softcap(20.0)},
    "sink": {"mask": fg.causal(), "sink": fg.Tensor("sinks", "float32", 1)},
    "documents": {"mask": fg.document("ids"), "out_dtype": "float32"},
}
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")


def spec_of(variant: str, page_size: int = 64) -> AttentionSpec:
    options = {"page_size": page_size, "shared_kv": True, "kv_dtype": "fp8_ds_mla", **VARIANTS[variant]}
    return AttentionSpec(576, "bfloat16", 512, **options)


def kernels(variant: str, page_size: int, target: str) -> dict[str, RenderedKernel]:
    return kernels_of(spec_of(variant, page_size), TARGETS[target], ("decode",))


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_texts(variant: str, page_size: int, target: str) -> None:
    found = kernels(variant, page_size, target)
    assert ("decode_rows64" in found) == (target == "sm_90a" and page_size == 64)
    for kernel in found.values():
        tidy(kernel.source)
        unconditional(kernel.source)
        all_used(kernel)
        all_called(kernel)
        members_read(replace(kernel, source=kernel.source.replace("launched.", "arguments.")))
        functions_fit(kernel, longest_file=700 if "rows64" in kernel.name else 740)


@needs_nvrtc
@pytest.mark.rotated(12)
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_default_plans_do_not_spill(variant: str, target: str) -> None:
    for kernel in kernels(variant, 64, target).values():
        used = nvrtc.compile(kernel.source, target, kernel.name).resources
        assert used.spill_stores == used.spill_loads == used.stack_frame == 0, (kernel.name, used)


@needs_nvrtc
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_the_appending_kernel(target: str) -> None:
    kernel = render_append_records(TARGETS[target], KV_RECORDS["fp8_ds_mla"])
    tidy(kernel.source)
    all_used(kernel)
    all_called(kernel)
    members_read(kernel)
    functions_fit(kernel, longest_file=150)
    used = nvrtc.compile(kernel.source, target, kernel.name).resources
    assert used.spill_stores == used.stack_frame == 0


def test_plans() -> None:
    """Each warp has a group of columns; tiles of 64 records need more shared memory than consumer GPUs have."""
    spec = spec_of("full")
    assert choose_decode_plan(spec, TARGETS["sm_90a"]).tile_k == 64
    assert choose_decode_plan(spec, TARGETS["sm_86"]).tile_k == 32
    assert "split=2 must be 4" in str(DecodePlan(16, 64, 2, 2, split=2).problem(spec, TARGETS["sm_80"]))
    assert "tile_k=16 must be a multiple of 8" in str(DecodePlan(16, 16, 4, 2, split=4).problem(spec, TARGETS["sm_80"]))
    assert "tile_k=144 must be at most 128" in str(HopperDecodePlan(144, 2).problem(spec, TARGETS["sm_90a"]))
    for default in (choose_decode_plan(spec, TARGETS["sm_90a"]), HopperDecodePlan(64, 2)):
        found = decode_candidates(spec, TARGETS["sm_90a"], default)
        assert found[0] == default and all(plan.problem(spec, TARGETS["sm_90a"]) is None for plan in found)


def test_a_target_without_bfloat16_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="dtype='bfloat16' is not supported on sm_75"):
        kernels_of(spec_of("full"), target_named("sm_75"), ("decode",))
