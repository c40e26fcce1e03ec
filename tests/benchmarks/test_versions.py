"""The comparison of another checkout with this one: turns, medians, and the checkout that a process imports."""

from __future__ import annotations

from collections.abc import Sequence
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

    def measure(group: str, checkouts: Sequence[Path]) -> list[dict[str, float]]:
        measured.append((group, *checkouts))
        more = once if len(measured) == 1 else {}
        return [more | {"cell": next(times[each]), f"only in {each.name}": 1.0} for each in checkouts]

    (row,) = version_rows(OTHER, ["decode"], 3, measure)
    assert measured == [("decode", OTHER, ROOT), ("decode", ROOT, OTHER), ("decode", OTHER, ROOT)]
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
    assert versions.measured("backward", [tmp_path]) == [{"causal 64": 0.5}]
    with pytest.raises(LaunchError, match="AssertionError"):
        versions.measured("decode", [tmp_path])


def test_host_times_are_taken_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that append their groups to a common file, in place of host.py."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "host.py").write_text(
        "import json, os, pathlib, sys\n"
        "name = pathlib.Path.cwd().name\n"
        "print(json.dumps(['both', name]), flush=True)\n"
        "for request in sys.stdin:\n"
        "    with open('../groups', 'a') as groups: groups.write(name[0])\n"
        "    print(len(name) + int(request), flush=True)\n"
    )
    checkouts = [tmp_path / "old", tmp_path / "newer"]
    for folder in checkouts:
        folder.mkdir()
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    assert versions.measured("host", checkouts) == [{"both": 3.0}, {"both": 5.0}]
    assert (tmp_path / "groups").read_text() == "onno" * ((versions.host.WARM_GROUPS + versions.host.GROUPS) // 2)


def test_a_host_process_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "host.py").write_text("raise SystemExit('no such option')")
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    with pytest.raises(LaunchError, match="no such option"):
        versions.measured("host", [tmp_path])


def test_the_command_needs_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.commands.require_gpu", lambda: None)
    result = CliRunner().invoke(app, ["versions", str(tmp_path)])
    assert result.exit_code == 2 and "has no folder flashgen" in result.stderr
