"""The page of measured figures: it is short, its commands run, its files have the shape that benchmarks write."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from benchmarks import commands as benchmark_commands
from benchmarks import host_sdpa, host_torch
from benchmarks.host import PASSES, HostRow
from benchmarks.train import TrainRow
from flashgen.bench import BiasRow, DecodeRow, DecodeSize, Row, VariantRow, VarlenRow
from flashgen.cli import bench
from flashgen.cli.app import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TABLES: dict[str, Any] = runpy.run_path(str(DOCS / "measured_tables.py"))
COMMANDS: dict[str, str] = TABLES["COMMANDS"]
OTHERS = [page for page in (*DOCS.glob("*.md"), ROOT / "README.md") if page.name != "performance.md"]
WORDS, TABLE_LIMIT = 1100, 12  # what can be read in five minutes
ROWS = {
    "speed": Row("", "", "forward", 1, 1, 1, {"flashgen": 1.0}, {}),
    "variants": VariantRow("", "", "", "forward", 1.0, 1.0, None, None, None, None, 1.0),
    "decode": DecodeRow("", "", DecodeSize(1, 1, 1, 1), "", 1, {}, {}, {}),
    "biases": BiasRow("", "", "forward", {"flashgen": 1.0}),
    "ragged": VarlenRow("", "", "forward", 1, 1, 1, {"flashgen": 1.0}, {}),
    "host": HostRow("", "", "", "forward", (), 1.0, 1.0, {}),
    "train": TrainRow("", "", 1, 1, None, None, None),
}
"""A row of each command that COMMANDS runs."""


def kind(name: str) -> str:
    """Returns the key in ROWS of the rows that a command writes."""
    words = shlex.split(COMMANDS[name])
    found = [word for word in ("variants", *ROWS) if word in words or f"--{word}" in words]
    return found[0] if found else "speed"


def saved(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DOCS / "measured" / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def headings(page: str) -> list[str]:
    return re.findall(r"^##+ (.+)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), flags=re.MULTILINE)


def test_the_page_can_be_read_in_five_minutes() -> None:
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    prose = re.sub(r"^\|.*$", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    assert len(prose.split()) <= WORDS
    assert len(re.findall(r"^\| --- ", text, flags=re.MULTILINE)) <= TABLE_LIMIT


def test_every_file_has_a_command() -> None:
    files = {path.stem for path in (DOCS / "measured").glob("*.json")}
    assert files <= {*COMMANDS, "context"}, "context is on the page about several GPUs; others belong into COMMANDS"


@pytest.mark.parametrize("name", [name for name in COMMANDS if (DOCS / "measured" / f"{name}.json").exists()])
def test_files_have_the_shape_that_their_commands_write(name: str) -> None:
    keys = set(ROWS[kind(name)].to_dict())
    assert saved(name)["environment"]["gpu"]
    for row in saved(name)["rows"]:
        assert set(row) <= keys


def test_sections_of_missing_files_are_left_out(tmp_path: Path) -> None:
    """Each section appears exactly if one of its files exists, beside that of the forward."""
    found: dict[str, list[str]] = {}
    for path in (DOCS / "measured").glob("*.json"):
        if path.stem in COMMANDS:
            folder = tmp_path / path.stem
            folder.mkdir()
            for name in {path.stem, "forward"}:
                shutil.copy(DOCS / "measured" / f"{name}.json", folder)
            found[path.stem] = headings(TABLES["page"](folder))
    usual = ["How it was measured", "Forward", "Reproduce"]
    assert found.pop("forward") == usual
    for name, titles in found.items():
        assert len(titles) > len(usual), f"no section shows {name}"
        assert titles[:2] + titles[-1:] == usual
    assert {title for titles in found.values() for title in titles} >= {*headings(TABLES["page"]())} - {"Forward"}


def test_prompts_have_a_table(tmp_path: Path) -> None:
    """A table whose file does not exist yet: from the shape of its rows."""
    shutil.copy(DOCS / "measured" / "forward.json", tmp_path)
    micros = {"flashgen": 100.0, "16 bits": 95.0, "pages of 64": 104.0, "pages of 64, 16 bits": 99.5}
    row = DecodeRow("", "sm_90a", DecodeSize(1, 32, 8, 8192, 512), "", 1, micros, {}, dict.fromkeys(micros, 500.0))
    (tmp_path / "prompts.json").write_text(json.dumps({"environment": {"gpu": "x"}, "rows": [row.to_dict()]}))
    page = TABLES["page"](tmp_path)
    assert "| 1, 32:8, 8192, 512 queries | 100.0 | 95.0 | 104.0 | 99.5 | 500 |" in page
    assert "Measured on another card or with other versions: one x ()" not in page.partition("## Prompts")[0]


def test_host_times_of_every_function_are_shown() -> None:
    """The names of functions and calls are those that the benchmark writes."""
    operators = [
        HostRow(name, "sm_90a", "torch", timed, (1, 1, 64), 1.0, 1.0, {}).to_dict()
        for timed in PASSES
        for name in host_torch.operator_names([timed])
    ]
    registry = [
        HostRow(name, "-", "torch", timed, (1, 1, 64), median, 1.0, {}).to_dict()
        for name, timed in zip(host_sdpa.registry_names(), cycle(timed for _, timed in host_sdpa._CASES), strict=False)
        for median in (1.0, 3.0)
    ]
    lines = TABLES["host_table"](operators, registry).splitlines()[2:]
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines}
    assert cells == {
        "forward": ["1.0", "1.0", "1.0", "-", "2.0", "2.0"],
        "forward, with a graph": ["-", "1.0", "1.0", "1.0", "2.0", "2.0"],
        "forward, packed": ["-", "-", "-", "-", "2.0", "2.0"],
        "backward": ["1.0", "1.0", "1.0", "1.0", "-", "-"],
        "backward, in the caller's thread": ["1.0", "1.0", "1.0", "1.0", "2.0", "2.0"],
    }


def test_a_file_of_another_card_says_so(tmp_path: Path) -> None:
    for name in ("forward", "decode"):
        shutil.copy(DOCS / "measured" / f"{name}.json", tmp_path)
    assert "another card" not in TABLES["page"](tmp_path)
    changed = saved("decode")
    changed["environment"]["gpu"] = "NVIDIA B200"
    (tmp_path / "decode.json").write_text(json.dumps(changed))
    section = TABLES["page"](tmp_path).partition("## Decoding")[2]
    assert "another card or with other versions: one NVIDIA B200 (" in section


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_accept_their_options(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands run up to their first measurement, and check their specs, sizes and peers."""
    outputs: list[Path] = []

    def report(rows: Any, names: Sequence[str], columns: Any, output: Path, *rest: Any) -> None:
        assert names
        outputs.append(output)

    for module in (bench, benchmark_commands):
        monkeypatch.setattr(module, "require_gpu", lambda: None)
        monkeypatch.setattr(module, "report", report)
    words = shlex.split(TABLES["command"](name, str(tmp_path)))
    main, words = (app, words[1:]) if words[0] == "flashgen" else (benchmark_commands.app, words[3:])
    get_command(main)(words, standalone_mode=False)
    assert outputs == [tmp_path / f"{name}.json"]


def test_the_cost_of_deterministic_gradients_is_that_of_the_files() -> None:
    stated = re.findall(r"\d\.\d\d to \d\.\d\d", (DOCS / "performance.md").read_text().partition("### Determ")[2])[:3]
    ratios = [
        row["milliseconds"]["deterministic"] / row["milliseconds"]["flashgen"] for row in saved("mma-backward")["rows"]
    ]
    assert stated[2] == f"{min(ratios):.2f} to {max(ratios):.2f}"
    lists = [
        row["deterministic_ms"] / row["milliseconds"]
        for row in saved("variants-backward")["rows"]
        if row["name"] in ("16 documents", "neighbourhood 13x13")
    ]
    assert stated[1] == f"{min(lists):.2f} to {max(lists):.2f}"


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.name)
def test_other_pages_link_to_it(page: Path) -> None:
    for sentence in re.split(r"(?<=[.:;])\s", page.read_text(encoding="utf-8")):
        if "deterministic" in sentence:
            assert not re.search(r"\b[01]\.\d", sentence), f"state the cost in performance.md alone: {sentence}"
