"""Reads compiled images, which are ELF files: whether one is complete, and the machine code in it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from flashgen.errors import BuildError

_HEADER_BYTES = 64
_SECTION_WITHOUT_BYTES = 8  # SHT_NOBITS: occupies memory when loaded, but no bytes in the file
_CODE = b".text."  # begins the name of the section of each kernel of a cubin


class _Section(NamedTuple):
    """A section header: where its name begins in the table of names, its kind, and the range of its bytes."""

    name_at: int
    kind: int
    offset: int
    length: int


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


def machine_code(image: bytes) -> list[bytes]:
    """Returns the machine code of each kernel of a complete cubin, in an order that does not depend on their names."""
    sections = list(_sections(image))
    (names,) = struct.unpack_from("<H", image, 62)
    code = (each for each in sections if image.startswith(_CODE, sections[names].offset + each.name_at))
    return sorted(image[each.offset : each.offset + each.length] for each in code)


def _section_ends(image: bytes) -> list[int]:
    """Returns the end of the bytes of each section. Headers beyond the image are covered by the ends of the tables."""
    return [each.offset + each.length for each in _sections(image) if each.kind != _SECTION_WITHOUT_BYTES]


def _sections(image: bytes) -> Iterator[_Section]:
    """Yields the section headers that the image contains."""
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<2H", image, 58)
    for header in range(table, table + size * count, max(size, 1)):
        if header + _HEADER_BYTES > len(image):
            break
        yield _Section(*struct.unpack_from("<II16xQQ", image, header))
