"""Selection of a spec's target by the GPU, by name or by a plan, and of the backward that goes with it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import flashgen.language as fg
from flashgen import attention, release
from flashgen.build import nvrtc
from flashgen.cli.app import app
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.mma_sync.backward_plans import BackwardPlan
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.stages import kernels_of
from flashgen.codegen.targets import TARGETS, target_of_capability
from flashgen.errors import SEE_LIMITS, BuildError, LaunchError, UnsupportedError
from flashgen.launch import engines
from flashgen.runtime import gpu
from flashgen.verify import Case, Shape, learned, verify

needs_nvrtc = pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")
SPEC = fg.AttentionSpec(64, mask=fg.causal())
LISTED = fg.AttentionSpec(40, "bfloat16", value_dim=72, mask=fg.causal() & fg.document("ids"))
LEARNED = fg.AttentionSpec(64, mask=fg.causal(), score=learned(fg.alibi("slopes")), dropout=0.1)
WIDE = fg.AttentionSpec(256, mask=fg.causal(), score=fg.softcap(30.0), dropout=0.1)
WIDE = fg.AttentionSpec(256, mask=fg.causal(), score=fg.softcap(30.0), dropout=0.1)
HOPPERS, AMPERES = HopperPlan(2, 64), ForwardPlan(64, 64, 4)


class Built:
    """A runner that builds nothing."""

    def __init__(self, kernel: object, prebuild: str) -> None:
        self.kernel, self.prebuild = kernel, prebuild


@pytest.fixture(autouse=True)
def no_builds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    attention.compiling.clear()
    monkeypatch.setattr(engines, "GpuRunner", Built)
    yield
    attention.compiling.clear()  # the mock capability


def on(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "compute_capability", lambda: capability)


@pytest.mark.parametrize(
    ("capability", "name"),
    [((7, 5), "sm_75"), ((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100")],
)
def test_a_gpu_selects_the_target_of_its_generation(
    capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(capability, monkeypatch)
    compiled = attention.compile(SPEC)
    assert compiled.target.name == name == target_of_capability(*capability).name
    assert isinstance(compiled.plan, HopperPlan) == (name == "sm_90a")
    assert compiled.backward_kernels["dkdv"].target.name == name


def test_the_other_family_is_selected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    on((9, 0), monkeypatch)
    compiled = attention.compile(SPEC, target="sm_90")
    assert (compiled.target.family, type(compiled.plan)) == ("ampere", ForwardPlan)
    assert compiled.name.startswith("fwd-sm90-") and attention.compile(SPEC).name.startswith("fwd-sm90a-")
    assert attention.compile(SPEC, target="sm_90a") is attention.compile(SPEC)


def test_a_plan_selects_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    on((9, 0), monkeypatch)
    assert attention.compile(SPEC, plan=AMPERES).target.name == "sm_90"
    assert attention.compile(SPEC, plan=HOPPERS).target.name == "sm_90a"
    with pytest.raises(UnsupportedError, match="sm_90a takes a HopperBackwardPlan or a HopperWidePlan; target='sm_90'"):
        _ = attention.compile(SPEC, backward_plan=BackwardPlan(64, 64, 4)).backward_kernels
    on((8, 6), monkeypatch)
    assert attention.compile(SPEC, plan=AMPERES).target.name == "sm_86"
    with pytest.raises(UnsupportedError, match="sm_86 takes a ForwardPlan"):
        attention.compile(SPEC, plan=HOPPERS)


def test_a_plan_selects_the_emulated_target() -> None:
    chosen = [attention.compile(SPEC, emulate=True, plan=plan).target.name for plan in (None, AMPERES, HOPPERS)]
    assert chosen == ["sm_80", "sm_80", "sm_90a"]


def test_a_target_that_contradicts_the_plan_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="sm_90 takes a ForwardPlan; target='sm_90a' takes this one"):
        attention.compile(SPEC, target="sm_90", plan=HOPPERS)
    with pytest.raises(UnsupportedError, match="sm_90a takes a HopperPlan; target='sm_90' takes this one"):
        attention.compile(SPEC, target="sm_90a", plan=AMPERES)


def test_invalid_plans_are_refused() -> None:
    given: Any = "fast"
    with pytest.raises(UnsupportedError, match=r"plan='fast': sm_80 takes a ForwardPlan$"):
        attention.compile(SPEC, target="sm_80", plan=given)
    with pytest.raises(UnsupportedError, match=r"backward_plan='fast': sm_80 takes a BackwardPlan$"):
        _ = attention.compile(SPEC, target="sm_80", backward_plan=given).backward_kernels


def test_an_unsupported_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on((7, 0), monkeypatch)
    with pytest.raises(UnsupportedError, match="target='sm_70' is not supported; choose one of sm_75"):
        attention.compile(SPEC)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("h100", "the target of H100 GPUs is sm_90a"),
        ("NVIDIA H200", "the target of H200 GPUs is sm_90a"),
        ("gh200", "the target of H200 GPUs is sm_90a"),
        ("a100-80gb", "the target of A100 GPUs is sm_80"),
        ("a10g", "the target of A10 GPUs is sm_86"),
        ("rtx4090", "the target of RTX 4090 GPUs is sm_89"),
        ("GeForce RTX 3090 Ti", "the target of RTX 3090 GPUs is sm_86"),
        ("l40s", "the target of L40S GPUs is sm_89"),
        ("b200", "the target of B200 GPUs is sm_100"),
        ("5090", "the target of RTX 5090 GPUs is sm_120"),
        ("hopper", "the target of Hopper GPUs is sm_90a"),
        ("sm90", "did you mean sm_90 or sm_90a?"),
        ("sm_100a", "did you mean sm_100?"),
    ],
)
def test_the_name_of_a_gpu_leads_to_its_target(name: str, hint: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        attention.compile(SPEC, target=name)
    assert str(refused.value).endswith(f"sm_121; {hint} {SEE_LIMITS}")


@pytest.mark.parametrize("name", ["v100", "sm_91", "a1000", "h1000", "", "cuda"])
def test_other_names_get_no_hint(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"sm_121 \(see "):
        attention.compile(SPEC, target=name)


def test_targets_that_run_on_each_gpu() -> None:
    there = {(8, 0): ["sm_80"], (8, 9): ["sm_80", "sm_86", "sm_87", "sm_89"], (9, 0): ["sm_90", "sm_90a"]}
    there |= {(9, 1): ["sm_90"], (12, 1): ["sm_120", "sm_121"]}
    for capability, names in there.items():
        assert [name for name, target in TARGETS.items() if target.runs_on(*capability)] == names


def test_a_kernel_for_another_gpu_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(engines, "build", lambda kernel, prebuild: None)
    on((9, 0), monkeypatch)
    runner = engines.GpuRunner(attention.compile(SPEC, target="sm_80", emulate=True).kernels[0], "")
    with pytest.raises(LaunchError, match=r"compiled for sm_80 and cannot run on this GPU, sm_90; compile .* without"):
        _ = runner._loaded


@pytest.mark.parametrize("spec", [SPEC, LISTED, LEARNED, WIDE], ids=lambda spec: spec.name)
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_the_backward_on_hopper_uses_its_own_instructions(
    spec: fg.AttentionSpec, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launching, showing and releasing agree on that."""
    on((9, 0), monkeypatch)
    compiled = attention.compile(spec, deterministic=deterministic)
    shown = kernels_of(spec, TARGETS["sm_90a"], ("backward",), deterministic=deterministic)
    assert [kernel.source for kernel in shown.values()] == list(compiled.backward_sources.values())
    for part, kernel in shown.items():
        assert kernel.target.architecture == "sm_90a" and "-sm90a-" in kernel.name
        assert part.endswith("lists") or "target   sm_90a, family hopper" in kernel.source
        assert ("wgmma.mma_async" in kernel.source) == (part in ("dkdv", "dq"))
    assert compiled._backward.stages.runners["dkdv"].prebuild == compiled._prebuild("backward")  # type: ignore[attr-defined]
    assert "--target sm_90a" in compiled._prebuild("backward")


