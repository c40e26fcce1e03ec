"""`flashgen run` and its input and output files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import flashgen as fg
from flashgen import reference
from flashgen.cli.app import app
from flashgen.cli.arrays import load_arrays, save_arrays


def run(*arguments: object, expect: int = 0) -> Result:
    result = CliRunner().invoke(app, ["run", *map(str, arguments), "--emulate"])
    assert result.exit_code == expect, result.stderr
    return result


def qkv(**more: np.ndarray) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {**{name: random.standard_normal((1, 2, 40, 16)).astype(np.float16) for name in "qkv"}, **more}


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_numbers_are_zero_dimensional_arrays(tmp_path: Path, suffix: str) -> None:
    """Of any type that represents the number, as written by `numpy.savez(path, window=5)`."""
    variants = tmp_path / "variants.py"
    variants.write_text(
        "import flashgen as fg\n"
        "window, slope = fg.Scalar('window'), fg.Scalar('slope', 'float32')\n"
        "spec = fg.AttentionSpec(16, mask=fg.causal() & fg.sliding_window(window),\n"
        "                        score=lambda s, b, h, q, k: s + slope * (k - q))\n"
    )
    given = qkv(window=np.array(5), slope=np.array(0.25))
    save_arrays(tmp_path / f"in{suffix}", given)
    run(f"{variants}:spec", "-i", tmp_path / f"in{suffix}", "-o", tmp_path / f"out{suffix}", "--check")
    window, slope = fg.Scalar("window"), fg.Scalar("slope", "float32")
    spec = fg.AttentionSpec(
        16, mask=fg.causal() & fg.sliding_window(window), score=lambda s, b, h, q, k: s + slope * (k - q)
    )
    expected = reference.attention(spec, *(given[name] for name in "qkv"), window=5, slope=0.25)
    assert np.abs(load_arrays(tmp_path / f"out{suffix}")["out"] - expected).max() < 5e-3


def test_a_number_with_dimensions_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "near.py").write_text("import flashgen as fg\nnear = fg.sliding_window(fg.Scalar('window'))\n")
    np.savez(tmp_path / "in.npz", **qkv(window=np.array([5])))
    result = run(f"{tmp_path}/near.py:near", "-i", tmp_path / "in.npz", "-o", tmp_path / "out.npz", expect=2)
    assert "capture 'window'" in result.stderr


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("spec", ["causal()", '{"head_dim": 16, "mask": "causal()"}'])
def test_a_zero_dimensional_input_is_refused_by_name(tmp_path: Path, spec: str, name: str) -> None:
    np.savez(tmp_path / "in.npz", **qkv(**{name: np.array(1, np.float16)}))
    result = run(spec, "-i", tmp_path / "in.npz", "-o", tmp_path / "out.npz", expect=2)
    said = (f"{name} is an array without dimensions; give", f"{name} has shape (); give")
    assert any(words in result.stderr for words in said)


@pytest.mark.parametrize("another", ["itself", "symbolic link", "hard link", "other way"])
def test_the_input_is_not_overwritten(tmp_path: Path, another: str) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, **qkv())
    before = path.read_bytes()
    output = {"itself": path, "other way": tmp_path / "." / ".." / tmp_path.name / "x.npz"}.get(
        another, tmp_path / "y.npz"
    )
    if another == "symbolic link":
        output.symlink_to(path)
    if another == "hard link":
        os.link(path, output)
    result = run("causal()", "-i", path, "-o", output, expect=2)
    assert "is the file of --input, and would replace q, k and v; give another file" in result.stderr
    assert path.read_bytes() == before


def test_another_file_is_replaced(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **qkv())
    for _ in range(2):
        run("causal()", "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    assert load_arrays(tmp_path / "y.npz").keys() == {"out"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npz", "y.npz"]


def test_an_unwritable_output_is_reported_before_computing(tmp_path: Path) -> None:
    assert "suffix '.pt'" in run("causal()", "-i", "nowhere.npz", "-o", tmp_path / "y.pt", expect=2).stderr
    result = run("causal()", "-i", "nowhere.npz", "-o", tmp_path / "no" / "y.npz", expect=2)
    assert f"there is no folder {tmp_path / 'no'}" in " ".join(result.stderr.split())


def test_a_spec_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_bytes(b'{"head_dim": 64, "mask": "\xff"}')
    result = run(tmp_path / "spec.json", "-i", "nowhere.npz", "-o", tmp_path / "y.npz", expect=2)
    assert "nowhere.npz cannot be read" in result.stderr
    np.savez(tmp_path / "x.npz", **qkv())
    result = run(tmp_path / "spec.json", "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz", expect=2)
    assert "spec.json' is no text in UTF-8" in result.stderr
    deep = json.dumps({"head_dim": 64})[:-1] + ', "mask": ' + "[" * 100_000 + "]" * 100_000 + "}"
    (tmp_path / "spec.json").write_text(deep)
    result = run(tmp_path / "spec.json", "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz", expect=2)
    assert "nested too deep" in result.stderr


def test_wide_captures_of_numpy_are_converted_where_they_fit(tmp_path: Path) -> None:
    wide = {"ids": np.arange(40) // 9, "slopes": np.array([0.5, 0.25])}
    files = {name: tmp_path / f"{name}.npz" for name in ("in", "large")}
    np.savez(files["in"], **qkv(**wide))
    np.savez(files["large"], **qkv(**(wide | {"ids": wide["ids"] + 2**40})))
    common = ("document('ids')", "--score", "alibi('slopes')", "-o", tmp_path / "out.npz", "--check", "-i")
    run(*common, files["in"])
    assert "capture 'ids' has dtype int64; it was declared int32" in run(*common, files["large"], expect=2).stderr


def test_pages_and_varlen_batches_by_argument_names(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = lambda *shape: random.standard_normal(shape).astype(np.float16)
    paged = {"q": rows(2, 2, 1, 16), "k": rows(3, 16, 1, 16), "v": rows(3, 16, 1, 16)}
    paged |= {"page_table": np.array([[2, 0], [1, 0]], np.int32), "seqused_k": np.array([20, 7], np.int32)}
    ragged = {name: rows(30, 2, 16) for name in "qkv"} | {"cu_seqlens_q": np.array([0, 9, 30], np.int32)}
    narrow = paged | {name: random.integers(-99, 99, (3, 16, 1, 32)).astype(np.int8) for name in "kv"}
    narrow |= {"q": rows(2, 2, 1, 32), **{name: np.full(1, 0.02, np.float32) for name in ("k_scale", "v_scale")}}
    for arrays, options in (
        (paged, ("--page-size", 16)),
        (ragged, ("--layout", "thd")),
        (narrow, ("--page-size", 16, "--kv-dtype", "int8")),
    ):
        np.savez(tmp_path / "in.npz", **arrays)
        run("causal()", *options, "-i", tmp_path / "in.npz", "-o", tmp_path / "out.npz", "--check")
