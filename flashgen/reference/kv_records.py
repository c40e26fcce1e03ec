"""Records of a KV cache in NumPy: the bytes of a token to and from the columns of K."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from flashgen.errors import ArgumentError
from flashgen.language.kv_records import KvRecord

MIN_SCALE = 1e-4
"""Scales are at least this, rounded up to a power of two, as in FlashMLA."""
_LARGEST = 448.0  # of float8 e4m3


def encode_records(record: KvRecord, rows: Any) -> NDArray[np.uint8]:
    """Returns the records of rows of K, (..., head_dim) of any floating dtype, as FlashMLA's reference writes them.

    A scale is the smallest power of two of at least max(|x|) / 448 and MIN_SCALE, over the numbers x of its group. The
    numbers divided by it are rounded to float8 e4m3, to nearest even, and the other columns to bfloat16.

    Source: `quantize_k_cache` in tests/quant.py of FlashMLA (V32_FP8Sparse).
    """
    given = np.asarray(rows).astype(np.float32)
    scaled = given[..., : record.scaled_columns].reshape(*given.shape[:-1], record.groups, record.group)
    least = np.maximum(np.abs(scaled).max(axis=-1) / np.float32(_LARGEST), np.float32(MIN_SCALE))
    mantissa, exponent = np.frexp(least)
    scales = np.ldexp(np.float32(1), exponent - (mantissa == 0.5)).astype(np.float32)
    numbers = (scaled / scales[..., None]).astype(ml_dtypes.float8_e4m3fn).reshape(*given.shape[:-1], -1)
    plain = given[..., record.scaled_columns :].astype(ml_dtypes.bfloat16)
    parts = [np.ascontiguousarray(part).view(np.uint8) for part in (numbers, scales, plain)]
    return np.concatenate(parts, axis=-1)


def decode_records(record: KvRecord, given: Any) -> NDArray[np.float64]:
    """Returns the rows of K of records, (..., head_dim), without rounding. Scales may be any finite float32.

    Raises:
        ArgumentError: The array is not of records.
    """
    array = np.asarray(given)
    if array.dtype != np.uint8 or array.ndim < 1 or array.shape[-1] != record.bytes:
        raise ArgumentError(
            f"k has dtype {array.dtype} and shape {array.shape}; kv_dtype={record.name!r} takes uint8 (pages, "
            f"page_size, 1, {record.bytes})"
        )

    def part(first: int, end: int, dtype: Any) -> NDArray[np.float64]:
        return np.ascontiguousarray(array[..., first:end]).view(dtype).astype(np.float64)

    numbers = part(0, record.scaled_columns, ml_dtypes.float8_e4m3fn)
    scales = part(record.scaled_columns, record.first_plain_byte, np.float32)
    plain = part(record.first_plain_byte, record.bytes, ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore"):
        return np.concatenate([numbers * np.repeat(scales, record.group, axis=-1), plain], axis=-1)
