"""Compiles emitted kernels for the CPU, to run on the emulator.

A kernel becomes a small translation unit (`templates/emulator/unit.cpp.jinja`) that force-includes the header of the
emulator. The large runtime is compiled once per mode into a separate cache entry, which also contains the headers.
Kernels find it by a path relative to their own entry, so that a cache can be moved. A compilation does not read from
the cache folder, which `flashgen cache clear` may empty at any moment.

The keys contain a hash of the compiler's own headers, preprocessed with the flags of CXX and the environment. A change
of any of these, including files that the user's flags name by absolute paths, therefore gives another library.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flashgen.build.cache import Build, default_cache
from flashgen.build.entries import Artifacts, StoredEntry
from flashgen.build.keys import content_key, folder_name
from flashgen.errors import BuildError
from flashgen.templates_path import template_root

Mode = Literal["plain", "address", "thread"]
Settings = tuple[tuple[str, str], ...]
"""Environment variables and their values."""
MODES: tuple[Mode, ...] = ("plain", "address", "thread")

SOURCE = "kernel.cu"
_HEADER, _PRIMITIVES, _UNIT, _RUNTIME = "emulator.h", "primitives.h", "unit.cpp", "runtime.cpp"
_FOLDER = "emulator"  # folder of the headers and the library, next to the kernel being compiled
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_CLUSTER = re.compile(r"__cluster_dims__\((\d+), 1, 1\)")
_MISSING_SANITIZER = re.compile(r"(?:-l|lib)(?:a|t|ub)san|clang_rt\.(?:a|t|ub)san")
_MAX_LOG_LINES = 40  # lines of compiler output in an error message

_REMEDY = "install one (Debian, Ubuntu: `apt install g++`; Fedora: `dnf install gcc-c++`), or set CXX to its path"

# Environment variables that GCC, Clang and the linker read.
_COMPILER_VARIABLES = (
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"),
    *("CCC_OVERRIDE_OPTIONS", "SDKROOT", "MACOSX_DEPLOYMENT_TARGET", "NIX_CFLAGS_COMPILE", "NIX_LDFLAGS"),
)

# Kernels do type punning through pointers, so strict aliasing is off. FMA contraction is off, so that results are the
# same on x86-64 and aarch64.
_COMMON_OPTIONS = ("-std=c++17", "-fPIC", "-g1", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-omit-frame-pointer")
_KERNEL_OPTIONS = (*_COMMON_OPTIONS, "-w", "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fvisibility=hidden")
_RUNTIME_OPTIONS = (*_COMMON_OPTIONS, "-O3", "-fno-semantic-interposition", "-pthread")
_LIBRARY_OPTIONS = ("-shared",)

# Most of the time of a launch is spent in the runtime, so optimising the kernel hardly pays for the compile time: -Og
# takes 60% of the compile time of -O1 for equally fast kernels; under sanitizers -O0 takes 45%.
_KERNEL_MODE_OPTIONS: Mapping[Mode, tuple[str, ...]] = {
    "plain": ("-Og", *_LIBRARY_OPTIONS),
    # A left shift of a negative number is defined on every GPU, and in C++ since C++20.
    "address": ("-O0", "-fsanitize=address,undefined", "-fno-sanitize=shift-base", "-fno-sanitize-recover=all"),
    "thread": ("-O0", "-fsanitize=thread"),
}
# Under TSan the runtime is not instrumented: it annotates itself what a GPU would do (templates/emulator/sanitizers.h).
_RUNTIME_MODE_OPTIONS: Mapping[Mode, tuple[str, ...]] = {
    "plain": (),
    "address": ("-fsanitize=address",),
    "thread": ("-DFLASHGEN_TSAN",),
}


@dataclass(frozen=True)
class HostKernel:
    """A kernel compiled for the CPU.

    Attributes:
        source: the emitted source.
        path: a shared library (mode "plain") or a program that runs one launch from a file (sanitized modes).
        mode: "plain", "address" (AddressSanitizer and UBSan) or "thread" (ThreadSanitizer).
        name: the kernel's name in the source.
        source_path: the file of the emitted source, which findings refer to as `kernel.cu`.
        runtime: the emulator's own library, which the kernel needs. The kernel contains the path of that library in a
            cache; a loader must also pass the path, because one of the two may be in a temporary folder.

    A loader takes files, not bytes, so it runs whatever is at these paths. `flashgen.build.trust` checks that no
    untrusted user can write there.
    """

    source: str = field(repr=False)
    path: Path
    mode: Mode
    name: str
    source_path: Path
    runtime: Path

    def files(self) -> tuple[tuple[int, int], ...] | None:
        """Returns the identities of the files, which change when a file is replaced, or None if one is missing."""
        try:
            statuses = [path.stat() for path in (self.path, self.runtime)]
        except FileNotFoundError:
            return None
        return tuple((status.st_ino, status.st_ctime_ns) for status in statuses)

    def restored(self) -> HostKernel:
        """Returns the same kernel in a temporary folder of this process, for use after the cache was cleared.

        Raises the same errors as `compile_host`.
        """
        kernel = _compile(self.source, self.name, self.mode, default_cache().temporary_entry)
        if self.mode != "plain":
            kernel.path.chmod(0o700)
        return kernel


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    command: the program and the flags from CXX. identity: its version and target machine. settings: the environment
    variables that affect its output.
    """

    command: tuple[str, ...]
    identity: str
    settings: Settings = ()


