"""Commands run by typer's runner: output, files and exit status."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner, Result

import flashgen.language as fg
from flashgen import bench, reference, release
from flashgen.attention import compile
from flashgen.build import nvrtc
from flashgen.cli import doctor
from flashgen.cli.app import app
from flashgen.cli.arrays import load_arrays, save_arrays
from flashgen.cli.machine import Gpu, gpus
from flashgen.errors import SpecError
from flashgen.report import demo_page

EXAMPLE = Path(__file__).parents[2] / "examples" / "minilm_qkv.npz"
COMMANDS = ("demo", "run", "show", "verify", "bench", "doctor")
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_available(), reason="needs NVRTC: pip install '.[cuda13]'")


def invoke(*arguments: object, expect: int = 0, input: str | None = None) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=input)
    assert result.exit_code == expect, f"{result.output}\n{result.exception!r}"
    return result


# ---- the application


@pytest.mark.parametrize("command", COMMANDS)
def test_help_describes_each_command(command: str) -> None:
    assert "Usage" in invoke(command, "--help").output


@pytest.mark.parametrize(
    ("command", "dtype", "head_dim", "layout"),
    [
        ("show", "float16", "64", "bhsd"),
        ("run", "that of q", "that of q", "bhsd"),
        ("bench ragged", "bfloat16", "128", "thd"),
    ],
)
def test_help_shows_the_defaults_of_the_command(command: str, dtype: str, head_dim: str, layout: str) -> None:
    shown = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"}).stdout
    for option, default in (("--dtype", dtype), ("--head-dim", head_dim), ("--layout", layout)):
        found = re.search(rf"{option}\s+<str>|{option}\s+<int>", shown)
        assert found and shown[shown.index("[default: ", found.end()) :].startswith(f"[default: ({default})]"), option


def test_version() -> None:
    assert re.fullmatch(r"flashgen \d+\.\d+\.\d+\S*\n", invoke("--version").output)


def test_an_error_is_one_message_and_exit_2() -> None:
    result = invoke("show", "casual()", expect=2)
    assert "did you mean causal" in result.stderr and "Traceback" not in result.output and not result.stdout


def test_debug_shows_the_traceback() -> None:
    assert isinstance(invoke("--debug", "show", "casual()", expect=1).exception, SpecError)


# ---- show


def test_show_cuda_is_the_kernels_source() -> None:
    spec = fg.AttentionSpec(128, "bfloat16", mask=fg.causal() & fg.sliding_window(64))
    result = invoke(
        "show", "causal() & sliding_window(64)", "--head-dim", 128, "--dtype", "bfloat16", "--target", "sm_86"
    )
    assert result.stdout == compile(spec, target="sm_86", emulate=True).source
    assert result.stderr == ""


def test_show_both_kernels_of_a_mask_that_needs_lists() -> None:
    forward = invoke("show", "document('ids')", "--target", "sm_80")
    lists = invoke("show", "document('ids')", "--target", "sm_80", "--kernel", "lists")
    assert "--kernel lists" in forward.stderr and "attention_forward" in forward.stdout
    assert "list_key_tiles" in lists.stdout
    assert "needs none" in invoke("show", "causal()", "--target", "sm_80", "--kernel", "lists", expect=2).stderr


def test_show_backward_kernels() -> None:
    spec = fg.AttentionSpec(64, mask=fg.causal() & fg.document("ids"))
    arguments = ("show", "causal() & document('ids')", "--target", "sm_80", "--pass", "backward")
    every = invoke(*arguments)
    assert "4 kernels, in launch order: query_lists, preprocess, dkdv, postprocess. Each is a" in every.stderr
    assert "--output DIR/" in every.stderr
    sources = compile(spec, target="sm_80", emulate=True).backward_sources
    titles = re.findall(r"^// ==== (\w+): file (\d) of 4, (\S+) =+$", every.stdout, re.MULTILINE)
    parts = ("query_lists", "preprocess", "dkdv", "postprocess")
    assert titles == [(part, str(n), name) for n, (part, name) in enumerate(zip(parts, sources, strict=True), start=1)]
    sources = list(sources.values())
    assert invoke(*arguments, "--kernel", "dkdv").stdout == sources[2]
    renamed = invoke(*arguments, "--kernel", "keys")
    assert renamed.stdout == sources[2] and "--kernel keys is named dkdv now" in renamed.stderr
    deterministic = invoke(*arguments, "--deterministic", "--kernel", "dq")
    assert "attention_backward_dq_" in deterministic.stdout and deterministic.stderr == ""
    assert "its kernels are query_lists, preprocess" in invoke(*arguments, "--kernel", "forward", expect=2).stderr


def test_show_writes_one_file_per_kernel(tmp_path: Path) -> None:
    """With names and contents as in a release; the forward includes the kernel that lists its tiles."""
    text = "[[kernels]]\nmask = \"causal() & document('ids')\"\nhead_dim = 64\ntarget = 'sm_80'\n"
    (tmp_path / "release.toml").write_text(f"{text}passes = ['forward', 'backward']\ndeterministic = [false, true]\n")
    release.build(tmp_path / "release.toml", tmp_path / "released", sources_only=True)
    released = {path.name: path.read_bytes() for path in (tmp_path / "released").glob("*.cu")}
    arguments = ("show", "causal() & document('ids')", "--target", "sm_80", "--output", tmp_path / "out" / "kernels")
    written = [invoke(*arguments)]
    written += [invoke(*arguments, "--pass", "backward", *more) for more in ((), ("--deterministic",))]
    assert {path.name: path.read_bytes() for path in (tmp_path / "out" / "kernels").iterdir()} == released
    assert sum(len(result.stdout.splitlines()) for result in written) == len(released)
    assert re.fullmatch(r"lists\t\S+/lists-\S+\.cu\nforward\t\S+/fwd-\S+\.cu\n", written[0].stdout)


@needs_nvrtc
def test_show_writes_one_kernel_or_its_compiled_form(tmp_path: Path) -> None:
    arguments = ("show", "causal()", "--target", "sm_80", "--pass", "backward", "--kernel", "postprocess")
    invoke(*arguments, "--what", "ptx", "--output", tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("bwd-postprocess-") and path.suffix == ".ptx" and ".target sm_80" in path.read_text()


def test_show_writes_into_a_folder_or_reports_why_not(tmp_path: Path) -> None:
    arguments = ("show", "causal()", "--target", "sm_80", "--output")
    assert "must be a folder" in invoke(*arguments, tmp_path / "causal.cu", expect=2).stderr
    (tmp_path / "file").write_text("mine")
    assert "is a file: give a folder" in invoke(*arguments, tmp_path / "file", expect=2).stderr
    assert (tmp_path / "file").read_text() == "mine"
    refused = invoke("show", "causal()", "--what", "spec", "--output", tmp_path / "out", expect=2)
    assert "--what spec only prints" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_show_tiles_of_the_backward() -> None:
    arguments = ("show", "causal()", "--target", "sm_80", "--what", "tiles", "--len-q", 512, "--pass", "backward")
    plan = compile(fg.AttentionSpec(64, mask=fg.causal()), target="sm_80", emulate=True).backward_plan
    assert json.loads(invoke(*arguments, "--json").stdout)["tile"] == [plan.tile_q, plan.tile_k]


def test_show_hopper_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200 without --target: the target that `compile` selects; the command in a kernel shows that kernel."""
    monkeypatch.setattr("flashgen.cli.machine.gpus", lambda: (Gpu("NVIDIA H200", "sm_90", 150 * 2**30),))
    spec = fg.AttentionSpec(64, mask=fg.causal() & fg.document("ids"))
    compiled = compile(spec, target="sm_90a", emulate=True)
    arguments = ("show", "causal() & document('ids')")
    assert invoke(*arguments).stdout == compiled.source == invoke(*arguments, "--target", "sm_90a").stdout
    assert invoke(*arguments, "--kernel", "lists").stdout == next(iter(compiled.sources.values()))
    assert "family ampere" in invoke(*arguments, "--target", "sm_90").stdout
    keys = invoke(*arguments, "--pass", "backward", "--kernel", "dkdv").stdout
    assert keys in compiled.backward_sources.values() and "target   sm_90a, family hopper" in keys
    for shown in (compiled.source, keys):
        (command,) = re.findall(r"^//   flashgen (show .*)$", shown, re.MULTILINE)
        assert invoke(*shlex.split(command)).stdout == shown
    tiles = json.loads(invoke("show", "causal()", "--what", "tiles", "--len-q", 512, "--json").stdout)["tile"]
    plan = compile(fg.AttentionSpec(64, mask=fg.causal()), target="sm_90a", emulate=True).plan
    assert tiles == [plan.tile_q, plan.tile_k]


