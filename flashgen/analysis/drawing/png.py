"""Pixels -> the bytes of a PNG file, with the standard library (PNG specification, third edition, W3C 2025)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from flashgen.errors import ArgumentError

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MOST_COLOURS = 256
_BIT_DEPTH, _PALETTE = 8, 3  # a byte for each pixel, which is an index into the palette


def encode(pixels: np.ndarray[Any, Any], texts: Mapping[str, str] | None = None) -> bytes:
    """A PNG file of `pixels`, uint8 (height, width, 3), red, green and blue, of at most 256 different colours.

    texts: what the file says of itself by keyword, such as Title and Description.
    Raises ArgumentError for pixels of another shape or dtype, none at all, or too many colours.
    """
    pixels = np.asarray(pixels)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise ArgumentError(f"pixels are {pixels.dtype} {pixels.shape}: give uint8 (height, width, 3), not empty")
    height, width, _ = pixels.shape
    palette, indices = _palette(pixels)
    rows = np.zeros((height, 1 + width), np.uint8)  # each row begins with its filter: 0, none
    rows[:, 1:] = indices
    chunks = [
        _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, _BIT_DEPTH, _PALETTE, 0, 0, 0)),
        _chunk(b"PLTE", palette.tobytes()),
        *(_text(keyword, text) for keyword, text in (texts or {}).items()),
        _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)),
        _chunk(b"IEND", b""),
    ]
    return _SIGNATURE + b"".join(chunks)


def _palette(pixels: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The colours, uint8 (n, 3), and for each pixel the index of its colour."""
    packed = pixels.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32)
    colours, indices = np.unique(packed, return_inverse=True)
    if len(colours) > _MOST_COLOURS:
        raise ArgumentError(f"pixels have {len(colours)} colours: at most {_MOST_COLOURS} are written")
    channels = np.stack([colours >> 16, colours >> 8, colours], axis=1) & 0xFF
    return channels.astype(np.uint8), indices.reshape(packed.shape)


def _text(keyword: str, text: str) -> bytes:
    """An iTXt chunk: UTF-8, neither compressed nor in a language of its own."""
    return _chunk(b"iTXt", keyword.encode("latin-1") + b"\0\0\0\0\0" + text.encode())


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
