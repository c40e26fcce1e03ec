"""Output of commands about the cache folder: doctor's row, and kernels when the folder is unusable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import flashgen
from flashgen.build import Artifacts, KernelCache, cache_folder, content_key, nvrtc
from flashgen.cli import doctor
from flashgen.cli.app import app

EXAMPLE = Path(flashgen.__file__).parents[1] / "examples" / "minilm_qkv.npz"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_folder, "_warned_kinds", set())
    return tmp_path / "cache"


def invoke(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.stderr
    return result


def test_doctor_describes_the_folder(folder: Path) -> None:
    assert (found := doctor.examine_cache().found) and found.startswith(f"{folder}: 0 entries, 0.0 MiB, of ")
    for name in ("one", "two"):
        KernelCache(folder).put(name, content_key("test", {"name": name}), Artifacts({"a": bytes(300_000)}))
    row = doctor.examine_cache()
    assert (row.area, row.name, row.ok) == ("cache", "folder", True)
    owner = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    assert row.found == f"{folder}: 2 entries, 0.6 MiB, of {owner}, mode 0700, writable"


def test_doctor_reports_an_unusable_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    row = doctor.examine_cache()
    assert row.found is None and "everybody may write to it (mode 0777); `chmod -R go-w" in row.remedy
    folder.rmdir()
    folder.touch()
    assert "File exists" in doctor.examine_cache().remedy
    monkeypatch.setenv("FLASHGEN_CACHE_SHARED", "maybe")
    assert "FLASHGEN_CACHE_SHARED must be 1" in doctor.examine_cache().remedy
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "/dev/null")
    monkeypatch.delenv("FLASHGEN_CACHE_SHARED")
    assert "File exists: /dev/null" in doctor.examine_cache().remedy
    assert "chmod" not in doctor.examine_cache().remedy


@pytest.mark.parametrize("command", [("cache", "path"), ("cache", "list"), ("cache", "clear", "--yes"), ("doctor",)])
def test_a_missing_home(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "~nosuch/x")
    result = CliRunner().invoke(app, command)
    assert result.exit_code == (0 if command == ("doctor",) else 2)
    assert "FLASHGEN_CACHE_DIR='~nosuch/x' names no folder" in result.output


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install 'flashgen[cuda13]'")
def test_show_without_a_cache(folder: Path) -> None:
    folder.touch()
    result = invoke("show", "causal()", "--target", "sm_80", "--what", "resources", "--json")
    assert json.loads(result.stdout)["cubin"] == "in memory"
    assert "builds in memory" in result.stderr


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0, reason="only root can mount a small disk"
)
def test_a_really_full_disk(tmp_path: Path) -> None:
    """A disk of 128 KiB: the emulator works in memory, and an output that does not fit leaves the previous one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k,mode=0700", "none", str(disk)], check=False)
    if mounted.returncode != 0:
        pytest.skip("nothing can be mounted here")
    try:
        (disk / "out.npz").write_bytes(b"before")
        root = Path(flashgen.__file__).parents[1]
        environment = os.environ | {"PYTHONPATH": str(root), "FLASHGEN_CACHE_DIR": str(disk / "cache")}
        command = [sys.executable, "-m", "flashgen", "run", "full()", "-i", str(EXAMPLE), "--emulate", "--force", "-o"]
        done = subprocess.run([*command, str(disk / "out.npz")], env=environment, capture_output=True, text=True)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert "No space left on device" in done.stderr and "builds in memory" in done.stderr
        assert f"error: --output {disk / 'out.npz'} cannot be written: No space left" in done.stderr
        assert (disk / "out.npz").read_bytes() == b"before"
        assert sorted(path.name for path in disk.iterdir()) == ["cache", "out.npz"]
        assert not [path for path in (disk / "cache").iterdir() if path.name.startswith(".")]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