def test_show_packed_heads() -> None:
    arguments = ("show", "causal()", "--target", "sm_90a", "--packed-heads", 4)
    plan = compile(fg.AttentionSpec(64, mask=fg.causal()), target="sm_90a", emulate=True).plan
    tile = [plan.tile_q // 4, plan.tile_k]
    shown = invoke(*arguments).stdout
    (command,) = re.findall(r"^//   flashgen (show --packed-heads 4 .*)$", shown, re.MULTILINE)
    assert f"{tile[0]} queries of 4 heads" in shown and invoke(*shlex.split(command)).stdout == shown
    assert json.loads(invoke(*arguments, "--what", "tiles", "--len-q", 512, "--json").stdout)["tile"] == tile
    refused = invoke(*arguments, "--pass", "backward", expect=2)
    assert "only the forward packs heads" in refused.stderr


def test_shown_spec_can_be_parsed_again(tmp_path: Path) -> None:
    text = invoke("show", "causal()", "--score", "softcap(30)", "--head-dim", 96, "--what", "spec").stdout
    assert fg.AttentionSpec.from_json(text) == fg.AttentionSpec(96, score=fg.softcap(30), mask=fg.causal())


@needs_nvrtc
def test_show_compiled_forms() -> None:
    assert ".target sm_80" in invoke("show", "causal()", "--target", "sm_80", "--what", "ptx").stdout
    facts = json.loads(invoke("show", "causal()", "--target", "sm_80", "--what", "resources", "--json").stdout)
    assert facts["target"] == "sm_80" and facts["spill_stores"] == 0 and 0 < facts["registers"] <= 255
    table = invoke("show", "causal()", "--target", "sm_80", "--what", "resources").stdout
    assert f"registers\t{facts['registers']}\n" in table


@needs_nvrtc
def test_show_compiled_forms_and_costs_of_the_backward() -> None:
    arguments = ("show", "causal()", "--target", "sm_80", "--pass", "backward", "--what", "resources")
    facts = {row["part"]: row for row in json.loads(invoke(*arguments, "--json").stdout)}
    assert list(facts) == ["preprocess", "dkdv", "postprocess"] and 0 < facts["dkdv"]["registers"] <= 255
    assert facts["dkdv"]["flops"].startswith("640 * batch * heads_q * len_q * len_k")  # 5 products, 2 in the forward
    assert all("batch" in row["hbm_bytes"] for row in facts.values())
    assert re.search(r"^dkdv\t\d+\t", invoke(*arguments).stdout, re.MULTILINE)
    forward = json.loads(invoke(*arguments[:4], "--what", "resources", "--json").stdout)
    assert forward["flops"].startswith("256 * batch") and "bytes" in forward["hbm_bytes"]


@needs_nvrtc
def test_show_machine_instructions() -> None:
    pytest.importorskip("nvidia", reason="needs nvdisasm: pip install '.[inspect]'")
    assert "HMMA" in invoke("show", "causal()", "--target", "sm_80", "--what", "sass").stdout


def test_show_tiles() -> None:
    drawn = invoke("show", "causal()", "--target", "sm_80", "--what", "tiles", "--len-q", 512).stdout
    assert "partial" in drawn and "512 queries" in drawn
    found = json.loads(
        invoke("show", "causal()", "--target", "sm_80", "--what", "tiles", "--len-q", 512, "--json").stdout
    )
    tiles = compile(fg.AttentionSpec(64, mask=fg.causal()), target="sm_80", emulate=True).tiles(512, 512)
    assert found["classes"] == tiles.classes.tolist() and tuple(found["tile"]) == tiles.tile


def test_show_tiles_of_a_mask_with_captures() -> None:
    arguments = ("show", "document('sentence')", "--target", "sm_80", "--what", "tiles", "--len-q", 176)
    assert "176 queries" in invoke(*arguments, "--input", EXAMPLE).stdout
    assert "sentence" in invoke(*arguments, expect=2).stderr


def test_show_the_tiles_of_a_sequence(tmp_path: Path) -> None:
    np.savez(tmp_path / "packed.npz", lengths=np.array([64, 512, 512], np.int32))
    mask = "prefix_lm(Tensor('lengths', 'int32', 1))"
    arguments = ("show", mask, "--target", "sm_80", "--what", "tiles", "--len-q", 512, "--captures")
    packed = tmp_path / "packed.npz"
    first, second = (invoke(*arguments, packed, *more).stdout for more in ((), ("--batch", 1)))
    assert "; batch 0 of 3 (" in first and "·" in first.splitlines()[0]
    assert "100.0% of the work" in second and "; batch 1 of 3 (" in second and first != second
    every, one = (
        json.loads(invoke(*arguments, packed, *more, "--json").stdout)["classes"] for more in ((), ("--batch", 1))
    )
    assert len(every) == 3 and one == every[1:2]
    invoke(*arguments, packed, "--batch", 1, "--output", tmp_path / "second.svg")
    invoke(*arguments, packed, "--output", tmp_path / "first.svg")
    assert (tmp_path / "second.svg").read_bytes() != (tmp_path / "first.svg").read_bytes()
    zoom = (*arguments, packed, "--zoom", "0,7")
    assert "full: queries" in invoke(*zoom, "--batch", 2).stdout and "empty: queries" in invoke(*zoom).stdout
    assert "batch=3 is not in this map: give 0 to 2" in invoke(*arguments, packed, "--batch", 3, expect=2).stderr
    assert "--batch, --head: only" in invoke("show", mask, "--batch", 0, "--head", 1, expect=2).stderr


def test_show_writes_images(tmp_path: Path) -> None:
    arguments = ("show", "causal()", "--target", "sm_80", "--what", "tiles", "--len-q", 512, "--output")
    svg = tmp_path / "map.svg"
    assert "of the work: 512 queries" in invoke(*arguments, svg).stdout
    assert svg.read_text() == invoke("show", "causal()", "--target", "sm_80", "--what", "svg", "--len-q", 512).stdout
    refused = invoke(*arguments, tmp_path / "map.png", expect=2).stderr
    assert "pictures are written as SVG" in refused and not (tmp_path / "map.png").exists()
    assert "cannot be written" in invoke(*arguments, tmp_path / "nowhere" / "map.svg", expect=2).stderr


def test_show_elements_of_a_tile(tmp_path: Path) -> None:
    arguments = ("show", "sliding_window(9)", "--target", "sm_80", "--what", "tiles", "--len-q", 300, "--zoom")
    drawn = invoke(*arguments, "0,0").stdout
    assert "tile 0,0, partial" in drawn and "█ kept" in drawn and "of the work: 300 queries" in drawn
    zoom = json.loads(invoke(*arguments, "0,1", "--json").stdout)["zoom"]
    kept = np.array(zoom["kept"])
    q, k = zoom["first_q"] + np.arange(len(kept))[:, None], zoom["first_k"] + np.arange(kept.shape[1])
    assert zoom["column"] == 1 and np.array_equal(kept, (q - 9 <= k) & (k <= q))
    written = invoke(*arguments, "0,0", "--output", tmp_path / "tile.svg").stdout
    assert "of the work" in written and "tile 0,0, partial" in written and "% kept" in written
    assert "ROW,COLUMN" in invoke(*arguments, "0x0", expect=2).stderr
    assert "tile 99,0 is not in this map" in invoke(*arguments, "99,0", expect=2).stderr


def test_show_names_the_missing_capture(tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", other=np.zeros(3))
    arguments = ("show", "document('ids')", "--target", "sm_80", "--what", "tiles")
    assert "'ids' (int32, ndim 1), which is missing: give --captures" in invoke(*arguments, expect=2).stderr
    assert "c.npz holds other" in invoke(*arguments, "--captures", tmp_path / "c.npz", expect=2).stderr
    assert "--captures" in invoke(*arguments, "--captures", tmp_path / "c.pt", expect=2).stderr


def test_show_refuses_image_options_elsewhere(tmp_path: Path) -> None:
    assert "--zoom, --captures: only" in invoke("show", "causal()", "--zoom", "0,0", "-i", "a.npz", expect=2).stderr
    assert "must be a folder" in invoke("show", "causal()", "--output", "a.svg", expect=2).stderr


def test_shell_completion_of_options() -> None:
    for option, said in (("--target", "sm_9"), ("--dtype", "bf"), ("--layout", "t"), ("--scheme", "ulysses_")):
        words = f"flashgen show full() {option} {said}"
        environment = {"_FLASHGEN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "4"}
        completed = CliRunner().invoke(app, [], prog_name="flashgen", env=environment).stdout.split()
        assert completed and all(word.startswith(said) for word in completed), (option, completed)


# ---- run


def test_run_writes_what_numpy_computes(tmp_path: Path) -> None:
    output = tmp_path / "out.npz"
    result = invoke(
        *("run", "document('sentence')", "--score", "alibi('slopes')", "--dropout", 0.1, "--seed", 3),
        *("--input", EXAMPLE, "--output", output, "--lse", "--check", "--emulate", "--json"),
    )
    example = load_arrays(EXAMPLE)
    spec = fg.AttentionSpec(32, dropout=0.1, score=fg.alibi("slopes"), mask=fg.document("sentence"))
    expected, lse = reference.attention(
        spec, *(example[name] for name in "qkv"), seed=3, return_lse=True,
        slopes=example["slopes"], sentence=example["sentence"],
    )  # fmt: skip
    found = load_arrays(output)
    assert np.abs(found["out"] - expected).max() < 5e-3 and np.abs(found["lse"] - lse).max() < 1e-3
    report = json.loads(result.stdout)
    assert report["check"]["ok"] and report["spec"] == spec.name and report["out"] == list(expected.shape)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_run_on_bfloat16(tmp_path: Path, suffix: str) -> None:
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal((1, 2, 9, 16)).astype(ml_dtypes.bfloat16) for name in "qkv"}
    source, output = tmp_path / f"in{suffix}", tmp_path / f"out{suffix}"
    save_arrays(source, arrays)
    dtype = ["--dtype", "bfloat16"] if suffix == ".npz" else []
    invoke("run", "causal()", *dtype, "--input", source, "--output", output, "--check", "--emulate")
    found = load_arrays(output)
    assert found.keys() == {"out"}
    assert found["out"].dtype == (np.uint16 if suffix == ".npz" else ml_dtypes.bfloat16)


def test_run_a_full_spec_and_a_function_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "variants.py").write_text("def near(b, h, q, k):\n    return abs(q - k) <= 9\n")
    spec = fg.AttentionSpec(32, mask=fg.causal()).to_json()
    for text in (spec, f"{tmp_path}/variants.py:near"):
        invoke("run", text, "--input", EXAMPLE, "--output", tmp_path / "o.npz", "--check", "--emulate")


def test_run_names_missing_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", q=np.zeros((1, 1, 8, 8), np.float32))
    np.savez(tmp_path / "b.npz", **{name: np.zeros((1, 1, 8, 8), np.float32) for name in "qkv"})
    common = ("--output", tmp_path / "o.npz", "--emulate")
    assert "lacks k, v" in invoke("run", "full()", "--input", tmp_path / "a.npz", *common, expect=2).stderr
    assert "float32" in invoke("run", "full()", "--input", tmp_path / "b.npz", *common, expect=2).stderr
    missing = invoke("run", "document('ids')", "--input", EXAMPLE, *common, expect=2).stderr
    assert "lacks the captures ids; it holds k, q, sentence, slopes" in missing
    assert "suffix '.pt'" in invoke("run", "full()", "--input", tmp_path / "a.pt", *common, expect=2).stderr


@pytest.mark.skipif(bool(gpus()), reason="there is a GPU")
def test_run_does_not_fall_back_to_the_cpu(tmp_path: Path) -> None:
    result = invoke("run", "full()", "--input", EXAMPLE, "--output", tmp_path / "o.npz", expect=2)
    assert "--emulate" in result.stderr and not (tmp_path / "o.npz").exists()


# ---- verify


def test_verify_a_spec() -> None:
    rows = json.loads(invoke("verify", "causal()", "--head-dim", 32, "--emulate", "--schedules", 2, "--json").stdout)
    assert rows["ok"] and rows["failures"] == 0 and len(rows["results"]) == 40
    assert all(row["error"] <= row["bound"] for row in rows["results"])
    assert [row["pass"] for row in rows["results"][:2]] == ["forward", "backward"]
    assert list(rows["results"][1]["outputs"]) == ["dq", "dk", "dv"]


def test_verify_only_the_backward() -> None:
    arguments = ("verify", "full()", "--head-dim", 8, "--emulate", "--pass", "backward", "--deterministic")
    result = invoke(*arguments, "--schedules", 2)
    assert result.stderr.endswith("\n20 of 20 passed\n") and "forward" not in result.stdout
    (heading, row) = (line.split("\t") for line in result.stdout.splitlines())
    assert heading == ["spec", "passed", "worst", "error", "bound", "LSE error", "verdict"]
    assert row[0].startswith("fp16-d8-full-") and row[1] == "20 of 20" and row[2] in ("dq", "dk", "dv")
    assert 0 < float(row[3]) < float(row[4]) and row[5:] == ["", "ok"]


def test_verify_under_a_sanitizer() -> None:
    result = invoke("verify", "full()", "--head-dim", 8, "--sanitize", "address")
    assert "engine: emulator, address" in result.stderr and "FAILED" not in result.stdout


def test_verify_without_a_compiler_is_an_error_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    refused = invoke("verify", "full()", "--emulate", expect=2)
    assert "error: CXX names '/no/such/compiler'" in refused.stderr and not refused.stdout


def test_verify_exits_1_on_a_failure() -> None:
    refused = invoke("verify", "full()", "--dtype", "bfloat16", "--target", "sm_75", "--emulate", expect=1)
    assert "0 of 20 passed, 20 failed" in refused.stderr
    row, why = refused.stdout.splitlines()[1:]  # all for the same reason
    assert row.endswith("\tFAILED") and why.startswith("  2x2x113x203 forward and 19 more\t")
    assert "UnsupportedError" in why and "use float16 there (see docs/limits.md) (emulator, sm_75, in_order, " in why
    overflowing = invoke("verify", "full()", "--head-dim", 8, "--scale", 1e5, "--emulate", expect=1)
    row, forward, backward = overflowing.stdout.splitlines()[1:]
    assert "\t0 of 20\t" in row and "forward and 9 more\t\tout" in forward and "dq, dk, dv beyond" in backward


def test_verify_names_the_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run of six fails, in the second of two specs; the row has the numbers of that run, not of a passing one."""
    from flashgen import verify
    from flashgen.reference import Verdict

    def results(cases: Any, **_options: Any) -> Iterator[verify.Result]:
        for number, case in enumerate(cases):
            wrong = number == 13
            verdict = Verdict(0.5 if wrong else 0.1, 0.2, 1e-7 * number, ok=not wrong)
            yield verify.Result(case, "emulator", 1.0, {"out": verdict})

    monkeypatch.setattr(verify, "verify", results)
    found = invoke("verify", "full()", "causal()", "--pass", "forward", "--emulate", expect=1)
    full, causal, failed = (line.split("\t") for line in found.stdout.splitlines()[1:])
    assert full[1:] == ["10 of 10", "out", "1.0e-01", "2.0e-01", "9.0e-07", "ok"]
    assert causal[1:] == ["9 of 10", "out", "5.0e-01", "2.0e-01", "1.9e-06", "FAILED"]
    assert failed == [
        "  2x2x128x217 forward",
        "",
        "out",
        "5.0e-01",
        "2.0e-01",
        "1.3e-06",
        "out beyond the bound (emulator)",
    ]
    assert found.stderr.endswith("\n19 of 20 passed, 1 failed\n")


VARIANTS_FILE = """
import numpy as np
import flashgen.language as fg
from flashgen.verify import Variant

def ordered(shape, random):
    print("made for", shape)
    return {"first": np.minimum(np.arange(shape.len_q), shape.len_k - 1).astype(np.int32)}

first = fg.Tensor("first", "int32", 1)
mask = fg.trace_mask(lambda b, h, q, k: k >= first[q])
late = Variant(mask, fg.alibi(2), equal=True, captures=ordered, scale=0.5)
"""


def test_verify_a_variant_of_a_file_with_custom_captures(tmp_path: Path) -> None:
    (tmp_path / "variants.py").write_text(VARIANTS_FILE)
    result = invoke("verify", f"{tmp_path}/variants.py:late", "--head-dim", 16, "--emulate")
    assert "made for 2x2x65x65" in result.stdout and "\t8 of 8\t" in result.stdout
    assert "8 of 8 passed" in result.stderr and "failed" not in result.stderr
    refused = invoke("verify", f"{tmp_path}/variants.py:late", "--scale", 1, "--dropout", 0.5, expect=2).stderr
    assert "is a Variant, so --dropout, --scale cannot change it" in refused


def test_verify_named_variants_of_the_suite() -> None:
    suite = Path(__file__).parents[1] / "gym" / "suite.py"
    found = json.loads(invoke("verify", f"{suite}:flamingo", "--head-dim", 16, "--emulate", "--json").stdout)
    assert found["ok"] and [result["shape"] for result in found["results"]][2].endswith("203x315")
    assert "document_causal_with_alibi" in invoke("verify", f"{suite}:unheard_of", "--emulate", expect=2).stderr


def test_verify_refuses_options_without_a_spec() -> None:
    assert "need a SPEC" in invoke("verify", "--head-dim", 32, expect=2).output


# ---- demo, doctor, bench


def test_demo(tmp_path: Path) -> None:
    result = invoke("demo", "--output", tmp_path, "--emulate", "--json")
    summary = json.loads(result.stdout)
    assert "emulator" in summary["engine"] and "emulator" in result.stderr
    assert len(summary["variants"]) == 6 and all(variant["ok"] for variant in summary["variants"])
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    for variant in summary["variants"]:
        folder = Path(variant["folder"])
        assert "__global__ void __launch_bounds__" in (folder / "kernel.cu").read_text()
        assert (folder / "tiles.svg").read_text().startswith("<svg")
        assert fg.AttentionSpec.from_json((folder / "spec.json").read_text()).name == variant["spec"]
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    linked = re.findall(r'href="([^"#:]+)"', index)
    assert len(linked) >= 18 and all((tmp_path / path).is_file() for path in linked)
    assert index.count("<svg") == 12 and "http://" not in index.replace("http://www.w3.org/2000/svg", "")
    assert index.count("viewBox=") == index.count(">query ↓<") == index.count(">key →<") == 12
    for colour, name, meaning in demo_page.LEGEND:
        assert re.search(rf"background: {colour}.*{name}</th><td>{meaning}</td>", index)
    for variant in summary["variants"]:
        assert f"{100 * variant['share_of_tiles_visited']:.1f}% of the work" in index
        assert f">kept {100 * variant['share_of_scores_kept']:.1f}%<" in index
        skipped = 1 - variant["bytes"] / variant["bytes_without_skipping"]
        assert f"skipping saves {skipped:.0%} of 5.4 MB; standard attention 36.8 MB" in index
    rows, tokens, heads = 4 * 1056, 1056, 4  # standard attention: algorithm 0 of FlashAttention, in float16
    assert summary["variants"][0]["bytes_of_standard_attention"] == 2 * (4 * rows * 32 + 4 * heads * tokens**2)
    shares = [variant["share_of_tiles_visited"] for variant in summary["variants"]]
    assert shares[0] == 1 and shares[1] < 0.6 and all(shares[number] < 0.25 for number in (2, 4, 5))


def test_demo_shows_tile_maps_and_attention_weights(tmp_path: Path) -> None:
    shown = invoke("demo", "--output", tmp_path, "--emulate").stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    told = re.findall(r"^ +tiles +(\S+)% visited: 1056 × 1056 scores in tiles of (\d+) × (\d+)$", shown, re.MULTILINE)
    assert told == [
        (f"{100 * ran['share_of_tiles_visited']:.1f}", *map(str, ran["tile"])) for ran in summary["variants"]
    ]
    assert "blue: all kept, no mask code, orange: masked by element" in shown
    assert all(len(line) <= 80 for line in shown.splitlines() if "kernel.cu" not in line)
    assert all(ran["tokens"] == 1056 for ran in summary["variants"])
    axis, *causal = shown.split("2. causal()\n")[1].splitlines()[:19]  # 1056 tokens in blocks of 64
    assert axis.strip() == "query ↓" and causal[17].split() == ["0", "256", "512", "768", "1024", "key", "→"]
    assert [line[7:] for line in causal[:17]] == [("██" * row + "▒▒").ljust(34, "·") for row in range(17)]
    assert [line[:7].strip() for line in causal[:17:4]] == ["0", "256", "512", "768", "1024"]
    kept = re.findall(r"^ +mask +keeps (\S+)% of the scores$", shown, re.MULTILINE)
    assert kept == [f"{100 * ran['share_of_scores_kept']:.1f}" for ran in summary["variants"]]
    assert summary["variants"][1]["share_of_scores_kept"] == 1057 / (2 * 1056)  # causal
    assert "causal() & sliding_window(100)" in shown and "█" in shown and "FAILED" not in shown
    assert re.search(r'Attention weights of "rabbit" within its sentence.*\n( +head +\d+: .*\n){3}', shown)


def test_doctor() -> None:
    findings = {(row["area"], row["name"]): row for row in json.loads(invoke("doctor", "--json").stdout)}
    assert findings["python", "numpy"]["ok"] and findings["emulator", "plain"]["ok"]
    assert all(row["ok"] or row["remedy"] for row in findings.values())
    assert "emulator\tplain\tworks" in invoke("doctor").stdout


@pytest.mark.parametrize("package", doctor.ENGINES)
@pytest.mark.parametrize(("problem", "found"), [(None, "0.33.0"), ("pip install 'vllm==0.33.*'", None)])
def test_doctor_reports_engines(
    package: str, problem: str | None, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_version() -> None:
        if problem:
            raise ImportError(problem)

    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, f"{package}.versions", SimpleNamespace(check_version=check_version))
    monkeypatch.setattr(doctor, "package_version", lambda package: "0.33.0")
    rows = {row.name: row for row in doctor.examine_engines()}
    found = found and f"{doctor.ENGINES[package]} {found}"
    assert rows[package] == doctor.Finding("engine", package, found, problem or "")


def test_doctor_reports_an_engine_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashgen_vllm", None)
    row = next(row for row in doctor.examine_engines() if row.name == "flashgen_vllm")
    assert row.found is None and row.remedy == "pip install ./integrations/vllm, in a checkout of flashgen"


def test_doctor_lists_each_remedy_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [doctor.Finding("python", "numpy", "2.0", "install it")]
    found += [doctor.Finding("cuda", name, None, "pip install '.[cuda13]'") for name in ("CuPy", "NVRTC")]
    found += [
        doctor.Finding("cuda", "driver", None, "a driver"),
        doctor.Finding("target", "sm_80", None, found[1].remedy),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: iter(found))
    rows, missing = invoke("doctor").stdout.split("\n\n")
    assert rows.splitlines()[1:3] == ["python\tnumpy\t2.0", "cuda\tCuPy\tno"]
    assert missing.splitlines()[1:] == ["CuPy, NVRTC, sm_80\tpip install '.[cuda13]'", "driver\ta driver"]
    assert [row["remedy"] for row in json.loads(invoke("doctor", "--json").stdout)] == [
        "",
        *[found[1].remedy] * 2,
        *["a driver", found[1].remedy],
    ]


@needs_nvrtc
@pytest.mark.parametrize(
    ("architecture", "runs"), [("sm_90", {"sm_90", "sm_90a"}), ("sm_86", {"sm_80", "sm_86"}), ("sm_120", {"sm_120"})]
)
def test_doctor_lists_targets_that_run_here(architecture: str, runs: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpus", lambda: (Gpu("a GPU", architecture, 2**35),))
    found = {finding.name: finding.found for finding in doctor.examine_targets()}
    assert {name for name, what in found.items() if what == "compiles and runs"} == runs
    assert found["sm_90a"] is not None


@pytest.mark.parametrize(
    ("driver", "cupy", "said"),
    [
        ("12.8", "cupy-cuda13x", "the driver supports CUDA 12.8 and CuPy needs CUDA 13"),
        ("13.0", "cupy-cuda13x", "none is needed"),
        ("12.8", "cupy-cuda12x", "none is needed"),
        (None, "cupy-cuda13x", "none is needed"),
    ],
)
def test_doctor_reports_an_old_driver(
    driver: str | None, cupy: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "gpus", tuple)
    monkeypatch.setattr(doctor, "driver_version", lambda: driver)
    monkeypatch.setattr(doctor, "package_version", lambda *names: "14.0" if cupy in names else None)
    found = {finding.name: finding for finding in doctor.examine_cuda()}
    assert not found["GPU"].ok and found["GPU"].remedy.startswith(said)
    assert ("[cuda12]'" in found["GPU"].remedy) == said.startswith("the driver")


@pytest.mark.skipif(bool(gpus()), reason="there is a GPU")
def test_bench_needs_a_gpu() -> None:
    for arguments in ((), ("causal()",), ("--variants",), ("speed",), ("gqa",), ("biases",), ("decode",), ("ragged",)):
        assert "no GPU" in invoke("bench", *arguments, expect=2).stderr


@pytest.mark.parametrize("name", ["context", "host", "paper", "plot", "train"])
def test_a_moved_bench_command_names_its_successor(name: str) -> None:
    for more in ("--help",), ("--output", "a b.json"):
        refused = invoke("bench", name, *more, expect=2)
        assert f"`python -m benchmarks {name} {shlex.join(more)}`" in refused.stderr and not refused.stdout
    assert name not in invoke("bench", "--help").stdout


def test_bench_passes_its_options_on_and_saves_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements are mocked."""
    asked: dict[str, Any] = {}

    def speed_rows(specs: Any, lengths: Any, *choices: Any) -> Iterator[bench.Row]:
        asked["speed"] = [[spec.name for spec in specs], lengths, *choices]
        yield bench.Row("causal", "sm_90", "forward", 4096, 4, 16, {"flashgen": 1, "FA4": 2}, {"flashgen": 9, "FA4": 4})

    def variant_rows(variants: Any, *choices: Any) -> Iterator[bench.VariantRow]:
        asked["variants"] = [[variant.name for variant in variants], *choices]
        yield bench.VariantRow("dropout 0.1", "d", "sm_90a", "forward", 1.1, 1.0, None, None, None, None, 1.0)

    def grouped_rows(specs: Any, *choices: Any) -> Iterator[bench.GroupedRow]:
        asked["gqa"] = [[(spec.dtype, spec.head_dim) for spec in specs], *choices]
        yield bench.GroupedRow("full", "sm_90a", "forward", 4096, 4, 32, 8, {"flashgen": 1}, {"flashgen": 9}, {})

    for stub in (speed_rows, variant_rows, grouped_rows):
        monkeypatch.setattr(bench, stub.__name__, stub)
    monkeypatch.setattr(bench, "environment", lambda: {"gpu": "none"})
    monkeypatch.setattr("flashgen.cli.bench.require_gpu", lambda: None)
    output = ("--output", tmp_path / "bench.json")
    chosen = ("--target", "sm_90", "--dtype", "float16", "--head-dims", 64, "--lengths", 4096, "--peers", "cuDNN,FA4")
    result = invoke("bench", "causal()", *chosen, *output)
    (name,), *rest = asked["speed"]
    assert name.startswith("fp16-d64-causal") and rest == [[4096], ["cuDNN", "FA4"], "forward", False, "sm_90", 0, 0]
    assert "sm_90" in result.stdout and "beside the best peer: 1 of 1 cells" in result.stderr
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert saved["rows"][0]["best_peer"] == "FA4" and "the best peer" in saved["summary"][0]
    result = invoke("bench", "--variants", "--only", "dropout 0.1", "--no-mask-times", *output)
    assert asked["variants"] == [["dropout 0.1"], "forward", "bfloat16", True, False, None]
    assert "dropout 0.1: +10.0%" in result.stderr
    assert "GQA 32:8" in invoke("bench", "gqa", "--lengths", 4096, "--target", "sm_90a", *output).stdout
    assert asked["gqa"] == [2 * [("bfloat16", 128)], [4096], [32, 8, 1], 32, [], "forward", "sm_90a"]
    assert "5 does not divide --heads 32" in invoke("bench", "gqa", "--heads-kv", "32,5", expect=2).stderr
    assert "not one of FA2, cuDNN, Flex, FA4, FFPA" in invoke("bench", "--peers", "FA5", expect=2).stderr


@pytest.mark.parametrize(("broken", "said"), [(None, "[torch]"), ("torch", "Error")])
def test_doctor_reports_frameworks(broken: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With frameworks that are missing, and with one whose import fails."""
    monkeypatch.setattr(doctor, "package_version", lambda *names: "9.9" if broken in names else None)
    if broken:
        monkeypatch.setitem(sys.modules, broken, None)
        for module in [name for name in sys.modules if name.startswith("flashgen.torch")]:
            monkeypatch.delitem(sys.modules, module)
    found = {finding.name: finding for finding in doctor.examine_frameworks()}
    assert found.keys() == {"flashgen.torch", "flashgen.transformers", "flashgen.jax"}
    assert not any(finding.ok for finding in found.values()) and "[jax]" in found["flashgen.jax"].remedy
    assert said in found["flashgen.torch"].remedy


@pytest.mark.parametrize(
    ("built", "sees", "said"),
    [(None, False, "built without CUDA"), ("13.0", False, "sees no GPU"), ("13.0", True, "after register_sdpa()")],
)
def test_doctor_says_whether_torchs_registry_is_possible(
    built: str | None, sees: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees)
    (finding,) = [each for each in doctor.examine_frameworks() if each.name == "torch's SDPA registry"]
    assert said in (finding.found if sees else finding.remedy) and finding.ok is sees
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    assert not sees or "install torch 2.11" in doctor.examine_sdpa_registry().remedy


def test_bench_prints_rows_immediately_and_keeps_them_at_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = bench.Row("full", "sm_90", "forward", 4096, 4, 16, {"flashgen": 1, "FA4": 2}, {"flashgen": 9, "FA4": 4})
    measured, printed = [row], []

    def speed_rows(*_choices: Any) -> Iterator[bench.Row]:
        yield from measured
        sys.stdout.flush()
        printed.append(sys.stdout.buffer.getvalue().decode())  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "speed_rows", speed_rows)
    monkeypatch.setattr(bench, "environment", lambda: {"gpu": "none"})
    monkeypatch.setattr("flashgen.cli.bench.require_gpu", lambda: None)
    output = tmp_path / "bench.json"
    result = invoke("bench", "--peers", "cuDNN,FA4", "--output", output, expect=130)
    heading, cells = (line.split("\t") for line in result.stdout.splitlines())
    assert dict(zip(heading, cells, strict=True))["FA4 TFLOP/s"] == "4" and "cuDNN TFLOP/s" in heading
    assert printed == [result.stdout] and "interrupted after 1 of 18 rows\n" in result.stderr
    saved = json.loads(output.read_text())
    assert saved["interrupted"] and len(saved["rows"]) == 1 and saved["summary"]
    before = output.read_text()
    measured.clear()
    assert "after 0 of 18 rows" in invoke("bench", "--output", output, expect=130).stderr
    assert output.read_text() == before  # no measurement that could replace it


@pytest.mark.gpu
def test_bench(tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    invoke("bench", "causal()", "--head-dims", 64, "--lengths", 1024, "--output", output)
    report = json.loads(output.read_text())
    assert report["environment"]["gpu"] and report["rows"][0]["tflops"]["flashgen"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("passes", ["backward", "both"])
def test_bench_the_backward(tmp_path: Path, passes: str) -> None:
    output = tmp_path / "bench.json"
    sizes = ("--head-dims", 64, "--lengths", 1024, "--peers", "FA2,cuDNN", "--output", output)
    invoke("bench", "causal()", "--pass", passes, "--deterministic", *sizes)
    (row,) = json.loads(output.read_text())["rows"]
    assert row["timed"] == passes and {"flashgen", "deterministic"} <= row["tflops"].keys()


@pytest.mark.gpu
def test_bench_variants_of_the_backward(tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    chosen = ("--only", "16 documents,learned slopes causal", "--peers", "", "--output", output)
    invoke("bench", "--variants", "--pass", "backward", *chosen)
    documents, slopes = json.loads(output.read_text())["rows"]
    assert documents["lists_ms"] > 0 and documents["deterministic_ratio"] > 0 and slopes["lists_ms"] is None


@pytest.mark.gpu
def test_bench_grouped_heads(tmp_path: Path) -> None:
    output = tmp_path / "gqa.json"
    invoke("bench", "gqa", "causal()", "--lengths", 4096, "--peers", "cuDNN", "--output", output)
    rows = json.loads(output.read_text())["rows"]
    assert [row["name"] for row in rows] == ["MHA 32:32", "GQA 32:8", "MQA 32:1"]
    assert rows[0]["of_first"]["flashgen"] == 1.0 and rows[2]["of_first"]["flashgen"] > 0


@pytest.mark.gpu
def test_bench_checks_its_results() -> None:
    assert "1024,4096" in invoke("bench", "--lengths", "many", expect=2).stderr
    assert "positive" in invoke("bench", "--lengths", "0", expect=2).stderr


# ---- cache and release


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    assert invoke("cache", "path").stdout == f"{tmp_path / 'cache'}\n"
    assert json.loads(invoke("cache", "list", "--json").stdout) == []
    invoke("run", "full()", "--input", EXAMPLE, "--output", tmp_path / "o.npz", "--emulate", "--dropout", 0.25)
    entries = json.loads(invoke("cache", "list", "--json").stdout)
    assert len(entries) == 2 and all(entry["bytes"] > 0 for entry in entries)
    assert invoke("cache", "list").stdout.count("\n") == 3
    invoke("cache", "clear", expect=1, input="n\n")
    assert len(json.loads(invoke("cache", "list", "--json").stdout)) == 2
    assert "removed 2 entries" in invoke("cache", "clear", "--yes").stdout
    assert json.loads(invoke("cache", "list", "--json").stdout) == []


MANIFEST = """
[[kernels]]
mask = ["causal()", "document('ids')"]
head_dim = 64
target = ["sm_75", "sm_80"]
passes = ["forward", "backward"]
"""


def test_release(tmp_path: Path) -> None:
    manifest, folder = tmp_path / "release.toml", tmp_path / "kernels"
    manifest.write_text(MANIFEST)
    invoke("release", "build", manifest, "--out", folder, "--sources-only")
    assert "is unaltered" in invoke("release", "check", folder, "--manifest", manifest).stderr
    source = next(folder.glob("*.cu"))
    source.write_text(source.read_text() + "// altered\n")
    result = invoke("release", "check", folder, "--manifest", manifest, "--json", expect=1)
    assert {finding["path"] for finding in json.loads(result.stdout)["findings"]} == {source.name}
    assert source.name in invoke("release", "check", folder, expect=1).stderr


@needs_nvrtc
def test_a_release_serves_a_machine_without_jit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, folder = tmp_path / "release.toml", tmp_path / "kernels"
    manifest.write_text(MANIFEST)
    report = json.loads(invoke("release", "build", manifest, "--out", folder, "--json").stdout)
    assert report["kernels"]
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHGEN_JIT", "0")
    arguments = ("show", "causal()", "--target", "sm_80", "--what", "resources", "--json")
    assert "FLASHGEN_JIT=0" in invoke(*arguments, expect=2).stderr
    monkeypatch.setenv("FLASHGEN_RELEASE", str(folder))
    assert str(folder) in json.loads(invoke(*arguments).stdout)["cubin"]
    backward = json.loads(invoke(*arguments, "--pass", "backward").stdout)
    assert len(backward) == 3 and all(str(folder) in kernel["cubin"] for kernel in backward)


def test_a_mask_with_a_closed_over_array_needs_no_file(tmp_path: Path) -> None:
    program = "import numpy as np\nids = np.arange(512) // 256\ndef mask(b, h, q, k):\n    return ids[q] == ids[k]\n"
    (tmp_path / "closed.py").write_text(program)
    drawn = invoke("show", f"{tmp_path / 'closed.py'}:mask", "--what", "tiles", "--len-q", 512, "--target", "sm_80")
    assert "100.0% of the work" not in drawn.stdout and "512 queries" in drawn.stdout
