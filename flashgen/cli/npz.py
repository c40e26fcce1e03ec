"""Reads the arrays of an .npz file. Sizes are checked against the bytes in the file, and nothing is unpickled."""

from __future__ import annotations

import lzma
import math
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from flashgen.files import open_file

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_SUFFIX, _MAGIC = ".npy", b"\x93NUMPY"


def load_npz(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the arrays of a file that `numpy.savez` or `numpy.savez_compressed` wrote, by name.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not such a file or is damaged, or the size of an array, which the message names,
            disagrees with its data.
        MemoryError: an array does not fit into memory.
    """
    with open_file(path) as file:
        if not zipfile.is_zipfile(file):
            raise ValueError(_not_zip_reason(file))
        try:
            with zipfile.ZipFile(file) as archive:
                members = [info for info in archive.infolist() if info.filename.endswith(_SUFFIX)]
                return {info.filename.removesuffix(_SUFFIX): _member(archive, info) for info in members}
        except (zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, RuntimeError) as error:
            raise ValueError(f"it is damaged, or compressed in a way that is not supported: {error}") from error


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray[Any, Any]:
    name = info.filename.removesuffix(_SUFFIX)
    with archive.open(info) as file:
        shape, fortran, dtype = _header(file, name)
        held = info.file_size - file.tell()
        claimed = math.prod(shape) * dtype.itemsize
        if claimed != held:
            raise ValueError(f"{name!r} claims {claimed} bytes of {dtype} in the shape {shape}, and holds {held}")
        array = np.empty(math.prod(shape), dtype)
        if array.size:
            _fill(array.view(np.uint8).data, file, name)
    return array.reshape(shape, order="F" if fortran else "C")


def _header(file: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = npy.read_magic(file)
        if version not in _HEADERS:
            raise ValueError(f"the version {version} of NumPy's format is not supported")
        shape, fortran, dtype = _HEADERS[version](file)
    except Exception as error:  # a header is a Python literal, and NumPy raises many kinds of errors for other text
        raise ValueError(f"{name!r} is not an array in NumPy's format ({str(error)[:200]})") from error
    if dtype.hasobject:
        raise ValueError(f"{name!r} holds Python objects, which are pickled and so never read: save plain arrays")
    if dtype.itemsize == 0 or min(shape, default=0) < 0:
        raise ValueError(f"{name!r} has elements of {dtype.itemsize} bytes in the shape {shape}")
    return shape, fortran, dtype


def _fill(memory: memoryview, file: IO[bytes], name: str) -> None:
    """Reads directly into the memory of an array, so that a large array is in memory only once."""
    at = 0
    while at < len(memory):
        count = file.readinto(memory[at:])  # type: ignore[attr-defined]
        if not count:
            raise ValueError(f"{name!r} ends after {at} of {len(memory)} bytes")
        at += count


def _not_zip_reason(file: IO[bytes]) -> str:
    file.seek(0)
    if file.read(len(_MAGIC)) == _MAGIC:
        return "it is a single array (.npy); numpy.savez writes several arrays by name"
    return "it is no zip archive, as numpy.savez writes, or it is truncated"
