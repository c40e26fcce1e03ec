"""Counts the instructions in a kernel's machine code by kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flashgen.build import inspect
from flashgen.build.cache import Entry
from flashgen.build.tools import find_tool
from flashgen.codegen.rendered_kernel import RenderedKernel

_SASS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)
_PTX = re.compile(r"^\s+(?:@!?%p\d+\s+)?([a-z][a-z0-9_]*)[.\s][^:;\n]*;", re.MULTILINE)
# Prefixes of opcodes by the kind of instruction. The first kind with a matching prefix is taken.
_KINDS: Mapping[str, tuple[str, ...]] = {
    "products": ("HGMMA", "HMMA", "IMMA", "WARPGROUP", "mma", "wgmma"),
    "exponentials and their like": ("MUFU", "ex2", "lg2", "rcp", "tanh", "sqrt"),
    "shared memory": ("LDSM", "STSM", "LDS", "STS", "ldmatrix", "stmatrix"),
    "copies": ("LDGSTS", "UTMA", "UBLKCP", "LDGDEPBAR", "DEPBAR", "cp"),
    "global memory": ("LDG", "STG", "RED", "ATOM", "LD", "ST", "ld", "st", "red", "atom"),
    "barriers": ("BAR", "SYNCS", "WARPSYNC", "BSYNC", "BSSY", "FENCE", "MEMBAR", "mbarrier", "bar", "barrier", "fence"),
    "float arithmetic": (
        "FFMA",
        "FADD",
        "FMUL",
        "FMNMX",
        "FSET",
        "FSEL",
        "F2F",
        "HADD",
        "HFMA",
        "HMUL",
        "F2FP",
        "FCHK",
    ),
    "integers, addresses, moves": (),
}
_FLOAT_PTX = re.compile(r"\.(?:f32|f16|bf16|f16x2|bf16x2)\b")


@dataclass(frozen=True)
class Instructions:
    """Static instruction counts by kind, of SASS or PTX. The instructions of a loop are counted once.

    why: the reason for counting PTX instead of SASS, or "".
    """

    language: str
    why: str
    total: int
    kinds: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def instructions_of(kernel: RenderedKernel, entry: Entry) -> Instructions:
    """Returns the instruction mix of a kernel's SASS, or of its PTX if no disassembler is installed."""
    if find_tool("nvdisasm") or find_tool("cuobjdump"):
        return _counted("SASS", "", _SASS.findall(inspect.sass(entry.cubin)), {})
    text = inspect.ptx(kernel.source, kernel.target.architecture, kernel.name)
    found = [match[1] for match in _PTX.finditer(text)]
    floats = Counter(match[1] for match in _PTX.finditer(text) if _FLOAT_PTX.search(match[0]))
    why = "nvdisasm is not installed (the extra `inspect` installs it), so PTX is counted, before register allocation"
    return _counted("PTX", why, found, floats)


def _counted(language: str, why: str, opcodes: list[str], floats: Mapping[str, int]) -> Instructions:
    kinds = dict.fromkeys(_KINDS, 0)
    for opcode, count in Counter(opcodes).items():
        if opcode in ("NOP",):
            continue
        kind = _kind(opcode)
        float_count = floats.get(opcode, 0) if kind == "integers, addresses, moves" else 0
        kinds[kind] += count - float_count
        kinds["float arithmetic"] += float_count
    return Instructions(language, why, sum(kinds.values()), kinds)


def _kind(opcode: str) -> str:
    for kind, beginnings in _KINDS.items():
        if any(opcode == each or (opcode.startswith(each) and each.isupper()) for each in beginnings):
            return kind
    return "integers, addresses, moves"
