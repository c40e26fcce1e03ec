"""Bar charts of saved measurements as SVG and PNG, and refusals."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from benchmarks import bars
from benchmarks.commands import app
from benchmarks.paper import PaperRow
from benchmarks.train import TrainRow
from flashgen.bench.beside_flex import VariantRow
from flashgen.bench.measure import Row
from flashgen.errors import ArgumentError, LaunchError

SPEED = [
    Row(
        "bf16-d64-full", "sm_90a", "forward", length, 1, 32, {"flashgen": 1.0, "cuDNN": 2.0}, {"flashgen": 500.0} | more
    )
    for length, more in ((1024, {"cuDNN": 400.0}), (4096, {}))
]
VARIANT = VariantRow("window 1024", "bf16", "sm_90a", "backward", 1.0, 10.0, 1.2, None, 2.0, None, 0.07)
PAPER = [PaperRow("standard", 9.0, 11.0, 20.0, 10, 825.0, 25), PaperRow("FA2", 0.7, 2.7, 3.2, 1, None, None)]
TRAIN = [TrainRow("FA2", "eager", 32, 1024, 100.0, 1.0, 1), TrainRow("flashgen", "compile", 32, 1024, 80.0, 1.0, 1)]
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib: pip install '.[plot]'"
)


def saved(*rows: Any) -> dict[str, Any]:
    """Returns measurements as a command saves them."""
    data = {"environment": {"gpu": "NVIDIA H200", "driver": "13000"}, "rows": [row.to_dict() for row in rows]}
    return json.loads(json.dumps(data))


def test_speed_has_a_panel_for_each_spec() -> None:
    (panel,) = bars.panels(saved(*SPEED))
    assert panel.groups == ["1024", "4096"] and panel.unit == "TFLOP/s" and "bf16-d64-full" in panel.title
    assert panel.bars == {"flashgen": [500.0, 500.0], "cuDNN": [400.0, None]}


def test_variants_the_paper_and_training() -> None:
    (variants,) = bars.panels(saved(VARIANT))
    assert variants.bars == {"flashgen": [1.0], "deterministic": [1.2], "Flex": [2.0]}
    (paper,) = bars.panels(saved(*PAPER))
    assert paper.groups == ["forward", "backward", "both"] and paper.bars["FA2"] == [0.7, 2.7, 3.2]
    (train,) = bars.panels(saved(*TRAIN))
    assert train.groups == ["eager", "compile"] and train.bars == {"FA2": [100.0, None], "flashgen": [None, 80.0]}


def test_decoding_and_ragged_batches() -> None:
    spec, sizes = "bf16-d128-full-e0cc1a7b", ("1, 32:8, 1024", "16, 64:8, 8192, 4 queries")
    rows = [{"spec": spec, "size": size, "terabytes": {"cuDNN": 2.0, "flashgen": 4.0}} for size in sizes]
    (decode,) = bars.panels({"rows": rows})
    assert decode.groups == ["1\n32:8\n1024", "16\n64:8\n8192\n4 queries"] and "e0cc1a7b" not in decode.title
    assert list(decode.bars) == ["flashgen", "cuDNN"] and decode.bars["cuDNN"] == [2.0, 2.0]
    ragged = {"spec": spec, "timed": "backward", "documents": 16, "tokens": 16384, "tflops": {"flashgen": 300.0}}
    (panel,) = bars.panels({"rows": [ragged]})
    assert panel.groups == ["16 in\n16384"] and panel.bars == {"flashgen": [300.0]}


def test_several_gpus() -> None:
    rows = [
        {"ranks": 2, "timed": timed, "name": "8192 window 1024", "tflops": {"ring": 100.0, "torch": None}}
        for timed in ("forward", "both")
    ]
    forward, both = bars.panels({"rows": rows})
    assert forward.groups == ["8192\nwindow 1024"] and forward.bars == {"ring": [100.0], "torch": [None]}
    assert "2 GPUs, forward and backward" in both.title and "backward" not in forward.title


def test_many_variants_have_several_panels() -> None:
    found = bars.panels(saved(*[VARIANT] * 15))
    assert [len(panel.groups) for panel in found] == [6, 6, 3]


@pytest.mark.parametrize(
    "wrong", [[], {}, {"rows": []}, {"rows": [1]}, {"rows": [{"a": 1}]}, {"rows": [SPEED[0].to_dict() | {"tflops": 1}]}]
)
def test_other_json_is_refused(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="flashgen bench"):
        bars.panels(wrong)


@needs_matplotlib
@pytest.mark.parametrize("form", bars.FORMATS)
def test_the_command_draws_reproducibly(form: str, tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(saved(*SPEED)), encoding="utf-8")
    drawn = []
    for number in range(2):
        path = tmp_path / f"{number}.{form}"
        result = CliRunner().invoke(app, ["plot", str(tmp_path / "bench.json"), "--output", str(path)])
        assert result.exit_code == 0, result.output
        drawn.append(path.read_bytes())
    assert drawn[0] == drawn[1]
    if form == "png":
        assert drawn[0].startswith(b"\x89PNG")
        return
    words = " ".join(ElementTree.fromstring(drawn[0]).itertext())
    for word in ("flashgen", "cuDNN", "1024", "4096", "TFLOP/s", "500", "400", "NVIDIA H200"):
        assert word in words, word


def test_without_matplotlib_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"matplotlib, which is not installed: pip install '.*\[plot\]'"):
        bars.draw(saved(*SPEED), "svg")


@pytest.mark.parametrize(
    ("content", "output", "said"),
    [
        ("{", "x.svg", "cannot be read as JSON"),
        ("{}", "x.svg", "holds no rows"),
        ("{}", "x.pdf", "must end in .svg"),
    ],
)
def test_wrong_inputs_of_the_command(content: str, output: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(content, encoding="utf-8")
    result = CliRunner().invoke(app, ["plot", str(tmp_path / "bench.json"), "-o", str(tmp_path / output)])
    assert result.exit_code == 2 and said in " ".join(result.stderr.split())
