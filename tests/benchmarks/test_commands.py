"""The commands of `python -m benchmarks`: calls, output and saved files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks import host, start, train
from benchmarks.commands import COMMANDS, app
from flashgen.cli.machine import gpus

ROOT = Path(__file__).parents[2]


def invoke(*arguments: object, expect: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == expect, f"{result.output}\n{result.exception!r}"
    return result


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets commands run without a GPU, whose name they would save."""
    monkeypatch.setattr("flashgen.bench.environment", lambda: {"gpu": "none"})
    monkeypatch.setattr("benchmarks.commands.require_gpu", lambda: None)


def test_the_module_lists_its_commands() -> None:
    command = [sys.executable, "-m", "benchmarks", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "python -m benchmarks" in shown and all(f" {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(name: str) -> None:
    assert "--output" in invoke(name, "--help").stdout


@pytest.mark.skipif(bool(gpus()), reason="there is a GPU")
@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"plot"}))
def test_measurements_need_a_gpu(name: str) -> None:
    assert "no GPU" in invoke(name, *([ROOT] if name == "versions" else []), expect=2).stderr


def test_host_passes_its_options_on(tmp_path: Path, no_gpu_needed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements are mocked."""
    asked: list[Any] = []

    def host_rows(*choices: Any) -> Iterator[host.HostRow]:
        asked.extend(choices)
        yield host.HostRow("causal", "sm_90a", "cupy", "forward", (1, 1, 64), 20.25, 19.5, {"checks": 4.0})

    def start_rows(*choices: Any) -> Iterator[host.HostRow]:
        yield host.HostRow("compile, from disk", "sm_90a", "-", "start", (), 7000.0, 6900.0, {})

    monkeypatch.setattr(host, "host_rows", host_rows)
    monkeypatch.setattr(start, "start_rows", start_rows)
    output = ("--output", tmp_path / "host.json")
    result = invoke("host", "--libraries", "cupy", "--pass", "forward", "--target", "sm_90a", *output)
    assert asked == [["cupy"], ["forward"], "sm_90a", 40] and "20.2\t19.5\t4.0" in result.stdout
    assert "compile, from disk" in result.stdout
    assert [row["name"] for row in json.loads(output[1].read_text())["rows"]] == ["causal", "compile, from disk"]
    assert "jax" in invoke("host", "--libraries", "jax", expect=2).stderr


def test_train_passes_its_options_on_and_compares(
    tmp_path: Path, no_gpu_needed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measurements are mocked."""
    asked: list[Any] = []

    def train_rows(*choices: Any) -> Iterator[train.TrainRow]:
        asked.extend(choices)
        yield train.TrainRow("standard", "compile", 4, 8192, 200.0, 1e5, 2 * 10**9, (4.0, 3.0))
        yield train.TrainRow("cuDNN", "compile", 4, 8192, 100.0, 2e5, 10**9)
        yield train.TrainRow("FA2", "compile", 4, 8192, None, None, None, (), "RuntimeError: none")
        yield train.TrainRow("flashgen", "compile", 4, 8192, 80.0, 2.5e5, 10**9, (4.0, 3.03))

    monkeypatch.setattr(train, "train_rows", train_rows)
    output = ("--output", tmp_path / "train.json")
    chosen = ("--modes", "compile", "--shapes", "4x8192", "--loss-steps", 2)
    result = invoke("train", *chosen, *output)
    assert asked == [["standard", "FA2", "cuDNN", "Flex", "flashgen"], ["compile"], [(4, 8192)], 2, False]
    assert "4 x 8192, compile: 1.250 times as fast as the best other, cuDNN" in result.stderr
    assert "losses of 2 steps" in result.stderr and "flashgen: 0.43%; 1.000%" in result.stderr
    assert "RuntimeError: none" in result.stdout
    assert "such as 32x1024" in invoke("train", "--shapes", "32", expect=2).stderr
    asked.clear()
    monkeypatch.setattr(train, "registered_names", lambda: ["FA4 in SDPA", "flashgen in SDPA"])
    invoke("train", "--attentions", "FA2", "--sdpa-registry", "--force", *output)
    assert asked[0] == ["FA2", "FA4 in SDPA", "flashgen in SDPA"]


def test_an_implementation_that_cannot_be_activated_has_a_row_with_the_reason() -> None:
    pytest.importorskip("torch")
    assert "flashgen in SDPA" in train.registered_names()
    (row,) = train.train_rows(["nobody's in SDPA"], ["eager"], [(1, 64)])
    assert row.ms is None and row.problem.startswith("ValueError: Unknown flash attention impl")


def test_flash_attention_4_returns_what_torch_unpacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch's registry only: its own functions return the rest as well."""
    module: Any = ModuleType("flash_attn.cute.interface")
    module._flash_attn_fwd = lambda q, **options: (q, "lse", options, None, None)
    module._flash_attn_bwd = lambda q: (q, "dk", "dv", None, None)
    module._flash_attn_fwd.compile_cache = {}
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    own = module._flash_attn_fwd
    with train._results_that_torch_unpacks():
        assert module._flash_attn_fwd("q", causal=True) == ("q", "lse") and module._flash_attn_fwd.compile_cache == {}
        assert module._flash_attn_bwd("q") == ("q", "dk", "dv")
    assert module._flash_attn_fwd is own


def test_train_adds_a_floor_to_standard_attentions_losses() -> None:
    """Losses need one more training; at long lengths attentions without windows are left out."""
    planned = train.trainings(["standard", "flashgen"], ["eager", "compile"], [(2, 8), (1, 16)], 5, long=False)
    begin = [("standard", 5), ("standard in float32", 5), ("flashgen", 5), ("standard", 0), ("flashgen", 0)]
    assert [(name, steps) for name, _, _, steps in planned] == [*begin, *[("standard", 0), ("flashgen", 0)] * 2]
    long = train.trainings(["standard", "Flex", "flashgen"], ["eager"], [(2, 8)], 0, long=True)
    assert [(name, shape) for name, _, shape, _ in long] == [("Flex", (1, 65536)), ("flashgen", (1, 65536))]


@pytest.mark.gpu
def test_paper(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    output = tmp_path / "paper.json"
    assert "times as fast" in invoke("paper", "--output", output).stderr
    rows = {row["name"]: row for row in json.loads(output.read_text())["rows"]}
    assert rows["flashgen"]["peak_bytes"] < rows["standard"]["peak_bytes"]
