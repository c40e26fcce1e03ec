"""Emitted kernels of every family with NVRTC 12, whichever NVRTC CuPy has; the extra cuda12 compiles with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import flashgen.language as fg
import nvrtc_12
from flashgen.build import nvrtc
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import kernels_of
from flashgen.codegen.targets import TARGETS
from flashgen.errors import BuildError
from flashgen.language import AttentionSpec

pytestmark = pytest.mark.skipif(
    nvrtc_12.library_path() is None, reason="there is no libnvrtc.so.12: pip install nvidia-cuda-nvrtc-cu12"
)


@pytest.fixture(autouse=True)
def of_version_12(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`flashgen.build.nvrtc` with that library; only CuPy's binding is replaced."""
    monkeypatch.setattr(nvrtc, "_load", nvrtc_12.loaded)
    yield
    monkeypatch.undo()
    assert nvrtc._load is not nvrtc_12.loaded


DROPPED = AttentionSpec(
    64, dropout=0.1, mask=fg.causal() & fg.trace_mask(lambda b, h, q, k: (abs(q - k) <= 128) | (k < 4), "near")
)
SPECS = {
    "causal": AttentionSpec(128, "bfloat16", mask=fg.causal()),
    "dropped": DROPPED,
    "documents": AttentionSpec(64, mask=fg.document("ids") & fg.causal()),
    "capped": AttentionSpec(96, mask=fg.sliding_window(300), score=fg.softcap(20)(fg.alibi("slopes"))),
    "learned": AttentionSpec(64, "bfloat16", score=fg.alibi(fg.Tensor("slopes", "float32", 1, grad=True))),
}
FORWARDS = [
    ("causal", "sm_80"), ("causal", "sm_90a"), ("causal", "sm_120"), ("dropped", "sm_80"), ("dropped", "sm_90a"),
    ("documents", "sm_90a"), ("documents", "sm_86"), ("capped", "sm_75"), ("capped", "sm_89"), ("capped", "sm_100"),
]  # fmt: skip
BACKWARDS = [("causal", "sm_80"), ("documents", "sm_90a"), ("learned", "sm_90"), ("capped", "sm_75")]


def assert_compiles(kernel: RenderedKernel, most_spilled: int = 0) -> None:
    compiled = nvrtc.compile(kernel.source, kernel.target.architecture, kernel.name)
    used = compiled.resources
    assert compiled.nvrtc_version[0] == 12 and compiled.cubin[:4] == b"\x7fELF"
    assert used.registers > 0 and used.registers * kernel.threads <= 65536, f"{kernel!r}: {used}"
    assert max(used.spill_stores, used.spill_loads) <= most_spilled, f"{kernel!r}: {used}"


def test_it_is_version_12_and_knows_the_targets() -> None:
    assert nvrtc.version()[0] == 12
    known = {name for name, target in TARGETS.items() if target.base_architecture in nvrtc.supported_architectures()}
    assert {target for _, target in (*FORWARDS, *BACKWARDS)} <= known
    if nvrtc.version() >= (12, 9):
        assert known == set(TARGETS)


@pytest.mark.rotated(4)
@pytest.mark.parametrize(("name", "target"), FORWARDS)
def test_forward_kernels_compile_without_spills(name: str, target: str) -> None:
    for kernel in kernels_of(SPECS[name], TARGETS[target]).values():
        assert_compiles(kernel)


@pytest.mark.rotated(4)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("name", "target"), BACKWARDS)
def test_backward_kernels_compile(name: str, target: str, deterministic: bool) -> None:
    for kernel in kernels_of(SPECS[name], TARGETS[target], ("backward",), deterministic=deterministic).values():
        assert_compiles(kernel, most_spilled=96)  # the allowance of test_backward_compiles.py for NVRTC 13


def test_errors_and_unknown_architectures_are_reported() -> None:
    with pytest.raises(BuildError, match=r"k\.cu\(1\): error: identifier \"missing\" is undefined"):
        nvrtc.compile('extern "C" __global__ void k() { missing(); }', "sm_90a", "k")
    with pytest.raises(BuildError, match=r"architecture 'sm_33' is not one that NVRTC 12\.\d+ compiles for"):
        nvrtc.compile("", "sm_33", "k")


def test_ptx_is_that_of_version_12() -> None:
    (kernel,) = kernels_of(SPECS["causal"], TARGETS["sm_90a"]).values()
    text = nvrtc.compile_ptx(kernel.source, "sm_90a", kernel.name)
    assert "\n.version 8." in text and "wgmma.mma_async" in text
