"""The cache in one process: hits, damage, settings, and unusable folders."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import warnings
from pathlib import Path

import pytest

from flashgen.build import Artifacts, KernelCache, content_key, default_cache, nvrtc
from flashgen.build.cache import default_root
from flashgen.build.entries import META, _sealed, canonical_json, describe
from flashgen.build.resources import Resources
from flashgen.errors import BuildError, FlashgenWarning

KEY = content_key("test", {"source": "one"})
RESOURCES = Resources(registers=64, spill_stores=0, static_shared=128)


class Compiler:
    """A mock of NVRTC that counts its compilations."""

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


def test_source_architecture_and_compiler_version_are_distinguished(tmp_path: Path, compiler: Compiler) -> None:
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
def test_a_damaged_entry_warns_and_is_rebuilt(
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


def test_a_modified_meta_file_is_damage(tmp_path: Path, compiler: Compiler) -> None:
    path = KernelCache(tmp_path).load_or_compile("k", "source", "sm_80").path / META
    meta = json.loads(path.read_text())
    meta["resources"]["registers"] = 32
    path.write_text(json.dumps(meta))
    with pytest.warns(FlashgenWarning, match=r"meta\.json is not what was written"):
        assert KernelCache(tmp_path).load_or_compile("k", "source", "sm_80").resources == RESOURCES


def seal(folder: Path, **changes: object) -> None:
    """Changes the facts of an entry and renews their seal."""
    meta = json.loads((folder / META).read_text()) | changes
    (folder / META).write_bytes(canonical_json(_sealed(meta)))


@pytest.mark.parametrize("name", ["../escape", "/etc/hostname", "a\0b", "..", ".", "", "a\nb"])
def test_meta_cannot_name_a_file_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="plain name"):
        KernelCache(tmp_path).get_or_build("k", KEY, lambda: {name: b""})
    assert KernelCache(tmp_path).list() == ()
    folder = KernelCache(tmp_path).get_or_build("k", KEY, lambda: {"a": b"1"})
    seal(folder, files={name: describe(b"")})
    with pytest.warns(FlashgenWarning, match="names a file outside of the entry"):
        assert KernelCache(tmp_path).get_or_build("k", KEY, lambda: {"a": b"2"}) == folder
    assert (folder / "a").read_bytes() == b"2"


@pytest.mark.parametrize(
    "meta",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"files": {}, "key": "%s", "format": 1, "a": NaN}' % KEY.encode(),
        b'{"files": {}, "key": "%s", "format": 1, "a": 1e999}' % KEY.encode(),
        b'{"files": {}, "key": "%s", "format": 1, "a": "\\ud800"}' % KEY.encode(),
        b'{"files": {"a": 3}, "key": "%s", "format": 1}' % KEY.encode(),
        b"\xff\xfe",
        b"[]",
        b"null",
    ],
    ids=lambda meta: str(meta[-30:]),
)
def test_malicious_meta_is_damage(tmp_path: Path, meta: bytes) -> None:
    folder = KernelCache(tmp_path).get_or_build("k", KEY, lambda: {"a": b"1"})
    (folder / META).write_bytes(meta)
    with pytest.warns(FlashgenWarning, match=r"is damaged: meta\.json"):
        KernelCache(tmp_path).get_or_build("k", KEY, lambda: {"a": b"2"})
    assert (folder / "a").read_bytes() == b"2"


@pytest.mark.parametrize("files", [{"a": 3}, {"a": {}}, {"a": {"bytes": "1", "sha256": ""}}, {"a": {"bytes": -1}}])
def test_meta_that_describes_no_file_is_damage(tmp_path: Path, files: dict[str, object]) -> None:
    folder = KernelCache(tmp_path).get_or_build("k", KEY, lambda: {"a": b"1"})
    seal(folder, files=files)
    with pytest.warns(FlashgenWarning, match="is damaged: "):
        KernelCache(tmp_path).get_or_build("k", KEY, lambda: {"a": b"2"})


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", [META, "a"])
@pytest.mark.parametrize("what", ["pipe", "device", "socket"])
def test_special_files_are_damage_and_do_not_block(tmp_path: Path, name: str, what: str) -> None:
    folder = KernelCache(tmp_path).get_or_build("k", KEY, lambda: {"a": b"1"})
    (folder / name).unlink()
    if what == "pipe":
        os.mkfifo(folder / name)
    elif what == "device":
        (folder / name).symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as unix, contextlib.chdir(folder):
            unix.bind(name)
    with pytest.warns(FlashgenWarning, match=rf"is damaged: {name} cannot be read"):
        KernelCache(tmp_path).get_or_build("k", KEY, lambda: {"a": b"2"})
    assert (folder / "a").read_bytes() == b"2"


def test_a_file_that_grew_is_not_read(tmp_path: Path) -> None:
    folder = KernelCache(tmp_path).get_or_build("k", KEY, lambda: {"a": b"1"})
    os.truncate(folder / "a", 2**40)
    with pytest.warns(
        FlashgenWarning, match=r"is damaged: a cannot be read \(it has 1099511627776 bytes, more than 1\)"
    ):
        KernelCache(tmp_path).get_or_build("k", KEY, lambda: {"a": b"2"})


def test_a_file_at_the_path_of_an_entry(tmp_path: Path) -> None:
    folder = KernelCache(tmp_path).get_or_build("k", KEY, lambda: {"a": b"1"})
    KernelCache(tmp_path).clear()
    folder.write_text("not a folder")
    with pytest.warns(FlashgenWarning, match="damaged"):
        assert KernelCache(tmp_path).get_or_build("k", KEY, lambda: {"a": b"2"}) == folder
    assert (folder / "a").read_bytes() == b"2"


def test_programs_are_executable(tmp_path: Path) -> None:
    def build() -> Artifacts:
        return Artifacts({"main": b"#!/bin/sh\n", "kernel.cu": b""}, executables=frozenset({"main"}))

    folder = KernelCache(tmp_path).get_or_build("host", KEY, build)
    assert os.access(folder / "main", os.X_OK)
    assert not (folder / "kernel.cu").stat().st_mode & 0o111


def test_a_failing_build_leaves_nothing_and_raises_its_error(tmp_path: Path) -> None:
    def fail() -> Artifacts:
        raise FileNotFoundError(2, "No such file", "g++")

    with pytest.raises(FileNotFoundError, match="g\\+\\+"):
        KernelCache(tmp_path).get_or_build("k", KEY, fail)
    assert list(tmp_path.iterdir()) == []


def test_without_jit_an_error_names_the_remedy(tmp_path: Path, compiler: Compiler) -> None:
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


def test_without_jit_a_damaged_entry_is_not_used(tmp_path: Path, compiler: Compiler) -> None:
    cut(KernelCache(tmp_path).load_or_compile("fwd", "source", "sm_80").cubin_path)
    with pytest.warns(FlashgenWarning, match="it is not used"), pytest.raises(BuildError, match="FLASHGEN_JIT=0"):
        KernelCache(tmp_path, jit=False).load_or_compile("fwd", "source", "sm_80")


def test_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "here"))
    monkeypatch.setenv("FLASHGEN_JIT", "0")
    monkeypatch.setenv("FLASHGEN_RELEASE", str(tmp_path / "release"))
    cache = default_cache()
    assert (cache.path(), cache.jit, cache.release) == (tmp_path / "here", False, tmp_path / "release")
    monkeypatch.setenv("FLASHGEN_JIT", "no")
    with pytest.raises(BuildError, match="FLASHGEN_JIT must be 0"):
        default_cache()


@pytest.mark.parametrize("variable", ["FLASHGEN_CACHE_DIR", "XDG_CACHE_HOME", "FLASHGEN_RELEASE"])
def test_a_missing_home_is_named_by_its_variable(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if variable == "XDG_CACHE_HOME":
        monkeypatch.delenv("FLASHGEN_CACHE_DIR")
    monkeypatch.setenv(variable, "~nosuch/x")
    with pytest.raises(BuildError, match=rf"^{variable}='~nosuch/x' names no folder \(.*\); give an absolute path$"):
        default_cache()
    if variable != "FLASHGEN_RELEASE":
        with pytest.raises(BuildError, match=f"{variable}='~nosuch/x'"):
            default_root()


@pytest.mark.parametrize("argument", ["root", "release"])
def test_a_missing_home_is_named_by_its_argument(tmp_path: Path, argument: str) -> None:
    with pytest.raises(BuildError, match=f"{argument}='~nosuch' names no folder"):
        KernelCache(**{"root": tmp_path, argument: "~nosuch"})


def test_a_home_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "~/kernels")
    assert default_root() == default_cache().path() == tmp_path / "kernels"


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
    assert [(entry.name, len(entry.key), entry.bytes > 100) for entry in cache.list()] == [
        ("a", 16, True),
        ("b.c", 16, True),
    ]
    assert cache.clear() == 2
    assert list((tmp_path / "cache").iterdir()) == []


def test_only_entries_are_listed_and_cleared(tmp_path: Path) -> None:
    """Everything else in the folder is kept, even if its name looks like an entry's or a lock's."""
    cache = KernelCache(tmp_path / "cache")
    entry = cache.get_or_build("k", KEY, lambda: {"a": b"1"})
    (entry / "a").write_bytes(b"damaged")  # which is still an entry
    short = KEY[:16]
    foreign = cache.root / f"thesis.{short}"
    foreign.mkdir()
    (foreign / "chapter.tex").write_text("years of work")
    backups = {f"photos.{'0' * 16}": "{}", f"mail.{'1' * 16}": json.dumps({"key": KEY, "files": {}}), "x.y": "{}"}
    for name, text in backups.items():
        (cache.root / name).mkdir()
        (cache.root / name / META).write_text(text)
    (cache.root / f"link.{short}").symlink_to(entry)
    for name in (".lock-my-own-program", ".lock-", f".staging-{short}-notes", ".trash-can"):
        (cache.root / name).write_text("somebody's")
    (cache.root / f".lock-{'2' * 16}").write_text("somebody's process id")
    left = sorted(path.name for path in cache.root.iterdir() if path != entry)
    for name in (f".lock-{short}", f".staging-{short}-{'a' * 12}", f".trash-{short}-{'b' * 12}"):  # of killed builders
        (cache.root / name).touch() if "lock" in name else (cache.root / name).mkdir()
    assert [listed.path for listed in cache.list()] == [entry]
    assert cache.clear() == 1
    assert sorted(path.name for path in cache.root.iterdir()) == left
    assert (foreign / "chapter.tex").read_text() == "years of work"


def test_an_entry_is_flushed_to_disk_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file, then their folder, the rename, and the parent folder; otherwise a crash may leave a partial entry."""
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recorded(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        size = os.fstat(descriptor).st_size
        events.append("staging" if name.startswith(".staging") else name if name == "cache" else f"{name}: {size}")
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(Path, "rename", renamed)
    folder = KernelCache(tmp_path / "cache").get_or_build("k", KEY, lambda: {"a": b"1", "b": b"22"})
    assert sorted(events[:3]) == ["a: 1", "b: 2", f"meta.json: {(folder / META).stat().st_size}"]
    assert events[3:] == ["staging", "rename", "rename", "cache"]  # the first moves an existing entry away
