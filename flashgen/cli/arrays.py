"""Reads and writes named arrays in .npz and .safetensors files, without pickle.

safetensors supports bfloat16. NumPy's file format does not, so an .npz stores bfloat16 elements as 16-bit words: as
`uint16`, which this module writes, or as the 2-byte void type to which `numpy.savez` converts `ml_dtypes.bfloat16`. The
reader must know which arrays of a file are bfloat16; `as_bfloat16` reinterprets such words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from flashgen.cli.npz import load_npz
from flashgen.cli.writing import replacing_output
from flashgen.errors import ArgumentError
from flashgen.files import read_file
from flashgen.strict_json import parse_json

Arrays = dict[str, np.ndarray[Any, Any]]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# A safetensors file is the size of the header (8 bytes, little-endian), the header in JSON, and the data of the arrays.
_SAFETENSORS_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_MAX_HEADER = 100_000_000  # bytes, the limit of the format


def load_arrays(path: Path, option: str = "--input") -> Arrays:
    """Returns the arrays of an .npz or .safetensors file by name. `option` names the file in error messages.

    Raises ArgumentError for another kind of file, for a file that cannot be read, and for a damaged file.
    """
    check_kind(path, option)
    try:
        return load_npz(path) if path.suffix == ".npz" else _load_safetensors(read_file(path))
    except OSError as error:
        raise ArgumentError(f"{option} {path} cannot be read: {error.strerror or error}") from error
    except MemoryError as error:
        raise ArgumentError(f"{option} {path} does not fit into memory: {error}") from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ArgumentError(f"{option} {path} is not a sound {path.suffix} file: {error}") from error


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays to an .npz or .safetensors file atomically.

    Raises ArgumentError for another kind of file, a dtype that the format lacks, and a path that cannot be written.
    """
    check_kind(path, "--output")
    with replacing_output(path) as file:
        if path.suffix == ".npz":
            plain = {
                name: array.view(np.uint16) if array.dtype == BFLOAT16 else array for name, array in arrays.items()
            }
            np.savez(file, allow_pickle=False, **plain)
        else:
            file.write(_safetensors_bytes(arrays))


def as_bfloat16(array: np.ndarray) -> np.ndarray:
    """Views the 16-bit words of an .npz file as bfloat16. Other arrays are returned unchanged."""
    is_word = array.dtype == np.uint16 or array.dtype == np.dtype("V2")
    return array.view(BFLOAT16) if is_word else array


def check_kind(path: Path, option: str) -> None:
    """Raises ArgumentError if the suffix of a file is not that of a supported format."""
    if path.suffix not in {".npz", ".safetensors"}:
        raise ArgumentError(f"{option} {path} has the suffix {path.suffix!r}; .npz and .safetensors are supported")


def _load_safetensors(content: bytes) -> Arrays:
    header_size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or header_size > min(_MAX_HEADER, len(content) - 8):
        raise ValueError("its header is cut short")
    header = parse_json(content[8 : 8 + header_size])
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    data = memoryview(content)[8 + header_size :]
    return {name: _tensor(name, entry, data) for name, entry in header.items() if name != "__metadata__"}


def _tensor(name: str, entry: Mapping[str, Any], data: memoryview) -> np.ndarray:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{name!r} lacks a dtype, a shape or data_offsets")
    if entry["dtype"] not in _SAFETENSORS_DTYPES:
        raise ValueError(f"{name!r} has the type {entry['dtype']}, which is not supported")
    dtype = _SAFETENSORS_DTYPES[str(entry["dtype"])]
    shape = tuple(int(size) for size in entry["shape"])
    begin, end = entry["data_offsets"]
    fits = 0 <= begin <= end <= len(data) and end - begin == math.prod(shape) * dtype.itemsize
    if not fits or min(shape, default=0) < 0:
        raise ValueError(f"{name!r} of shape {shape} does not fit the bytes {begin} to {end} of {len(data)}")
    return np.frombuffer(data[begin:end], dtype=dtype).reshape(shape)


def _safetensors_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    names = {dtype: name for name, dtype in _SAFETENSORS_DTYPES.items()}
    header, offset = {}, 0
    for name, array in arrays.items():
        if array.dtype not in names:
            raise ArgumentError(f"--output: safetensors has no type for {name!r}, which is {array.dtype}")
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data to 8 bytes
    return len(text).to_bytes(8, "little") + text + b"".join(np.ascontiguousarray(a).tobytes() for a in arrays.values())
