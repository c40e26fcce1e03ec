"""A cubin is accepted as complete only if its own tables agree."""

from __future__ import annotations

import struct

import pytest

from flashgen.build import nvrtc
from flashgen.build.elf import complete_image, machine_code
from flashgen.errors import BuildError


def image(table_last: bool = True, extra: bytes = b"") -> bytes:
    """A small ELF file: 64 bytes of header, one section header, 16 bytes of section, one program header."""
    section_at, data_at = 64, 128
    program_at = data_at + 16 if table_last else 0
    header = (
        b"\x7fELF\x02\x01"
        + bytes(10)
        + struct.pack("<HHIQQQI6H", 2, 190, 1, 0, program_at, section_at, 0, 64, 56, 1 if table_last else 0, 64, 1, 0)
    )
    section = struct.pack("<IIQQQQIIQQ", 0, 1, 0, 0, data_at, 16, 0, 0, 1, 0)
    program = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 0, 0, 8) if table_last else b""
    return header + section + bytes(range(1, 17)) + program + extra


def test_a_complete_image_is_unchanged() -> None:
    assert complete_image(image()) == image()
    assert complete_image(image(table_last=False)) == image(table_last=False)
    assert complete_image(image(extra=b"more")) == image(extra=b"more")


def test_a_dropped_last_byte_is_restored() -> None:
    assert complete_image(image()[:-1]) == image()


@pytest.mark.parametrize(
    "broken",
    [image()[:-2], image()[:-60], image(table_last=False)[:-1], b"", b"// PTX", b"\x7fELF\x01\x01" + bytes(100)],
    ids=["two bytes", "the table", "a byte of code", "nothing", "text", "32 bit"],
)
def test_anything_else_is_an_error(broken: bytes) -> None:
    with pytest.raises(BuildError, match="ELF image"):
        complete_image(broken)


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")
def test_machine_code_does_not_depend_on_names() -> None:
    def compiled(name: str, value: int) -> list[bytes]:
        source = f'extern "C" __global__ void {name}(int* out) {{ out[threadIdx.x] = {value}; }}'
        return machine_code(nvrtc.compile(source, "sm_80", name).cubin)

    (code,) = compiled("store", 1)
    assert len(code) >= 128 and compiled("other_name", 1) == [code] != compiled("store", 2)
