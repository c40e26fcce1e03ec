"""Tensor maps of the emulator: maps that no GPU accepts are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from flashgen.errors import LaunchError
from flashgen.runtime.emulated_maps import encode_map
from flashgen.runtime.tensor_maps import MAP_BYTES, MapShape, emulated_map

GIVEN: dict[str, Any] = {
    "dtype": "float16",
    "sizes": (64, 100, 2, 3),
    "byte_strides": (128, 12800, 25600),
    "box": (64, 32, 1, 1),
    "swizzle": 128,
}


def test_a_map_has_the_drivers_size_and_begins_with_the_address() -> None:
    encoded = encode_map(**GIVEN)
    assert len(encoded) == MAP_BYTES and encoded[:8] == bytes(8)
    assert encoded == emulated_map(MapShape("float16", GIVEN["sizes"], GIVEN["byte_strides"], (64, 32)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float64"}, "the dtype must be one of .* got 'float64'"),
        ({"sizes": (64, 0, 2, 3)}, "sizes must be from 1"),
        ({"sizes": (64, 100, 2)}, "as many of the box, one stride less"),
        ({"byte_strides": (128, 12800)}, "as many of the box, one stride less"),
        ({"byte_strides": (128, 12808, 25600)}, "multiples of 16 bytes"),
        ({"byte_strides": (-128, 12800, 25600)}, r"below 2\*\*40"),
        ({"box": (64, 257, 1, 1)}, "1 to 256 elements a side"),
        ({"box": (32, 32, 1, 1)}, "must have the swizzle's 128 bytes, got 64"),
        ({"box": (12, 32, 1, 1), "swizzle": 0}, "a multiple of 16 bytes, got 24"),
        ({"swizzle": 96}, "one of .* got 96"),
    ],
)
def test_maps_that_no_gpu_accepts_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        encode_map(**{**GIVEN, **change})
