"""Compiles CUDA C++ to a cubin or to PTX with NVRTC. The architecture is always given, so no GPU or driver is needed.

CuPy's `RawModule(code=...)` is not used, because it asks the driver for the architecture.
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

# Line numbers cost no instructions. The folder of the source must be given: otherwise NVRTC writes the current folder
# into the image, and the same source gives different bytes on different machines.
_BASE_OPTIONS = ("--std=c++17", "-lineinfo")
_VERBOSE = "--ptxas-options=-v"
_NO_CACHE, _CACHES_SINCE = "--no-cache", (12, 9)
_SOURCE_FOLDER = "/flashgen/"
_ANNOUNCE_AFTER_SECONDS = 10.0
_ARCHITECTURE = re.compile(r"sm_(?P<number>\d{2,3})(?P<suffix>[af]?)")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compiled:
    """The machine code of a kernel, the log of the compiler, and the resources that the kernel uses."""

    cubin: bytes
    log: str
    resources: Resources
    nvrtc_version: tuple[int, int]


def compile(source: str, architecture: str, name: str) -> Compiled:
    """Compiles CUDA C++ to machine code of one real architecture.

    A compilation that takes more than 10 seconds issues a FlashgenWarning while it runs.

    Args:
        source: one self-contained translation unit.
        architecture: `sm_75`, `sm_80`, ... `sm_90a`.
        name: the readable name, shown in messages and by profilers as `<name>.cu`.

    Raises:
        BuildError: CuPy or NVRTC is missing, NVRTC does not support the architecture, or the source does not compile;
            the message then contains the log and the numbered source lines around each error.
    """
    check_architecture(architecture)
    nvrtc, program, log = _run(source, name, options(architecture))
    try:
        cubin = complete_image(nvrtc.getCUBIN(program))
    finally:
        nvrtc.destroyProgram(program)
    return Compiled(cubin, without_timings(log), combined(parse_resources(log)), version())


def compile_ptx(source: str, architecture: str, name: str) -> str:
    """Compiles to PTX instead of machine code, and returns it as text. Raises the same errors as `compile`."""
    check_architecture(architecture)
    nvrtc, program, _ = _run(source, name, options(architecture))
    try:
        text: bytes | str = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    return (text.decode() if isinstance(text, bytes) else text).rstrip("\0")


def options(architecture: str, nvrtc_version: tuple[int, int] | None = None) -> tuple[str, ...]:
    """Returns the options that `compile` passes, which are part of a kernel's key. Fast math is left to the source.

    NVRTC's own cache, which exists if a driver is installed, is disabled because its results have no resource report.

    nvrtc_version: the version of NVRTC that compiles; None for the installed one.
    """
    own_cache = (_NO_CACHE,) if (nvrtc_version or version()) >= _CACHES_SINCE else ()
    return (*_BASE_OPTIONS, f"--gpu-architecture={architecture}", _VERBOSE, *own_cache)


def version() -> tuple[int, int]:
    """Returns NVRTC's (major, minor) version. Raises BuildError if NVRTC is missing."""
    return _load()[1]


def is_available() -> bool:
    """Returns whether NVRTC is installed."""
    try:
        version()
    except BuildError:
        return False
    return True


def supported_architectures() -> tuple[str, ...]:
    """Returns the base architectures that the installed NVRTC supports, such as `sm_75`, in ascending order."""
    return tuple(f"sm_{number}" for number in sorted(_load()[0].getSupportedArchs()))


def check_architecture(architecture: str) -> None:
    """Raises BuildError that lists the supported architectures if the installed NVRTC does not support this one."""
    match = _ARCHITECTURE.fullmatch(architecture)
    supported = supported_architectures()
    if match is None or f"sm_{match['number']}" not in supported or (match["suffix"] and int(match["number"]) < 90):
        major, minor = version()
        raise BuildError(
            f"architecture {architecture!r} is not one that NVRTC {major}.{minor} compiles for; it knows "
            f"{', '.join(supported)} (from sm_90 on also with an `a`, such as sm_90a)"
        )


def _run(source: str, name: str, arguments: Sequence[str]) -> tuple[Any, Any, str]:
    """Returns the nvrtc module, a compiled program that the caller must destroy, and its log."""
    nvrtc, _ = _load()
    program = nvrtc.createProgram(source, f"{_SOURCE_FOLDER}{name}.cu", (), ())
    try:
        with _announce_if_slow(name):
            nvrtc.compileProgram(program, tuple(arguments))
    except nvrtc.NVRTCError as error:
        log = _readable(nvrtc.getProgramLog(program))
        nvrtc.destroyProgram(program)
        raise BuildError(_failure(source, name, arguments, str(error), log)) from None
    return nvrtc, program, _readable(nvrtc.getProgramLog(program))


@contextmanager
def _announce_if_slow(name: str) -> Iterator[None]:
    """Issues one warning if the body takes long. NVRTC does not block other threads, so a timer thread can do this."""
    timer = threading.Timer(_ANNOUNCE_AFTER_SECONDS, _announce, (name,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _announce(name: str) -> None:
    message = (
        f"kernel {name} has been compiling for {_ANNOUNCE_AFTER_SECONDS:g} s: NVRTC repeats the operations of a score "
        "or mask for every element that a thread holds, so that many slow operations, such as nested sin and cos, can "
        "take minutes; the result is cached, so later calls do not wait"
    )
    _log.warning("%s", message)
    with suppress(FlashgenWarning):  # if warnings are errors, the timer thread ends silently after the log message
        warnings.warn(message, FlashgenWarning, stacklevel=2)


def _readable(log: str) -> str:
    return log.replace(_SOURCE_FOLDER, "").rstrip(" \0\n")


def _failure(source: str, name: str, arguments: Sequence[str], status: str, log: str) -> str:
    sections = [f"kernel {name} did not compile with NVRTC options {' '.join(arguments)}: {status}", log]
    lines = numbered_errors(source, log)
    if lines:
        sections.append(f"source around the errors:\n{lines}")
    return "\n".join(section for section in sections if section)


@functools.cache
def _load() -> tuple[Any, tuple[int, int]]:
    """Returns CuPy's binding and NVRTC's version. A failure is not cached, so the user can install NVRTC and retry."""
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
    except Exception as error:  # versions of CuPy raise RuntimeError, ImportError or NVRTCError for a missing library
        return error
    return int(major), int(minor)


def _library_candidates() -> Iterator[Path]:
    """Yields paths of libnvrtc that CuPy may not search: in wheels of NVIDIA, CUDA_HOME, CUDA_PATH, /usr/local."""
    for root in (*wheel_roots(), *cuda_roots()):
        for folder in ("lib", "lib64"):
            yield from sorted((root / folder).glob("libnvrtc.so.*"), reverse=True)
