"""Runs a sanitized kernel: one launch in a separate program, which gets its request in a file.

The format is that of templates/emulator/request_file.cpp; change both together.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flashgen.build.host import HostKernel
from flashgen.errors import LaunchError
from flashgen.runtime.findings import failure_text, summarise
from flashgen.runtime.schedule import Schedule

Pointers = Sequence[tuple[int, np.ndarray[Any, Any]]]
Size = tuple[int, int, int]

_MAGIC = b"FGEMU001"
_HEADER = struct.Struct("<8s 3I 3I I I I I I I Q")
_BUFFER = struct.Struct("<QQ")
_POINTER = struct.Struct("<IIQ")
_RESULT = struct.Struct("<II4Q")
_ALIGNMENT = 16  # bytes: that of the program's allocations

# The program stops at the first error. Leaks do not matter in a short process, and fake stacks break with fibers.
_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:halt_on_error=1:color=never",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:color=never",
    "TSAN_OPTIONS": "halt_on_error=1:report_thread_leaks=0:history_size=4:atexit_sleep_ms=0:color=never",
}
_MAX_LINES = 40  # of an output that is not a sanitizer's report
_ADDR_NO_RANDOMIZE = 0x0040000


def launch_program(
    kernel: HostKernel,
    grid: Size,
    block: Size,
    shared_bytes: int,
    arguments: bytes,
    pointers: Pointers,
    schedule: Schedule,
) -> tuple[int, int, int, int]:
    """Launches like `emulator.launch`; returns (blocks, switches, collectives, copies)."""
    spans = _spans([array for _, array in pointers])
    with tempfile.TemporaryDirectory(prefix="flashgen-launch-") as text:
        request, result = Path(text) / "request", Path(text) / "result"
        header = _HEADER.pack(
            _MAGIC,
            *grid,
            *block,
            shared_bytes,
            schedule.order_index,
            schedule.copies_index,
            len(arguments),
            len(spans),
            len(pointers),
            schedule.seed,
        )
        with request.open("wb") as file:
            file.write(header + arguments)
            for span in spans:
                file.write(_BUFFER.pack(span.bytes, span.begin % _ALIGNMENT))
                file.write(span.memory())
            for offset, array in pointers:
                file.write(_POINTER.pack(offset, *_locate(array, spans)))
        done = _run(kernel, request, result)
        answer = result.read_bytes() if result.exists() else b""
    if done.returncode != 0 or not answer:
        raise LaunchError(failure_text(kernel, _finding(done), schedule))
    failed, message_bytes, *counts = _RESULT.unpack_from(answer)
    body = memoryview(answer)[_RESULT.size :]
    if failed:
        raise LaunchError(failure_text(kernel, bytes(body[:message_bytes]).decode(errors="replace"), schedule))
    _copy_back(body[message_bytes:], spans)
    return counts[0], counts[1], counts[2], counts[3]


@dataclass
class _Span:
    """The memory range of one array, or of several arrays that share memory."""

    begin: int
    end: int
    writeable: bool

    @property
    def bytes(self) -> int:
        return self.end - self.begin

    def memory(self) -> ctypes.Array[ctypes.c_char]:
        return (ctypes.c_char * self.bytes).from_address(self.begin)


def _bounds(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    if array.size == 0:
        return array.ctypes.data, array.ctypes.data
    begin, end = np.lib.array_utils.byte_bounds(array)
    return int(begin), int(end)


def _spans(arrays: Sequence[np.ndarray[Any, Any]]) -> list[_Span]:
    """Returns the memory of the arrays without duplicates, so that views of one buffer stay views of one buffer."""
    spans: list[_Span] = []
    for (begin, end), writeable in sorted((_bounds(array), array.flags.writeable) for array in arrays):
        if spans and begin < spans[-1].end:
            spans[-1].end = max(spans[-1].end, end)
            spans[-1].writeable |= writeable
        else:
            spans.append(_Span(begin, end, writeable))
    return spans


def _locate(array: np.ndarray[Any, Any], spans: Sequence[_Span]) -> tuple[int, int]:
    """Returns the index of the span that holds an array, and the offset of the array's data address in it."""
    begin, end = _bounds(array)
    number = next(i for i, span in enumerate(spans) if span.begin <= begin and end <= span.end)
    return number, array.ctypes.data - spans[number].begin


def _copy_back(data: memoryview, spans: Sequence[_Span]) -> None:
    for span in spans:
        if span.writeable and span.bytes:
            ctypes.memmove(span.begin, bytes(data[: span.bytes]), span.bytes)
        data = data[span.bytes :]


def _run(kernel: HostKernel, request: Path, result: Path) -> subprocess.CompletedProcess[str]:
    """Runs the program. If the cache was cleared before it is loaded, its files are built again."""
    before = kernel.files()
    try:
        done = _run_once(kernel, request, result)
        if done.returncode == 0 or (before is not None and kernel.files() == before):
            return done
    except FileNotFoundError:
        if before is not None and kernel.files() == before:
            raise
    return _run_once(kernel.restored(), request, result)


def _run_once(kernel: HostKernel, request: Path, result: Path) -> subprocess.CompletedProcess[str]:
    searched = (str(kernel.runtime.parent), os.environ.get("LD_LIBRARY_PATH", ""))
    environment = os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, searched))}
    for name, options in _OPTIONS.items():
        given = environment.get(name)
        environment[name] = f"{options}:{given}" if given else options
    with _fixed_addresses():
        return subprocess.run(
            [kernel.path, request, result],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )


@contextlib.contextmanager
def _fixed_addresses() -> Iterator[None]:
    """Disables address space randomization for programs that are started inside.

    Sanitizers shadow fixed parts of the address space. If the operating system randomizes mappings over more bits than
    they expect (vm.mmap_rnd_bits above 28), they exit before main, so the program itself cannot prevent it. It inherits
    the personality of this thread, as with `setarch -R`. If a container forbids that, nothing changes.
    """
    try:
        personality = ctypes.CDLL(None).personality
    except AttributeError:  # not Linux
        yield
        return
    before = personality(ctypes.c_ulong(0xFFFFFFFF))
    if before != -1:
        personality(ctypes.c_ulong(before | _ADDR_NO_RANDOMIZE))
    try:
        yield
    finally:
        if before != -1:
            personality(ctypes.c_ulong(before))


def _finding(done: subprocess.CompletedProcess[str]) -> str:
    if "unexpected memory mapping" in done.stderr:
        return "ThreadSanitizer cannot run with this address layout; `sysctl vm.mmap_rnd_bits=28` allows it"
    summary = summarise(done.stderr)
    if summary is not None:
        return summary
    report = "\n".join(done.stderr.strip().splitlines()[:_MAX_LINES])
    return f"the program ended with status {done.returncode} and no sanitizer's report\n{report}"
