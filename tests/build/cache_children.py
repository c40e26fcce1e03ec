"""Programs that the cache tests run as separate processes: `python cache_children.py ROLE ROOT ...`."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flashgen.build import Artifacts, KernelCache, content_key, nvrtc
from flashgen.build.elf import complete_image
from flashgen.build.entries import discard, read_entry
from flashgen.build.keys import folder_name

KEYS = {f"kernel-{number}": content_key("test", {"number": str(number)}) for number in range(5)}


def make_files() -> Artifacts:
    """Files that take long enough to write to be killed meanwhile."""
    return Artifacts({"kernel.cu": b"source\n" * 2000, "kernel.cubin": os.urandom(300_000)}, {"registers": 7})


def build_for_ever(root: Path) -> None:
    """Builds, damages and removes entries until killed."""
    cache, chance = KernelCache(root), random.Random(os.getpid())
    while True:
        for name, key in KEYS.items():
            cache.get_or_build(name, key, make_files)
            if chance.random() < 0.8:
                discard(root / folder_name(name, key), key)


def compile_for_ever(root: Path) -> None:
    """Compiles distinct kernels with NVRTC until killed."""
    cache, number = KernelCache(root), 0
    while True:
        number += 1
        source = f'extern "C" __global__ void k(float* x) {{ x[threadIdx.x] += {os.getpid()}.{number}f; }}'
        cache.load_or_compile(f"compiled-{number}", source, "sm_80")


def kill_often(root: Path, role: Callable[[Path], None], kills: int, longest: float, least_torn: int) -> None:
    """Kills pairs of builders at random moments and checks each time that the cache only has complete entries.

    Continues until there were `kills` kills, `least_torn` of them in the middle of writing, and 10 complete entries
    were seen. Prints the three numbers.
    """
    chance, done, whole, torn = random.Random(1), 0, 0, 0
    while done < kills or whole < 10 or torn < least_torn:
        children = [_fork(lambda: role(root)) for _ in range(2)]
        time.sleep(chance.uniform(0.002, longest))
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        done += 1
        whole += check_all(root)
        torn += any(root.glob(".staging-*"))
    print(done, whole, torn)


def check_all(root: Path) -> int:
    """Returns the number of entries. Raises an error if one is damaged."""
    entries = KernelCache(root).list()
    for entry in entries:
        meta = json.loads((entry.path / "meta.json").read_text())
        stored = read_entry(entry.path, meta["key"])  # raises when it is damaged
        assert stored is not None and entry.path.name == folder_name(entry.name, meta["key"])
        if entry.name.startswith("compiled"):
            complete_image(stored.files["kernel.cubin"])
    return len(entries)


def ask_once(root: Path, gate: Path, marker: Path) -> None:
    """Requests one kernel once the gate opens; a process that compiles it appends a line to the marker."""

    def counted(source: str, architecture: str, name: str) -> nvrtc.Compiled:
        with marker.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        return nvrtc.Compiled(b"cubin", "", nvrtc.Resources(8), (13, 0))

    nvrtc.version, nvrtc.compile = (lambda: (13, 0)), counted
    (gate.parent / f"ready-{os.getpid()}").touch()
    while not gate.exists():
        time.sleep(0.005)
    entry = KernelCache(root).load_or_compile("asked", "source", "sm_80")
    assert entry.cubin_path.read_bytes() == entry.cubin == b"cubin"


def hold_lock(root: Path) -> None:
    """Begins to build and never ends."""

    def never() -> Artifacts:
        print("building", flush=True)
        time.sleep(600)
        raise AssertionError("it was to be killed")

    KernelCache(root).get_or_build("held", KEYS["kernel-0"], never)


def _fork(role: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            role()
        finally:
            os._exit(1)
    return child


if __name__ == "__main__":
    role, root, *rest = sys.argv[1:]
    if role == "kill_builders":
        kill_often(Path(root), build_for_ever, int(rest[0]), longest=0.03, least_torn=5)
    elif role == "kill_compilers":
        nvrtc.version()  # imported in advance, so that the children compile from the start
        kill_often(Path(root), compile_for_ever, int(rest[0]), longest=0.2, least_torn=0)
    elif role == "ask_once":
        ask_once(Path(root), Path(rest[0]), Path(rest[1]))
    elif role == "hold_lock":
        hold_lock(Path(root))
    else:
        raise SystemExit(f"unknown role {role!r}")
