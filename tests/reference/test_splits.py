"""Flash-Decoding: equal to attention for every split; its traffic equals the closed form, `show` and a GPU's."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.codegen.costs import WorkSizes
from flashgen.codegen.mma_sync.decode import render_decode
from flashgen.codegen.targets import target_named
from flashgen.errors import ArgumentError
from flashgen.reference import HbmTraffic, attention, flash_decoding, traffic_flash_decoding

pytestmark = pytest.mark.filterwarnings("error")  # warnings about NaN would hide mistakes of the reference

MASKS = {
    "causal": fg.causal(),
    "window": fg.sliding_window(9),
    "rows with nothing": fg.trace_mask(lambda b, h, q, k: (q % 2 != h) & (k > 20)),
    "nothing": fg.trace_mask(lambda b, h, q, k: k < b - 5),
}


def arrays(len_q: int, len_k: int, heads: int = 4, heads_kv: int = 2) -> list[Any]:
    rng = np.random.default_rng(len_q * 100 + len_k)
    shapes = [(2, heads, len_q, 16), (2, heads_kv, len_k, 16), (2, heads_kv, len_k, 8)]
    return [rng.standard_normal(shape) for shape in shapes]


@pytest.mark.parametrize("splits", [1, 3, 50])  # one split; unequal ones; more than there are keys
@pytest.mark.parametrize("mask", MASKS)
def test_splits_change_nothing(mask: str, splits: int) -> None:
    spec = fg.AttentionSpec(16, value_dim=8, mask=MASKS[mask], score=fg.softcap(3.0), dropout=0.2)
    q, k, v = arrays(3, 45)
    expected, expected_lse = attention(spec, q, k, v, return_lse=True, seed=5)
    out, lse, *_ = flash_decoding(spec, q, k, v, splits=splits, rows=4, seed=5)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-10)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("len_q", "len_k", "splits", "rows"), [(1, 40, 1, 16), (3, 61, 4, 4), (5, 0, 2, 16)])
def test_counters_equal_the_closed_form(len_q: int, len_k: int, splits: int, rows: int) -> None:
    spec = fg.AttentionSpec(16, value_dim=8)
    *_, counted, shares = flash_decoding(spec, *arrays(len_q, len_k), splits=splits, rows=rows)
    of_head = traffic_flash_decoding(len_q, len_k, 16, 8, heads=2, splits=splits, rows=rows)
    assert (counted, shares) == (4 * of_head[0], 4 * of_head[1])  # two KV heads in each of two batches


def test_invalid_numbers_of_splits() -> None:
    with pytest.raises(ArgumentError, match="splits=0 and rows=16 must be 1 or more"):
        flash_decoding(fg.AttentionSpec(16, value_dim=8), *arrays(1, 4), splits=0)


SPEC = fg.AttentionSpec(128)
SIZES = {"batch": 16, "heads_q": 32, "heads_kv": 8, "len_q": 1, "len_k": 8192, "splits": 2}


def counted_bytes() -> int:
    """Returns the counts of the reference for a call of these sizes."""
    heads = SIZES["heads_q"] // SIZES["heads_kv"]
    told: dict[str, Any] = {"heads": heads, "splits": SIZES["splits"]}
    of_head, beside = traffic_flash_decoding(SIZES["len_q"], SIZES["len_k"], 128, **told)
    everything: HbmTraffic = SIZES["batch"] * SIZES["heads_kv"] * (2 * of_head + 4 * beside)
    return everything.total


def test_show_prints_the_counts() -> None:
    (kernel,) = render_decode(SPEC, target_named("sm_90a"))
    assert kernel.cost is not None and "(share of tiles visited)" in kernel.cost.hbm_text
    assert kernel.cost.partials is not None
    work = WorkSizes(**SIZES)
    assert kernel.cost.hbm(work) + kernel.cost.partials(work) == counted_bytes()


PROGRAM = """
import cupy
import flashgen as fg
compiled = fg.compile(fg.AttentionSpec(128))
q, k, v = (cupy.random.standard_normal(shape, dtype=cupy.float32).astype(cupy.float16) for shape in {shapes})
compiled(q, k, v, num_splits={splits}, return_lse=True)
cupy.cuda.Device().synchronize()
"""


@pytest.mark.gpu
def test_a_gpu_reads_the_counted_bytes() -> None:
    """HBM bytes of its profiler with cold caches, within 5 %. Partial outputs stay in the L2."""
    profiler = shutil.which("ncu")
    if profiler is None:
        pytest.skip("needs ncu, the profiler of CUDA's toolkit")
    shapes = [(16, 32, 1, 128), (16, 8, 8192, 128), (16, 8, 8192, 128)]
    command = [profiler, "--csv", "--metrics", "dram__bytes_read.sum,dram__bytes_write.sum", "--print-units", "base"]
    command += ["-k", "regex:attention_decode", "-c", "1", sys.executable, "-c"]
    program = PROGRAM.format(shapes=shapes, splits=SIZES["splits"])
    done = subprocess.run([*command, program], capture_output=True, text=True, timeout=120)
    if "ERR_NVGPUCTRPERM" in done.stdout:
        pytest.skip("this user may not read the GPU's counters")
    table = [line for line in done.stdout.splitlines() if line.startswith('"')]
    found = sum(float(row["Metric Value"].replace(",", "")) for row in csv.DictReader(table))
    assert found == pytest.approx(counted_bytes(), rel=0.05), done.stdout + done.stderr
