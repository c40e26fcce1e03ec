"""Output files of commands are complete, or keep their previous contents."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashgen.cli import bench_report
from flashgen.cli.app import app
from flashgen.errors import ArgumentError


def test_an_image(tmp_path: Path, full_disk: None) -> None:
    path = tmp_path / "tiles.svg"
    path.write_text("before")
    result = CliRunner().invoke(
        app, ["show", "causal()", "--target", "sm_80", "--what", "tiles", "-o", str(path), "--force"]
    )
    assert result.exit_code == 2
    assert f"error: --output {path} cannot be written: No space left" in result.stderr
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_kernels(tmp_path: Path, full_disk: None) -> None:
    result = CliRunner().invoke(app, ["show", "causal()", "--target", "sm_80", "--output", str(tmp_path / "out")])
    assert result.exit_code == 2 and "cannot be written" in result.stderr and "No space left" in result.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_measurements(tmp_path: Path, full_disk: None) -> None:
    path = tmp_path / "bench.json"
    path.write_text("before")
    with pytest.raises(ArgumentError, match="cannot be written: No space left"):
        bench_report.save({"rows": []}, path)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
