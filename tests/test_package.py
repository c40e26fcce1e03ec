"""The package: its version and addresses agree everywhere, and what is published is complete, valid and installable."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import flashgen

ROOT = Path(__file__).parents[1]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CITATION = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


def cited(field: str) -> str:
    found = re.search(rf"^{field}: (.+)$", CITATION, flags=re.MULTILINE)
    assert found, field
    return found[1]


def test_version_and_date_agree() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", flashgen.__version__)
    released = re.findall(r"^## \[(\d\S+)\] - (\d{4}-\d\d-\d\d)$", CHANGELOG, flags=re.MULTILINE)
    assert released[0] == (flashgen.__version__, cited("date-released")) and cited("version") == flashgen.__version__
    assert [date for _, date in released] == sorted((date for _, date in released), reverse=True)
    assert len(released) == CHANGELOG.count("\n## ") - 1, "every section but the first has a version and a date"


def test_addresses_agree() -> None:
    urls = DECLARED["urls"]
    assert set(urls) == {"Repository", "Documentation", "Changelog", "Issues"}
    assert cited("repository-code") == urls["Repository"] and cited("license") == DECLARED["license"]
    for url in urls.values():
        assert url.startswith(urls["Repository"])
        _, _, path = url.partition("/blob/main/")
        assert (ROOT / path).exists()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    missing = [name for name in ("build", "hatchling", "twine") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install '.[dev]'")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def test_twine_accepts_both(published: tuple[Path, Path]) -> None:
    assert run(sys.executable, "-m", "twine", "check", "--strict", *published).count("PASSED") == 2


def test_both_are_complete(published: tuple[Path, Path]) -> None:
    sdist, wheel = published
    tracked = set(run("git", "ls-files", cwd=ROOT).splitlines())
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    outside = {path for path in tracked - packed if not path.startswith(".")}
    assert not outside, "an sdist has every file but those of tools"
    with zipfile.ZipFile(wheel) as archive:
        installed = set(archive.namelist())
    expected = {path for path in tracked if path.startswith("flashgen/")}
    expected |= {f"flashgen/{path}" for path in tracked if path.startswith("templates/")}
    assert expected <= installed
    extra = {name for name in installed - expected if ".dist-info/" not in name}
    assert extra == {"flashgen/examples/minilm_qkv.npz"}


def test_an_installed_wheel_works(published: tuple[Path, Path], tmp_path: Path) -> None:
    """Away from the checkout, with templates of its own; dependencies are those of this environment."""
    place = tmp_path / "installed"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place, published[1])
    environment = os.environ | {"PYTHONPATH": str(place), "FLASHGEN_CACHE_DIR": str(tmp_path / "cache")}
    program = "import flashgen; print(flashgen.__version__, flashgen.__file__)"
    version, path = run(sys.executable, "-c", program, cwd=tmp_path, env=environment).split()
    assert version == flashgen.__version__ and Path(path).is_relative_to(place)
    shown = ("show", "causal()", "--head-dim", "64", "--target", "sm_80")
    assert "__global__" in run(sys.executable, "-m", "flashgen", *shown, cwd=tmp_path, env=environment)
    report = run(sys.executable, "-m", "flashgen", "demo", "--emulate", "--json", cwd=tmp_path, env=environment)
    assert all(row["ok"] for row in json.loads(report)["variants"])
