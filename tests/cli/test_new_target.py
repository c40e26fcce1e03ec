"""A target is one record: with another entry in `TARGETS`, every command supports it."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flashgen.build import nvrtc
from flashgen.cli.app import app
from flashgen.codegen.targets import TARGETS, ReferenceGpu, Target

GPU = ReferenceGpu("a new GPU", tflops=500, gb_per_second=250)
NEW = {
    # Supported by NVRTC 13 and not among the targets: of the families without generation-specific instructions.
    "sm_110": replace(TARGETS["sm_100"], name="sm_110", compute_capability=110, reference_gpu=GPU),
    # A capability with generation-specific instructions, which no compiler supports.
    "sm_99a": replace(TARGETS["sm_90a"], name="sm_99a", compute_capability=99, tensor_multiply_adds=64),
}


def compiles(target: Target) -> bool:
    return nvrtc.is_available() and target.base_architecture in nvrtc.supported_architectures()


@pytest.fixture(params=NEW)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Adds a target that is only known by its entry in the table."""
    monkeypatch.setitem(TARGETS, request.param, NEW[request.param])
    return NEW[request.param]


def invoke(command: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return result.stdout


def invoke_json(command: str) -> Any:
    return json.loads(invoke(f"{command} --json"))


def test_show(target: Target) -> None:
    for of in ("forward", "backward", "decode"):
        words = f'show "causal()" --target {target.name} --pass {of}'
        assert f"target   {target.name}, family {target.family}" in invoke(words)
        if compiles(target):
            found = invoke_json(f"{words} --what resources")
            assert {each["target"] for each in (found if isinstance(found, list) else [found])} == {target.name}
    assert "cycles of the model" in invoke(f'show "causal()" --target {target.name} --what timeline')


def test_report(target: Target) -> None:
    if nvrtc.is_available() and not compiles(target):
        pytest.skip(f"NVRTC does not compile for {target.name}")
    found = invoke_json(f'report "causal()" --target {target.name}')
    assert found["target"]["name"] == target.name
    assert found["card"]["name"] == GPU.name and found["card"]["ridge"] == 2000
    kernels = {kernel["role"]: kernel for kernel in found["kernels"]}
    assert kernels["forward"]["roofline"]["limit"] == "memory"
    assert kernels["forward"]["timeline"]["cycles"] > 0 and kernels["dkdv"]["timeline"]["cycles"] > 0
    assert found["checked"]["verdicts"] and all(each["ok"] for each in found["checked"]["verdicts"].values())
    if compiles(target):
        assert kernels["forward"]["occupancy"]["blocks"] > 0


def test_the_timeline_uses_the_rates_of_the_target(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slower tensor cores lengthen the timeline: the model reads the rates from the record."""
    words = f'show "full()" --target {target.name} --what timeline'
    slow = replace(target, tensor_multiply_adds=target.tensor_multiply_adds // 8)
    usual = cycles(invoke(words))
    monkeypatch.setitem(TARGETS, target.name, slow)
    assert cycles(invoke(words)) > 1.5 * usual


def cycles(svg: str) -> float:
    return float(svg.split(" cycles", 1)[0].rsplit(" ", 1)[1])


def test_doctor(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.cli.doctor.examine_emulator", lambda: iter(()))  # takes long
    found = {each["name"]: each for each in invoke_json("doctor") if each["area"] == "target"}
    assert found[target.name]["ok"] == compiles(target) and found.keys() >= {"sm_80", target.name}


def test_release(target: Target, tmp_path: Path) -> None:
    request, out = tmp_path / "release.toml", tmp_path / "out"
    request.write_text(
        f"[[kernels]]\nmask = 'causal()'\nhead_dim = 64\npasses = ['forward', 'backward']\ntarget = '{target.name}'\n"
    )
    invoke(f"release build {request} --out {out} {'' if compiles(target) else '--sources-only'}")
    manifest = json.loads((out / "manifest.json").read_text())
    assert {kernel["target"] for kernel in manifest["kernels"]} == {target.name}
    assert any(kernel["name"].startswith(f"fwd-{target.name.replace('_', '')}-") for kernel in manifest["kernels"])


def test_its_limits_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans and occupancy follow the record's limits, not those of the target from which it was copied."""
    small = replace(TARGETS["sm_80"], name="sm_88", shared_per_block=24 * 1024, shared_per_multiprocessor=25 * 1024)
    monkeypatch.setitem(TARGETS, small.name, small)
    usual, less = (invoke(f'show "causal()" --target {name}').splitlines() for name in ("sm_80", small.name))
    (plan,) = (line for line in less if "bytes of shared memory" in line and "plan " in line)
    assert plan not in usual and int(plan.split(" bytes of shared memory")[0].rsplit(" ", 1)[1]) <= 24 * 1024
