"""Compiles CUDA C++ to a cubin or to PTX, by NVRTC. Needs no GPU and no driver: the architecture is always given.

CuPy's `RawModule(code=...)` is not used: it picks an architecture by itself and asks the driver for it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.build.diagnostics import numbered_errors
from flashgen.build.elf import complete_image
from flashgen.build.resources import Resources, combined, parse_resources, without_timings
from flashgen.build.tools import cuda_roots, wheel_roots
from flashgen.errors import BuildError, FlashgenWarning
from flashgen.remedies import install_cuda

# Line numbers cost no instructions. The source's folder must be given, as NVRTC else writes the current one into the
# image, and then the same source makes different bytes on every machine.
_BASE_OPTIONS = ("--std=c++17", "-lineinfo")
_VERBOSE = "--ptxas-options=-v"
_NO_CACHE, _CACHES_SINCE = "--no-cache", (12, 9)
_SOURCE_FOLDER = "/flashgen/"
_PATIENCE = 10.0  # seconds after which a compilation is announced
_ARCHITECTURE = re.compile(r"sm_(?P<number>\d{2,3})(?P<suffix>[af]?)")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compiled:
    """A kernel's machine code, the compiler's log of it, and what it uses."""

    cubin: bytes
    log: str
    resources: Resources
    nvrtc_version: tuple[int, int]


def compile(source: str, architecture: str, name: str) -> Compiled:
    """Compile CUDA C++ to machine code of one real architecture.

    Args:
        source: one self-contained translation unit.
        architecture: `sm_75`, `sm_80`, ... `sm_90a`.
        name: the readable name, shown in messages and by profilers as `<name>.cu`.

    A compilation that takes more than 10 seconds is announced by a FlashgenWarning while it runs.

    Raises:
        BuildError: CuPy or NVRTC is missing, the architecture is unknown to it, or the source does not compile; the
            message then holds the log and the numbered source lines around each error.
    """
    check_architecture(architecture)
    nvrtc, program, log = _run(source, name, options(architecture))
    try:
        cubin = complete_image(nvrtc.getCUBIN(program))
    finally:
        nvrtc.destroyProgram(program)
    return Compiled(cubin, without_timings(log), combined(parse_resources(log)), version())


def compile_ptx(source: str, architecture: str, name: str) -> str:
    """The PTX of the same compilation as `compile`, as text. Raises what `compile` raises."""
    check_architecture(architecture)
    nvrtc, program, _ = _run(source, name, options(architecture))
    try:
        text: bytes | str = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    return (text.decode() if isinstance(text, bytes) else text).rstrip("\0")


def options(architecture: str, of_version: tuple[int, int] | None = None) -> tuple[str, ...]:
    """The options that `compile` passes, which are part of a kernel's key. Fast math is left to the source.

    of_version: the version of the NVRTC that compiles; None is the one here.

    NVRTC's own cache, which it has where there is a driver, is turned off, as what comes from it has no report.
    """
    own_cache = (_NO_CACHE,) if (of_version or version()) >= _CACHES_SINCE else ()
    return (*_BASE_OPTIONS, f"--gpu-architecture={architecture}", _VERBOSE, *own_cache)


def version() -> tuple[int, int]:
    """NVRTC's (major, minor). Raises BuildError when NVRTC is missing."""
    return _load()[1]


def is_available() -> bool:
    """Whether kernels can be compiled here."""
    try:
        version()
    except BuildError:
        return False
    return True


def supported_architectures() -> tuple[str, ...]:
    """The base architectures that this NVRTC compiles for, as `sm_75`, in ascending order."""
    return tuple(f"sm_{number}" for number in sorted(_load()[0].getSupportedArchs()))


def check_architecture(architecture: str) -> None:
    """Raises BuildError, with the list of what is supported, for an architecture that this NVRTC does not know."""
    match = _ARCHITECTURE.fullmatch(architecture)
    supported = supported_architectures()
    if match is None or f"sm_{match['number']}" not in supported or (match["suffix"] and int(match["number"]) < 90):
        major, minor = version()
        raise BuildError(
            f"architecture {architecture!r} is not one that NVRTC {major}.{minor} compiles for; it knows "
            f"{', '.join(supported)} (from sm_90 on also with an `a`, such as sm_90a)"
        )


def _run(source: str, name: str, arguments: Sequence[str]) -> tuple[Any, Any, str]:
    """(the nvrtc module, a compiled program that the caller destroys, its log)."""
    nvrtc, _ = _load()
    program = nvrtc.createProgram(source, f"{_SOURCE_FOLDER}{name}.cu", (), ())
    try:
        with _announced(name):
            nvrtc.compileProgram(program, tuple(arguments))
    except nvrtc.NVRTCError as error:
        log = _readable(nvrtc.getProgramLog(program))
        nvrtc.destroyProgram(program)
        raise BuildError(_failure(source, name, arguments, str(error), log)) from None
    return nvrtc, program, _readable(nvrtc.getProgramLog(program))


@contextmanager
def _announced(name: str) -> Iterator[None]:
    """Announces a compilation, once, when it takes long. NVRTC leaves other threads running meanwhile."""
    timer = threading.Timer(_PATIENCE, _announce, (name,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _announce(name: str) -> None:
    message = (
        f"kernel {name} has been compiling for {_PATIENCE:g} s: NVRTC repeats the operations of a score or mask for "
        "every element that a thread holds, and many slow ones, such as nested sin and cos, can take it minutes; the "
        "result is kept, so that later calls do not wait"
    )
    _log.warning("%s", message)
    with suppress(FlashgenWarning):  # where warnings are errors this thread ends quietly, and the log has it
        warnings.warn(message, FlashgenWarning, stacklevel=2)


def _readable(log: str) -> str:
    return log.replace(_SOURCE_FOLDER, "").rstrip(" \0\n")


def _failure(source: str, name: str, arguments: Sequence[str], status: str, log: str) -> str:
    parts = [f"kernel {name} did not compile with NVRTC options {' '.join(arguments)}: {status}", log]
    lines = numbered_errors(source, log)
    if lines:
        parts.append(f"source around the errors:\n{lines}")
    return "\n".join(part for part in parts if part)


@functools.cache
def _load() -> tuple[Any, tuple[int, int]]:
    """(CuPy's binding, NVRTC's version). A failure is not cached: the user may install what is missing and go on."""
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise BuildError(
            f"compiling a kernel needs CuPy and NVRTC, and CuPy is missing ({error}); both come with {install_cuda()}"
        ) from error
    first = _version_or_error(nvrtc)
    if isinstance(first, tuple):
        return nvrtc, first
    for library in _library_candidates():
        try:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            _log.debug("cannot load %s: %s", library, error)
            continue
        found = _version_or_error(nvrtc)
        if isinstance(found, tuple):
            return nvrtc, found
    raise BuildError(
        f"compiling a kernel needs NVRTC, and CuPy cannot load it ({first}); both come with {install_cuda()}"
    )


def _version_or_error(nvrtc: Any) -> tuple[int, int] | Exception:
    try:
        major, minor = nvrtc.getVersion()
    except Exception as error:  # CuPy's versions raise RuntimeError, ImportError or NVRTCError for a missing library
        return error
    return int(major), int(minor)


def _library_candidates() -> Iterator[Path]:
    """Places of a libnvrtc that CuPy did not find: other wheels' folders, CUDA_PATH, CUDA_HOME, /usr/local."""
    for root in (*wheel_roots(), *cuda_roots()):
        for folder in ("lib", "lib64"):
            yield from sorted((root / folder).glob("libnvrtc.so.*"), reverse=True)
