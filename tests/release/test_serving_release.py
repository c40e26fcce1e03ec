"""examples/serving.toml is built, checked, and has the kernels that calls launch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flashgen as fg
from flashgen import attention, release
from flashgen.build import nvrtc
from flashgen.codegen.stages import decode_kernels, forward_kernels
from flashgen.codegen.targets import TARGETS
from flashgen.release.folder import emit

MANIFEST = Path(__file__).parents[2] / "examples" / "serving.toml"
SPEC = fg.AttentionSpec(128, "bfloat16", layout="bshd", mask=fg.causal(), page_size=16)
MIXED = fg.AttentionSpec(128, "bfloat16", layout="thd", mask=fg.causal(), page_size=16)


def test_it_is_built_and_checked(tmp_path: Path) -> None:
    written = release.build(MANIFEST, tmp_path, sources_only=True)
    assert release.check(tmp_path) == release.stale(MANIFEST, tmp_path) == []
    kernels = written["kernels"]
    parts = {kernel["part"] for kernel in kernels}
    assert parts == {
        "forward", "decode", "decode_rows32", "decode_scheduled", "decode_scheduled_rows32", "decode_schedule",
        "decode_schedule_rows32", "append", "merge", "few",
    }  # fmt: skip
    specs = [kernel["spec"] for kernel in kernels if kernel["spec"]]
    assert {spec.get("page_size") for spec in specs} == {16, 64, None}
    assert {spec.get("kv_dtype") for spec in specs} == {None, "float8_e4m3fn", "int8"}
    assert any(spec.get("sink") for spec in specs) and any(spec["layout"] == "thd" for spec in specs)
    assert json.loads((tmp_path / "manifest.json").read_text())["kernels"] == kernels


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_it_has_all_kernels_of_calls_over_pages(target: str) -> None:
    sources = {kernel.rendered.source for kernel in emit(release.read_requests(MANIFEST))}
    made = forward_kernels(SPEC, TARGETS[target]), decode_kernels(SPEC, TARGETS[target])
    assert {kernel.source for kernels in made for kernel in kernels.values()} <= sources
    for spec in (SPEC, MIXED):
        assert set(attention.compile(spec, target=target, emulate=True).sources.values()) <= sources


@pytest.mark.slow
@pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")
@pytest.mark.parametrize("part", range(8))
@pytest.mark.rotated(36)
def test_every_kernel_compiles_without_spills(part: int) -> None:
    for kernel in list(emit(release.read_requests(MANIFEST)))[part::8]:
        rendered = kernel.rendered
        compiled = nvrtc.compile(rendered.source, rendered.target.architecture, rendered.name)
        assert compiled.resources.spills == 0, rendered.name
