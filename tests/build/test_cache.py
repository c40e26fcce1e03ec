"""The cache in one process: hits, damage, settings, and folders that cannot be used."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flashgen.build import Artifacts, KernelCache, content_key, default_cache, nvrtc
from flashgen.build.cache import default_root
from flashgen.build.entries import META
from flashgen.build.resources import Resources
from flashgen.errors import BuildError, FlashgenWarning

KEY = content_key("test", {"source": "one"})
RESOURCES = Resources(registers=64, spill_stores=0, static_shared=128)


class Compiler:
    """Stands for NVRTC and counts what it compiles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, str]] = []
        self.version = (13, 0)
        monkeypatch.setattr(nvrtc, "version", lambda: self.version)
        monkeypatch.setattr(nvrtc, "compile", self.compile)

    def compile(self, source: str, architecture: str, name: str) -> nvrtc.Compiled:
        self.asked.append((name, architecture))
        return nvrtc.Compiled(f"{architecture} {source}".encode(), "a log", RESOURCES, self.version)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(monkeypatch)


def test_an_entry_is_readable_and_found_again(tmp_path: Path, compiler: Compiler) -> None:
    first = KernelCache(tmp_path).load_or_compile("fwd-causal", "the source", "sm_90a")
    again = KernelCache(tmp_path).load_or_compile("fwd-causal", "the source", "sm_90a")
    assert (first.hit, again.hit) == (False, True)
    assert compiler.asked == [("fwd-causal", "sm_90a")]
    assert first.path.parent == tmp_path
    assert first.path.name.startswith("fwd-causal.")
    assert len(first.path.name) == len("fwd-causal.") + 16
    assert sorted(file.name for file in first.path.iterdir()) == ["kernel.cu", "kernel.cubin", "meta.json"]
    assert (first.path / "kernel.cu").read_text() == first.source == "the source"
    assert again.cubin_path.read_bytes() == again.cubin == first.cubin == b"sm_90a the source"
    assert again.resources == first.resources == RESOURCES
    assert again.meta == first.meta
    assert again.meta["nvrtc_version"] == [13, 0]
    assert again.meta["log"] == "a log"


def test_source_architecture_and_compiler_version_are_told_apart(tmp_path: Path, compiler: Compiler) -> None:
    cache = KernelCache(tmp_path)
    folders = {cache.load_or_compile("k", source, arch).path for source in ("a", "b") for arch in ("sm_80", "sm_90")}
    compiler.version = (13, 1)
    folders.add(cache.load_or_compile("k", "a", "sm_80").path)
    assert len(folders) == len(compiler.asked) == 5


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("file", ["kernel.cu", "kernel.cubin", "meta.json"])
@pytest.mark.parametrize("harm", [cut, alter, empty, Path.unlink, become_folder])
def test_a_damaged_entry_is_said_and_built_again(
    tmp_path: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture, file: str, harm: object
) -> None:
    good = KernelCache(tmp_path).load_or_compile("k", "source", "sm_80")
    harm(good.path / file)  # type: ignore[operator]
    with (
        caplog.at_level(logging.WARNING, "flashgen"),
        pytest.warns(FlashgenWarning, match=rf"{good.path.name} is damaged: .*{file}.* it is built again"),
    ):
        rebuilt = KernelCache(tmp_path).load_or_compile("k", "source", "sm_80")
    assert "is damaged" in caplog.text
    assert not rebuilt.hit
    assert (rebuilt.cubin, rebuilt.path) == (good.cubin, good.path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert KernelCache(tmp_path).load_or_compile("k", "source", "sm_80").hit
    assert [path.name for path in tmp_path.iterdir()] == [good.path.name]


def test_a_fact_changed_in_meta_is_damage(tmp_path: Path, compiler: Compiler) -> None:
    path = KernelCache(tmp_path).load_or_compile("k", "source", "sm_80").path / META
    meta = json.loads(path.read_text())
    meta["resources"]["registers"] = 32
    path.write_text(json.dumps(meta))
    with pytest.warns(FlashgenWarning, match=r"meta\.json is not what was written"):
        assert KernelCache(tmp_path).load_or_compile("k", "source", "sm_80").resources == RESOURCES


def test_meta_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="plain name"):
        KernelCache(tmp_path).get_or_build("k", KEY, lambda: {"../escape": b""})
    assert KernelCache(tmp_path).list() == ()


def test_a_file_in_the_place_of_an_entry(tmp_path: Path) -> None:
    folder = KernelCache(tmp_path).get_or_build("k", KEY, lambda: {"a": b"1"})
    KernelCache(tmp_path).clear()
    folder.write_text("not a folder")
    with pytest.warns(FlashgenWarning, match="damaged"):
        assert KernelCache(tmp_path).get_or_build("k", KEY, lambda: {"a": b"2"}) == folder
    assert (folder / "a").read_bytes() == b"2"


