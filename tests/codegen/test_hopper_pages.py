"""Hopper's forward kernel over pages without a GPU: text and assembled code."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest

import flashgen.language as fg
from emitted_text import all_called, functions, lines_of_element_loads, tidy, without_comments, without_types
from flashgen.build import nvrtc
from flashgen.codegen.dispatch import render_forward, render_forward_kernels
from flashgen.codegen.hopper.pages import box_keys, panels_joined
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.targets import target_named
from flashgen.language import AttentionSpec
from flashgen.verify import variants
from flashgen.verify.variants import Variant, spec_of

SM_90A = target_named("sm_90a")
DIMS = (128, 64, 256, 40, 96, 192, 8, 160, 72, 80, 224)
MOST_CODE, MOST_RAGGED, MOST_FEW, LONGEST_FUNCTION = (
    536,
    610,
    700,
    75,
)  # lines of a function; of a file, lines of code without primitives
MOST_BESIDE_DROPOUT = 64  # bytes, of few queries: where lanes hold dropout bits and scores, no registers are left
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")


def rendered(variant: Variant, dim: int, dtype: str, size: int, layout: Any = "bhsd") -> list[RenderedKernel]:
    """Returns the kernel of prompts, and in a mixed batch that of all other sequences."""
    spec = replace(spec_of(variant, dim, dtype), layout=layout)
    return list(render_forward_kernels(replace(spec, page_size=size), SM_90A))


CASES = list(zip(variants(), cycle(DIMS), cycle(("float16", "bfloat16")), cycle((16, 64, 8, 256, 32))))


def without_spills(kernel: RenderedKernel, most: int = 0) -> None:
    result = nvrtc.compile(kernel.source, "sm_90a", kernel.name)
    used = result.resources
    assert used.spills <= most, f"{kernel.name}, {kernel.plan}: {used}"
    # C7510 and similar: products that wait for each other; C7508: setmaxnreg without effect.
    assert not re.search(r"\(C75\d\d\)", result.log), f"{kernel.name}: {result.log}"


@needs_nvrtc
@pytest.mark.parametrize(("variant", "dim", "dtype", "size"), CASES)
@pytest.mark.rotated(48)
def test_every_variant_compiles_without_spills(variant: Variant, dim: int, dtype: str, size: int) -> None:
    (kernel,) = rendered(variant, dim, dtype, size)
    without_spills(kernel)
    prompts, few = rendered(variant, dim, dtype, size, "thd")
    without_spills(prompts)
    without_spills(few, MOST_BESIDE_DROPOUT if variant.dropout else 0)


@needs_nvrtc
@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.rotated(3)
def test_packed_heads_compile_without_spills(heads: int) -> None:
    for dim, score in ((128, None), (64, fg.alibi("slopes")), (256, None)):
        spec = AttentionSpec(dim, "bfloat16", mask=fg.causal(), score=score, page_size=16)
        plan = render_forward(spec, SM_90A).plan
        without_spills(render_forward(spec, SM_90A, plan.packing(heads, spec)))


@pytest.mark.rotated(3)
@pytest.mark.parametrize(("variant", "dim", "dtype", "size"), CASES)
def test_text_is_short_and_tidy(variant: Variant, dim: int, dtype: str, size: int) -> None:
    (kernel,) = rendered(variant, dim, dtype, size)
    prompts, few = rendered(variant, dim, dtype, size, "thd")
    for each, most in ((kernel, MOST_CODE), (prompts, MOST_RAGGED), (few, MOST_FEW)):
        _is_text(each, most)
    assert few.name.startswith("few-") and "namespace prefill" not in few.source


def _is_text(kernel: RenderedKernel, most_code: int) -> None:
    tidy(kernel.source)
    all_called(kernel)
    source = without_types(without_comments(kernel.source))
    assert sum(
        bool(line.strip()) for line in source.split("#endif\n", 1)[1].splitlines()
    ) <= most_code + lines_of_element_loads(source)
    words = re.findall(r"[A-Za-z_]\w*", source)
    for name, text in functions(kernel.source).items():
        assert text.count("\n") < LONGEST_FUNCTION, f"{name} has {text.count(chr(10)) + 1} lines"
        assert name == kernel.entry or words.count(name) > 1, f"{name} has no caller"


def test_copies_are_full_pages_or_parts_of_a_page() -> None:
    for size, tile_k, keys in ((8, 80, 8), (16, 80, 16), (64, 80, 16), (64, 128, 64), (256, 128, 128), (256, 96, 32)):
        spec = AttentionSpec(96, value_dim=64, page_size=size)
        assert box_keys(spec, tile_k) == keys
        boxes = render_forward(spec, SM_90A, HopperPlan(2, tile_k)).boxes
        assert boxes == {"q": (32, 64), "k": (32, 8, 3, keys // 8), "v": (64, keys), "o": (64, 16)}


@pytest.mark.parametrize(
    ("width", "panel", "joined"), [(64, 64, 1), (128, 64, 2), (256, 64, 4), (96, 32, 3), (80, 16, 5), (40, 16, 1)]
)
def test_full_panels_are_copied_together(width: int, panel: int, joined: int) -> None:
    """A partial panel is copied separately, so that its columns beyond the last are zeros."""
    assert panels_joined(AttentionSpec(width, page_size=16), width, panel) == joined
    assert panels_joined(AttentionSpec(width), width, panel) == 1


def test_register_counts_of_warpgroups_fit_the_launch() -> None:
    """setmaxnreg redistributes registers in multiples of 8 per thread; the total must not exceed that of the launch."""
    spec = AttentionSpec(64, page_size=16)
    for consumers in (1, 2, 3):
        plan = HopperPlan(consumers, 64)
        for each in (spec, AttentionSpec(64)):
            loads, computes = plan.warpgroup_registers(each)
            launched = min(65536 // plan.threads // 8 * 8, 255 // 8 * 8)
            assert loads % 8 == computes % 8 == 0
            assert loads + consumers * computes <= launched * (consumers + 1)