@needs_nvrtc
def test_a_release_for_sm_90a_serves_both_passes_without_jit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release for sm_90 serves only calls with that target; others get an error with a remedy."""
    monkeypatch.undo()
    attention.compiling.clear()
    on((9, 0), monkeypatch)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("sm_90a", "sm_90"):
        passes = ["forward", "backward"]
        request = {"kernels": [{"spec": LISTED.to_json(), "target": name, "passes": passes, "deterministic": True}]}
        manifest = tmp_path / f"{name}.json"
        manifest.write_text(json.dumps(request))
        release.build(manifest, tmp_path / name)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("FLASHGEN_JIT", "0")
    monkeypatch.setenv("FLASHGEN_RELEASE", str(tmp_path / "sm_90a"))
    spec = fg.AttentionSpec.from_json(LISTED.to_json())  # masks from a spec's JSON get new names
    compiled = attention.compile(spec, deterministic=True)
    resources = {compiled.name: compiled.resources, **compiled.backward_resources}
    assert all("-sm90a-" in name and used.registers for name, used in resources.items()) and len(resources) == 6
    attention.compiling.clear()
    monkeypatch.setenv("FLASHGEN_RELEASE", str(tmp_path / "sm_90"))
    assert attention.compile(spec, target="sm_90", deterministic=True).backward_resources
    with pytest.raises(BuildError, match=r"for sm_90a(.|\n)*flashgen show --what resources --target sm_90a"):
        attention.compile(spec)


@needs_nvrtc
@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_the_commands_of_the_error_build_what_is_missing(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    attention.compiling.clear()
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    spec = fg.AttentionSpec.from_json(LISTED.to_json())

    def refused(compiled: Callable[[], object]) -> None:
        monkeypatch.setenv("FLASHGEN_JIT", "0")
        with pytest.raises(BuildError) as refusal:
            compiled()
        (commands,) = re.findall(r"`(flashgen show .*)`", str(refusal.value))
        monkeypatch.setenv("FLASHGEN_JIT", "1")
        for command in commands.split(" && "):
            assert CliRunner().invoke(app, shlex.split(command)[1:]).exit_code == 0
        monkeypatch.setenv("FLASHGEN_JIT", "0")
        compiled()

    refused(lambda: attention.compile(spec, target=target))
    refused(lambda: attention.compile(spec, target=target).backward_resources)
    refused(lambda: attention.compile(spec, target=target, deterministic=True).backward_resources)


@pytest.mark.parametrize("spec", [SPEC, LISTED, LEARNED], ids=lambda spec: spec.name)
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.covering(4)
def test_both_passes_of_hopper_on_the_emulator(spec: fg.AttentionSpec, deterministic: bool) -> None:
    """The backward uses the output and LSE of the forward."""
    cases = [Case(spec, Shape(150, 170, 1, 4, 2)), Case(spec, Shape(1, 33, 2, 2, 1), lse_gradient=True)]
    passes = ("forward", "backward")
    for result in verify(cases, passes=passes, target="sm_90a", emulate=True, deterministic=deterministic):
        assert result.ok, f"{result.case}, {result.pass_}: {result.problem or result.verdicts}"


def test_gradients_of_lengths_0_and_1_on_hopper() -> None:
    compiled = attention.compile(SPEC, target="sm_90a", emulate=True)
    for shape in ((0, 5, 1, 2), (5, 0, 1, 2), (5, 5, 0, 2), (1, 1, 1, 1)):
        len_q, len_k, batch, heads = shape
        q, d_out = (np.ones((batch, heads, len_q, 64), np.float16) for _ in range(2))
        k, v = (np.ones((batch, heads, len_k, 64), np.float16) for _ in range(2))
        out, pullback = compiled.vjp(q, k, v)
        dq, dk, dv = pullback(d_out)[:3]
        assert out.shape == q.shape and [dq.shape, dk.shape, dv.shape] == [q.shape, k.shape, v.shape]
        one = shape == (1, 1, 1, 1)
        assert (out == one).all() and not dq.any() and not dk.any() and (dv == one).all()
