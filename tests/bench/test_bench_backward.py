"""What `flashgen bench` counts, chooses and prints; its measurements need a GPU and stand with the commands' tests."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen.language as fg
from flashgen.attention import compile
from flashgen.bench.beside_flex import VariantRow
from flashgen.bench.cases import Case, case, products
from flashgen.bench.measure import Row
from flashgen.bench.ours import ours
from flashgen.bench.paper import PaperRow, flash_bytes, flash_gflops, paper_case, standard_bytes, standard_gflops
from flashgen.bench.variants import chosen_variants
from flashgen.cli import bench_tables
from flashgen.errors import ArgumentError

ROW = VariantRow("window 1024", "bf16", "backward", 2.0, 2.5, None, 3.0, None, 0.25, None)


def test_the_backward_counts_two_and_a_half_forwards() -> None:
    plain = case(fg.AttentionSpec(64), 1024)
    assert plain.flops("backward") == 2.5 * plain.flops() and plain.flops("both") == 3.5 * plain.flops()
    causal = Case(fg.AttentionSpec(64, mask=fg.causal()), plain.length, plain.batch, plain.heads)
    assert causal.flops("backward") == plain.flops("backward") / 2
    # QK, dQ and dK are of the head dim, dV and dP of the value dim
    assert products(fg.AttentionSpec(64, value_dim=8), "backward") == 3 * 64 + 2 * 8


def test_variants_are_chosen_by_name() -> None:
    forward, backward = ([variant.name for variant in chosen_variants(timed)] for timed in ("forward", "backward"))
    assert "learned table" in backward and "learned table" not in forward and set(forward) < set(backward)
    chosen = chosen_variants("backward", ["16 documents", "full"])
    assert [variant.name for variant in chosen] == ["full", "16 documents"]
    with pytest.raises(ArgumentError, match="variant 'windows' is not known; choose from full, causal, window 1024"):
        chosen_variants("forward", ["windows"])


def test_every_variant_is_a_spec_with_a_backward() -> None:
    for variant in chosen_variants("backward"):
        spec = fg.AttentionSpec(128, "bfloat16", **variant.options)
        assert any(capture.grad for capture in spec.captures) is variant.learned


class Recorder:
    """An attention that says what it was called with."""

    def __init__(self, dropout: float = 0.0) -> None:
        self.spec = fg.AttentionSpec(64, dropout=dropout)
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arrays: Any, **options: Any) -> Any:
        self.calls.append(("forward", options))
        return "out", "lse"

    def backward(self, *arrays: Any, **options: Any) -> None:
        self.calls.append(("backward", arrays, options))


def test_what_is_timed_of_ours() -> None:
    recorder: Any = Recorder(dropout=0.1)
    lists = {"forward": {"tile_lists": "of keys"}, "backward": {"tile_lists": "of queries"}}
    run = ours(recorder, "backward", ("q", "k", "v", "dO"), {"ids": 1}, **lists)
    assert recorder.calls == [("forward", {"ids": 1, "seed": 1, "tile_lists": "of keys", "return_lse": True})]
    run()
    run()
    given = ("dO", "q", "k", "v", "out", "lse")
    assert recorder.calls[1:] == 2 * [("backward", given, {"ids": 1, "seed": 1, "tile_lists": "of queries"})]
    recorder.calls.clear()
    ours(recorder, "both", ("q", "k", "v", "dO"))()
    assert [call[0] for call in recorder.calls] == ["forward", "backward"]
    recorder.calls.clear()
    ours(recorder, "forward", ("q", "k", "v", "dO"))()
    assert recorder.calls == [("forward", {"seed": 1})]


def test_the_paper_s_counts() -> None:
    """GFLOPs: 6 and 7 products of 1024 heads, flash's over a little more than half. Bytes: 11 N^2 + 12 N d."""
    problem = paper_case()
    heads, scores, features = problem.batch * problem.heads, 1024**2, 1024 * 64
    attention = compile(problem.spec, target="sm_90", emulate=True)
    assert standard_gflops(problem) == 6 * 2 * heads * scores * 64 / 1e9
    assert 0.5 < flash_gflops(problem, attention) / (7 * 2 * heads * scores * 64 / 1e9) < 0.6
    assert standard_bytes(problem) == 2 * heads * (11 * scores + 12 * features)
    tiles_q, tiles_k = 1024 // attention.plan.tile_q, 1024 // attention.backward_plan.tile_k
    forward = tiles_q * 2 * features + 2 * features + 1024
    backward = tiles_k * (5 * features + 1024) + 7 * features
    assert flash_bytes(problem, attention) == 2 * heads * (forward + backward)


def test_tables_leave_out_what_was_not_measured() -> None:
    heading, cells = bench_tables.variants([ROW])
    assert heading == (
        "variant",
        "ms",
        "Flex ms",
        "times Flex",
        "deterministic ms",
        "of the default's speed",
        "tiles left",
    )
    assert cells == [["window 1024", "2.000", "3.000", "1.50", "2.500", "0.80", "25.0%"]]
    row = Row("bf16", "backward", 1024, 16, 32, {"flashgen": 1.0, "FA2": 2.0}, {"flashgen": 400.0, "FA2": 200.0})
    assert bench_tables.speed([row]) == (
        ("spec", "pass", "length", "flashgen TFLOP/s", "FA2 TFLOP/s"),
        [["bf16", "backward", "1024", "400", "200"]],
    )
    assert row.ratio("FA2") == 2.0


def test_the_paper_s_table() -> None:
    standard = PaperRow("standard", 10.0, 20.0, 30.0, 16 * 10**9, 824.6, 24 * 10**9)
    flash = PaperRow("flashgen", 1.0, 3.0, 4.0, 2 * 10**9, 500.0, 6 * 10**9)
    fa2 = PaperRow("FA2", 1.0, 3.0, None, 2 * 10**9, None, None)
    heading, cells = bench_tables.paper([standard, fa2, flash])
    assert len(heading) == len(cells[0]) and cells[1][-2:] == ["-", "-"] and cells[1][3] == "-"
    summary = bench_tables.paper_summary([standard, fa2, flash])
    assert "7.5 times as fast, takes 0.12 of the memory, and moves 0.25 of the bytes" in summary
    assert "did not run" in bench_tables.paper_summary([flash])
    assert ROW.to_dict()["deterministic_ratio"] == 0.8
