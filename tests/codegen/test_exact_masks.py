"""The machine code of mask decisions: no product is fused with a sum, on any GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

import flashgen.language as fg
from flashgen.build import inspect, nvrtc, tools
from flashgen.codegen.mma_sync.forward_plans import choose_forward_plan
from flashgen.codegen.targets import TARGETS
from flashgen.codegen.tile_list_kernel import render_lists

pytestmark = [
    pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install 'flashgen[cuda13]'"),
    pytest.mark.skipif(
        not (tools.find_tool("nvdisasm") or tools.find_tool("cuobjdump")),
        reason="needs nvdisasm or cuobjdump: pip install 'flashgen[inspect]'",
    ),
]

CAP = fg.Scalar("cap", "float32")


def tenths(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q * 0.1 - k * 0.1 >= 0


def sums_of_products(b: Any, h: Any, q: Any, k: Any) -> Any:
    return fg.to_int(q * 0.3 + CAP * k) % 7 < fg.floor(k * CAP - q * 0.7)


def instructions(mask: Any, target: str) -> set[str]:
    """Returns the instructions of the kernel that lists the mask's tiles, which computes no other floats."""
    spec = fg.AttentionSpec(64, mask=mask)
    kernel = render_lists(spec, TARGETS[target], choose_forward_plan(spec, TARGETS["sm_80"]))
    cubin = nvrtc.compile(kernel.source, TARGETS[target].architecture, kernel.name).cubin
    return set(re.findall(r"\b(F[A-Z]+)\b", inspect.sass(cubin)))


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("mask", [tenths, sums_of_products])
def test_no_product_is_fused_with_a_sum(mask: Any, target: str) -> None:
    found = instructions(mask, target)
    assert {"FMUL", "FADD"} <= found and "FFMA" not in found, found
