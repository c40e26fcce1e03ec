"""Is a compiled image whole? The tables of an ELF file say where it must end."""

from __future__ import annotations

import struct

from flashgen.errors import BuildError

_HEADER_BYTES = 64
_SECTION_WITHOUT_BYTES = 8  # SHT_NOBITS: takes memory when loaded, nothing in the file


def complete_image(image: bytes) -> bytes:
    """A cubin as NVRTC made it, with the last byte that CuPy 14's `getCUBIN` drops put back where it is missing.

    CuPy treats the image as a C string and cuts its "terminating zero". The image is mended only when exactly one byte
    is missing and that byte is the top one of a table's 64-bit number below 2**56, so that it is known to be zero.

    Raises:
        BuildError: the image is not a 64-bit little-endian ELF file, or more of it is missing than that.
    """
    if len(image) < _HEADER_BYTES or image[:6] != b"\x7fELF\x02\x01":
        raise BuildError(f"the compiler returned {len(image)} bytes that are no 64-bit ELF image")
    tables = _table_ends(image)
    end = max(*tables, *_section_ends(image))
    if len(image) >= end:
        return image
    if len(image) == end - 1 and end in tables:
        return image + b"\0"
    raise BuildError(f"the compiler returned {len(image)} bytes of an ELF image of {end} bytes; it is cut short")


def _table_ends(image: bytes) -> tuple[int, int]:
    """Where the program headers' table and the section headers' table end. Both end with a 64-bit alignment or size."""
    program_at, section_at = struct.unpack_from("<QQ", image, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<4H", image, 54)
    return program_at + program_size * program_count, section_at + section_size * section_count


def _section_ends(image: bytes) -> list[int]:
    """Where each section's bytes end. Headers beyond the image are left to the tables' own check."""
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
