"""HBM bytes: closed forms of the papers and of a kernel, compared with counts and tile maps."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import flashgen as fg
from flashgen.analysis.tile_classes import tile_map
from flashgen.cli.app import app
from flashgen.codegen.stages import backward_kernels, forward_kernels
from flashgen.codegen.targets import target_named
from flashgen.errors import ArgumentError
from flashgen.report.sizes import CallSizes
from flashgen.report.traffic import backward_traffic, flops, forward_traffic, hbm_bytes

TARGET = target_named("sm_80")
SPEC = fg.AttentionSpec(64, mask=fg.causal() & fg.sliding_window(100))


def rows_of(spec: Any, sizes: CallSizes) -> dict[str, Any]:
    plan = forward_kernels(spec, TARGET)["forward"].plan
    tiles = tile_map(spec.mask.expression, (plan.tile_q, plan.tile_k), sizes.len_q, sizes.len_k)
    return {row.name: row for row in forward_traffic(spec, TARGET, tiles, sizes)}


def test_standard_attention_equals_the_paper() -> None:
    row = rows_of(SPEC, CallSizes(512, 512, batch=2, heads_q=3, heads_kv=3))["standard attention"]
    assert row.bytes == 2 * 6 * (4 * 512**2 + 4 * 512 * 64) and row.times == 1


def test_uncached_keys_are_those_of_visited_tiles() -> None:
    """Counted again tile by tile, with lengths that tiles do not divide."""
    sizes = CallSizes(300, 430)
    plan = forward_kernels(SPEC, TARGET)["forward"].plan
    q, k = np.arange(sizes.len_q)[:, None], np.arange(sizes.len_k)
    distance = q + sizes.len_k - sizes.len_q - k
    kept = (distance >= 0) & (distance <= 100)
    keys = 0
    for first_q in range(0, sizes.len_q, plan.tile_q):
        for first_k in range(0, sizes.len_k, plan.tile_k):
            if kept[first_q : first_q + plan.tile_q, first_k : first_k + plan.tile_k].any():
                keys += min(plan.tile_k, sizes.len_k - first_k)
    rows = rows_of(SPEC, sizes)
    assert rows["this kernel, nothing cached"].bytes == 2 * 128 * (sizes.len_q + keys) + 4 * sizes.len_q
    assert rows["this kernel, each array once"].bytes == 2 * 128 * (sizes.len_q + sizes.len_k) + 4 * sizes.len_q


def test_a_kernels_formulas_give_the_same_numbers() -> None:
    sizes = CallSizes(512, 512, batch=2, heads_q=4, heads_kv=2)
    kernel = forward_kernels(SPEC, TARGET)["forward"]
    assert hbm_bytes(kernel, sizes) == rows_of(SPEC, sizes)["this kernel, each array once"].bytes
    assert flops(kernel, sizes, share=0.5) == 4 * 64 * 2 * 4 * 512 * 512 // 2


def test_backward_kernels_are_added_up() -> None:
    sizes = CallSizes(512, 512)
    kernels = backward_kernels(SPEC, TARGET)
    standard, _, own = backward_traffic(SPEC, TARGET, kernels, sizes)
    assert own.bytes == sum(hbm_bytes(kernel, sizes) or 0 for kernel in kernels.values()) > 0
    assert standard.bytes == 2 * (7 * 512**2 + 8 * 512 * 64)


def test_invalid_sizes() -> None:
    with pytest.raises(ArgumentError, match="batch=0"):
        CallSizes(8, 8, batch=0)
    with pytest.raises(ArgumentError, match="heads_q=3 must be a multiple of heads_kv=2"):
        CallSizes(8, 8, heads_q=3, heads_kv=2)


def test_show_prints_the_same(tmp_path: Any) -> None:
    words = ["show", "causal() & sliding_window(100)", "--what", "traffic", "--len-q", "512", "--target", "sm_80"]
    shown = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert shown == [row.to_dict() for row in rows_of(SPEC, CallSizes(512, 512)).values()]
    table = CliRunner().invoke(app, words).stdout
    assert table.splitlines()[0] == "algorithm\tMB of HBM\ttimes fewer\tcounted by"
    backward = CliRunner().invoke(app, [*words, "--pass", "backward"])
    assert backward.exit_code == 0 and "algorithm 4" in backward.stdout
    refused = CliRunner().invoke(app, [*words, "--output", str(tmp_path / "x")])
    assert refused.exit_code == 2 and "--what traffic only prints" in refused.stderr
