"""The benchmark of the FlashAttention paper's problem: counts, table and summary."""

from __future__ import annotations

from benchmarks import tables
from benchmarks.paper import (
    PaperRow,
    flash_bytes,
    flash_gflops,
    paper_case,
    paper_summary,
    standard_bytes,
    standard_gflops,
)
from flashgen.attention import compile
from flashgen.cli import bench_tables


def test_the_paper_s_counts() -> None:
    """GFLOPs: 6 and 7 products for 1024 heads, flash's over slightly more than half. Bytes: 11 N^2 + 12 N d."""
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


def test_the_paper_s_table() -> None:
    standard = PaperRow("standard", 10.0, 20.0, 30.0, 16 * 10**9, 824.6, 24 * 10**9)
    flash = PaperRow("flashgen", 1.0, 3.0, 4.0, 2 * 10**9, 500.0, 6 * 10**9)
    fa2 = PaperRow("FA2", 1.0, None, 4.0, 2 * 10**9, None, None)
    cells = bench_tables.cells(tables.paper(), fa2)
    assert cells == ["FA2", "1.00", "-", "4.00", "2.00", "-", "-"]
    (summary,) = paper_summary([standard, fa2, flash])
    assert "7.5 times as fast, takes 0.12 of the memory, and moves 0.25 of the bytes" in summary
    assert "did not run" in paper_summary([flash])[0]
