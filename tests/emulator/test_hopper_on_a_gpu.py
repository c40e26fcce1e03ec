"""Hopper's small kernels on a GPU, each in a separate process, which may lose its context."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashgen.build import nvrtc
from flashgen.runtime.gpu import compute_capability
from hopper_kernels import COPIES_OF_BOXES, PRODUCTS, Pipeline, WrittenOperands, kernel_source

HARDWARE = Path(__file__).with_name("hopper_hardware.py")
TESTS = re.findall(r"^def (test_\w+)", HARDWARE.read_text(encoding="utf-8"), flags=re.MULTILINE)
CASES: dict[str, list[Any]] = {
    "test_operand_layouts": PRODUCTS,
    "test_box_copies": [f"{box}-{kernel}" for box, kernel in COPIES_OF_BOXES],
    "test_stmatrix_named_barriers_registers_and_elections": [""],
    "test_clusters": [""],
    "test_all_together": [""],
}
LONGEST = 100  # seconds, in case a kernel hangs


def test_every_kind_is_listed() -> None:
    assert sorted(CASES) == sorted(TESTS)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "case"), [(kind, str(case)) for kind, cases in CASES.items() for case in cases])
@pytest.mark.quick_every(7)
def test_the_hardware_agrees_with_the_emulator(kind: str, case: str) -> None:
    if compute_capability() != (9, 0):
        pytest.skip(f"needs a GPU of compute capability 9.0, this one has {compute_capability()}")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", "0", "-p", "no:cacheprovider"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HARDWARE.parents[2]), os.environ.get("PYTHONPATH", "")])
    }
    done = subprocess.run(
        [*command, *(["-k", case] if case else []), f"{HARDWARE}::{kind}"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")
def test_the_kernels_compile_for_a_gpu() -> None:
    texts = {"load_box": kernel_source("boxes.cu", {"kBoxBytes": 1024}), "exchange": kernel_source("exchanges.cu", {})}
    texts |= {"pass": kernel_source("clusters.cu", {"kStages": 2, "kSteps": 7})}
    texts |= {kernel.name: kernel.source for kernel in (Pipeline(), WrittenOperands())}
    texts |= {"product": PRODUCTS[20].source, "product ": PRODUCTS[-1].source}
    for name, source in texts.items():
        compiled = nvrtc.compile(source, "sm_90a", name.strip())
        assert compiled.resources.spill_stores == 0
        assert "C75" not in compiled.log, compiled.log  # wgmma serialized, setmaxnreg ignored
