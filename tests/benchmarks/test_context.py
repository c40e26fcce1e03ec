"""The benchmark of several GPUs: requests to the ranks, rows and summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import context
from benchmarks.commands import app
from benchmarks.context import ranks, rows
from flashgen.errors import LaunchError


@pytest.mark.parametrize("window", [None, 100, 5000])
def test_flops_count_visited_scores(window: int | None) -> None:
    shape = context.Shape(1024, heads_q=4, heads_kv=2, head_dim=64, window=window)
    length = 4 * 1024
    scores = sum(min(q, length if window is None else window) + 1 for q in range(length))
    assert shape.flops(4, "forward") == pytest.approx(4 * 64 * 4 * scores / 4, rel=1e-3)
    assert shape.flops(4, "both") == 3.5 * shape.flops(4, "forward")


def test_one_gpu_alone_has_equally_much_work() -> None:
    for shape in (context.Shape(8192), context.Shape(8192, window=512)):
        alone = shape.flops_of_one("forward", shape.ideal_length(4))
        assert alone == pytest.approx(shape.flops(4, "forward"), rel=0.05)
    assert context.Shape(8192).ideal_length(4) == 16384


def test_windows_are_named_with_their_shards() -> None:
    assert context.Shape(8192).name == "8192"
    assert context.Shape(8192, window=512, shards="plain").name == "8192 window 512 plain"


ANSWER = {
    "one_ms": 2.0,
    "milliseconds": {"ring": 2.5, "torch": 5.0},
    "problems": {"ulysses": "ArgumentError: heads"},
    "sampled": {},
    "gigabytes": 1.5,
}


def test_rows_are_fractions_of_one_gpus_speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def answers(count: int, questions: Any) -> Any:
        asked.extend([count, *questions])
        return iter([ANSWER] * len(questions))

    monkeypatch.setattr(rows, "answers_of_ranks", answers)
    monkeypatch.setattr(context, "gpus_here", lambda: 4)
    monkeypatch.setattr("benchmarks.commands.require_gpu", lambda: None)
    monkeypatch.setattr("flashgen.bench.environment", dict)
    saved = tmp_path / "context.json"
    arguments = ["context", "--tokens", "8192", "--pass", "forward", "--windows", "", "--output", str(saved)]
    done = CliRunner().invoke(app, [*arguments, "--contenders", "ring,ulysses,torch"])
    assert done.exit_code == 0, done.output
    assert asked[0] == 4 and asked[1]["length_of_one"] == 16384
    (row,) = json.loads(saved.read_text())["rows"]
    assert row["of_ideal"]["ring"] == pytest.approx(0.8, rel=1e-3)
    assert row["tflops"]["ring"] == pytest.approx(context.Shape(8192).flops(4, "forward") / 2.5e9)
    assert "ulysses: ArgumentError: heads" in done.output


def test_a_common_reason_for_missing_rows_is_printed_once() -> None:
    shapes = [context.Shape(tokens, window=64) for tokens in (8192, 32768, 131072)]
    problems = [{"torch": "no window"}, {"torch": "no window", "ring": "other"}, {"torch": "no window"}]
    made = [
        rows.ContextRow(2, "both", shape, 1.0, {}, {}, {}, why, {}, 0.5)
        for shape, why in zip(shapes, problems, strict=True)
    ]
    assert rows.context_summary(made) == [
        "8192 window 64 zigzag both and 2 more, torch: no window",
        "32768 window 64 zigzag both, ring: other",
    ]


@pytest.mark.parametrize(("given", "shards"), [((), ["zigzag", "plain"]), (("--shards", "zigzag"), ["zigzag"])])
def test_windows_are_measured_with_each_kind_of_shards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: tuple[str, ...], shards: list[str]
) -> None:
    asked: list[Any] = []

    def answers(count: int, questions: Any) -> Any:
        asked.extend(question["shape"] for question in questions)
        return iter([ANSWER] * len(questions))

    monkeypatch.setattr(rows, "answers_of_ranks", answers)
    monkeypatch.setattr(context, "gpus_here", lambda: 4)
    monkeypatch.setattr("benchmarks.commands.require_gpu", lambda: None)
    monkeypatch.setattr("flashgen.bench.environment", dict)
    arguments = ["context", "--tokens", "8192", "--pass", "forward", "--output", str(tmp_path / "c.json")]
    done = CliRunner().invoke(app, [*arguments, *given])
    assert done.exit_code == 0, done.output
    assert [(shape["window"], shape["shards"]) for shape in asked] == [
        (None, "zigzag"),
        *((1024, each) for each in shards),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "8"], "--gpus 8"),
        (["--pass", "backward"], "'backward'"),
        (["--contenders", "FA9"], "'FA9'"),
        (["--shards", "striped"], "'striped'"),
    ],
)
def test_requests_that_cannot_be_measured_are_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(context, "gpus_here", lambda: 4)
    monkeypatch.setattr("benchmarks.commands.require_gpu", lambda: None)
    done = CliRunner().invoke(app, ["context", *arguments])
    assert done.exit_code == 2 and message in done.stderr, done.output


def test_ranks_that_end_early_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(LaunchError, match="a rank of 2 has ended"):
        list(ranks.answers_of_ranks(2, [{"shape": {"tokens": 64}}]))
