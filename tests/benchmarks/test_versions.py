"""The comparison of another checkout with this one: turns, medians, and the checkout that a process imports."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import versions
from benchmarks.commands import app
from benchmarks.versions import ROOT, VersionRow, version_rows, version_summary
from flashgen.errors import LaunchError

OTHER = Path("other")


def test_rounds_alternate_and_rows_hold_medians_of_the_common_cells() -> None:
    times = {OTHER: iter([9.0, 4.0, 2.0]), ROOT: iter([2.0, 5.0, 4.0])}
    once = {"only in the first round": 1.0}
    measured = []

    def measure(group: str, checkout: Path) -> dict[str, float]:
        measured.append((group, checkout))
        more = once if len(measured) <= 2 else {}
        return more | {"cell": next(times[checkout]), f"only in {checkout.name}": 1.0}

    (row,) = version_rows(OTHER, ["decode"], 3, measure)
    assert measured == [("decode", checkout) for checkout in (OTHER, ROOT, ROOT, OTHER, OTHER, ROOT)]
    assert (row.cell, row.before, row.after, row.ratio) == ("cell", 4.0, 4.0, 1.0)


def test_the_summary_names_the_slowest_cell_of_a_group() -> None:
    rows = [VersionRow("forward", "a", 2.0, 1.0), VersionRow("forward", "b", 1.0, 2.0), VersionRow("host", "c", 3, 3)]
    forward, host = version_summary(rows)
    assert forward.startswith("forward: 1.000 times") and "at least 0.500 (b)" in forward
    assert host.startswith("host: 1.000")


def test_processes_import_flashgen_from_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout that saves its own location as a cell, in place of `flashgen bench`."""
    (tmp_path / "flashgen").mkdir()
    (tmp_path / "flashgen" / "__init__.py").write_text("")
    (tmp_path / "flashgen" / "__main__.py").write_text(
        "import json, pathlib, sys\n"
        "rows = [{'spec': 'causal', 'length': 64, 'milliseconds': {'flashgen': 0.5}}]\n"
        "assert sys.argv[1:5] == ['bench', 'speed', '--pass', 'backward'], sys.argv\n"
        "pathlib.Path(sys.argv[-1]).write_text(json.dumps({'rows': rows}))\n"
    )
    assert versions.measured("backward", tmp_path) == {"causal 64": 0.5}
    with pytest.raises(LaunchError, match="AssertionError"):
        versions.measured("decode", tmp_path)


def test_the_command_needs_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.commands.require_gpu", lambda: None)
    result = CliRunner().invoke(app, ["versions", str(tmp_path)])
    assert result.exit_code == 2 and "has no folder flashgen" in result.stderr