def compile_host(source: str, kernel_name: str, sanitize: Literal["address", "thread"] | None = None) -> HostKernel:
    """Compiles an emitted kernel for the emulator, or loads it from the cache.

    Args:
        source: the emitted CUDA source. Its kernel takes exactly one struct by value.
        kernel_name: the `extern "C" __global__` function in it.
        sanitize: None for a library that runs in this process, "address" or "thread" for a sanitized program.

    Raises:
        BuildError: there is no C++ compiler, or it rejects the source; the message contains its first errors.
    """
    mode: Mode = sanitize or "plain"
    if mode not in MODES:
        raise BuildError(f"sanitize must be None, 'address' or 'thread', got {sanitize!r}")
    if not _IDENTIFIER.fullmatch(kernel_name):
        raise BuildError(f"kernel_name must be the name of a function in the source, got {kernel_name!r}")
    return _compile(source, kernel_name, mode, default_cache().entry)


FindOrBuild = Callable[[str, str, Build], StoredEntry]
"""Finds an entry by its name and key, or builds it."""


def _compile(source: str, kernel_name: str, mode: Mode, entries: FindOrBuild) -> HostKernel:
    compiler = find_compiler()
    runtime_key = _runtime_key(mode, compiler)
    runtime = _runtime(mode, compiler, runtime_key, entries)
    entry = entries(
        f"{kernel_name}-host-{mode}",
        _kernel_key(source, kernel_name, mode, runtime_key),
        lambda: _build_kernel(source, kernel_name, mode, compiler, runtime_key),
    ).path
    path, library = entry / _output(kernel_name, mode), runtime / _library_name(runtime.name)
    return HostKernel(source, path, mode, kernel_name, entry / SOURCE, library)


def find_compiler() -> Compiler:
    """Returns the compiler that CXX names, else the first of c++, g++ and clang++ on the PATH.

    Raises:
        BuildError: there is no compiler, or it does not run.
    """
    return _identify(_compiler_command(os.environ.get("CXX", "").strip()), _settings())


def _compiler_command(chosen: str) -> tuple[str, ...]:
    if chosen:
        try:
            program, *flags = shlex.split(chosen)
        except ValueError as error:
            raise BuildError(
                f"CXX={chosen!r} cannot be split into a program and its flags, as a shell does ({error}); set it to a "
                "C++17 compiler or unset it"
            ) from None
        if shutil.which(program) is None:
            raise BuildError(
                f"CXX names {program!r}, which is not a program here; set it to a C++17 compiler or unset it"
            )
        # The compiler runs in another folder, where a relative path would name another program.
        return (os.path.abspath(program) if os.path.dirname(program) else program, *flags)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return (name,)
    raise BuildError(f"the emulator needs a C++17 compiler, and neither c++, g++ nor clang++ is on the PATH; {_REMEDY}")


def _settings() -> Settings:
    """Returns the set environment variables that affect the output of a compiler, and PATH, by which it is found."""
    names = (*_COMPILER_VARIABLES, "PATH")
    return tuple((name, os.environ[name]) for name in names if os.environ.get(name))


