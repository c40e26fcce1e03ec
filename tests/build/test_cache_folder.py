"""A cache folder that cannot be used or trusted causes one warning and stops nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import flashgen
from flashgen.build import Artifacts, KernelCache, cache_folder, content_key, nvrtc
from flashgen.build.cache_folder import default_root, why_unusable
from flashgen.build.host import compile_host
from flashgen.build.locks import exclusive
from flashgen.build.memory import ProcessMemory
from flashgen.build.resources import Resources
from flashgen.errors import BuildError, FlashgenWarning

KEY = content_key("test", {"source": "one"})
RESOURCES = Resources(registers=64)
NOBODY = 65534
PROJECT = Path(flashgen.__file__).parents[1]

needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A mock of NVRTC that records the names of its programs."""
    names: list[str] = []

    def compile(source: str, architecture: str, name: str) -> nvrtc.Compiled:
        names.append(name)
        return nvrtc.Compiled(f"{architecture} {source}".encode(), "a log", RESOURCES, (13, 0))

    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "compile", compile)
    return names


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "_warned_kinds", set())
    monkeypatch.delenv("FLASHGEN_CACHE_SHARED", raising=False)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Acts as an ordinary user, to whom file modes apply."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that an ordinary user can reach, unlike some of pytest's own."""
    with tempfile.TemporaryDirectory(prefix="flashgen-test-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755)


# ---- unusable folders


def serves_from_memory(root: Path, compiled: list[str], said: str) -> None:
    """The kernel is compiled, once; the folder is said, once; nothing is left behind."""
    with pytest.warns(FlashgenWarning, match=rf"{said}.*keeps what it builds in memory") as caught:
        first = KernelCache(root).load_or_compile("k", "source", "sm_80")
        second = KernelCache(root).load_or_compile("other", "source 2", "sm_80")
        again = KernelCache(root).load_or_compile("k", "source", "sm_80")
    assert len(caught) == 1
    assert compiled == ["k", "other"]
    assert (first.hit, second.hit, again.hit) == (False, False, True)
    assert first.cubin == again.cubin == b"sm_80 source" and first.path is None and first.cubin_path is None
    assert again.resources == RESOURCES and again.meta["log"] == "a log"


def test_a_full_disk(tmp_path: Path, compiled: list[str], full_disk: None) -> None:
    serves_from_memory(tmp_path / "cache", compiled, r"cache cannot be used \(No space left on device")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_path_below_a_file(tmp_path: Path, compiled: list[str]) -> None:
    (tmp_path / "file").touch()
    serves_from_memory(
        tmp_path / "file" / "cache", compiled, r"cannot be used \(Not a directory.*set FLASHGEN_CACHE_DIR"
    )


def test_a_read_only_folder(open_folder: Path, compiled: list[str]) -> None:
    root = open_folder / "cache"
    root.mkdir(mode=0o755)
    KernelCache(root).load_or_compile("there", "source 3", "sm_80")
    compiled.clear()
    root.chmod(0o555)
    with as_nobody():
        assert KernelCache(root).load_or_compile("there", "source 3", "sm_80").hit
        serves_from_memory(root, compiled, r"Permission denied.*set FLASHGEN_CACHE_DIR")
        compiled.clear()
        serves_from_memory(root / "deeper", compiled, "Permission denied")


def test_an_unreadable_entry(open_folder: Path, compiled: list[str]) -> None:
    (open_folder / "cache").mkdir(mode=0o755)
    entry = KernelCache(open_folder / "cache").load_or_compile("k", "source", "sm_80")
    assert entry.cubin_path is not None
    entry.cubin_path.chmod(0)
    compiled.clear()
    with as_nobody():
        serves_from_memory(open_folder / "cache", compiled, r"Permission denied.*kernel\.cubin")


def test_a_file_system_without_locks(tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    serves_from_memory(tmp_path / "cache", compiled, "its file system cannot lock files")


def test_a_lock_that_cannot_be_removed_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with exclusive(tmp_path / "lock") as held:
        assert held
    with exclusive(tmp_path / "lock", wait=False) as held:  # and blocks nobody
        assert held


def test_without_jit_the_folder_is_the_reason(tmp_path: Path, compiled: list[str]) -> None:
    (tmp_path / "file").touch()
    cache = KernelCache(tmp_path / "file" / "cache", jit=False)
    with pytest.raises(BuildError, match=r"FLASHGEN_JIT=0 forbids building it now.*cannot be used \(Not a directory"):
        cache.load_or_compile("k", "source", "sm_80")
    assert compiled == []


def test_storing_raises_and_looking_up_finds_nothing(tmp_path: Path, full_disk: None) -> None:
    with pytest.raises(BuildError, match="No space left"):
        KernelCache(tmp_path / "cache").put("k", KEY, Artifacts({"a": b"1"}))
    (tmp_path / "file").touch()
    with pytest.warns(FlashgenWarning, match="its entries are not used"):
        assert KernelCache(tmp_path / "file" / "cache").find("k", KEY) is None
    with pytest.raises(BuildError, match="Not a directory"):
        KernelCache(tmp_path / "file" / "cache").put("k", KEY, Artifacts({"a": b"1"}))


EMULATED = """
struct Arguments { int* out; };
extern "C" __global__ void store(const __grid_constant__ Arguments arguments) { *arguments.out = 7; }
"""
LAUNCH = """
import sys, warnings
import numpy as np
from flashgen.build.host import compile_host
from flashgen.runtime.emulator import launch
warnings.simplefilter("always")
for sanitize in (None, "address"):
    kernel, out = compile_host(sys.argv[1], "store", sanitize), np.zeros(1, np.int32)
    launch(kernel, (1, 1, 1), (1, 1, 1), 0, bytes(8), [(0, out)])
    print(out[0], kernel.path.exists(), kernel.path)
"""


def test_the_emulator_without_a_cache(tmp_path: Path) -> None:
    """Kernels and the emulator's libraries are kept in a temporary folder of the process, which is removed with it."""
    temporary, cache = tmp_path / "temporary", default_root()
    temporary.mkdir()
    for sanitize in (None, "address"):  # of another kernel, whose libraries the cache keeps
        compile_host(EMULATED.replace("7", "8"), "store", sanitize)
    refuse = (
        "import os\ndef refuse(path, *more, real=os.mkdir, **named):\n"
        f"    if str(path).startswith({str(cache)!r}): raise OSError(28, 'No space left on device', str(path))\n"
        "    real(path, *more, **named)\nos.mkdir = refuse\n"
    )
    settings = {"FLASHGEN_CACHE_DIR": str(cache), "PYTHONPATH": str(PROJECT), "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", refuse + LAUNCH, EMULATED]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 2) for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines] == [["7", "True"]] * 2
    assert all(str(temporary) in line[2] for line in lines)
    assert done.stderr.count("keeps what it builds in memory") == 1
    assert list(temporary.iterdir()) == []


