"""Measures the import of flashgen, and the compilation of a spec with an empty and with a filled disk cache."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.host import HostRow

REPEATS = 5
STARTS = 3  # rows
# Imports are measured in CPU time, which depends less on the load of the machine. Compilations are measured in wall
# time, since NVRTC has threads of its own.
_PROGRAM = """
import json, sys, time
begin = time.process_time()
import numpy, sympy
there = time.process_time()
import flashgen
flashgen.AttentionSpec
imported = time.process_time()
scale, target = float(sys.argv[1]), sys.argv[2] or None
flashgen.compile(flashgen.AttentionSpec(32), target=target)  # loads NVRTC and the templates
start = time.perf_counter()
attention = flashgen.compile(flashgen.AttentionSpec(64, scale=scale, mask=flashgen.causal()), target=target)
print(json.dumps([imported - there, time.perf_counter() - start, attention.target.name]))
"""


def start_rows(target: str | None = None, repeats: int = REPEATS, checkout: Path | None = None) -> Iterator[HostRow]:
    """Measures in new processes with a fresh disk cache.

    `target` is that of `flashgen.compile`. The processes import flashgen from `checkout`, by default as this one does.
    """
    name = ""
    imports: list[float] = []
    compiled: list[float] = []
    loaded: list[float] = []
    with tempfile.TemporaryDirectory(prefix="flashgen-bench-") as cache:
        for number in range(repeats):
            for times in (compiled, loaded):
                imported, ready, name = _start(cache, 0.1015625 + number / 1024, target, checkout)
                imports.append(imported)
                times.append(ready)
    measured = {
        "import, beyond NumPy and SymPy": imports,
        "compile, from nothing": compiled,
        "compile, from disk": loaded,
    }
    for what, times in measured.items():
        micros = [seconds * 1e6 for seconds in times]
        yield HostRow(what, name, "-", "start", (), statistics.median(micros), min(micros), {})


def _start(cache: str, scale: float, target: str | None, checkout: Path | None = None) -> tuple[float, float, str]:
    """Returns seconds of the import and of a compilation in a new process, and the target of the compilation."""
    command = [sys.executable, *(["-P"] if checkout else []), "-c", _PROGRAM, str(scale), target or ""]
    environment = os.environ | {"FLASHGEN_CACHE_DIR": cache} | ({"PYTHONPATH": str(checkout)} if checkout else {})
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    imported, ready, name = json.loads(done.stdout)
    return imported, ready, name
