"""The cache with many processes, with kills, and with removal during use."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import flashgen
from flashgen.build import Artifacts, KernelCache, content_key, nvrtc
from flashgen.build.locks import exclusive

CHILDREN = Path(__file__).with_name("cache_children.py")
KEY = content_key("test", {"number": "0"})

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX processes")


def start(role: str, *arguments: object) -> subprocess.Popen[str]:
    """Returns a child program, which imports the flashgen under test."""
    environment = {**os.environ, "PYTHONPATH": str(Path(flashgen.__file__).parents[1])}
    command = [sys.executable, str(CHILDREN), role, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def hidden(root: Path) -> list[str]:
    """Returns what is in a cache besides its entries."""
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


def test_killed_builders_leave_complete_entries_or_none(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    out, errors = start("kill_builders", root, 150).communicate(timeout=120)
    assert errors == ""
    kills, whole, torn = map(int, out.split())
    assert kills >= 150 and whole >= 10 and torn >= 5
    cache = KernelCache(root)
    entries = len(cache.list())
    assert cache.clear() == entries
    assert list(root.iterdir()) == []


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")
def test_killed_compilers_leave_complete_kernels_or_none(tmp_path: Path) -> None:
    out, errors = start("kill_compilers", tmp_path / "cache", 20).communicate(timeout=120)
    assert errors == ""
    kills, whole, _ = map(int, out.split())
    assert kills >= 20 and whole >= 10


def test_sixteen_processes_compile_one_kernel_once(tmp_path: Path) -> None:
    root, gate, marker = tmp_path / "cache", tmp_path / "gate", tmp_path / "compiled"
    children = [start("ask_once", root, gate, marker) for _ in range(16)]
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("ready-*"))) < 16 and time.monotonic() < deadline:
        time.sleep(0.01)
    gate.touch()
    results = [child.communicate(timeout=60) for child in children]
    assert [errors for _, errors in results if errors] == []
    assert [child.returncode for child in children] == [0] * 16
    assert len(marker.read_text().splitlines()) == 1
    assert hidden(root) == []


@pytest.mark.timeout(60)
def test_a_dead_owner_does_not_block(tmp_path: Path) -> None:
    owner = start("hold_lock", tmp_path)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "building\n"
    owner.kill()
    owner.communicate()
    assert hidden(tmp_path), "the owner held no lock"
    folder = KernelCache(tmp_path).get_or_build("held", KEY, lambda: {"kernel.cu": b"built"})
    assert (folder / "kernel.cu").read_bytes() == b"built"
    assert hidden(tmp_path) == []


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\nfrom pathlib import Path\nfrom flashgen.build.locks import exclusive\n"
        "with exclusive(Path(sys.argv[1])):\n"
        "    if os.fork() == 0:\n"
        "        print(os.getpid(), flush=True)\n        time.sleep(600)\n"
        "    time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(flashgen.__file__).parents[1])}
    lock = tmp_path / "lock"
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(lock)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    grandchild = int(owner.stdout.readline())
    try:
        owner.kill()
        owner.wait()
        with exclusive(lock, wait=False) as held:
            assert held
    finally:
        os.kill(grandchild, 9)
        owner.stdout.close()


def test_threads_build_once(tmp_path: Path) -> None:
    built: Counter[str] = Counter()

    def build() -> Artifacts:
        built["times"] += 1
        time.sleep(0.1)
        return Artifacts({"kernel.cu": b"source"})

    threads = [
        threading.Thread(target=KernelCache(tmp_path).get_or_build, args=("threads", KEY, build)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built["times"] == 1


def test_clearing_during_builds(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Requests during clearing get their entries, and nothing is reported as damaged."""
    failures: list[BaseException] = []
    stop = time.monotonic() + 1.5

    def ask(number: int) -> None:
        cache, key = KernelCache(tmp_path), content_key("test", {"number": str(number % 2)})
        try:
            while time.monotonic() < stop:
                cache.get_or_build(
                    f"kernel-{number % 2}", key, lambda: {"kernel.cu": b"x" * 50_000, "b": b"y" * 50_000}
                )
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    cleared = 0
    while time.monotonic() < stop:
        cleared += KernelCache(tmp_path).clear()
        KernelCache(tmp_path).list()
    for thread in threads:
        thread.join()
    assert failures == []
    assert cleared > 1
    assert [str(warning.message) for warning in recwarn] == []
