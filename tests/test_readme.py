"""The README's examples equal those in examples/, its pictures are current, and both work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashgen.cli.app import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
FIRST_SPEC = ROOT / "examples" / "first_spec.py"
MOST_LINES = 180
LARGEST_PICTURE = 20_000  # bytes of a picture in the gallery


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


def test_the_blocks_run() -> None:
    check = "\nassert abs(out - expected).max() < 5e-3 and abs(lse - expected_lse).max() < 1e-3\n"
    run_python("-c", "".join(python_blocks()) + check)


def test_the_example_runs_and_checks_its_results() -> None:
    shown = run_python(str(FIRST_SPEC))
    assert "of the tiles visited" in shown
    judged = re.findall(r"^(\w+) +ok: error \S+ <= \S+", shown, flags=re.MULTILINE)
    assert judged == ["out", "dq", "dk", "dv", "d_slopes"]


def failed_example(name: str, *program: str, **environment: str) -> str:
    """Returns the output of an example that cannot run here: one line, with exit status 1."""
    command = [sys.executable, *program, str(ROOT / "examples" / name)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_the_first_example_reports_a_missing_compiler() -> None:
    assert "C++17 compiler" in failed_example("first_spec.py", PATH="/nowhere", CXX="")


@pytest.mark.parametrize(
    ("spec", "picture"),
    [(f"{FIRST_SPEC}:spec", "tiles-first-spec.svg"), ("causal() & sliding_window(600)", "tiles-window.svg")],
)
def test_the_pictures_are_drawn_from_these_specs(tmp_path: Path, spec: str, picture: str) -> None:
    drawn = tmp_path / picture
    arguments = ["show", spec, "--what", "tiles", "--len-q", "2048", "--target", "sm_80", "--output", str(drawn)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    command = f"flashgen show {spec!r} --what tiles --len-q 2048 --target sm_80 --output docs/{picture}"
    assert drawn.read_bytes() == (ROOT / "docs" / picture).read_bytes(), f"run: {command}"


def test_pictures_of_the_gallery_are_small() -> None:
    shown = re.findall(r'"(docs/gallery/\w+\.svg)"', README)
    assert len(shown) == 8
    for name in shown:
        assert len((ROOT / name).read_text(encoding="utf-8")) < LARGEST_PICTURE, name


@pytest.mark.parametrize("page", PAGES)
def test_links_pictures_and_paths_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)|src=\"([^\"]+)\"", text):
        path = next(part for part in target if part)
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`(\w+/[\w./]*)(?:::\w+)?`", text):
        folders = [folder for folder in (ROOT, ROOT / "flashgen") if (folder / path.partition("/")[0]).is_dir()]
        assert not folders or any((folder / path).exists() for folder in folders), path


def test_every_command_of_the_readme_exists() -> None:
    for command in set(re.findall(r"^    flashgen (\w+)", README, flags=re.MULTILINE)):
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0, command


@pytest.mark.parametrize("page", ["README.md", "docs/command-line.md"])
def test_commands_name_existing_files(page: str) -> None:
    """Files that a command reads. Kernels that `show` wrote, and results of `bench`, come from the commands before."""
    text = (ROOT / page).read_text(encoding="utf-8")
    written = set(re.findall(r"--(?:output|out) (\S+)", text)) | {"flashgen-bench.json"}
    for command in re.findall(r"^ *((?:flashgen|python) .*?)(?: {2,}#.*)?$", text, flags=re.MULTILINE):
        for word in re.sub(r"--(?:output|out|dtype) \S+", "", command).split():
            path = word.partition(":")[0]
            if re.fullmatch(r"[\w./-]+(?:\.(?:py|npz|toml|json|cu)|/)", path) and path not in written:
                assert (ROOT / path).exists(), f"{page}: {command}"


def test_one_command_sets_up_and_runs_the_tests() -> None:
    """Of all installed extras, each is one of the project; `.ci/run` runs the command as its last step."""
    found = re.search(r"<!-- test -->\n```sh\n(.*?)```", README, flags=re.DOTALL)
    assert found and found[1].count("\n") == 1
    command = re.fullmatch(r"pip install -e '\.\[([\w,]+)\]' && pytest -n 2\n", found[1])
    assert command
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"test", "dev"} <= {*command[1].split(",")} <= {*project["optional-dependencies"]}
    steps = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "\ntests=$(readme_block test)\n" in steps and steps.endswith('\nbash -euo pipefail -c "$tests"\n')


def test_the_folder_of_the_demo_is_ignored() -> None:
    assert "flashgen-demo/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_it_is_short_and_begins_with_two_commands() -> None:
    """Details and timings are in docs/."""
    assert README.count("\n") <= MOST_LINES
    first = re.search(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    assert first and first[1] == "pip install . && flashgen demo\n"
