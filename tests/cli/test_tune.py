"""`flashgen tune`: options, errors and tables without a GPU; the full command with one."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import flashgen.language as fg
from flashgen import attention
from flashgen.attention import backward_tuning
from flashgen.attention.trials import Timing, Tuning
from flashgen.attention.tuned_plans import LengthClass
from flashgen.cli import tune
from flashgen.cli.app import app
from flashgen.cli.machine import gpus
from flashgen.codegen.hopper.backward_plans import HopperBackwardPlan
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.hopper.wide_plans import HopperWidePlan
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.workload import Workload
from flashgen.errors import ArgumentError
from flashgen.runtime.gpu import Card
from flashgen.verify import Shape

SPEC, SHAPE = fg.AttentionSpec(128, mask=fg.causal()), Shape(4096, 4096, 4, 16, 16)
DEFAULT, WINNER, SPILLING = HopperPlan(2, 128, 2, takes_turns=True), HopperPlan(2, 160), HopperPlan(3, 96)
FOUND = Tuning(
    kernel="fwd-sm90a-causal",
    gpu=Card("a GPU", 132),
    workload=Workload(4096, 4096, 64, 132),
    lengths=LengthClass(4096, 4096, 32),
    default=DEFAULT,
    winner=WINNER,
    timings=(
        Timing(DEFAULT, 1.0, 168),
        Timing(SPILLING, None, 128, "it spills 96 bytes of registers"),
        Timing(WINNER, 0.8, 168),
    ),
    kept=Path("/cache/tuned-fwd"),
)


def invoke(*arguments: object, expect: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == expect, f"{result.output}\n{result.exception!r}"
    return result


def test_help_has_examples() -> None:
    text = invoke("tune", "--help").output
    assert "Usage" in text and "--lengths" in text and "flashgen tune" in text and "--heads-kv" in text


@pytest.mark.skipif(bool(gpus()), reason="there is a GPU")
def test_a_gpu_is_required() -> None:
    result = invoke("tune", "causal()", expect=2)
    assert "there is no GPU here to measure on" in result.stderr and not result.stdout


def test_options_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "require_gpu", lambda: None)
    assert "did you mean causal" in invoke("tune", "casual()", expect=2).stderr
    assert "must be comma-separated integers" in invoke("tune", "causal()", "--lengths", "1k", expect=2).stderr
    assert "must be positive" in invoke("tune", "causal()", "--lengths", "0", expect=2).stderr
    divides = invoke("tune", "causal()", "--heads", 32, "--heads-kv", 5, expect=2)
    assert "--heads-kv 5 does not divide --heads 32" in divides.stderr
    assert "add --pass backward" in invoke("tune", "causal()", "--deterministic", expect=2).stderr
    assert "suffix '.pt'" in invoke("tune", "causal()", "--captures", "ids.pt", expect=2).stderr


def test_default_sizes_are_those_of_the_benchmark() -> None:
    assert tune.shape_of(SPEC, 4096, 4096, None, None, None) == SHAPE
    assert tune.shape_of(SPEC, 1, 65536, None, None, None) == Shape(1, 65536, 1, 16, 16)
    assert tune.shape_of(SPEC, 64, 128, 3, 32, 8) == Shape(64, 128, 3, 32, 8)
    with pytest.raises(ArgumentError, match="does not divide"):
        tune.shape_of(SPEC, 64, 64, 1, 8, 16)


def test_captures_come_from_the_file(tmp_path: Path) -> None:
    window, ids = fg.Scalar("window"), np.arange(40, dtype=np.int32) // 10
    spec = fg.AttentionSpec(16, mask=fg.document("ids") & fg.sliding_window(window))
    found = tune.inputs_of("document('ids')", spec, Shape(40, 40), 0, {"ids": ids, "window": np.array(7), "x": ids})
    assert found.captures.keys() == {"ids", "window"} and found.captures["window"] == 7
    np.testing.assert_array_equal(found.captures["ids"], ids)
    assert tune.inputs_of("document('ids')", spec, Shape(40, 40), 0, {}).captures["ids"].shape == (40,)


def test_the_table_shows_the_fastest_and_why_others_are_dropped() -> None:
    heading, cells = tune.table(FOUND, SPEC, SHAPE)
    assert [cell[0] for cell in cells] == [
        "128 x 160, consumers 2, stages 2", "128 x 128, consumers 2, stages 2, takes_turns",
        "192 x 96, consumers 3, stages 2",
    ]  # fmt: skip
    tflops = 4 * 4 * 16 * 4096**2 * 128 / 2 / 0.8e-3 / 1e12
    assert cells[0][1:] == ["0.8000", f"{tflops:.0f}", "168", "1.250", "winner"] and cells[1][-1] == "default"
    assert cells[2][1:] == ["-", "-", "128", "-", "it spills 96 bytes of registers"] and len(heading) == 6
    assert tune.plan_text(ForwardPlan(64, 32, 4)) == "64 x 32, warps 4, stages 1, blocks 1"


def test_output(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(tune, "require_gpu", lambda: None)
    monkeypatch.setattr(tune, "inputs_of", lambda *given: given)
    monkeypatch.setattr(tune, "tune_pass", lambda *given: asked.append(given) or FOUND)
    arguments = ("tune", "causal()", "--head-dim", 128, "--lengths", "4096,512", "--target", "sm_90a")
    result = invoke(*arguments)
    assert [shape for _, shape, *_ in asked] == [SHAPE, Shape(512, 512, 32, 16, 16)]
    assert all(given[3:] == ("sm_90a", 0, "forward", False) for given in asked)
    assert result.stdout.count("winner") == 2 and "1.25 times as fast: 0.8 ms" in result.stderr
    assert "saved to /cache/tuned-fwd" in result.stderr
    facts = json.loads(invoke(*arguments, "--json").stdout)
    assert len(facts) == 2 and facts[0]["gain"] == 1.25 and facts[0]["winner"]["tile_k"] == 160
    assert facts[0]["spec"] == SPEC.name and facts[0]["shape"]["len_q"] == 4096
    assert facts[0]["timings"][1]["tflops"] is None and facts[0]["timings"][2]["tflops"] > 0


def test_both_passes_are_tuned_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(tune, "require_gpu", lambda: None)
    monkeypatch.setattr(tune, "inputs_of", lambda *given: given)
    monkeypatch.setattr(tune, "tune_pass", lambda *given: asked.append(given[5:]) or FOUND)
    arguments = ("tune", "causal()", "--head-dim", 128, "--lengths", "4096", "--deterministic", "--pass")
    forward, backward = json.loads(invoke(*arguments, "both", "--json").stdout)
    assert asked == [("forward", True), ("backward", True)]
    assert (forward["pass"], backward["pass"]) == ("forward", "backward")
    # Five products in the backward, two in the forward.
    assert backward["timings"][0]["tflops"] == pytest.approx(2.5 * forward["timings"][0]["tflops"])
    invoke(*arguments, "backward")
    assert asked[2:] == [("backward", True)]


def test_short_descriptions_of_backward_plans() -> None:
    assert (
        tune.plan_text(HopperBackwardPlan(64, 3, heads_apart=True)) == "64 x 128, stages 3, early_scores, heads_apart"
    )
    assert tune.plan_text(HopperWidePlan(32)) == "32 x 64, stages 2"


def test_the_backward_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(attention, "compile", partial(attention.compile, emulate=True))
    monkeypatch.setattr(backward_tuning, "tune_backward", lambda *given, progress: asked.append(given) or FOUND)
    spec, shape = fg.AttentionSpec(16, mask=fg.causal(), dropout=0.25), Shape(40, 40)
    inputs = tune.inputs_of("causal()", spec, shape, 0, {})
    assert tune.tune_pass(spec, shape, inputs, "sm_90a", 5, "backward", True) is FOUND
    ((backward, forward, qkv, captures, seed),) = asked
    assert backward.dispatch.deterministic and backward.spec == forward.spec == spec
    assert qkv == (inputs.q, inputs.k, inputs.v) and captures == {} and seed == 5


@pytest.mark.gpu
def test_tuning_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    sizes = ("--lengths", 512, "--batch", 1, "--heads", 4, "--heads-kv", 2)
    arguments = ("tune", "document('ids')", "--scale", 0.12, "--pass", "both", *sizes)
    for found in json.loads(invoke(*arguments, "--json").stdout):
        assert found["gain"] >= 1 and Path(found["kept"]).parent == tmp_path and len(found["timings"]) > 1
    assert "winner" in invoke(*arguments).stdout
    kept = invoke("cache", "list").stdout
    assert "tuned-fwd" in kept and "tuned-bwd" in kept
