"""Counts, options and output of `flashgen bench`; measurements need a GPU and are tested with the commands."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen.language as fg
from flashgen.bench import ffpa, flash_attention4, measure, summary
from flashgen.bench.beside_flex import VariantRow
from flashgen.bench.cases import Case, case
from flashgen.bench.flash_attention4 import mask_options
from flashgen.bench.grouped import row as grouped_row
from flashgen.bench.measure import Row
from flashgen.bench.ours import ours
from flashgen.bench.peers import peer
from flashgen.bench.variants import chosen_variants
from flashgen.cli import bench_tables
from flashgen.codegen.costs import products
from flashgen.errors import ArgumentError

ROW = VariantRow("window 1024", "bf16", "sm_90", "backward", 2.0, 4.0, 2.5, None, 3.0, None, 0.25)


def speed_row(length: int, ours: float, **peers: float) -> Row:
    """Returns a row of 1000 GFLOP with milliseconds of flashgen and of peers."""
    milliseconds = {"flashgen": ours, **peers}
    return Row(
        "bf16", "sm_90a", "forward", length, 16, 32, milliseconds, {k: 1000 / v for k, v in milliseconds.items()}
    )


def test_the_backward_counts_two_and_a_half_forwards() -> None:
    plain = case(fg.AttentionSpec(64), 1024)
    assert plain.flops("backward") == 2.5 * plain.flops() and plain.flops("both") == 3.5 * plain.flops()
    causal = Case(fg.AttentionSpec(64, mask=fg.causal()), plain.length, plain.batch, plain.heads)
    assert causal.flops("backward") == plain.flops("backward") / 2
    # QK, dQ and dK have the head dim, dV and dP the value dim
    assert products(fg.AttentionSpec(64, value_dim=8), "backward") == 3 * 64 + 2 * 8


def test_variants_are_selected_by_name() -> None:
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
    """A mock attention that records the arguments of its calls."""

    def __init__(self, dropout: float = 0.0) -> None:
        self.spec = fg.AttentionSpec(64, dropout=dropout)
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arrays: Any, **options: Any) -> Any:
        self.calls.append(("forward", options))
        return "out", "lse"

    def backward(self, *arrays: Any, **options: Any) -> None:
        self.calls.append(("backward", arrays, options))


def test_what_is_timed_for_flashgen() -> None:
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


def test_tables_have_the_requested_columns() -> None:
    columns = bench_tables.variants(backward=True, beside_flex=True, mask_times=False)
    assert dict(zip(columns, bench_tables.cells(columns, ROW), strict=True)) == {
        "variant": "window 1024",
        "target": "sm_90",
        "ms": "2.000",
        "Flex ms": "3.000",
        "times Flex": "1.50",
        "deterministic ms": "2.500",
        "of the default's speed": "0.80",
        "lists ms": "-",
        "of full's time": "0.50",
        "tiles left": "25.0%",
        "ms per tile / full's": "2.00",
    }
    alone = bench_tables.variants(backward=False, beside_flex=False, mask_times=True)
    assert not [heading for heading in alone if "Flex" in heading or "determ" in heading or "default" in heading]
    columns = bench_tables.speed(["flashgen", "FA2", "cuDNN"])
    assert dict(zip(columns, bench_tables.cells(columns, speed_row(1024, 2.0, FA2=4.0)), strict=True)) == {
        "spec": "bf16",
        "target": "sm_90a",
        "pass": "forward",
        "length": "1024",
        "flashgen TFLOP/s": "500",
        "FA2 TFLOP/s": "250",
        "cuDNN TFLOP/s": "-",  # requested but not available
        "times cuDNN": "-",
        "times the best peer": "2.00",
    }
    assert list(bench_tables.speed(["flashgen", "deterministic"]))[4:] == ["flashgen TFLOP/s", "deterministic TFLOP/s"]


def test_a_row_compares_deterministic_times() -> None:
    assert ROW.to_dict()["deterministic_ratio"] == 0.8


def test_a_row_knows_its_best_peer() -> None:
    row = speed_row(4096, 2.0, FA2=4.0, cuDNN=1.9, deterministic=1.0)
    assert row.ratio("FA2") == 2.0 and row.ratio("Flex") is None
    assert row.best_peer == "cuDNN" and row.best_ratio == 0.95  # not flashgen's other mode
    assert row.to_dict()["ratios"] == {"FA2": 2.0, "cuDNN": 0.95} and row.to_dict()["best_peer"] == "cuDNN"
    alone = speed_row(4096, 2.0)
    assert alone.best_peer is None and alone.best_ratio is None and alone.to_dict()["ratios"] == {}


def test_summary_of_the_speed_table() -> None:
    rows = [
        speed_row(1024, 1.0, cuDNN=0.5, FA4=0.4),  # short: not compared with the best
        speed_row(4096, 1.0, cuDNN=2.0, FA4=0.98),
        speed_row(16384, 1.0, cuDNN=1.0, FA4=0.9),
    ]
    assert summary.speed(rows) == [
        "beside cuDNN: 2 of 3 cells at 1.00 times or more (below: bf16 1024 0.500); geometric mean 1.000",
        "beside the best peer: 1 of 2 cells of 4096 tokens or more at 0.97 times or more (below: bf16 16384 0.900);"
        " geometric mean 0.939",
        "flashgen: geometric mean 1000 TFLOP/s",
    ]
    assert summary.speed([speed_row(4096, 2.0)]) == ["flashgen: geometric mean 500 TFLOP/s"]
    assert summary.speed([]) == []


def test_summary_of_the_variants() -> None:
    full = VariantRow("full", "bf16", "sm_90a", "forward", 4.0, 4.0, None, None, 4.0, None, 1.0)
    window = VariantRow("window 1024", "bf16", "sm_90a", "forward", 2.0, 4.0, None, None, 3.0, None, 0.25)
    dropout = VariantRow("dropout 0.1", "bf16", "sm_90a", "forward", 5.0, 4.0, None, None, None, None, 1.0)
    assert summary.variants([full, window, dropout]) == [
        "beside FlexAttention: 1 of 1 variants at 1.40 times or more; geometric mean 1.500",
        "dropout 0.1: +25.0% of full attention's time",
    ]
    assert summary.variants([full]) == []


def test_grouped_heads_are_compared_with_the_first() -> None:
    sizes = [Case(fg.AttentionSpec(64), 4096, 4, 32, heads_kv) for heads_kv in (32, 8, 1)]
    taken = [{"flashgen": 1.0, "cuDNN": 2.0}, {"flashgen": 1.0, "cuDNN": 1.0}, {"flashgen": 1.25}]
    rows = [grouped_row(size, "forward", "sm_90a", times, taken[0]) for size, times in zip(sizes, taken, strict=True)]
    assert [row.name for row in rows] == ["MHA 32:32", "GQA 32:8", "MQA 32:1"]
    assert rows[0].tflops["flashgen"] == sizes[0].flops() / 1e9 == sizes[2].flops() / 1e9
    assert rows[1].of_first == {"flashgen": 1.0, "cuDNN": 2.0} and rows[2].of_first == {"flashgen": 0.8}
    columns = bench_tables.grouped(["flashgen", "cuDNN"])
    assert list(columns)[4:] == [
        "heads", "flashgen TFLOP/s", "cuDNN TFLOP/s", "flashgen of the first", "cuDNN of the first"
    ]  # fmt: skip
    cells = bench_tables.cells(columns, rows[2])
    assert cells[4] == "MQA 32:1" and cells[6:] == ["-", "0.800", "-"]
    (line,) = summary.grouped(rows)
    assert line.startswith("beside 32 heads of k and v: 1 of 2 cells at 0.95 times or more (below: fp16-d64-full-")
    assert summary.grouped(rows[:1]) == summary.grouped([]) == []


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (fg.full(), {}),
        (fg.causal(), {"causal": True}),
        (fg.sliding_window(1024), {"window_size": (1024, 0)}),
        (fg.sliding_window(64, 32), {"window_size": (64, 32)}),
        (fg.sliding_window(64, align="top_left"), None),
        (fg.causal() & fg.sliding_window(64), None),
        (fg.prefix_lm(64), None),
    ],
)
def test_masks_that_flash_attention4_supports(mask: fg.Mask, options: dict[str, Any] | None) -> None:
    assert mask_options(fg.AttentionSpec(64, mask=mask), square=False) == options


def test_flash_attention4_supports_top_left_causal_where_it_is_the_same() -> None:
    spec = fg.AttentionSpec(64, mask=fg.causal("top_left"))
    assert mask_options(spec, square=True) == {"causal": True} and mask_options(spec, square=False) is None


class Array:
    """The attributes of an array that are used before a peer gets it."""

    shape = (1, 128, 8, 64)

    def contiguous(self) -> Array:
        return self

    def swapaxes(self, *_: int) -> Array:
        return self

    transpose = swapaxes


def test_a_peer_that_is_missing_or_refuses_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, spec = (Array(), Array(), Array(), Array()), fg.AttentionSpec(64, layout="bshd", mask=fg.causal())
    monkeypatch.setattr(flash_attention4.importlib.util, "find_spec", lambda name: None)
    assert peer("FA4", spec, "forward", arrays) is None  # not installed
    given: list[Any] = []
    monkeypatch.setattr(flash_attention4, "_attention", lambda: lambda *arrays, **options: given.append(options))
    monkeypatch.setattr(flash_attention4, "differentiated", lambda forward, timed, arrays, d_out: forward(*arrays))
    peer("FA4", spec, "forward", arrays)
    assert given == [{"softmax_scale": 0.125, "causal": True}]
    for other in (fg.AttentionSpec(64, dropout=0.1), fg.AttentionSpec(64, score=fg.softcap(20))):
        assert peer("FA4", other, "forward", arrays) is None

    def refuse(*arrays: Any, **options: Any) -> None:
        raise KeyError("no such head dim")  # as errors of compilers are

    monkeypatch.setattr(flash_attention4, "_attention", lambda: refuse)
    with pytest.warns(UserWarning, match="not measured: KeyError: 'no such head dim'"):
        assert peer("FA4", spec, "forward", arrays) is None


def test_ffpa_gets_wide_heads_with_its_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, spec = (Array(), Array(), Array(), Array()), fg.AttentionSpec(512, mask=fg.causal())
    monkeypatch.setattr(ffpa.importlib.util, "find_spec", lambda name: None)
    assert peer("FFPA", spec, "forward", arrays) is None  # not installed
    given: list[Any] = []
    monkeypatch.setattr(ffpa, "_attention", lambda: lambda *arrays, **options: given.append(options))
    monkeypatch.setattr(ffpa, "differentiated", lambda forward, timed, arrays, d_out: forward(*arrays))
    peer("FFPA", spec, "forward", arrays)
    assert given == [{"backend": "cutedsl", "is_causal": True, "scale": spec.scale, "enable_gqa": False}]
    for other in (
        fg.AttentionSpec(256),
        fg.AttentionSpec(512, score=fg.softcap(20)),
        fg.AttentionSpec(512, dropout=0.1),
    ):
        assert peer("FFPA", other, "forward", arrays) is None


def test_batch_and_heads_replace_those_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure", lambda sized, *rest: (sized.batch, sized.heads, sized.length))
    spec = fg.AttentionSpec(512)
    assert list(measure.speed_rows([spec], [8192])) == [(2, 4, 8192)]
    assert list(measure.speed_rows([spec], [8192, 16384], batch=1, heads=16)) == [(1, 16, 8192), (1, 16, 16384)]
