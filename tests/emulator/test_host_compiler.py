"""Compiling for the CPU: what is found, what is refused, what is cached."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashgen.build import host
from flashgen.build.host import compile_host, find_compiler
from flashgen.errors import BuildError

SOURCE = """
struct Arguments { int* out; };
extern "C" __global__ void store(const __grid_constant__ Arguments arguments) { *arguments.out = %d; }
"""


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that has the emulator's runtimes, which take seconds to compile, and nothing else."""
    cache, compiler = tmp_path / "cache", find_compiler()
    cache.mkdir(mode=0o700)
    for mode in ("plain", "address"):
        runtime = host._runtime(mode, compiler, host._runtime_key(mode, compiler))  # type: ignore[arg-type]
        shutil.copytree(runtime, cache / runtime.name)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(cache))
    monkeypatch.setattr(host, "_build_runtime", lambda *_: pytest.fail("a runtime was compiled again"))
    return cache


def test_a_second_compilation_is_a_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_host(SOURCE % 1, "store")
    monkeypatch.setattr(host, "_run_compiler", lambda *_, **__: pytest.fail("a compiler ran"))
    assert compile_host(SOURCE % 1, "store") == first
    assert first.source_path.read_text() == SOURCE % 1


def test_what_makes_a_key() -> None:
    kernels = [compile_host(SOURCE % n, "store", mode) for n in (1, 2) for mode in (None, "address", "thread")]
    assert len({kernel.path.parent for kernel in kernels}) == 6
    assert [kernel.mode for kernel in kernels[:3]] == ["plain", "address", "thread"]


def test_a_cache_may_be_moved(run: Any, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for sanitize in (None, "address"):
        compile_host(SOURCE % 7, "store", sanitize)
    moved = own_cache.with_name("elsewhere")
    own_cache.rename(moved)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(moved))
    monkeypatch.setattr(host, "_build_kernel", lambda *_: pytest.fail("compiled again"))
    for sanitize in (None, "address"):
        out = np.zeros(1, np.int32)
        run(SOURCE % 7, "store", out, sanitize=sanitize)
        assert out[0] == 7


def test_an_error_in_the_source_is_told_by_its_line() -> None:
    with pytest.raises(BuildError, match=r"(?s)kernel store does not compile .*kernel\.cu:3:\d+: error: .*nothing"):
        compile_host((SOURCE % 1).replace("= 1", "= nothing"), "store")


def test_a_kernel_that_is_not_in_the_source() -> None:
    with pytest.raises(BuildError, match=r"'load' was not declared|undeclared identifier 'load'"):
        compile_host(SOURCE % 1, "load")


def test_a_static_shared_variable_is_refused() -> None:
    source = (SOURCE % 1).replace("{ *", "{ __shared__ int cell[4]; *")
    with pytest.raises(BuildError, match="dynamic shared memory only"):
        compile_host(source, "store")


@pytest.mark.parametrize("name", ["two words", "", "a;b", "x\n"])
def test_a_kernel_name_must_be_a_name(name: str) -> None:
    with pytest.raises(BuildError, match="kernel_name must be the name of a function"):
        compile_host(SOURCE % 1, name)


def test_an_unknown_sanitizer_is_refused() -> None:
    with pytest.raises(BuildError, match="sanitize must be None, 'address' or 'thread', got 'memory'"):
        compile_host(SOURCE % 1, "store", "memory")  # type: ignore[arg-type]


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match=r"neither c\+\+, .* is on the PATH; install one .*apt install g\+\+"):
        find_compiler()


def test_a_wrong_cxx_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(BuildError, match=r"CXX names '/nowhere/c\+\+', which is not a program"):
        find_compiler()


def test_cxx_may_have_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = find_compiler().command[0]
    monkeypatch.setenv("CXX", f"{compiler} -pipe")
    assert find_compiler().command == (compiler, "-pipe")


def test_a_program_that_is_no_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(BuildError, match="the C\\+\\+ compiler 'false' does not answer --version"):
        find_compiler()


def test_every_primitive_has_a_host_meaning() -> None:
    text = host._render_primitives()
    for path in (host.template_root() / "device").glob("*.cuh.jinja"):
        assert "macro host" in path.read_text() or "macro shared" in path.read_text(), path.name
    for name in ("copy_async_16", "load_matrix_x4_transposed", "mma_m16n8k16_bf16", "mma_m16n8k8x2_f16", "pack_bf16"):
        assert f" {name}(" in text
