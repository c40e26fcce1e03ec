"""Release folders with untrusted contents, on full disks and after kills:

other files are kept, nothing partial is left.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import flashgen
from flashgen import release
from flashgen.build import KernelCache
from flashgen.build.entries import describe
from flashgen.build.prebuilt import MANIFEST
from flashgen.cli.app import app
from flashgen.errors import BuildError, FlashgenWarning

TWO = "[[kernels]]\nmask = ['causal()', 'full()']\nhead_dim = 64\ntarget = 'sm_80'\n"
ONE = "[[kernels]]\nmask = 'causal()'\nhead_dim = 64\ntarget = 'sm_80'\n"


def build(folder: Path, text: str, force: bool = False) -> Any:
    request = folder / "release.toml"
    request.write_text(text)
    return release.build(request, folder / "out", sources_only=True, force=force)


def edit(out: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Modifies a release's manifest."""
    manifest = json.loads((out / MANIFEST).read_text())
    change(manifest)
    (out / MANIFEST).write_text(json.dumps(manifest))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def name_file(path: object, data: bytes) -> Callable[[dict[str, Any]], None]:
    """Returns a manifest that declares a file to be a kernel's, with its true size and hash."""
    return lambda manifest: manifest["kernels"][0]["files"].update(notes={"path": path, **describe(data)})


@pytest.mark.parametrize("path", ["../thesis.tex", "/etc/hostname", "a/b", "..", "", "a\0b", MANIFEST, 3, None, ["a"]])
def test_a_manifest_only_names_files_of_its_folder(tmp_path: Path, path: object) -> None:
    """For each reader: building over it, checking it, and looking up a kernel."""
    (tmp_path / "thesis.tex").write_text("years of work")
    build(tmp_path, TWO)
    out = tmp_path / "out"
    edit(out, name_file(path, b"years of work"))
    before = content(out)
    with pytest.raises(BuildError, match="names a file outside of the folder"):
        build(tmp_path, ONE)
    (finding,) = release.check(out)
    assert finding.path == MANIFEST and "names a file outside of the folder" in finding.problem
    with pytest.raises(BuildError, match=r"FLASHGEN_RELEASE cannot be used: .*outside of the folder"):
        KernelCache(tmp_path / "cache", release=out).load_or_compile("k", "source", "sm_80")
    assert content(out) == before and (tmp_path / "thesis.tex").read_text() == "years of work"


def test_files_of_other_origin_are_not_removed(tmp_path: Path) -> None:
    build(tmp_path, TWO)
    out = tmp_path / "out"
    (out / "thesis.tex").write_text("years of work")
    edit(out, name_file("thesis.tex", b"years of work"))
    with pytest.raises(BuildError, match=r"names 'thesis\.tex', which no release writes"):
        build(tmp_path, ONE)
    assert (out / "thesis.tex").read_text() == "years of work"


def test_an_edited_kernel_is_kept_and_reported(tmp_path: Path) -> None:
    kept = {kernel["name"] for kernel in build(tmp_path, ONE)["kernels"]}
    (removed,) = [kernel["name"] for kernel in build(tmp_path, TWO)["kernels"] if kernel["name"] not in kept]
    edited = tmp_path / "out" / f"{removed}.cu"
    edited.write_text("my own kernel")
    with pytest.warns(
        FlashgenWarning, match=rf"{edited.name} was changed after the earlier release wrote it, so it is kept"
    ):
        build(tmp_path, ONE)
    assert edited.read_text() == "my own kernel"
    assert [finding.path for finding in release.check(tmp_path / "out")] == [edited.name]


@pytest.mark.parametrize("edited", [True, False], ids=["edited", "of other origin"])
def test_an_edited_kernel_is_replaced_only_on_request(tmp_path: Path, edited: bool) -> None:
    (kernel,) = build(tmp_path, ONE)["kernels"]
    path = tmp_path / "out" / f"{kernel['name']}.cu"
    if not edited:
        path.rename(path.with_suffix(".kept"))
        build(tmp_path, TWO.replace("'causal()', ", ""))  # a release without this kernel
    path.write_text("my own kernel")
    before = content(tmp_path / "out")
    with pytest.raises(BuildError, match=rf"{path.name} would be replaced, and was edited .*--force"):
        build(tmp_path, TWO)
    result = CliRunner().invoke(app, ["release", "build", str(tmp_path / "release.toml"), "--out", str(path.parent)])
    assert result.exit_code == 2 and "--force" in result.stderr
    assert content(tmp_path / "out") == before
    build(tmp_path, TWO, force=True)
    assert path.read_text() != "my own kernel"


