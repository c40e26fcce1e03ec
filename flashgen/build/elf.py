"""Checks that a compiled image is complete: the tables of an ELF file determine where it ends."""

from __future__ import annotations

import struct

from flashgen.errors import BuildError

_HEADER_BYTES = 64
_SECTION_WITHOUT_BYTES = 8  # SHT_NOBITS: occupies memory when loaded, but no bytes in the file


def complete_image(image: bytes) -> bytes:
    """Returns a cubin with the last byte restored if `getCUBIN` of CuPy 14 has dropped it.

    CuPy treats the image as a C string and removes its "terminating zero". The byte is restored only if exactly one
    byte is missing, and it is the most significant byte of a 64-bit number in a table that is below 2**56. Then it is
    known to be zero.

    Raises:
        BuildError: the image is not a 64-bit little-endian ELF file, or more than this byte is missing.
    """
    if len(image) < _HEADER_BYTES or image[:6] != b"\x7fELF\x02\x01":
        raise BuildError(f"the compiler returned {len(image)} bytes that are not a 64-bit ELF image")
    tables = _table_ends(image)
    end = max(*tables, *_section_ends(image))
    if len(image) >= end:
        return image
    if len(image) == end - 1 and end in tables:
        return image + b"\0"
    raise BuildError(f"the compiler returned {len(image)} bytes of an ELF image of {end} bytes; it is cut short")


def _table_ends(image: bytes) -> tuple[int, int]:
    """Returns the ends of the program and section header tables. Each ends with a 64-bit alignment or size."""
    program_at, section_at = struct.unpack_from("<QQ", image, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<4H", image, 54)
    return program_at + program_size * program_count, section_at + section_size * section_count


def _section_ends(image: bytes) -> list[int]:
    """Returns the end of the bytes of each section. Headers beyond the image are covered by the ends of the tables."""
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<2H", image, 58)
    ends = []
    for header in range(table, table + size * count, max(size, 1)):
        if header + _HEADER_BYTES > len(image):
            break
        kind, offset, length = struct.unpack_from("<4xI16xQQ", image, header)
        if kind != _SECTION_WITHOUT_BYTES:
            ends.append(offset + length)
    return ends
