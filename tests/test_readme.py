"""The README's examples are what stands in examples/, its pictures are what is drawn now, and both work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashgen.cli.app import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_SPEC = ROOT / "examples" / "first_spec.py"


def run_python(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_first_spec_is_the_example() -> None:
    declared, used = python_blocks()
    example = FIRST_SPEC.read_text(encoding="utf-8")
    assert declared.strip() in example
    assert all(line in example for line in used.splitlines() if line)


def test_the_blocks_run_as_they_stand() -> None:
    check = "\nassert abs(out - expected).max() < 5e-3 and abs(lse - expected_lse).max() < 1e-3\n"
    run_python("-c", "".join(python_blocks()) + check)


def test_the_example_runs() -> None:
    assert "of the tiles visited" in run_python(str(FIRST_SPEC))


@pytest.mark.parametrize(
    ("spec", "picture"),
    [(f"{FIRST_SPEC}:spec", "tiles-first-spec.svg"), ("causal() & sliding_window(600)", "tiles-window.svg")],
)
def test_the_pictures_are_drawn_from_these_specs(spec: str, picture: str) -> None:
    result = CliRunner().invoke(app, ["show", spec, "--what", "svg", "--len-q", "2048", "--target", "sm_80"])
    drawn = (ROOT / "docs" / picture).read_text(encoding="utf-8")
    assert result.stdout == drawn, f"draw docs/{picture} anew: flashgen show {spec!r} --what svg --len-q 2048 ..."


def test_links_and_pictures_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)|src=\"([^\"]+)\"", README):
        path = next(part for part in target if part)
        assert (ROOT / path).exists(), path


def test_every_command_of_the_readme_exists() -> None:
    for command in set(re.findall(r"^    flashgen (\w+)", README, flags=re.MULTILINE)):
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0, command
