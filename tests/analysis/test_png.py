"""PNG files, decoded by the specification's own words: chunks, checksums, palette, rows."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

from flashgen.analysis.drawing.png import encode
from flashgen.errors import ArgumentError


def decode(content: bytes) -> tuple[np.ndarray, dict[str, str]]:
    """Pixels and texts of a PNG with a palette and no filters."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, texts, place = {}, {}, 8
    while place < len(content):
        size, kind = struct.unpack(">I4s", content[place : place + 8])
        body = content[place + 8 : place + 8 + size]
        assert struct.unpack(">I", content[place + 8 + size : place + 12 + size])[0] == zlib.crc32(kind + body)
        if kind == b"iTXt":
            keyword, rest = body.split(b"\0", 1)
            texts[keyword.decode()] = rest[4:].decode()
        chunks[kind], place = body, place + 12 + size
    assert tuple(chunks)[0 :: len(chunks) - 1] == (b"IHDR", b"IEND")
    width, height, *form = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert form == [8, 3, 0, 0, 0]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + width)
    assert not rows[:, 0].any()
    return np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)[rows[:, 1:]], texts


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (16, 16)])
def test_pixels_come_back(shape: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    decoded, texts = decode(encode(pixels, {"Title": "a × b"}))
    assert np.array_equal(decoded, pixels) and texts == {"Title": "a × b"}


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentError, match="float64"):
        encode(np.zeros((2, 2, 3)))
    with pytest.raises(ArgumentError, match="not empty"):
        encode(np.zeros((0, 2, 3), np.uint8))
    with pytest.raises(ArgumentError, match="257 colours"):
        encode(np.array([[[i // 256, i % 256, 0] for i in range(257)]], np.uint8))