MALFORMED: dict[str, Callable[[dict[str, Any]], object]] = {
    "no files": lambda manifest: manifest["kernels"][0].pop("files"),
    "files is a list": lambda manifest: manifest["kernels"][0].update(files=[]),
    "no source": lambda manifest: manifest["kernels"][0].update(files={}),
    "file is text": lambda manifest: manifest["kernels"][0]["files"].update(source="a.cu"),
    "file without hash": lambda manifest: manifest["kernels"][0]["files"]["source"].pop("sha256"),
    "size is text": lambda manifest: manifest["kernels"][0]["files"]["source"].update(bytes="1"),
    "no path": lambda manifest: manifest["kernels"][0]["files"]["source"].pop("path"),
    "kernel is text": lambda manifest: manifest["kernels"].append("kernel"),
    "no name": lambda manifest: manifest["kernels"][0].pop("name"),
    "cubin without resources": lambda manifest: manifest["kernels"][0]["files"].update(
        cubin=manifest["kernels"][0]["files"]["source"]
    ),
    "version is text": lambda manifest: manifest.update(nvrtc_version="13.0"),
    "version is short": lambda manifest: manifest.update(nvrtc_version=[13]),
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_manifest_is_an_error_by_name(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    build(tmp_path, TWO)
    edit(tmp_path / "out", change)
    refuses(tmp_path, "is not as `flashgen release build` writes it")


@pytest.mark.parametrize(
    "data",
    [b"[" * 100_000 + b"]" * 100_000, b'{"format": NaN}', b"\xff", b"", b"3", b'{"format": 1}'],
    ids=["deep", "NaN", "not UTF-8", "empty", "number", "no kernels"],
)
def test_a_malicious_manifest_is_an_error_by_name(tmp_path: Path, data: bytes) -> None:
    build(tmp_path, TWO)
    (tmp_path / "out" / MANIFEST).write_bytes(data)
    refuses(tmp_path, "cannot be read as a release manifest|is not a release manifest")


@pytest.mark.timeout(60)
def test_a_manifest_that_is_a_pipe_does_not_block(tmp_path: Path) -> None:
    build(tmp_path, TWO)
    (tmp_path / "out" / MANIFEST).unlink()
    os.mkfifo(tmp_path / "out" / MANIFEST)
    refuses(tmp_path, "it is not a regular file")


def refuses(folder: Path, message: str) -> None:
    """Asserts that every reader of the folder's release reports what is wrong with its manifest."""
    (finding,) = release.check(folder / "out")
    assert finding.path == MANIFEST
    with pytest.raises(BuildError, match=message):
        build(folder, ONE)
    with pytest.raises(BuildError, match=message):
        KernelCache(folder / "cache", release=folder / "out").load_or_compile("k", "source", "sm_80")


@pytest.mark.timeout(60)
def test_a_kernel_that_is_a_pipe_is_a_finding(tmp_path: Path) -> None:
    (kernel,) = build(tmp_path, ONE)["kernels"]
    path = tmp_path / "out" / f"{kernel['name']}.cu"
    path.unlink()
    os.mkfifo(path)
    assert release.check(tmp_path / "out") == [release.Finding(path.name, "cannot be read (it is not a regular file)")]


@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_keeps_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    out = tmp_path / "out"
    if there:
        build(tmp_path, ONE)
        (next(out.glob("*.cu"))).write_text("an older kernel")
    before = content(out) if there else None
    written: list[int] = []

    def full_after_one(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full_after_one)
        with pytest.raises(BuildError, match=r"out=.* cannot be written \(No space left on device"):
            build(tmp_path, TWO, force=True)
    assert (content(out) if there else out.exists()) == (before if there else False)
    build(tmp_path, TWO, force=True)
    assert release.check(out) == []


@pytest.mark.parametrize("there", [False, True])
def test_a_killed_build_is_continued(tmp_path: Path, there: bool) -> None:
    if there:
        build(tmp_path, ONE)
    (tmp_path / "release.toml").write_text(TWO)
    script = (
        "import os, sys\nfrom flashgen import release\n"
        "os.fsync = lambda descriptor: os.kill(os.getpid(), 9)\n"
        "release.build(sys.argv[1], sys.argv[2], sources_only=True)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(flashgen.__file__).parents[1])}
    command = [sys.executable, "-c", script, str(tmp_path / "release.toml"), str(tmp_path / "out")]
    assert subprocess.run(command, env=environment, check=False).returncode == -9
    assert any(path.name.startswith(".staging-") for path in (tmp_path / "out").iterdir())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(tmp_path, TWO)
    assert release.check(tmp_path / "out") == []


def test_files_are_flushed_before_the_manifest_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def recorded(descriptor: int) -> None:
        events.append("flush " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).suffix)
        fsync(descriptor)

    def replaced(path: Path, target: Path) -> Path:
        events.append("place " + target.suffix)
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(Path, "replace", replaced)
    build(tmp_path, TWO)
    assert events == ["flush .cu"] * 2 + ["flush .json"] + ["place .cu"] * 2 + ["place .json", "flush "]


@pytest.mark.parametrize("name", ["nowhere", "release.toml"])
def test_checking_a_missing_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "release.toml").write_text(ONE)
    result = CliRunner().invoke(app, ["release", "check", str(tmp_path / name)])
    assert result.exit_code == 2
    assert f"there is no folder {tmp_path / name}; name one that `flashgen release build` wrote" in result.stderr


def test_checking_a_folder_without_a_manifest_reports_it_once(tmp_path: Path) -> None:
    assert release.check(tmp_path) == [
        release.Finding(MANIFEST, "is missing; name a folder that `flashgen release build` wrote")
    ]
