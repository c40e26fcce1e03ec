"""Compilation for the CPU: search for a compiler, refusals, caching."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashgen.build import Artifacts, KernelCache, cache, default_cache, host
from flashgen.build.entries import META
from flashgen.build.host import compile_host, find_compiler
from flashgen.errors import BuildError, LaunchError
from flashgen.runtime import emulator, sanitized

SOURCE = """
struct Arguments { int* out; };
extern "C" __global__ void store(const __grid_constant__ Arguments arguments) { *arguments.out = %d; }
"""


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that only contains the emulator's runtimes, which take seconds to compile."""
    folder, compiler = tmp_path / "cache", find_compiler()
    folder.mkdir(mode=0o700)
    for mode in ("plain", "address"):
        runtime = host._runtime(mode, compiler, host._runtime_key(mode, compiler))  # type: ignore[arg-type]
        shutil.copytree(runtime, folder / runtime.name)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(folder))
    monkeypatch.setattr(host, "_build_runtime", lambda *_: pytest.fail("a runtime was compiled again"))
    return folder


def test_a_second_compilation_is_a_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_host(SOURCE % 1, "store")
    monkeypatch.setattr(host, "_run_compiler", lambda *_, **__: pytest.fail("a compiler ran"))
    assert compile_host(SOURCE % 1, "store") == first
    assert first.source_path.read_text() == SOURCE % 1


def test_parts_of_a_key() -> None:
    kernels = [compile_host(SOURCE % n, "store", mode) for n in (1, 2) for mode in (None, "address", "thread")]
    assert len({kernel.path.parent for kernel in kernels}) == 6
    assert [kernel.mode for kernel in kernels[:3]] == ["plain", "address", "thread"]


def keys() -> tuple[str, str]:
    """Returns the keys of a runtime and of a kernel with the compiler of the current environment."""
    runtime_key = host._runtime_key("plain", find_compiler())
    return runtime_key, host._kernel_key(SOURCE % 1, "store", "plain", runtime_key)


@pytest.mark.parametrize("name", ["_KERNEL_OPTIONS", "_KERNEL_MODE_OPTIONS", "_RUNTIME_OPTIONS"])
def test_options_are_part_of_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, given = keys(), getattr(host, name)
    monkeypatch.setattr(host, name, {"plain": ("-O1",)} if isinstance(given, dict) else (*given, "-O1"))
    after = keys()
    assert before[1] != after[1]
    assert (before[0] != after[0]) == (name == "_RUNTIME_OPTIONS")


