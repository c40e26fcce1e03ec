"""NVRTC itself, where it is installed; needs no GPU and no driver."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import flashgen
from flashgen.build import KernelCache, inspect, nvrtc, tools
from flashgen.build.elf import complete_image
from flashgen.errors import BuildError, FlashgenWarning

SOURCE = """extern "C" __global__ void shift(float* values, int count) {
  __shared__ float held[64];
  held[threadIdx.x] = values[threadIdx.x];
  __syncthreads();
  values[threadIdx.x] = held[(threadIdx.x + count) & 63];
}
"""
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_120")

needs_nvrtc = pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")
needs_disassembler = pytest.mark.skipif(
    not (tools.find_tool("nvdisasm") or tools.find_tool("cuobjdump")),
    reason="needs nvdisasm or cuobjdump: pip install '.[inspect]'",
)


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_for(architecture: str) -> None:
    if architecture.rstrip("a") not in nvrtc.supported_architectures():
        pytest.skip(f"this NVRTC does not know {architecture}")
    compiled = nvrtc.compile(SOURCE, architecture, "shift")
    assert complete_image(compiled.cubin) == compiled.cubin
    assert compiled.resources.static_shared >= 256
    assert compiled.resources.registers > 0
    assert compiled.resources.spills == 0
    assert compiled.nvrtc_version == nvrtc.version()
    assert f"Compiling entry function 'shift' for '{architecture}'" in compiled.log


@needs_nvrtc
def test_equal_sources_give_equal_bytes_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = nvrtc.compile(SOURCE, "sm_80", "shift")
    monkeypatch.chdir(tmp_path)
    there = nvrtc.compile(SOURCE, "sm_80", "shift")
    assert here == there
    assert str(tmp_path).encode() not in there.cubin


@needs_nvrtc
def test_an_error_shows_log_and_lines() -> None:
    with pytest.raises(BuildError) as caught:
        nvrtc.compile(SOURCE.replace("count)", "cuont)", 1).replace("held[thr", "hled[thr"), "sm_80", "shift")
    message = str(caught.value)
    assert "kernel shift did not compile" in message
    assert 'shift.cu(3): error: identifier "hled" is undefined' in message
    assert ">    3 |   hled[threadIdx.x] = values[threadIdx.x];" in message


@needs_nvrtc
def test_an_error_of_ptxas_is_shown() -> None:
    with pytest.raises(BuildError, match="bogus"):
        nvrtc.compile('extern "C" __global__ void k() { asm volatile("bogus.f32 %r0;"); }', "sm_80", "k")


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_52", "sm_80a", "sm_90b", "90", "compute_80", ""])
def test_an_unknown_architecture_lists_the_known_ones(architecture: str) -> None:
    with pytest.raises(BuildError, match=f"architecture '{architecture}' is not one .* sm_80"):
        nvrtc.compile(SOURCE, architecture, "shift")


class MadeUpCompiler:
    """A mock of CuPy's binding; `compile` runs while a program is compiled."""

    NVRTCError = RuntimeError

    def __init__(self, monkeypatch: pytest.MonkeyPatch, compile: Callable[[], object]) -> None:
        self.createProgram, self.destroyProgram = (lambda *_: 1), (lambda _: None)
        self.compileProgram = lambda *_: compile()
        self.getProgramLog, self.getPTX = (lambda _: ""), (lambda _: b".entry k")
        self.getSupportedArchs = lambda: (80,)
        monkeypatch.setattr(nvrtc, "_load", lambda: (self, (13, 0)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("filter", ["always", "error"])
def test_a_slow_compilation_is_announced(
    filter: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends only after the announcement. If warnings are errors, only the log has it."""
    announced = threading.Event()

    def announce(name: str, announce: Callable[[str], None] = nvrtc._announce) -> None:
        announce(name)
        announced.set()

    MadeUpCompiler(monkeypatch, announced.wait)
    monkeypatch.setattr(nvrtc, "_announce", announce)
    monkeypatch.setattr(nvrtc, "_ANNOUNCE_AFTER_SECONDS", 0.0)
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING, "flashgen"):
        warnings.simplefilter(filter)
        assert nvrtc.compile_ptx("", "sm_80", "fwd-slow") == ".entry k"
    assert caplog.text.count("kernel fwd-slow has been compiling") == 1
    assert [(warning.category, "such as nested sin and cos" in str(warning.message)) for warning in caught] == (
        [] if filter == "error" else [(FlashgenWarning, True)]
    )


def test_a_fast_compilation_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it fails or not, no announcement follows later."""
    timers: list[threading.Timer] = []

    def timer(*arguments: object) -> threading.Timer:
        timers.append(threading.Timer(*arguments))  # type: ignore[arg-type]
        return timers[-1]

    monkeypatch.setattr(nvrtc, "threading", SimpleNamespace(Timer=timer))
    MadeUpCompiler(monkeypatch, lambda: None)
    nvrtc.compile_ptx("", "sm_80", "k")

    def fail() -> None:
        raise RuntimeError("no")

    MadeUpCompiler(monkeypatch, fail)
    with pytest.raises(BuildError, match="did not compile"):
        nvrtc.compile_ptx("", "sm_80", "k")
    assert [timer.finished.is_set() for timer in timers] == [True, True]


@needs_nvrtc
def test_ptx() -> None:
    text = inspect.ptx(SOURCE, "sm_90a", "shift")
    assert ".entry shift" in text
    assert ".target sm_90a" in text
    assert not text.endswith("\0")


@needs_nvrtc
@needs_disassembler
def test_machine_instructions(tmp_path: Path) -> None:
    entry = KernelCache(tmp_path).load_or_compile("shift", SOURCE, "sm_80")
    assert "BAR.SYNC" in inspect.sass(entry.cubin)


@needs_disassembler
def test_data_that_is_no_cubin_is_refused() -> None:
    with pytest.raises(BuildError, match="could not disassemble the cubin"):
        inspect.sass(b"not a cubin")


def test_a_missing_disassembler_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "find_tool", lambda name: None)
    missing = r"nvdisasm or cuobjdump is not installed; pip install '\S+\[inspect\]' installs it"
    with pytest.raises(BuildError, match=missing):
        inspect.sass(b"")


def test_tools_are_found_in_cuda_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "nvtool"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert tools.find_tool("nvtool") is None
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert tools.find_tool("nvtool") == program


@pytest.mark.parametrize("missing", ["cupy", "NVRTC"])
def test_a_missing_compiler_names_the_remedy(missing: str, tmp_path: Path) -> None:
    """In a separate process, because an import cannot be undone."""
    binding = tmp_path / "cupy" / "cuda"
    binding.mkdir(parents=True)
    (tmp_path / "cupy" / "__init__.py").write_text("raise ImportError('no CuPy')" if missing == "cupy" else "")
    (binding / "__init__.py").touch()
    (binding / "nvrtc.py").write_text("def getVersion():\n    raise RuntimeError('libnvrtc.so.13 not found')\n")
    script = (
        "from flashgen.build import nvrtc\nfrom flashgen.errors import BuildError\nassert not nvrtc.is_available()\n"
        "try:\n    nvrtc.compile('', 'sm_80', 'k')\nexcept BuildError as error:\n    print(error)"
    )
    path = f"{tmp_path}:{Path(flashgen.__file__).parents[1]}"
    done = subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.stderr == ""
    assert "pip install '" in done.stdout and "[cuda13]'" in done.stdout
    assert ("CuPy is missing" if missing == "cupy" else "libnvrtc.so.13 not found") in done.stdout


def test_importing_build_imports_no_cupy() -> None:
    script = "import flashgen.build, sys; print([name for name in ('cupy', 'jinja2', 'typer') if name in sys.modules])"
    environment = {"PYTHONPATH": str(Path(flashgen.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
