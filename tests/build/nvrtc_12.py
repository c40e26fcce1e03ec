"""NVRTC 12 in addition to CuPy's NVRTC: the library through ctypes, with the interface of CuPy's binding."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from flashgen.build.tools import cuda_roots, wheel_roots


def library_path() -> Path | None:
    """Returns libnvrtc.so.12 of the wheel nvidia-cuda-nvrtc-cu12, or of a toolkit; None if there is none."""
    places = (
        root / folder / "libnvrtc.so.12" for root in (*wheel_roots(), *cuda_roots()) for folder in ("lib", "lib64")
    )
    return next((place for place in places if place.is_file()), None)


class NVRTCError(RuntimeError):
    """A failed call, with the library's name for the error, as in CuPy."""


class Binding:
    """The functions of `cupy.cuda.nvrtc` that flashgen calls."""

    NVRTCError = NVRTCError

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def getVersion(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def getSupportedArchs(self) -> list[int]:
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return list(found)

    def createProgram(self, source: str, name: str, headers: Sequence[str], includes: Sequence[str]) -> int:
        assert not headers and not includes
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        assert program.value
        return program.value

    def compileProgram(self, program: int, options: Sequence[str]) -> None:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self._call("nvrtcCompileProgram", ctypes.c_void_p(program), len(options), given)

    def destroyProgram(self, program: int) -> None:
        self._call("nvrtcDestroyProgram", ctypes.byref(ctypes.c_void_p(program)))

    def getProgramLog(self, program: int) -> str:
        return self._bytes(program, "ProgramLog").decode()

    def getCUBIN(self, program: int) -> bytes:
        return self._bytes(program, "CUBIN")

    def getPTX(self, program: int) -> bytes:
        return self._bytes(program, "PTX")

    def _bytes(self, program: int, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", ctypes.c_void_p(program), ctypes.byref(size))
        into = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", ctypes.c_void_p(program), into)
        return into.raw

    def _call(self, name: str, *arguments: Any) -> None:
        function: Callable[..., int] = getattr(self._library, name)
        status = function(*arguments)
        if status:
            raise NVRTCError(self._library.nvrtcGetErrorString(status).decode())


@cache
def loaded() -> tuple[Binding, tuple[int, int]]:
    """Replaces `flashgen.build.nvrtc._load`."""
    path = library_path()
    assert path is not None
    binding = Binding(path)
    return binding, binding.getVersion()
