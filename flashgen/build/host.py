"""Compiles emitted source for the CPU: the emulator's half of `build`.

A kernel becomes a small compile unit (`templates/emulator/unit.cpp.jinja`) with the emulator's header force-included.
The heavy runtime is compiled once per mode into an entry of its own, which also holds the headers; kernels find it by a
path relative to their own entry, so that a cache may be moved.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flashgen.build.cache import default_cache
from flashgen.build.entries import Artifacts
from flashgen.build.keys import content_key, folder_name
from flashgen.errors import BuildError
from flashgen.templates_path import template_root

Mode = Literal["plain", "address", "thread"]
MODES: tuple[Mode, ...] = ("plain", "address", "thread")

SOURCE = "kernel.cu"
_HEADER, _PRIMITIVES, _UNIT, _RUNTIME = "emulator.h", "primitives.h", "unit.cpp", "runtime.cpp"
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_MISSING_SANITIZER = re.compile(r"(?:-l|lib)(?:a|t|ub)san|clang_rt\.(?:a|t|ub)san")
_LONGEST_LOG = 40  # lines of a compiler's complaint in an error

_REMEDY = "install one (Debian, Ubuntu: `apt install g++`; Fedora: `dnf install gcc-c++`), or set CXX to its path"

# Type punning through pointers is what kernels do, so aliasing is not assumed; sums are not contracted, so that results
# are the same on x86-64 and aarch64.
_COMMON = ("-std=c++17", "-fPIC", "-g1", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-omit-frame-pointer")
_KERNEL = (*_COMMON, "-w", "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fvisibility=hidden")
_RUNTIME_OPTIONS = (*_COMMON, "-O3", "-fno-semantic-interposition", "-pthread")
_LIBRARY = ("-shared",)

# Most of a launch is the runtime's work, so optimising the kernel hardly pays for the compiler's time:
# -Og takes 60% of that of -O1, and its kernels as long; under sanitizers -O0 takes 45%.
_KERNEL_MODE: Mapping[Mode, tuple[str, ...]] = {
    "plain": ("-Og", *_LIBRARY),
    # Shifting a negative number left is defined on every GPU, and in C++ since 2020.
    "address": ("-O0", "-fsanitize=address,undefined", "-fno-sanitize=shift-base", "-fno-sanitize-recover=all"),
    "thread": ("-O0", "-fsanitize=thread"),
}
# Under TSan the runtime is not instrumented: it says itself what a GPU would do (templates/emulator/sanitizers.h).
_RUNTIME_MODE: Mapping[Mode, tuple[str, ...]] = {
    "plain": (),
    "address": ("-fsanitize=address",),
    "thread": ("-DFLASHGEN_TSAN",),
}


@dataclass(frozen=True)
class HostKernel:
    """A kernel compiled for the CPU.

    Attributes:
        path: a shared library (mode "plain") or a program that runs one launch from a file (sanitized modes).
        mode: "plain", "address" (AddressSanitizer and UBSan) or "thread" (ThreadSanitizer).
        name: the kernel's name in the source.
        source_path: the emitted source beside it, which findings name as `kernel.cu`.
        runtime: the emulator's own library, which it needs. It holds that library's place in a cache; whoever loads it
            gives the place too, as one of the two may stand in a temporary folder.

    A loader takes files, not bytes, so whatever stands at these paths is run: `flashgen.build.trust` checks that nobody
    else may write there.
    """

    path: Path
    mode: Mode
    name: str
    source_path: Path
    runtime: Path


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its command, its version and its target machine."""

    command: tuple[str, ...]
    identity: str