def test_each_text_is_part_of_a_kernels_key(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime_key, before = keys()
    found = {
        before,
        host._kernel_key(SOURCE % 2, "store", "plain", runtime_key),
        host._kernel_key(SOURCE % 1, "load", "plain", runtime_key),
        host._kernel_key(SOURCE % 1, "store", "plain", "0" * 64),
    }
    monkeypatch.setattr(host, "_render_unit", lambda *_: "another unit")
    assert len(found | {keys()[1]}) == 5


def test_cxx_and_the_environment_are_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags, including those that a wrapper adds, headers that they include, and variables that compilers read."""
    compiler = shutil.which(find_compiler().command[0])
    texts = [f'#!/bin/sh\nexec {compiler} {flags} "$@"\n' for flags in ("", "-DHIDDEN", "-ffast-math")]
    (tmp_path / "own.h").write_text("inline int own() { return 1; }\n")
    found = [keys()]
    for flags in ("-O1", "-DX", "-DX=2", "-isystem /one", "-isystem /two", f"-include {tmp_path}/own.h"):
        monkeypatch.setenv("CXX", f"{compiler} {flags}")
        found.append(keys())
    (tmp_path / "own.h").write_text("inline int own() { return 2; }\n")
    host._preprocessed.cache_clear()
    found.append(keys())
    for number, text in enumerate(texts):
        monkeypatch.setenv("CXX", program(tmp_path / f"wrapper-{number}", text))
        found.append(keys())
    assert found[0] == found[-3]  # a wrapper that adds nothing
    for variable in ("CPATH", "LIBRARY_PATH"):
        monkeypatch.setenv(variable, str(tmp_path))
        found.append(keys())
    assert len({runtime for runtime, _ in found}) == len({kernel for _, kernel in found}) == len(found) - 1


@pytest.fixture
def quick_runtimes(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the emulator's runtimes from the contents of the cache."""
    held = {
        entry.name.partition(".")[0]: {file.name: file.read_bytes() for file in entry.iterdir() if file.name != META}
        for entry in own_cache.iterdir()
    }
    monkeypatch.setattr(host, "_build_runtime", lambda mode, *_: Artifacts(held[f"emulator-{mode}"]))


@pytest.mark.parametrize("sanitize", [None, "address"])
@pytest.mark.parametrize("moment", ["compiled", "written", "loaded", "run"])
def test_the_cache_is_cleared_meanwhile(
    moment: str, sanitize: Any, quick_runtimes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the compiler runs, before the kernel is stored, before it is loaded, and during loading."""

    def cleared(function: Any) -> Any:
        def clear_once(*arguments: Any, **options: Any) -> Any:
            monkeypatch.setattr(*place, function)
            default_cache().clear()
            return function(*arguments, **options)

        return clear_once

    place = {
        "compiled": (host, "_run_compiler"),
        "written": (cache, "write_entry"),
        "loaded": (emulator, "_check"),
        "run": (emulator, "_load") if sanitize is None else (sanitized, "_run_once"),
    }[moment]
    monkeypatch.setattr(*place, cleared(getattr(*place)))
    emulator._entry_point.cache_clear()
    out, kernel = np.zeros(1, np.int32), compile_host(SOURCE % 5, "store", sanitize)
    emulator.launch(kernel, (1, 1, 1), (1, 1, 1), 0, bytes(8), [(0, out)])
    assert out[0] == 5 and getattr(*place).__name__ != "clear_once"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("sanitize", [None, "address"])
def test_the_cache_is_cleared_all_the_time(
    sanitize: Any, quick_runtimes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are compiled and launched even if the cache is cleared faster than it is filled."""

    def entry(cache: KernelCache, *arguments: Any, found: Any = KernelCache.entry) -> Any:
        stored = found(cache, *arguments)
        cache.clear()
        return stored

    monkeypatch.setattr(KernelCache, "entry", entry)
    out, kernel = np.zeros(1, np.int32), compile_host(SOURCE % 9, "store", sanitize)
    assert kernel.files() is None
    for _ in range(2):
        emulator.launch(kernel, (1, 1, 1), (1, 1, 1), 0, bytes(8), [(0, out)])
    assert out[0] == 9 and default_cache().list() == ()


@pytest.mark.parametrize("sanitize", [None, "address"])
def test_libraries_that_cannot_be_loaded_are_an_error(sanitize: Any, quick_runtimes: None) -> None:
    """Files that do not change are not rebuilt forever, although the cache may have been cleared."""
    kernel = compile_host(SOURCE % 6, "store", sanitize)
    kernel.path.write_bytes(b"no library")
    emulator._entry_point.cache_clear()
    with pytest.raises(OSError):
        emulator.launch(kernel, (1, 1, 1), (1, 1, 1), 0, bytes(8), [(0, np.zeros(1, np.int32))])


def test_a_report_quotes_the_source_of_a_cleared_kernel(quick_runtimes: None) -> None:
    source = (SOURCE % 1).replace("*arguments.out = 1;", "arguments.out[5] = 1;")
    kernel = compile_host(source, "store", "address")
    default_cache().clear()
    with pytest.raises(LaunchError, match=r"3 \| .*arguments\.out\[5\] = 1;"):
        emulator.launch(kernel, (1, 1, 1), (1, 1, 1), 0, bytes(8), [(0, np.zeros(1, np.int32))])


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


def test_an_error_in_the_source_is_reported_by_line() -> None:
    with pytest.raises(BuildError, match=r"(?s)kernel store does not compile .*kernel\.cu:3:\d+: error: .*nothing"):
        compile_host((SOURCE % 1).replace("= 1", "= nothing"), "store")


def test_a_missing_kernel_is_refused() -> None:
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


def test_a_missing_compiler_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match=r"neither c\+\+, .* is on the PATH; install one .*apt install g\+\+"):
        find_compiler()


def program(path: Path, text: str | bytes) -> str:
    """Writes a program with that text and returns its path."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(0o755)
    return str(path)


def test_a_cxx_with_invalid_quoting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", 'g++ "')
    with pytest.raises(BuildError, match=r"CXX='g\+\+ \"' cannot be split .*No closing quotation.* or unset it$"):
        find_compiler()


def test_version_output_may_have_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = shutil.which(find_compiler().command[0])
    say = r"[ $1 = --version ] && printf 'c++ \%s 1.0\n' && exit"
    names = [program(tmp_path / octal, f'#!/bin/sh\n{say % octal}\nexec {compiler} "$@"\n') for octal in ("377", "376")]
    identities = []
    for name in names:
        monkeypatch.setenv("CXX", name)
        identities.append(find_compiler().identity)
    assert identities[0].startswith(r"c++ \xff 1.0 | ") and identities[1].startswith(r"c++ \xfe 1.0 | ")


def test_a_program_that_cannot_be_started_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = program(tmp_path / "broken", b"\x7fELF of another machine")
    monkeypatch.setenv("CXX", name)
    with pytest.raises(BuildError, match=rf"the C\+\+ compiler '{name}' cannot be run \(Exec format error\); install"):
        find_compiler()


def test_a_relative_cxx_is_relative_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers run in other folders."""
    name = program(tmp_path / "mine", f'#!/bin/sh\nexec {shutil.which(find_compiler().command[0])} "$@"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "./mine -pipe")
    assert find_compiler().command == (name, "-pipe")


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


def test_every_primitive_has_a_host_implementation() -> None:
    text = host._render_primitives()
    for path in (host.template_root() / "device").glob("*.cuh.jinja"):
        assert "macro host" in path.read_text() or "macro shared" in path.read_text(), path.name
    for name in ("copy_async_16", "load_matrix_x4_transposed", "mma_m16n8k16_bf16", "mma_m16n8k8x2_f16", "pack_bf16"):
        assert f" {name}(" in text
