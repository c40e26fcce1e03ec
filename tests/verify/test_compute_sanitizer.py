"""The forward kernels of every variant under NVIDIA's compute-sanitizer, in separate processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CALLS = Path(__file__).with_name("sanitized_calls.py")
LONGEST = 500  # seconds


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_the_tool_reports_nothing(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer, which comes with the CUDA toolkit, on the PATH")
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--print-limit", "4", sys.executable, str(CALLS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert done.returncode == 0 and " agree" in done.stdout, done.stdout[-6000:]
    summary = [line for line in done.stdout.splitlines() if "SUMMARY" in line]
    assert summary and all(" 0 " in line for line in summary), done.stdout[-6000:]