# ---- untrusted folders


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        (0o777, r"everybody may write to it \(mode 0777\); `chmod -R go-w .*cache` fixes that"),
        (0o1777, "everybody may write"),
        (0o702, "everybody may write"),
        (0o775, r"its group may write to it \(mode 0775\); .*or FLASHGEN_CACHE_SHARED=1 says that you trust"),
        (0o2770, "its group may write"),
    ],
)
def test_nothing_in_a_folder_that_others_can_write_to_is_run(
    tmp_path: Path, compiled: list[str], mode: int, problem: str
) -> None:
    root = tmp_path / "cache"
    planted = KernelCache(root).load_or_compile("k", "source", "sm_80")
    compiled.clear()
    root.chmod(mode)
    serves_from_memory(root, compiled, f"cannot be trusted: {problem}")
    assert list(root.iterdir()) == [planted.path]
    assert why_unusable(root)


@needs_root
def test_a_folder_of_another_user(open_folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    root = open_folder / "cache"
    KernelCache(root).load_or_compile("k", "source", "sm_80")
    compiled.clear()
    root.chmod(0o755)
    os.chown(root, NOBODY, -1)
    serves_from_memory(
        root, compiled, "it belongs to .*; set FLASHGEN_CACHE_DIR to a folder of your own, or FLASHGEN_C"
    )
    monkeypatch.setenv("FLASHGEN_CACHE_SHARED", "1")
    assert KernelCache(root).load_or_compile("k", "source", "sm_80").path is not None


@needs_root
def test_a_folder_of_root_is_trusted(open_folder: Path, compiled: list[str]) -> None:
    root = open_folder / "cache"
    root.mkdir(mode=0o755)
    KernelCache(root).load_or_compile("k", "source", "sm_80")
    with as_nobody():
        assert KernelCache(root).load_or_compile("k", "source", "sm_80").path is not None


def test_a_shared_folder_needs_the_variable(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(0o2770)
    monkeypatch.setenv("FLASHGEN_CACHE_SHARED", "1")
    umask = os.umask(0o002)
    try:
        entry = KernelCache(root).load_or_compile("k", "source", "sm_80")
    finally:
        os.umask(umask)
    assert entry.path is not None and entry.path.stat().st_mode & 0o777 == 0o770  # group-writable here, too
    assert KernelCache(root).load_or_compile("k", "source", "sm_80").hit
    root.chmod(0o2777)
    compiled.clear()
    serves_from_memory(root, compiled, "everybody may write")
    monkeypatch.setenv("FLASHGEN_CACHE_SHARED", "yes")
    with pytest.raises(BuildError, match=r"FLASHGEN_CACHE_SHARED must be 1 .* or 0, got 'yes'"):
        KernelCache(root).load_or_compile("k", "source", "sm_80")


def test_created_files_are_only_for_their_user(tmp_path: Path, compiled: list[str]) -> None:
    """Also where new files are readable and writable by all, as in containers without a umask."""
    umask = os.umask(0)
    try:
        entry = KernelCache(tmp_path / "a" / "cache").load_or_compile("k", "source", "sm_80")
    finally:
        os.umask(umask)
    assert entry.path is not None
    assert [path.stat().st_mode & 0o777 for path in (entry.path.parent, entry.path)] == [0o700, 0o700]
    assert {path.stat().st_mode & 0o777 for path in entry.path.iterdir()} == {0o600}
    assert KernelCache(tmp_path / "a" / "cache").load_or_compile("k", "source", "sm_80").hit


def test_an_entry_more_writable_than_the_folder_is_damage(tmp_path: Path, compiled: list[str]) -> None:
    entry = KernelCache(tmp_path / "cache").load_or_compile("k", "source", "sm_80")
    assert entry.path is not None
    entry.path.chmod(0o777)
    with pytest.warns(FlashgenWarning, match=r"is damaged: others may write to it.*it is built again"):
        again = KernelCache(tmp_path / "cache").load_or_compile("k", "source", "sm_80")
    assert not again.hit and entry.path.stat().st_mode & 0o777 == 0o700


def test_a_usable_folder_is_described(tmp_path: Path, full_disk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No space left" in (why_unusable(tmp_path / "cache") or "")
    monkeypatch.undo()
    assert why_unusable(tmp_path / "cache") is None and list((tmp_path / "cache").iterdir()) == []


# ---- per process


def test_threads_build_once_in_memory() -> None:
    memory, built = ProcessMemory(), []

    def build() -> Artifacts:
        built.append(1)
        time.sleep(0.05)
        return Artifacts({"a": b"1"})

    found: list[bool] = []
    threads = [
        threading.Thread(target=lambda: found.append(memory.get_or_build((Path("k"), KEY), build)[1])) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1 and sorted(found) == [False] + [True] * 7


def test_a_build_that_fails_is_tried_again() -> None:
    memory = ProcessMemory()

    def fail() -> Artifacts:
        raise BuildError("it does not compile")

    for _ in range(2):
        with pytest.raises(BuildError, match="does not compile"):
            memory.get_or_build((Path("k"), KEY), fail)
    assert memory.get_or_build((Path("k"), KEY), lambda: Artifacts({})) == (Artifacts({}), False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX processes")
def test_a_forked_child_keeps_its_parents_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import os, sys, pathlib\nfrom flashgen.build import Artifacts\nfrom flashgen.build.memory import MEMORY\n"
        "place = (pathlib.Path('k'), 'a' * 64)\n"
        "folder = MEMORY.write_to_disk(place, Artifacts({'a': b'1'}))\n"
        "if os.fork() == 0:\n"
        "    assert MEMORY.write_to_disk(place, Artifacts({'a': b'1'})) != folder\n    sys.exit()\n"
        "assert os.wait()[1] == 0 and (folder / 'a').read_bytes() == b'1'\n"
    )
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], env=environment, check=True)
    assert list(tmp_path.iterdir()) == []
