"""Commands with `--shared-kv`: V is the first columns of K."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import flashgen as fg
from flashgen import reference
from flashgen.cli.app import app
from flashgen.cli.arrays import load_arrays, save_arrays
from flashgen.cli.options import SpecOptions
from flashgen.cli.specs import load_spec
from flashgen.cli.tune import bytes_moved, shape_of

OPTIONS = ("--shared-kv", "--value-dim", "24")
SPEC = fg.AttentionSpec(40, value_dim=24, mask=fg.causal(), shared_kv=True)


def invoke(*arguments: object, expect: int = 0) -> Result:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == expect, result.output
    return result


def arrays(names: str = "qk") -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {name: random.standard_normal((1, 2, 40, 40)).astype(np.float16) for name in names}


@pytest.mark.parametrize("spec", [("causal()", *OPTIONS), (SPEC.to_json(),)], ids=["options", "complete"])
def test_run_on_q_and_k(tmp_path: Path, spec: tuple[str, ...]) -> None:
    given = arrays()
    save_arrays(tmp_path / "in.npz", given)
    invoke("run", *spec, "-i", tmp_path / "in.npz", "-o", tmp_path / "out.npz", "--emulate", "--check")
    expected = reference.attention(SPEC, given["q"], given["k"])
    assert np.abs(load_arrays(tmp_path / "out.npz")["out"] - expected).max() < 5e-3


def test_run_refuses_v(tmp_path: Path) -> None:
    save_arrays(tmp_path / "in.npz", arrays("qkv"))
    files = ("-i", tmp_path / "in.npz", "-o", tmp_path / "out.npz", "--emulate")
    result = invoke("run", "causal()", *OPTIONS, *files, expect=2)
    assert "V is the first 24 columns of k: leave v out" in " ".join(result.stderr.split())
    save_arrays(tmp_path / "in.npz", arrays("q"))
    assert "lacks k; it holds q" in invoke("run", "causal()", *OPTIONS, *files, expect=2).stderr


def test_verify_show_and_report() -> None:
    spec = ("causal()", "--head-dim", "40", *OPTIONS)
    verified = invoke("verify", *spec, "--emulate", "--quick", "--target", "sm_80", "--json")
    assert "sharedkv" in verified.stdout
    shown = invoke("show", *spec, "--target", "sm_80")
    assert "sharedkv" in shown.stdout and "Element* v;" not in shown.stdout
    for passes in ("forward", "backward"):
        options = ("--pass", passes, "--target", "sm_80", "--len-q", "64", "--json")
        assert json.loads(invoke("report", *spec, *options).stdout)


def test_tune_counts_the_columns_of_k_once() -> None:
    spec = load_spec("full()", SpecOptions(head_dim=576, value_dim=512, shared_kv=True))
    assert spec.shared_kv and bytes_moved(spec, shape_of(spec, 1, 4096, 64, 128, 1)) == 64 * 4096 * 576 * 2
