"""Prompts over 8-bit keys and values in Hopper's forward: on the emulator, compiled without spills, and on a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashgen as fg
from flashgen import attention
from flashgen.build import nvrtc
from flashgen.codegen.dispatch import decode_plan, render_forward
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.mma_sync.decode_plans import DecodePlan
from flashgen.codegen.targets import target_named
from flashgen.codegen.workload import Workload
from flashgen.runtime.schedule import Schedule
from flashgen.verify import variants
from flashgen.verify.check import judged
from flashgen.verify.problems import Shape, random_inputs
from flashgen.verify.variants import spec_of
from paged import call

SM_90A = target_named("sm_90a")
KINDS = ("float8_e4m3fn", "int8")
DTYPES = ("bfloat16", "float16")
VARIANTS = variants()
DIMS = (64, 96, 32, 128, 160, 256)
SEED = 7


def assert_right(spec: fg.AttentionSpec, shape: Shape, plan: HopperPlan, scale: Any = None, **how: Any) -> None:
    captures, dropout = how.pop("captures", None), {"seed": SEED} if spec.dropout else {}
    inputs = random_inputs(spec, shape, captures=captures)
    if scale is not None:
        inputs.captures["k_scale"] = np.asarray(scale, np.float32)
    found = call(attention.compile(spec, "sm_90a", emulate=True, plan=plan, **how), inputs, **dropout)
    verdict = judged(spec, inputs.q, inputs.k, inputs.v, *found, inputs.captures, **dropout)
    assert verdict.ok, f"{spec.name}, {plan}: {verdict}"


@pytest.mark.slow
@pytest.mark.rotated(24)
@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=lambda number: VARIANTS[number].name)
def test_every_variant(number: int) -> None:
    """Contiguous keys and pages of 1, 16 and 64, several work tiles of a CTA, one to three warpgroups."""
    variant = VARIANTS[number]
    spec = spec_of(variant, DIMS[number % 6], DTYPES[number // 2 % 2], ("bhsd", "bshd")[number % 2])
    spec = replace(spec, value_dim=DIMS[number // 2 % 6], kv_dtype=KINDS[number % 2])
    spec = replace(spec, page_size=None if variant.equal else (None, 1, 16, 64)[number % 4])
    shape = Shape(90, 90, 1, 2, 1) if variant.equal else Shape(140, 150, 1, 4, 2)
    wide = max(spec.head_dim, spec.value_dim) > 128
    plan = HopperPlan(
        1 + number % (2 if wide else 3), (32, 32 if spec.dropout else 48, 64)[number // 3 % 3], 1 + number % 2
    )
    assert_right(spec, shape, plan, captures=variant.captures, schedule=Schedule("random", "late", seed=number))


@pytest.mark.rotated(3)
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("page_size", [None, 16])
def test_under_sanitizers(sanitize: Any, page_size: int | None) -> None:
    spec = fg.AttentionSpec(64, value_dim=96, mask=fg.causal(), page_size=page_size, kv_dtype=KINDS[page_size is None])
    schedule = Schedule("random", "late", seed=5)
    assert_right(spec, Shape(150, 170, 1, 4, 2), HopperPlan(2, 48, 2), sanitize=sanitize, schedule=schedule)


@pytest.mark.parametrize("score", [None, fg.softcap(20.0)], ids=["plain", "softcap"])
@pytest.mark.parametrize("scale", [[-0.05], [0.0], [0.004], [-0.02, 0.3]], ids=str)
def test_scales_of_any_sign(scale: list[float], score: Any) -> None:
    """With a sink, whose score has no scale."""
    spec = fg.AttentionSpec(32, score=score, mask=fg.causal(), kv_dtype="int8", sink=fg.Tensor("sink", "float32", 1))
    assert_right(spec, Shape(70, 90, 1, 2, 2), HopperPlan(1, 32, 2), scale)


@pytest.mark.parametrize(("dim", "page_size"), [(128, 64), (128, 1), (96, 16), (160, 16)])
def test_a_lane_looks_up_several_pages(dim: int, page_size: int) -> None:
    """The default tiles of 128 keys: a warp that converts K, or V, has 64 rows of each."""
    spec = fg.AttentionSpec(dim, "bfloat16", value_dim=128, page_size=page_size, kv_dtype="float8_e4m3fn")
    plan = HopperPlan(2, 128 if dim <= 128 else 96)
    assert_right(spec, Shape(70, 300, 2, 2, 1), plan, schedule=Schedule("random", "late", seed=3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("page_size", "tile_k", "pages"),
    [(16, 128, 8), (32, 96, 3), (64, 128, 2), (64, 64, 1), (256, 128, 1), (64, 96, None), (1, 128, None)],
)
def test_pages_of_a_tile(page_size: int, tile_k: int, pages: int | None, dtype: str) -> None:
    """Tiles of one page or several, and tiles that end inside of a page, whose lanes look up a page for each row."""
    spec = fg.AttentionSpec(128, dtype, mask=fg.causal(), page_size=page_size, kv_dtype="float8_e4m3fn")
    plan = HopperPlan(2, tile_k)
    assert plan.pages_of_tile(spec) == pages
    assert_right(spec, Shape(100, 420, 2, 2, 1), plan, schedule=Schedule("random", "late", seed=4))


def test_packed_heads() -> None:
    spec = fg.AttentionSpec(64, mask=fg.causal(), page_size=16, kv_dtype="float8_e4m3fn")
    assert_right(spec, Shape(40, 150, 1, 8, 2), HopperPlan(2, 64, 2, packed_heads=4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_is_converted_exactly(kind: str, dtype: str) -> None:
    """One key at a time is attended to: the output is its value; all 256 bit patterns of each type."""
    bits = np.arange(256, dtype=np.uint8)
    numbers: Any = bits.view(np.int8) if kind == "int8" else bits.view(ml_dtypes.float8_e4m3fn)
    numbers = np.where(np.isfinite(numbers.astype(np.float32)), numbers, np.zeros_like(numbers))
    spec = fg.AttentionSpec(256, dtype, kv_dtype=kind)
    plan, q_type = HopperPlan(2, 64), ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    one, values = np.ones(1, np.float32), numbers.reshape(1, 1, 1, 256)
    compiled = attention.compile(spec, "sm_90a", emulate=True, plan=plan)
    out = compiled(np.zeros((1, 1, 70, 256), q_type), np.zeros_like(values), values, k_scale=one, v_scale=one)
    np.testing.assert_array_equal(out[0, 0, 69].astype(np.float32), numbers.astype(np.float32))


@pytest.mark.parametrize("factor", [1e-30, 2.0**-20, 3.0, 2.0**100])
def test_queries_beyond_the_range_of_float16(factor: float) -> None:
    """Rows of bfloat16 queries of very different sizes, one of zeros, with a sink, whose score is not scaled."""
    sink = fg.Tensor("sink", "float32", 1)
    spec = fg.AttentionSpec(64, "bfloat16", scale=0.5 / factor, kv_dtype="float8_e4m3fn", sink=sink)
    inputs = random_inputs(spec, Shape(70, 90, 1, 2, 1))
    rows = np.exp2(-np.arange(70) % 23).reshape(70, 1)
    rows[31] = 0
    q = (inputs.q.astype(np.float32) * rows * factor).astype(inputs.q.dtype)
    compiled = attention.compile(spec, "sm_90a", emulate=True, plan=HopperPlan(1, 32, 2))
    found = compiled(q, inputs.k, inputs.v, return_lse=True, **inputs.captures)
    verdict = judged(spec, q, inputs.k, inputs.v, *found, inputs.captures)
    assert verdict.ok, verdict


def test_prompts_take_the_forward_and_few_queries_the_decode_kernel() -> None:
    for page_size in (None, 64):
        spec = fg.AttentionSpec(128, "bfloat16", mask=fg.causal(), page_size=page_size, kv_dtype="float8_e4m3fn")
        assert isinstance(render_forward(spec, SM_90A).plan, HopperPlan)
        for queries, decodes in ((512, False), (2048, False), (1, True), (16, True)):
            plan = decode_plan(spec, SM_90A, Workload(queries, 8192, 32, 132, 4))
            assert isinstance(plan, DecodePlan) if decodes else plan is None, (page_size, queries)
    wide = fg.AttentionSpec(512, "bfloat16", kv_dtype="int8")
    assert isinstance(render_forward(wide, SM_90A).plan, DecodePlan)


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=lambda number: VARIANTS[number].name)
@pytest.mark.rotated(48)
def test_no_spills(number: int, dim: int) -> None:
    spec = replace(spec_of(VARIANTS[number], dim, DTYPES[number % 2]), kv_dtype=KINDS[number // 2 % 2])
    for each in (spec, replace(spec, page_size=16)):
        kernel = render_forward(each, SM_90A)
        result = nvrtc.compile(kernel.source, "sm_90a", kernel.name)
        assert not result.resources.spills, f"{kernel.name}, {kernel.plan}: {result.resources}"
        assert not re.search(r"\(C75\d\d\)", result.log), f"{kernel.name}: {result.log}"


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(kind: str, dtype: str) -> None:
    """With torch's tensors, whose 8-bit types CuPy lacks."""
    torch = pytest.importorskip("torch")
    for page_size, dim, shape in (
        (None, 128, Shape(1000, 1500, 2, 8, 2)),
        (16, 64, Shape(600, 3000, 3, 8, 2)),
        (1, 96, Shape(513, 700, 2, 16, 4)),
    ):
        spec = fg.AttentionSpec(dim, dtype, mask=fg.causal(), page_size=page_size, kv_dtype=kind)
        inputs = random_inputs(spec, shape)
        q = torch.from_numpy(inputs.q.astype(np.float32)).cuda().to(getattr(torch, dtype))
        k, v = (
            torch.from_numpy(each.view(np.uint8)).cuda().view(getattr(torch, kind)) for each in (inputs.k, inputs.v)
        )
        captures = {name: torch.from_numpy(value).cuda() for name, value in inputs.captures.items()}
        compiled = attention.compile(spec, plan=render_forward(spec, SM_90A).plan)
        for _ in range(2):
            out, lse = compiled(q, k, v, return_lse=True, **captures)
            found = (out.float().cpu().numpy().astype(inputs.q.dtype), lse.cpu().numpy())
            verdict = judged(spec, inputs.q, inputs.k, inputs.v, *found, inputs.captures)
            assert verdict.ok, f"{page_size}: {verdict}"
