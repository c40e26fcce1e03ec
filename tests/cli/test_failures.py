"""Failures outside flashgen: output that cannot be written, a user's file that raises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flashgen.cli.app import app

ROOT = Path(__file__).parents[2]
FULL = Path("/dev/full")  # writing to it fails as on a full disk
needs_dev_full = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")


def refused(*arguments: object) -> str:
    """Returns what a failing command prints to stderr."""
    result: Result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2, f"{result.output}\n{result.exception!r}"
    assert result.stderr.startswith("error: ") or "\nerror: " in result.stderr
    return result.stderr


# ---- output


@needs_dev_full
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [("show", "causal()", "--target", "sm_80"), ("cache", "path"), ("--help",)])
def test_a_full_standard_output_is_reported(arguments: tuple[str, ...], unbuffered: str) -> None:
    """With text that is longer than Python's buffer, shorter, and unbuffered."""
    with FULL.open("wb") as full:
        command = [sys.executable, "-m", "flashgen", *arguments]
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


def test_the_demo_refuses_a_file_as_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    said = refused("demo", "--emulate", "--output", tmp_path / "taken")
    assert (
        said
        == f"error: --output {tmp_path / 'taken'} is a file: give a folder, which is created if it does not exist\n"
    )
    assert "cannot be written" in refused("demo", "--emulate", "--output", tmp_path / "taken" / "below")
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_the_demo_into_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert "cannot be written: Permission denied" in refused("demo", "--emulate", "--output", tmp_path / "demo")
        assert "cannot be written" in refused("demo", "--emulate", "--output", tmp_path)
    finally:
        tmp_path.chmod(0o700)


@needs_dev_full
def test_the_demo_on_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "summary.json").symlink_to(FULL)
    said = refused("demo", "--emulate", "--output", tmp_path, "--json")
    assert f"error: --output {tmp_path / 'summary.json'} cannot be written: No space left on device" in said


@needs_dev_full
def test_an_image_on_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "map.svg").symlink_to(FULL)
    said = refused("show", "causal()", "--target", "sm_80", "--what", "tiles", "--output", tmp_path / "map.svg")
    assert said == f"error: --output {tmp_path / 'map.svg'} cannot be written: No space left on device\n"


# ---- files of the user

VARIANTS = """\
import numpy as np
import flashgen as fg
from flashgen.verify import Variant

def helper():
    return 1 / 0

def near(b, h, q, k):
    return helper()

def captures(shape, random):
    return {"ids": np.zeros(3).reshape(2)}

wrong = Variant(fg.document("ids"), captures=captures, lengths=((9, 9),))
"""


def test_a_function_that_raises_is_reported_by_its_own_lines(tmp_path: Path) -> None:
    path = tmp_path / "variants.py"
    path.write_text(VARIANTS)
    (line,) = refused("show", f"{path}:near").splitlines()
    assert line.startswith("error: mask 'near' (variants.py:6) raised ZeroDivisionError: division by zero; it computes")


def test_captures_that_raise_in_numpy_are_reported_by_the_users_line(tmp_path: Path) -> None:
    path = tmp_path / "variants.py"
    path.write_text(VARIANTS)
    lines = refused("verify", f"{path}:wrong", "--emulate").splitlines()
    assert "error: ValueError: cannot reshape array of size 3 into shape (2,)" in lines
    assert [line for line in lines if line.startswith("  File ")] == [f'  File "{path}", line 12, in captures']


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nowhere_to_be_found\n", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("def f(:\n", "SyntaxError: invalid syntax"),
        ("import flashgen as fg\n\nw = fg.sliding_window(-1)\n", "bad.py:3: sliding_window: left=-1"),
        ("open('/nowhere/x')\n", "FileNotFoundError: "),
        ("raise SystemExit(3)\n", "exits when it is imported"),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    told = refused("show", f"{tmp_path / 'bad.py'}:w")
    assert said in told and str(tmp_path / "bad.py") in told and "importlib" not in told and len(told) < 600


def test_debug_shows_the_full_traceback(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("1 / 0\n")
    result = CliRunner().invoke(app, ["--debug", "show", f"{tmp_path / 'bad.py'}:w"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_an_internal_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("flashgen.cli.show.load_spec", broken)
    assert isinstance(CliRunner().invoke(app, ["show", "causal()"]).exception, ZeroDivisionError)
