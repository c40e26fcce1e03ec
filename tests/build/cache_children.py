"""Programs that the tests of the cache run as processes of their own: `python cache_children.py ROLE ROOT ...`."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from flashgen.build import Artifacts, KernelCache, content_key, nvrtc
from flashgen.build.entries import discard, read_entry
from flashgen.build.keys import folder_name

KEYS = {f"kernel-{number}": content_key("test", {"number": str(number)}) for number in range(5)}


def make_files() -> Artifacts:
    """Files whose writing takes long enough to be killed in."""
    return Artifacts({"kernel.cu": b"source\n" * 2000, "kernel.cubin": os.urandom(300_000)}, {"registers": 7})


def build_for_ever(root: Path) -> None:
    """Build entries, damage some and remove some, until killed."""
    cache, chance = KernelCache(root), random.Random(os.getpid())
    while True:
        for name, key in KEYS.items():
            cache.get_or_build(name, key, make_files)
            if chance.random() < 0.8:
                discard(root / folder_name(name, key), key)


def kill_often(root: Path, kills: int) -> None:
    """Kill builders at random moments; after each, every entry must be whole or absent. Prints how many were whole."""
    chance, whole = random.Random(1), 0
    for _ in range(kills):
        children = [_fork(lambda: build_for_ever(root)) for _ in range(2)]
        time.sleep(chance.uniform(0.002, 0.03))
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for name, key in KEYS.items():
            whole += read_entry(root / folder_name(name, key), key) is not None  # raises when it is damaged
    print(whole)


def ask_once(root: Path, gate: Path, marker: Path) -> None:
    """Once the gate opens, ask for one kernel; whoever compiles it adds a line to the marker."""

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
    """Begin to build and never end."""

    def never() -> Artifacts:
        print("building", flush=True)
        time.sleep(600)
        raise AssertionError("it was to be killed")

    KernelCache(root).get_or_build("held", KEYS["kernel-0"], never)


def _fork(role: object) -> int:
    child = os.fork()
    if child == 0:
        try:
            role()  # type: ignore[operator]
        finally:
            os._exit(1)
    return child


if __name__ == "__main__":
    role, root, *rest = sys.argv[1:]
    if role == "kill_often":
        kill_often(Path(root), int(rest[0]))
    elif role == "ask_once":
        ask_once(Path(root), Path(rest[0]), Path(rest[1]))
    elif role == "hold_lock":
        hold_lock(Path(root))
    else:
        raise SystemExit(f"unknown role {role!r}")