def compile_host(source: str, kernel_name: str, sanitize: Literal["address", "thread"] | None = None) -> HostKernel:
    """Compile an emitted kernel for the emulator, or take it from the cache.

    Args:
        source: the emitted CUDA text; its kernel takes exactly one struct by value.
        kernel_name: the `extern "C" __global__` function in it.
        sanitize: None for a library that runs in this process, "address" or "thread" for a program that checks itself.

    Raises:
        BuildError: there is no C++ compiler, or it refused the source; the message holds its first complaints.
    """
    mode: Mode = sanitize or "plain"
    if mode not in MODES:
        raise BuildError(f"sanitize must be None, 'address' or 'thread', got {sanitize!r}")
    if not _IDENTIFIER.fullmatch(kernel_name):
        raise BuildError(f"kernel_name must be the name of a function in the source, got {kernel_name!r}")
    compiler = find_compiler()
    runtime_key = _runtime_key(mode, compiler)
    runtime = _runtime(mode, compiler, runtime_key)
    key = content_key(
        "host-kernel",
        {"source": source, "kernel": kernel_name, "runtime": runtime_key, "options": " ".join(_kernel_options(mode))},
    )
    output = f"{kernel_name}.so" if mode == "plain" else kernel_name
    entry = default_cache().get_or_build(
        f"{kernel_name}-host-{mode}",
        key,
        lambda: _build_kernel(source, kernel_name, mode, compiler, runtime, output),
    )
    return HostKernel(entry / output, mode, kernel_name, entry / SOURCE, runtime / _library_name(runtime.name))


def find_compiler() -> Compiler:
    """The compiler that CXX names, else the first of c++, g++ and clang++ on the PATH.

    Raises:
        BuildError: none is there, or the one found does not run.
    """
    return _identify(_compiler_command(os.environ.get("CXX", "").strip()))


def _compiler_command(chosen: str) -> tuple[str, ...]:
    if chosen:
        command = shlex.split(chosen)
        if shutil.which(command[0]) is None:
            raise BuildError(
                f"CXX names {command[0]!r}, which is not a program here; set it to a C++17 compiler or unset it"
            )
        return tuple(command)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return (name,)
    raise BuildError(f"the emulator needs a C++17 compiler, and neither c++, g++ nor clang++ is on the PATH; {_REMEDY}")


@functools.cache
def _identify(command: tuple[str, ...]) -> Compiler:
    answers = []
    for question in ("--version", "-dumpmachine"):
        done = subprocess.run([*command, question], capture_output=True, text=True, check=False)
        if done.returncode != 0 or not done.stdout.strip():
            raise BuildError(
                f"the C++ compiler {command[0]!r} does not answer {question}: {done.stderr.strip()}; {_REMEDY}"
            )
        answers.append(done.stdout.splitlines()[0].strip())
    return Compiler(command, " | ".join(answers))


def _kernel_options(mode: Mode) -> tuple[str, ...]:
    return (*_KERNEL, *_KERNEL_MODE[mode])


def _runtime_options(mode: Mode) -> tuple[str, ...]:
    return (*_RUNTIME_OPTIONS, *_LIBRARY, *_RUNTIME_MODE[mode])


def _runtime_key(mode: Mode, compiler: Compiler) -> str:
    options = " ".join(_runtime_options(mode))
    return content_key("emulator", {**_emulator_sources(), "options": options, "compiler": compiler.identity})


def _runtime(mode: Mode, compiler: Compiler, key: str) -> Path:
    """The entry with the mode's runtime library and all headers."""
    return default_cache().get_or_build(f"emulator-{mode}", key, lambda: _build_runtime(mode, compiler, key))


def _library_name(folder: str) -> str:
    # The key is in the name, and so in the soname: the loader takes two libraries of one soname for the same.
    return f"libflashgen-{folder}.so"


def _build_runtime(mode: Mode, compiler: Compiler, key: str) -> Artifacts:
    library = _library_name(folder_name(f"emulator-{mode}", key))
    sources = _emulator_sources()
    with _workshop() as folder:
        for name, content in sources.items():
            (folder / name).write_text(content, encoding="utf-8")
        options = [*_runtime_options(mode), f"-Wl,-soname,{library}", f"-ffile-prefix-map={folder}=emulator"]
        _run_compiler([*compiler.command, *options, _RUNTIME, "-o", library], folder, what="the emulator's runtime")
        files = {name: content.encode() for name, content in sources.items() if name.endswith(".h")}
        return Artifacts({**files, library: (folder / library).read_bytes()}, _facts(mode, compiler))


