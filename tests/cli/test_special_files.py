"""Pipes and devices in place of a user's file are refused by name, and neither read nor waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import flashgen as fg
from benchmarks import commands
from flashgen import release
from flashgen.cli.arrays import load_arrays
from flashgen.cli.options import SpecOptions
from flashgen.cli.specs import load_spec
from flashgen.errors import FlashgenError

pytestmark = pytest.mark.timeout(60)


def plot(path: Path) -> None:
    """Runs `python -m benchmarks plot`."""
    commands.plot(path, path.with_suffix(".svg"))


READERS: dict[str, Callable[[Path], object]] = {
    "arrays.npz": load_arrays,
    "arrays.safetensors": load_arrays,
    "spec.json": lambda path: load_spec(str(path), SpecOptions()),
    "variants.py": lambda path: load_spec(f"{path}:near", SpecOptions()),
    "kernel.cu": lambda path: fg.compile(fg.AttentionSpec(64), source=path, emulate=True),
    "release.toml": release.read_requests,
    "requests.json": release.read_requests,
    "bench.json": plot,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_special_files_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(FlashgenError, match=r"no file|not a file|not a regular file") as caught:
        READERS[name](path)
    assert "\n" not in str(caught.value)
    assert (name in str(caught.value)) or kind == "device"


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_release_manifest_that_is_no_file(tmp_path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(tmp_path / "manifest.json")
    else:
        (tmp_path / "manifest.json").symlink_to("/dev/zero")
    (finding,) = release.check(tmp_path)
    assert "not a regular file" in finding.problem
