"""Inputs, counts and output of the groups of `flashgen bench decode`; measurements need a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import flashgen.language as fg
from flashgen import bench
from flashgen.bench import serving
from flashgen.bench.decode import DecodeSize, keys_needed
from flashgen.cli import bench_tables
from flashgen.cli.app import app
from flashgen.language import operations as ops
from flashgen.language.evaluate import evaluate
from flashgen.language.modifiers import Mask

SPEC = fg.AttentionSpec(128, "bfloat16")


def test_lengths_are_log_uniform_and_equal_ones_have_as_many_keys() -> None:
    drawn = serving.drawn_lengths(64, 32768)
    assert drawn == serving.drawn_lengths(64, 32768) and 1 <= min(drawn) < 16 and 8192 < max(drawn) <= 32768
    assert 0.3 < np.mean(np.array(drawn) < 32768**0.5) < 0.7
    equal = serving.equal_lengths(drawn)
    assert sum(equal) == sum(drawn) and len(equal) == 64 and max(equal) - min(equal) <= 1


def test_rows_count_the_visited_keys() -> None:
    row = serving.serving_row(
        "lengths", "equal", "sm_90a", 10**9, {"flashgen": 0.25, "scheduled": 0.24}, {"flashgen": 1}
    )
    assert row.microseconds["flashgen"] == 250 and row.terabytes["flashgen"] == pytest.approx(4.0)
    cells = bench_tables.cells(bench_tables.serving(["flashgen", "FlashInfer"], ["flashgen"]), row)
    assert cells == ["equal", "4.00", "-", "250.0", "-", "1.00"]
    assert row.to_dict()["group"] == "lengths"


def test_variants_visit_the_keys_that_they_state() -> None:
    """By their masks where they have a closed form; other variants state the number."""
    size = DecodeSize(2, 4, 2, 4096)
    needed = {}
    for variant in serving.serving_variants():
        mask = variant.options.get("mask", fg.full())
        assert isinstance(mask, Mask)
        own = variant.visited(size) if variant.visited else keys_needed(fg.AttentionSpec(128, mask=mask), size)
        needed[variant.name] = own
    assert needed == {"full": 4096, "window 1024": 1024, "softcap": 4096, "ALiBi": 4096, "documents": 512, "tree": 4096}
    assert set(serving.CONTENDERS) == set(serving.COMPARED) == set(serving.GROUPS)


def test_the_tree_for_flex_attention_is_the_same_mask() -> None:
    (variant,) = (variant for variant in serving.serving_variants() if variant.name == "tree")
    assert variant.flex is not None
    q, k = np.ogrid[:5, :40]
    values = {ops.BATCH: 0, ops.QUERY: q, ops.KEY: k, ops.LEN_Q: 5, ops.LEN_K: 40}
    bits = {"bits": fg.tree_bits([[-1, 0, 0, 1, -1]])}
    ours, theirs = (evaluate(mask.expression, values, bits) for mask in (variant.options["mask"], variant.flex))
    np.testing.assert_array_equal(ours, theirs)


def test_the_command_passes_a_group_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def serving_rows(*choices: Any) -> Iterator[serving.ServingRow]:
        asked.append(choices)
        yield serving.serving_row(
            "variants", "tree: 2", "sm_90a", 10**9, {"flashgen": 0.5, "Flex": 1.0}, {"of Flex": 2}
        )

    monkeypatch.setattr(bench, "serving_rows", serving_rows)
    monkeypatch.setattr(bench, "environment", lambda: {"gpu": "none"})
    monkeypatch.setattr("flashgen.cli.bench.require_gpu", lambda: None)
    output = ["--output", str(tmp_path / "decode.json")]
    options = ["--group", "variants", "--only", "tree,full", "--sizes", "2x4:2x4096", "--peers", "Flex"]
    done = CliRunner().invoke(app, ["bench", "decode", *options, *output])
    assert done.exit_code == 0, done.output
    ((group, spec, sizes, peers, target, only),) = asked
    assert (group, spec, target) == ("variants", SPEC, None)
    assert (sizes, peers, only) == ([DecodeSize(2, 4, 2, 4096)], ["Flex"], ["tree", "full"])
    assert "tree: 2" in done.output and (tmp_path / "decode.json").is_file()
    for wrong in (["--group", "variants", "--only", "nothing"], ["--group", "mixed", "--only", "tree"]):
        refused = CliRunner().invoke(app, ["bench", "decode", *wrong, *output])
        assert refused.exit_code == 2 and "choose among the variants" in refused.output


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("group", serving.GROUPS)
def test_a_group_is_measured(group: str) -> None:
    pytest.importorskip("torch")
    size = DecodeSize(4, 4, 2, 4096)
    rows = list(bench.serving_rows(group, SPEC, [size], [], None, []))
    assert len(rows) == {"lengths": 2, "variants": 6, "mixed": 1}[group]
    for row in rows:
        assert set(row.microseconds) == set(serving.CONTENDERS[group]) - {"FlashInfer", "Flex"}
        assert all(time > 0 for time in row.microseconds.values()) and row.compared
