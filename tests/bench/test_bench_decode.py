"""Counts, options and output of `flashgen bench decode`; measurements need a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import flashgen.language as fg
from flashgen import bench
from flashgen.bench import decode, latent_peers, summary
from flashgen.cli import bench_tables
from flashgen.cli.app import app
from flashgen.cli.bench import decode_size
from flashgen.codegen.hopper.decode_plans import HopperDecodePlan
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.mma_sync.decode_plans import DecodePlan
from flashgen.errors import ArgumentError

FULL = fg.AttentionSpec(128, "bfloat16")
SIZE = decode.DecodeSize(1, 32, 8, 131072)


def test_bytes_are_those_of_the_visited_keys() -> None:
    row = decode.row(FULL, SIZE, "sm_90a", "", {"flashgen": 0.2, "cuDNN": 0.1, "pages of 16": 0.25})
    assert row.bytes == 8 * 131072 * 256 * 2 and row.terabytes["flashgen"] == pytest.approx(2.684, abs=1e-3)
    assert row.microseconds["cuDNN"] == 100 and row.ratio() == 0.5 and row.ratio("pages of 16") == 0.4
    window = fg.AttentionSpec(128, mask=fg.sliding_window(1000, 0))
    assert decode.keys_needed(window, SIZE) == 1001
    assert decode.keys_needed(window, decode.DecodeSize(1, 8, 8, 5000, 4)) == 1004
    assert decode.keys_needed(fg.AttentionSpec(128, mask=fg.document("ids")), SIZE) == 131072
    assert decode.row(FULL, SIZE, "", "", {"flashgen": 1.0}).ratio() is None


def test_sizes_are_parsed_and_printed() -> None:
    assert decode_size("16x64:8x8192x4") == decode.DecodeSize(16, 64, 8, 8192, 4)
    assert str(decode_size("16x64:8x8192x4")) == "16, 64:8, 8192, 4 queries" and str(SIZE) == "1, 32:8, 131072"
    for text in ("16", "1x32x8", "0x32:8x10", "1x32:5x10", "1x32:8x-3"):
        with pytest.raises(ArgumentError, match=r"--sizes .* must be batch x heads:heads_kv x keys"):
            decode_size(text)


def test_summary_of_the_rows() -> None:
    rows = [
        decode.row(FULL, size, "sm_90a", "", {"flashgen": 1.0, "cuDNN": peer, "FA2": 9.0, "pages of 16": 1.25})
        for size, peer in zip(decode.SIZES[:2], (1.1, 0.8), strict=True)
    ]
    said = summary.decode(rows)
    assert said[0].startswith("beside the best peer: 1 of 2 sizes at 1.00 times or more (below: ")
    assert said[1].startswith("pages of 16: beside contiguous keys: 0 of 2 sizes at 0.95 times or more")
    cells = bench_tables.cells(bench_tables.decode(["flashgen", "FlashInfer"]), rows[0])
    assert cells[1:] == ["1, 32:8, 131072", "0.54", "-", "1000.0", "-", "1.10"]


def test_pages_use_another_spec() -> None:
    spec = fg.AttentionSpec(64, "bfloat16", mask=fg.causal(), score=fg.softcap(20))
    kept = decode.with_cache(spec, 16, "int8")
    assert (kept.page_size, kept.kv_dtype) == (16, "int8") and decode.with_cache(kept) == spec
    row = decode.row(kept, SIZE, "", "", {"flashgen": 0.1, "16 bits": 0.1, "cuDNN": 0.1})
    assert row.bytes == 8 * 131072 * 128 and row.terabytes["16 bits"] == 2 * row.terabytes["flashgen"]
    assert row.terabytes["cuDNN"] == row.terabytes["16 bits"]


def test_the_command_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def decode_rows(*choices: Any) -> Iterator[decode.DecodeRow]:
        asked.append(choices)
        yield decode.row(FULL, SIZE, "sm_90a", "", {"flashgen": 0.2, "cuDNN": 0.1})

    monkeypatch.setattr(bench, "decode_rows", decode_rows)
    monkeypatch.setattr(bench, "environment", lambda: {"gpu": "none"})
    monkeypatch.setattr("flashgen.cli.bench.require_gpu", lambda: None)
    output = ["--output", str(tmp_path / "decode.json")]
    options = ["--sizes", "1x32:8x131072", "--pages", "16,64", "--peers", "cuDNN"]
    options += ["--splits", "4,8", "--plans", "16x32x2x4x1"]
    done = CliRunner().invoke(app, ["bench", "decode", "causal()", *options, *output])
    assert done.exit_code == 0, done.output
    ((specs, sizes, peers, pages, target, splits, plans),) = asked
    assert [spec.head_dim for spec in specs] == [128] and specs[0].dtype == "bfloat16"
    assert (sizes, peers, pages, target) == ([SIZE], ["cuDNN"], [16, 64], None)
    assert (splits, plans) == ([4, 8], [DecodePlan(16, 32, 2, 4, 1)])
    assert list(decode.own_choices(splits, plans)) == [
        "4 splits", "8 splits", "16x32x2x4x1", "16x32x2x4x1, 4 splits", "16x32x2x4x1, 8 splits",
    ]  # fmt: skip
    assert "1, 32:8, 131072" in done.output and (tmp_path / "decode.json").is_file()
    refused = CliRunner().invoke(app, ["bench", "decode", "document('ids')", *output])
    assert refused.exit_code == 2 and "captures 'ids'" in refused.output
    for wrong in (["--plans", "16"], ["--plans", "16x16x4x3x2x1x1"], ["--group", "sizes"], ["--only", "tree"]):
        assert CliRunner().invoke(app, ["bench", "decode", *wrong, *output]).exit_code == 2
    refused = CliRunner().invoke(app, ["bench", "decode", "--page-size", "16", *output])
    assert refused.exit_code == 2 and "with --pages" in refused.output


@pytest.mark.parametrize(
    "plan",
    [
        DecodePlan(16, 32, 2, 4, 1),
        DecodePlan(16, 32, 4, 3, 1, split=4),
        HopperDecodePlan(64, 2),
        HopperPlan(2, 128),
        HopperPlan(3, 64, takes_turns=True),
    ],
    ids=decode.plan_name,
)
def test_plans_are_named_by_numbers(plan: Any) -> None:
    assert decode.plan_of_numbers([int(part) for part in decode.plan_name(plan).split("x")]) == plan
    assert list(decode.own_choices([4], [plan])) == ["4 splits", decode.plan_name(plan)] + (
        [] if isinstance(plan, HopperPlan) else [f"{decode.plan_name(plan)}, 4 splits"]
    )


def test_prompts_are_compared_with_16_bit_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def decode_rows(*choices: Any) -> Iterator[decode.DecodeRow]:
        asked.append(choices)
        times = {"flashgen": 0.5, "16 bits": 0.4, "pages of 64": 0.4, "pages of 64, 16 bits": 0.4}
        yield decode.row(choices[0][0], decode.PROMPT_SIZES[0], "sm_90a", "", times)

    monkeypatch.setattr(bench, "decode_rows", decode_rows)
    monkeypatch.setattr(bench, "environment", lambda: {"gpu": "none"})
    monkeypatch.setattr("flashgen.cli.bench.require_gpu", lambda: None)
    options = ["--prompts", "--peers", "", "--plans", "2x128x2", "--output", str(tmp_path / "prompts.json")]
    done = CliRunner().invoke(app, ["bench", "decode", "causal()", *options])
    assert done.exit_code == 0, done.output
    ((specs, sizes, _, pages, _, _, plans),) = asked
    assert specs[0].kv_dtype == "float8_e4m3fn" and sizes == list(decode.PROMPT_SIZES)
    assert (pages, plans) == ([64], [HopperPlan(2, 128)])
    assert "16-bit keys, flashgen: 0 of 1 sizes at 0.90 times" in " ".join(done.output.split())
    assert "16-bit keys, pages of 64: 1 of 1 sizes" in " ".join(done.output.split())


LATENT = fg.AttentionSpec(576, "bfloat16", value_dim=512, shared_kv=True)


def test_latent_attention_reads_each_key_once() -> None:
    times = {"flashgen": 0.119, "FlashMLA": 0.1192, "pages of 64": 0.2}
    row = decode.row(LATENT, decode.LATENT_SIZES[0], "sm_90a", "", times)
    assert row.bytes == 64 * 4096 * 576 * 2 and row.tflops["FlashMLA"] == pytest.approx(612, abs=1)
    assert row.terabytes["FlashMLA"] == pytest.approx(2.53, abs=0.01) and row.ratio() > 1
    assert decode.with_cache(LATENT, 64).shared_kv
    cells = bench_tables.cells(bench_tables.decode(["FlashMLA"], with_tflops=True), row)
    assert cells[2:] == ["2.53", "119.2", "613", "1.00"]


def test_a_record_has_fewer_bytes_than_a_key_of_16_bits() -> None:
    records = fg.AttentionSpec(576, "bfloat16", value_dim=512, shared_kv=True, page_size=64, kv_dtype="fp8_ds_mla")
    row = decode.row(records, decode.LATENT_SIZES[0], "sm_90a", "", {"flashgen": 1e-9, "16 bits": 1e-9})
    keys = 64 * 4096
    assert row.bytes == row.terabytes["flashgen"] == keys * 656 and row.terabytes["16 bits"] == keys * 1152


def test_latent_peers_get_pages_and_a_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each library is replaced by one that records its calls; plans are created once."""
    torch = pytest.importorskip("torch")
    asked: list[tuple[str, Any]] = []

    class Wrapper:
        def __init__(self, workspace: Any, backend: str) -> None:
            asked.append(("wrapper", backend))

        def plan(self, *given: Any) -> None:
            asked.append(("plan", given))

        def run(self, *given: Any) -> None:
            asked.append(("run", [each.shape for each in given]))

    def flash_mla_with_kvcache(*given: Any, use_legacy: bool = False, **named: Any) -> None:
        asked.append(("attention", (given, use_legacy, named)))

    def get_mla_metadata(*given: Any) -> Any:
        asked.append(("metadata", given))
        return "schedule", None

    modules = {
        "sgl_flash_mla": SimpleNamespace(
            **{each.__name__: each for each in (flash_mla_with_kvcache, get_mla_metadata)}
        ),
        "flashinfer": SimpleNamespace(),
        "flashinfer.mla": SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper),
    }
    monkeypatch.setattr(latent_peers.importlib.util, "find_spec", lambda name: modules.get(name))
    monkeypatch.setattr(latent_peers.importlib, "import_module", modules.__getitem__)
    q, pages, table = torch.zeros(2, 16, 3, 576), torch.zeros(4, 64, 1, 576), torch.tensor([[2, 0], [1, 3]]).int()
    lengths = torch.tensor([100, 128]).int()
    for name in latent_peers.LATENT_PEERS:
        run = latent_peers.latent_peer(name, LATENT, q, pages, table, lengths)
        assert run is not None
        run()
    (_, metadata), (_, (given, legacy, named)), _ = asked[:3]
    assert metadata[1:] == (48, 1) and metadata[0] is lengths and given[0].shape == (2, 3, 16, 576) and legacy
    assert given[4:] == (512, "schedule", None) and named == {"softmax_scale": LATENT.scale, "causal": False}
    assert [name for name, _ in asked[3:]] == ["wrapper", "plan", "run", "run"] and asked[3][1] == "fa3"
    starts, begins, order, kept, *sizes = asked[4][1]
    assert starts.tolist() == [0, 3, 6] and begins.tolist() == [0, 2, 4] and order.tolist() == [2, 0, 1, 3]
    assert kept is lengths and sizes[:6] == [16, 512, 64, 64, False, LATENT.scale]
    assert asked[5][1] == [(6, 16, 512), (6, 16, 64), (4, 64, 512), (4, 64, 64)]
    window = fg.AttentionSpec(576, "bfloat16", value_dim=512, shared_kv=True, mask=fg.sliding_window(9))
    assert latent_peers.latent_peer("FlashMLA", window, q, pages, table, lengths) is None