@functools.cache
def _identify(command: tuple[str, ...], settings: Settings) -> Compiler:
    answers = [_query_compiler(command, question).splitlines()[0].strip() for question in ("--version", "-dumpmachine")]
    return Compiler(command, " | ".join(answers), tuple(pair for pair in settings if pair[0] in _COMPILER_VARIABLES))


def _query_compiler(command: Sequence[str], *arguments: str, stdin: str = "") -> str:
    """Returns what a compiler prints. Raises BuildError if it fails or prints nothing."""
    done = _run([*command, *arguments], stdin=stdin)
    if done.returncode != 0 or not done.stdout.strip():
        raise BuildError(
            f"the C++ compiler {command[0]!r} does not answer {' '.join(arguments)}: {done.stderr.strip()}; {_REMEDY}"
        )
    return done.stdout


def _run(command: Sequence[str], folder: Path | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a compiler, with messages in English and without colours, whatever the user's settings are.

    Raises BuildError if it cannot be started.
    """
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C", "GCC_COLORS": ""},
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="backslashreplace",  # different outputs stay different
            check=False,
        )
    except OSError as error:
        raise BuildError(f"the C++ compiler {command[0]!r} cannot be run ({error.strerror}); {_REMEDY}") from error


@functools.cache
def _preprocessed(compiler: Compiler) -> str:
    """Returns a hash of the compiler's own preprocessed headers, including every macro that its flags define."""
    source = "#include <new>\n#include <vector>\n"
    text = _query_compiler(compiler.command, "-x", "c++", "-E", "-dD", "-P", "-", stdin=source)
    return hashlib.sha256(text.encode()).hexdigest()


def _output(kernel_name: str, mode: Mode) -> str:
    return f"{kernel_name}.so" if mode == "plain" else kernel_name


def _kernel_arguments(kernel_name: str, mode: Mode, runtime: str, folder: Path | str) -> list[str]:
    """Returns the arguments that compile a kernel in a folder. runtime: the folder name of the runtime's entry."""
    return [
        *_KERNEL_OPTIONS,
        *_KERNEL_MODE_OPTIONS[mode],
        f"-ffile-prefix-map={folder}=.",
        f"-I{_FOLDER}",
        *("-include", _HEADER),
        _UNIT,
        *("-o", _output(kernel_name, mode)),
        f"-L{_FOLDER}",
        f"-l:{_library_name(runtime)}",
        f"-Wl,-rpath,$ORIGIN/../{runtime}",
    ]


def _runtime_arguments(mode: Mode, library: str, folder: Path | str) -> list[str]:
    """Returns the arguments that compile the runtime of a mode in a folder."""
    return [
        *(*_RUNTIME_OPTIONS, *_LIBRARY_OPTIONS, *_RUNTIME_MODE_OPTIONS[mode]),
        f"-Wl,-soname,{library}",
        f"-ffile-prefix-map={folder}={_FOLDER}",
        _RUNTIME,
        *("-o", library),
    ]


def _kernel_key(source: str, kernel_name: str, mode: Mode, runtime_key: str) -> str:
    """Returns the key of a kernel for the CPU: its sources, arguments, and the runtime's key (with the compiler)."""
    arguments = _kernel_arguments(kernel_name, mode, _runtime_folder(mode, runtime_key), "")
    return content_key(
        "host-kernel",
        {
            "source": source,
            "unit": _render_unit(source, kernel_name, mode),
            "runtime": runtime_key,
            "options": json.dumps(arguments),
        },
    )


def _runtime_key(mode: Mode, compiler: Compiler) -> str:
    return content_key(
        "emulator",
        {
            **_emulator_sources(),
            "options": json.dumps(_runtime_arguments(mode, "", "")),
            "compiler": compiler.identity,
            "flags": json.dumps(compiler.command[1:]),
            "settings": json.dumps(compiler.settings),
            "preprocessed": _preprocessed(compiler),
        },
    )


def _runtime_folder(mode: Mode, key: str) -> str:
    return folder_name(_runtime_name(mode), key)


def _runtime_name(mode: Mode) -> str:
    return f"emulator-{mode}"


def _runtime(mode: Mode, compiler: Compiler, key: str, entries: FindOrBuild | None = None) -> Path:
    """Returns the folder of the entry with the runtime library of a mode and all headers."""
    return _runtime_entry(mode, compiler, key, entries or default_cache().entry).path


def _runtime_entry(mode: Mode, compiler: Compiler, key: str, entries: FindOrBuild) -> StoredEntry:
    return entries(_runtime_name(mode), key, lambda: _build_runtime(mode, compiler, key))


def _library_name(folder: str) -> str:
    # The name, which is also the soname, contains the key: a loader treats libraries with equal sonames as the same.
    return f"libflashgen-{folder}.so"


def _build_runtime(mode: Mode, compiler: Compiler, key: str) -> Artifacts:
    library = _library_name(_runtime_folder(mode, key))
    sources = _emulator_sources()
    with _build_folder() as folder:
        for name, content in sources.items():
            (folder / name).write_text(content, encoding="utf-8")
        arguments = _runtime_arguments(mode, library, folder)
        _run_compiler([*compiler.command, *arguments], folder, what="the emulator's runtime")
        files = {name: content.encode() for name, content in sources.items() if name.endswith(".h")}
        return Artifacts({**files, library: (folder / library).read_bytes()}, _facts(mode, compiler))


def _build_kernel(source: str, kernel_name: str, mode: Mode, compiler: Compiler, runtime_key: str) -> Artifacts:
    runtime = _runtime_entry(mode, compiler, runtime_key, default_cache().entry)
    output = _output(kernel_name, mode)
    with _build_folder() as folder:
        (folder / SOURCE).write_text(source, encoding="utf-8")
        (folder / _UNIT).write_text(_render_unit(source, kernel_name, mode), encoding="utf-8")
        (folder / _FOLDER).mkdir()
        for name, data in runtime.files.items():
            (folder / _FOLDER / name).write_bytes(data)
        arguments = _kernel_arguments(kernel_name, mode, runtime.path.name, folder)
        _run_compiler([*compiler.command, *arguments], folder, what=f"kernel {kernel_name}")
        files = {SOURCE: source.encode(), output: (folder / output).read_bytes()}
        programs = frozenset() if mode == "plain" else frozenset({output})
        return Artifacts(files, {"name": kernel_name, **_facts(mode, compiler)}, programs)


@contextmanager
def _build_folder() -> Iterator[Path]:
    """Provides a temporary folder for a compilation. Raises BuildError if it cannot be created or written."""
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
    done = _run(command, folder)
    if done.returncode == 0:
        return
    lines = done.stderr.strip().splitlines()
    more = [f"... and {len(lines) - _MAX_LOG_LINES} more lines"] if len(lines) > _MAX_LOG_LINES else []
    log = "\n".join([*lines[:_MAX_LOG_LINES], *more])
    hint = f"\n{_SANITIZER_REMEDY}" if _MISSING_SANITIZER.search(log) else ""
    raise BuildError(f"{what} does not compile for the emulator with {command[0]}:\n{log}{hint}")


_SANITIZER_REMEDY = (
    "the compiler's sanitizer libraries may be missing (they come with g++ on Debian and Ubuntu; "
    "on Fedora: `dnf install libasan libubsan libtsan`)"
)


@functools.cache
def _emulator_sources() -> Mapping[str, str]:
    """Returns all headers and sources of the emulator by name, including the generated header."""
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
    """Renders all primitives as host C++, from the `host` macros of templates/device for each element type."""
    texts = ["// Generated from the host() macros of templates/device.", "#pragma once"]
    for path in sorted((template_root() / "device").glob("*.cuh.jinja")):
        module = _environment().get_template(f"device/{path.name}").make_module({"target": None})
        if not hasattr(module, "host"):
            continue  # plain C++ that device and host share
        dtypes = getattr(module, "dtypes", None)
        rendered = [module.host()] if dtypes is None else [module.host(dtype) for dtype in dtypes]
        texts += [str(text).strip() for text in rendered]
    return "\n\n".join(texts) + "\n"


def _render_unit(source: str, kernel_name: str, mode: Mode) -> str:
    template = _environment().get_template("emulator/unit.cpp.jinja")
    cluster = _CLUSTER.search(source)
    blocks = int(cluster[1]) if cluster else 1
    return str(template.render(kernel_name=kernel_name, program=mode != "plain", cluster_blocks=blocks))
