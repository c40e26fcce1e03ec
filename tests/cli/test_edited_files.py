"""Commands check their output before they work, and replace a file that somebody edited only with --force."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from flashgen.build.written import record_file, recorded_hashes
from flashgen.cli import bench_report, demo, kernels
from flashgen.cli.app import app
from flashgen.errors import ArgumentError
from flashgen.report import facts

WRITERS = {
    "kernels": 'show "causal()" --target sm_80 --output {}/kernels',
    "tiles": 'show "causal()" --target sm_80 --what tiles --output {}/tiles.svg',
    "timeline": 'show "causal()" --target sm_80 --what timeline --output {}/timeline.svg',
    "report": 'report "causal()" --target sm_80 --pass forward --no-run --len-q 256 --output {}/report.html',
    "run": 'run "causal()" --input {0}/qkv.npz --emulate --output {0}/out.npz',
}


def run(command: str, expect: int = 0) -> str:
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == expect, f"{result.output}\n{result.exception!r}"
    return " ".join(result.stderr.split())


def written(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "qkv.npz")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    q = np.random.default_rng(0).standard_normal((1, 1, 8, 16)).astype("float16")
    np.savez(tmp_path / "qkv.npz", q=q, k=q, v=q)
    return tmp_path


@pytest.mark.parametrize("command", WRITERS.values(), ids=WRITERS)
def test_an_edited_file_is_replaced_only_on_request(folder: Path, command: str) -> None:
    words = command.format(folder)
    run(words)
    (path,) = written(folder)
    fresh = path.read_bytes()
    run(words)  # nobody edited the file
    path.write_bytes(fresh + b"mine")
    said = run(words, expect=2)
    assert f"{path} would be replaced, and was edited" in said and "--force" in said
    assert path.read_bytes() == fresh + b"mine" and written(folder) == [path]
    run(f"{words} --force")
    assert b"mine" not in path.read_bytes()[-4:]
    run(words)  # the file is recorded again


@pytest.mark.parametrize("name", ["tiles", "report", "run"])
def test_a_file_of_other_origin_is_not_replaced(folder: Path, name: str) -> None:
    path = folder / Path(WRITERS[name].split("/")[-1])
    path.write_text("years of work")
    assert "--force" in run(WRITERS[name].format(folder), expect=2)
    assert path.read_text() == "years of work"


def test_a_file_may_be_moved(folder: Path) -> None:
    run(WRITERS["tiles"].format(folder))
    (folder / "moved").mkdir()
    (folder / "tiles.svg").rename(folder / "moved" / "tiles.svg")
    run(WRITERS["tiles"].format(folder / "moved"))


@pytest.mark.parametrize("name", ["kernels", "tiles", "report", "run"])
def test_the_path_is_checked_before_the_work(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, unreachable: Callable[..., Any]
) -> None:
    for module, function in ((kernels, "render_kernels"), (facts, "report_of")):
        monkeypatch.setattr(module, function, unreachable)
    monkeypatch.setattr("flashgen.cli.show.render_kernels", unreachable)
    monkeypatch.setattr("flashgen.cli.show.drawing_of", unreachable)
    monkeypatch.setattr("flashgen.attention.compile", unreachable)
    (folder / "taken").touch()
    command = WRITERS[name].replace("/kernels", "/taken/kernels").replace("{0}/out", "{0}/taken/out")
    command = command.replace("{}/tiles", "{}/taken/tiles").replace("{}/report", "{}/taken/report")
    assert "cannot be written" in run(command.format(folder), expect=2)


@pytest.fixture
def unreachable() -> Callable[..., Any]:
    def fail(*_arguments: Any, **_options: Any) -> Any:
        raise AssertionError("the command works before it checks its output")

    return fail


def test_texts_are_not_generated_for_an_edited_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, unreachable: Callable[..., Any]
) -> None:
    run(WRITERS["kernels"].format(folder))
    (path,) = written(folder)
    path.write_text("mine")
    monkeypatch.setattr(kernels, "text_of", unreachable)
    assert "--force" in run(WRITERS["kernels"].format(folder), expect=2)


def test_the_demo(folder: Path, monkeypatch: pytest.MonkeyPatch, unreachable: Callable[..., Any]) -> None:
    example = demo.load_arrays(demo.example_path())
    *_, last = demo.file_names(demo.variants(example))
    monkeypatch.setattr(demo, "run_variant", unreachable)
    path = folder / "demo" / last
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    said = run(f"demo --emulate --output {folder / 'demo'}", expect=2)
    assert f"{path} would be replaced" in said and path.read_text() == "mine"


class Row:
    def to_dict(self) -> dict[str, Any]:
        return {"milliseconds": 1.0}


def test_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.bench.environment", dict)
    path = tmp_path / "bench.json"
    columns: Any = {"what": lambda row: "a"}

    def measure(force: bool = False) -> None:
        bench_report.report(iter([Row(), Row()]), ["a", "b"], columns, path, True, lambda rows: [], force)

    measure()
    measure()
    path.write_text("mine")
    with pytest.raises(ArgumentError, match=r"bench\.json would be replaced"):
        measure()
    assert path.read_text() == "mine"
    measure(force=True)
    assert "milliseconds" in path.read_text()


def test_without_a_usable_cache_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are then replaced only with --force."""
    (tmp_path / "cache").mkdir(mode=0o777)
    (tmp_path / "cache").chmod(0o777)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "a").write_text("a")
    record_file(tmp_path / "a")
    assert recorded_hashes() == set() and list((tmp_path / "cache").iterdir()) == []


def test_the_record_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("flashgen.build.written._MAX_BYTES", 65 * 8)
    for number in range(20):
        (tmp_path / "a").write_text(str(number))
        record_file(tmp_path / "a")
        record_file(tmp_path / "a")
    assert 4 <= len(recorded_hashes()) <= 9
    (record,) = (tmp_path / "cache").iterdir()
    assert record.stat().st_mode & 0o077 == 0
