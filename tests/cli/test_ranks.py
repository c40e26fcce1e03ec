"""`flashgen show --ranks` prints the plan of each rank before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from flashgen.cli.app import app


def show(*arguments: object, expect: int = 0) -> Any:
    result = CliRunner().invoke(app, ["show", *map(str, arguments)])
    assert result.exit_code == expect, f"{result.output}\n{result.exception!r}"
    return result


def test_a_causal_ring_is_drawn() -> None:
    shown = show("causal()", "--ranks", 4, "--length", 32768, "--head-dim", 128).stdout.splitlines()
    assert shown[:3] == ["   0 1 2 3 3 2 1 0", " 0 ▒ · · · · · · ·", " 1 █ ▒ · · · · · ·"]
    shown = shown[10:]
    assert shown[0].split("\t")[:4] == ["rank", "positions", "step 0", "step 1"]
    assert shown[2].split("\t") == [
        *("1", "4096-8191, 24576-28671", "own ▒", "0 █ 16.8 MB", "3 █ 33.6 MB", "2 █ 33.6 MB"),
        *("25.0%", "67.1 MB", "151.0 MB"),
    ]
    assert shown[-2].startswith("balance 100.0%")


def test_blocks_without_messages_are_not_drawn() -> None:
    shown = show("sliding_window(1024)", "--ranks", 4, "--shards", "plain", "--length", 32768).stdout.splitlines()
    assert shown[3] == " 2 · ▒ ▒ ·"
    rows = [line.split("\t") for line in shown[6:11]]
    assert rows[0][2:5] == ["step 0", "step 1", "share of work"], "only neighbours are read"
    assert rows[1][2:4] == ["own ▒", "·"] and rows[3][2:4] == ["own ▒", "1 ▒ 2.1 MB"]
    assert rows[1][5:] == ["2.1 MB", "0 B"] and rows[4][5:] == ["0 B", "2.1 MB"]


def test_the_plan_as_json() -> None:
    plan = json.loads(
        show("full()", "--ranks", 4, "--length", 4096, "--scheme", "ulysses_ring", "--heads", "8:4", "--json").stdout
    )
    assert (plan["ranks"], plan["heads_exchanged_by"], len(plan["by_rank"])) == (2, 2, 2)
    assert plan["by_rank"][0]["steps"][1]["received_rows"] == [[0, 2048]]
    assert plan["by_rank"][0]["exchanged_forward"] == 1024 * (8 + 4) * 128 * 2 // 2


def test_known_captures_are_used(tmp_path: Path) -> None:
    np.savez(tmp_path / "ids.npz", ids=(np.arange(4096) // 1024).astype(np.int32))
    arguments = ("document('ids')", "--ranks", 4, "--length", 4096, "--shards", "plain", "--json")
    known = json.loads(show(*arguments, "--captures", tmp_path / "ids.npz").stdout)
    unknown = json.loads(show(*arguments).stdout)
    assert all(sum(rank["sent_forward"]) == 0 for rank in known["by_rank"])
    assert all(sum(rank["sent_forward"]) > 0 for rank in unknown["by_rank"])


def test_impossible_plans_are_refused() -> None:
    assert "repeat the heads of k and v" in show("causal()", "--ranks", 16, "--scheme", "ulysses", expect=2).stderr
    assert "--heads '32:5'" in show("causal()", "--ranks", 2, "--heads", "32:5", expect=2).stderr


def test_meaningless_options_are_refused() -> None:
    alone = show("causal()", "--length", 4096, "--scheme", "ring", "--what", "spec", expect=2).stderr
    assert "--length, --scheme: only the plan for several GPUs takes this, add --ranks N" in alone
    beside = show("causal()", "--ranks", 2, "--zoom", "0,0", "--what", "tiles", expect=2).stderr
    assert "--what, --zoom: --ranks shows the work of each rank, and does not take this" in beside