def _build_kernel(
    source: str, kernel_name: str, mode: Mode, compiler: Compiler, runtime: Path, output: str
) -> Artifacts:
    with _workshop() as folder:
        (folder / SOURCE).write_text(source, encoding="utf-8")
        (folder / _UNIT).write_text(_render_unit(kernel_name, mode), encoding="utf-8")
        command = [
            *compiler.command,
            *_kernel_options(mode),
            f"-ffile-prefix-map={folder}=.",
            f"-ffile-prefix-map={runtime}=emulator",
            f"-I{runtime}",
            "-include",
            _HEADER,
            _UNIT,
            "-o",
            output,
            f"-L{runtime}",
            f"-l:{_library_name(runtime.name)}",
            f"-Wl,-rpath,$ORIGIN/../{runtime.name}",
        ]
        _run_compiler(command, folder, what=f"kernel {kernel_name}")
        files = {SOURCE: source.encode(), output: (folder / output).read_bytes()}
        programs = frozenset() if mode == "plain" else frozenset({output})
        return Artifacts(files, {"name": kernel_name, **_facts(mode, compiler)}, programs)


@contextmanager
def _workshop() -> Iterator[Path]:
    """A temporary folder for a compilation. BuildError where there is no room."""
    try:
        with tempfile.TemporaryDirectory(prefix="flashgen-build-") as folder:
            yield Path(folder)
    except OSError as error:
        raise BuildError(
            f"the emulator compiles in a temporary folder ({error}); set TMPDIR to one with room"
        ) from error


def _facts(mode: Mode, compiler: Compiler) -> dict[str, Any]:
    return {"mode": mode, "compiler": compiler.identity}


def _run_compiler(command: Sequence[str], folder: Path, *, what: str) -> None:
    # Messages in one language and without colours, whatever the user's settings.
    environment = {**os.environ, "LC_ALL": "C", "GCC_COLORS": ""}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode == 0:
        return
    lines = done.stderr.strip().splitlines()
    more = [f"... and {len(lines) - _LONGEST_LOG} lines more"] if len(lines) > _LONGEST_LOG else []
    log = "\n".join([*lines[:_LONGEST_LOG], *more])
    hint = f"\n{_SANITIZER_REMEDY}" if _MISSING_SANITIZER.search(log) else ""
    raise BuildError(f"{what} does not compile for the emulator with {command[0]}:\n{log}{hint}")


_SANITIZER_REMEDY = (
    "the compiler's sanitizer libraries may be missing (they come with g++ on Debian and Ubuntu; "
    "on Fedora: `dnf install libasan libubsan libtsan`)"
)


@functools.cache
def _emulator_sources() -> Mapping[str, str]:
    """Every header and source of the emulator by name, the generated one included."""
    folder = template_root() / "emulator"
    paths = sorted(path for path in folder.iterdir() if path.suffix in (".h", ".cpp"))
    return {**{path.name: path.read_text(encoding="utf-8") for path in paths}, _PRIMITIVES: _render_primitives()}


@functools.cache
def _environment() -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_root()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def _render_primitives() -> str:
    """Every primitive as C++ for the host: the `host` macros of templates/device, for each of their element types."""
    texts = ["// Generated from the host() macros of templates/device.", "#pragma once"]
    for path in sorted((template_root() / "device").glob("*.cuh.jinja")):
        module = _environment().get_template(f"device/{path.name}").make_module({"target": None})
        if not hasattr(module, "host"):
            continue  # plain C++, which device and host share
        dtypes = getattr(module, "dtypes", None)
        rendered = [module.host()] if dtypes is None else [module.host(dtype) for dtype in dtypes]
        texts += [str(text).strip() for text in rendered]
    return "\n\n".join(texts) + "\n"


def _render_unit(kernel_name: str, mode: Mode) -> str:
    template = _environment().get_template("emulator/unit.cpp.jinja")
    return str(template.render(kernel_name=kernel_name, program=mode != "plain"))
