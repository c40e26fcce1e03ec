"""`flashgen bench ragged`: batches, summary and options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import flashgen.language as fg
from flashgen import bench
from flashgen.bench.varlen import VarlenRow, lengths_of, varlen_flops
from flashgen.cli.app import app


def test_lengths_add_up_to_the_tokens() -> None:
    assert lengths_of(16, 16384, uneven=False) == 16 * [1024]
    assert lengths_of(3, 10, uneven=False) == [3, 3, 4]
    for documents, tokens in bench.SHAPES:
        lengths = lengths_of(documents, tokens, uneven=True)
        assert (len(lengths), sum(lengths)) == (documents, tokens) and min(lengths) >= 0
        assert max(lengths) > 3 * sorted(lengths)[documents // 2] and lengths == lengths_of(documents, tokens, True)


def test_flops_count_scores_within_documents() -> None:
    spec = fg.AttentionSpec(128, "bfloat16", layout="thd", mask=fg.causal())
    assert varlen_flops(spec, [1024] * 16, 16, "forward") == 4 * 128 * 16 * 16 * 1024**2 / 2
    full = fg.AttentionSpec(128, "bfloat16", layout="thd")
    assert varlen_flops(full, [10, 20], 2, "backward") == 2.5 * 4 * 128 * 2 * 500


def row(documents: int = 16, **milliseconds: float) -> VarlenRow:
    return VarlenRow(
        "spec", "sm_90a", "forward", documents, 16384, 1024, milliseconds, dict.fromkeys(milliseconds, 1.0)
    )


def test_a_row_compares_with_peers() -> None:
    assert row(flashgen=2.0, FA4=3.0, torch=5.0).ratio == 1.5 and row(flashgen=2.0).ratio is None
    (line,) = bench.summary.varlen([row(flashgen=2.0, FA4=3.0), row(8, flashgen=2.0, FA4=2.0)])
    assert line.startswith("beside the best peer: 1 of 2 batches at 1.05 times or more (below: spec 8 in 16384 1.00")
    assert bench.summary.varlen([row(flashgen=2.0)]) == []


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def rows(*given: Any) -> Any:
        asked.extend(given)
        yield row(flashgen=2.0, FA4=3.0)

    monkeypatch.setattr("flashgen.cli.machine.gpus", lambda: ["a GPU"])
    monkeypatch.setattr(bench, "varlen_rows", rows)
    monkeypatch.setattr(bench, "environment", dict)
    output = tmp_path / "ragged.json"
    told = ["bench", "ragged", "--documents", "2x512", "--peers", "FA4", "--pass", "backward", "--uneven"]
    done = CliRunner().invoke(app, [*told, "--output", str(output)])
    assert done.exit_code == 0, done.output
    (spec,), *rest = asked
    assert (spec.layout, spec.head_dim, spec.dtype, spec.mask.name) == ("thd", 128, "bfloat16", "causal()")
    assert rest == [[(2, 512)], 16, ["FA4"], "backward", True, None]
    assert "16 in 16384" in done.stdout and "1.50" in done.stdout
    assert json.loads(output.read_text())["rows"][0]["ratio"] == 1.5
    refused = CliRunner().invoke(app, ["bench", "ragged", "--documents", "16"])
    assert refused.exit_code == 2