def test_programs_can_be_run(tmp_path: Path) -> None:
    def build() -> Artifacts:
        return Artifacts({"main": b"#!/bin/sh\n", "kernel.cu": b""}, executables=frozenset({"main"}))

    folder = KernelCache(tmp_path).get_or_build("host", KEY, build)
    assert os.access(folder / "main", os.X_OK)
    assert not (folder / "kernel.cu").stat().st_mode & 0o111


def test_a_failing_build_leaves_nothing_and_is_itself(tmp_path: Path) -> None:
    def fail() -> Artifacts:
        raise FileNotFoundError(2, "No such file", "g++")

    with pytest.raises(FileNotFoundError, match="g\\+\\+"):
        KernelCache(tmp_path).get_or_build("k", KEY, fail)
    assert list(tmp_path.iterdir()) == []


def test_jit_off_refuses_and_says_what_to_do(tmp_path: Path, compiler: Compiler) -> None:
    cache = KernelCache(tmp_path, jit=False)
    with pytest.raises(
        BuildError, match=r"kernel fwd for sm_80 is not in the cache .*FLASHGEN_JIT=0.*flashgen release"
    ):
        cache.load_or_compile("fwd", "source", "sm_80")
    with pytest.raises(BuildError, match="beforehand with `flashgen show causal`"):
        cache.load_or_compile("fwd", "source", "sm_80", prebuild="flashgen show causal")
    with pytest.raises(BuildError, match=r"emulator is not in the cache .* run once without FLASHGEN_JIT=0"):
        cache.get_or_build("emulator", KEY, lambda: {"library.so": b""})
    assert compiler.asked == []
    assert list(tmp_path.iterdir()) == []
    KernelCache(tmp_path).load_or_compile("fwd", "source", "sm_80")
    assert cache.load_or_compile("fwd", "source", "sm_80").hit


def test_jit_off_does_not_use_a_damaged_entry(tmp_path: Path, compiler: Compiler) -> None:
    cut(KernelCache(tmp_path).load_or_compile("fwd", "source", "sm_80").cubin_path)
    with pytest.warns(FlashgenWarning, match="it is not used"), pytest.raises(BuildError, match="FLASHGEN_JIT=0"):
        KernelCache(tmp_path, jit=False).load_or_compile("fwd", "source", "sm_80")


def test_the_environment_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "here"))
    monkeypatch.setenv("FLASHGEN_JIT", "0")
    monkeypatch.setenv("FLASHGEN_RELEASE", str(tmp_path / "release"))
    cache = default_cache()
    assert (cache.path(), cache.jit, cache.release) == (tmp_path / "here", False, tmp_path / "release")
    monkeypatch.setenv("FLASHGEN_JIT", "no")
    with pytest.raises(BuildError, match="FLASHGEN_JIT must be 0"):
        default_cache()


def test_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHGEN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_root() == tmp_path / "flashgen"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_root().is_relative_to(tmp_path / "home")


def test_list_and_clear(tmp_path: Path, compiler: Compiler) -> None:
    cache = KernelCache(tmp_path / "cache")
    assert (cache.list(), cache.clear()) == ((), 0)
    for name in ("b.c", "a"):
        cache.load_or_compile(name, "source", "sm_80")
    (tmp_path / "cache" / "somebody's file").touch()
    assert [(entry.name, len(entry.key), entry.bytes > 100) for entry in cache.list()] == [
        ("a", 16, True),
        ("b.c", 16, True),
    ]
    assert cache.clear() == 2
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["somebody's file"]


def test_a_cache_under_a_file_is_an_error(tmp_path: Path, compiler: Compiler) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match=r"cannot be used .*set FLASHGEN_CACHE_DIR"):
        KernelCache(tmp_path / "file" / "cache").load_or_compile("k", "source", "sm_80")


@contextmanager
def without_root() -> Iterator[None]:
    """As an ordinary user, whom the modes of folders bind."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that an ordinary user can reach, which pytest's own need not be."""
    with tempfile.TemporaryDirectory(prefix="flashgen-test-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755)


def test_a_folder_that_cannot_be_written(open_folder: Path, compiler: Compiler) -> None:
    root = open_folder / "cache"
    KernelCache(root).load_or_compile("k", "source", "sm_80")
    root.chmod(0o555)
    with without_root():
        assert KernelCache(root).load_or_compile("k", "source", "sm_80").hit
        with pytest.raises(BuildError, match=r"Permission denied.*set FLASHGEN_CACHE_DIR"):
            KernelCache(root).load_or_compile("other", "source 2", "sm_80")
        with pytest.raises(BuildError, match="set FLASHGEN_CACHE_DIR"):
            KernelCache(root / "deeper").load_or_compile("k", "source", "sm_80")


def test_an_entry_that_cannot_be_read(open_folder: Path, compiler: Compiler) -> None:
    entry = KernelCache(open_folder / "cache").load_or_compile("k", "source", "sm_80")
    entry.cubin_path.chmod(0)
    with without_root(), pytest.raises(BuildError, match=r"Permission denied.*kernel\.cubin.*FLASHGEN_CACHE_DIR"):
        KernelCache(open_folder / "cache").load_or_compile("k", "source", "sm_80")