def test_the_command_measures_latent_attention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def decode_rows(*choices: Any) -> Iterator[decode.DecodeRow]:
        asked.append(choices)
        yield decode.row(LATENT, decode.LATENT_SIZES[0], "sm_90a", "", {"flashgen": 0.2})

    monkeypatch.setattr(bench, "decode_rows", decode_rows)
    monkeypatch.setattr(bench, "environment", lambda: {"gpu": "none"})
    monkeypatch.setattr("flashgen.cli.bench.require_gpu", lambda: None)
    command = ["bench", "decode", "--latent", "--output", str(tmp_path / "latent.json")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    ((specs, sizes, peers, pages, *_),) = asked
    assert specs == [LATENT] and sizes == list(bench.LATENT_SIZES) and pages == [64]
    assert peers == ["FlashInfer", "FlashMLA"]
    refused = CliRunner().invoke(app, [*command, "--group", "lengths"])
    assert refused.exit_code == 2 and "is not measured where V is a part of K" in refused.output


@pytest.mark.gpu
@pytest.mark.quick
def test_latent_attention_is_measured_with_pages() -> None:
    pytest.importorskip("torch")
    (row,) = bench.decode_rows([LATENT], [decode.DecodeSize(2, 16, 1, 1024)], bench.LATENT_PEERS, [64])
    assert {"flashgen", "pages of 64"} <= row.microseconds.keys() and row.tflops["flashgen"] > 0


@pytest.mark.gpu
@pytest.mark.quick
def test_a_size_is_measured_with_pages() -> None:
    (row,) = bench.decode_rows([FULL], [decode.DecodeSize(2, 8, 2, 1024)], [], [16])
    assert row.microseconds.keys() == {"flashgen", "pages of 16"} and "DecodePlan" in row.plan


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8"])
def test_8_bits_are_compared_with_16(kind: str) -> None:
    pytest.importorskip("torch")
    spec = fg.AttentionSpec(128, "bfloat16", kv_dtype=kind)
    (row,) = bench.decode_rows([spec], [decode.DecodeSize(2, 8, 2, 1024)], [], [16])
    assert row.microseconds.keys() == {"flashgen", "16 bits", "pages of 16"}
