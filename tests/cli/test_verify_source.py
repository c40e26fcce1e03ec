"""`flashgen verify SPEC --source` compares edited files of `flashgen show --output` with NumPy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flashgen.cli.app import app

SPEC = ("causal(align='top_left')", "--head-dim", "32", "--target", "sm_80")


def invoke(*arguments: object, expect: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == expect, f"{result.output}\n{result.exception!r}"
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns the kernels of both passes as emitted."""
    for of in ("forward", "backward"):
        invoke("show", *SPEC, "--pass", of, "--output", tmp_path)
    return tmp_path


def edit(folder: Path, kernel: str, old: str, new: str) -> Path:
    (path,) = folder.glob(f"{kernel}-*.cu")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


def verified(source: Path, *more: object, expect: int = 0) -> tuple[Any, str]:
    result = invoke("verify", *SPEC, "--source", source, "--emulate", "--json", *more, expect=expect)
    return json.loads(result.stdout)["results"], result.stderr


def test_a_correct_edit_passes_and_a_wrong_one_fails(folder: Path) -> None:
    path = edit(folder, "fwd", "return k <= q;", "return q >= k;")
    results, said = verified(path, "--pass", "forward")
    assert all(result["ok"] and result["engine"].endswith(", edited forward") for result in results)
    assert re.search(rf"^edited: {path.stem}-edited-[0-9a-f]{{8}}$", said, re.MULTILINE)
    edit(folder, "fwd", "return q >= k;", "return q > k;")
    results, _ = verified(path, "--pass", "forward", expect=1)
    assert not any(result["ok"] for result in results)


def test_a_folder_of_both_passes(folder: Path) -> None:
    results, said = verified(folder)
    assert f"{folder} equals the generated source: nothing in it is edited" in said
    assert not any("edited" in result["engine"] for result in results)
    edit(folder, "bwd-postprocess", "(low * kScale", "(2 * low * kScale")
    results, said = verified(folder, expect=1)
    assert "edited: bwd-postprocess-" in said
    failed = [result for result in results if not result["ok"]]
    assert len(failed) > 5 and {(result["pass"], result["worst"]) for result in failed} == {("backward", "dq")}
    refused = invoke("verify", *SPEC, "--source", folder, "--emulate", "--pass", "forward", expect=2)
    assert "edits postprocess, a kernel of the backward pass: add --pass backward" in refused.stderr


def test_a_syntax_error_is_one_message_before_anything_runs(folder: Path) -> None:
    path = edit(folder, "bwd-dkdv", "return k <= q;", "return k <= qq;")
    refused = invoke("verify", *SPEC, "--source", folder, "--emulate", expect=2)
    assert re.search(r"kernel\.cu:\d+:\d+: error: ", refused.stderr) and str(path) in refused.stderr
    assert refused.stdout == "" and "Traceback" not in refused.stderr
    invoke("verify", *SPEC, "--source", folder, "--emulate", "--pass", "forward", expect=2)


def test_a_source_belongs_to_one_spec(folder: Path) -> None:
    refused = invoke("verify", "--source", folder, "--emulate", expect=2)
    assert "holds kernels of one SPEC: name it" in refused.stderr
    refused = invoke("verify", *SPEC, "full()", "--source", folder, "--emulate", expect=2)
    assert "holds kernels of one SPEC" in refused.stderr
    refused = invoke("verify", "full()", "--target", "sm_80", "--source", folder, "--emulate", expect=2)
    assert "no file is of fp16-d64-full-" in refused.stderr
