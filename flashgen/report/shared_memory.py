"""How a kernel lays out its shared memory, read from the constants of its own text."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.errors import ArgumentError
from flashgen.report.arithmetic import evaluate

_CONSTANT = re.compile(r"^constexpr (?:int|unsigned) (k\w+) = ([^;]+);", re.MULTILINE)
_LARGER = re.compile(r"(k\w+) > (k\w+) \? \1 : \2")
_SIZES = {"sizeof(Element)": "2", "sizeof(float2)": "8", "sizeof(float)": "4"}
_FORWARD = {
    "Query": "Q",
    "Key": "K",
    "Value": "V",
    "Output": "O",
    "Rows": "Q, then O",
    "Barrier": "mbarriers",
    "Index": "tile number",
}
_BACKWARD = _FORWARD | {
    "Output": "dO",
    "Score": "dS",
    "Probability": "P",
    "Statistics": "L, D",
    "Gradient": "dQ",
}


@dataclass(frozen=True)
class Region:
    """Bytes of shared memory from `offset` on that hold one thing: a stage of K, the Q of a warpgroup."""

    name: str
    offset: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def constants_of(source: str) -> dict[str, int]:
    """The integer constants of an emitted text that follow from each other."""
    known: dict[str, int] = {}
    for name, formula in _CONSTANT.findall(source):
        for text, size in _SIZES.items():
            formula = formula.replace(text, size)
        larger = _LARGER.fullmatch(formula)
        try:
            known[name] = int(max(known[larger[1]], known[larger[2]]) if larger else evaluate(formula, known))
        except ArgumentError:  # of floats, or of what another function gives
            continue
    return known


def regions_of(kernel: RenderedKernel) -> list[Region]:
    """What a kernel's dynamic shared memory holds, in order; empty where it has none, or lays it out otherwise."""
    known = constants_of(kernel.source)
    offsets = sorted((at, name) for name, at in known.items() if name.endswith("Offset"))
    if not kernel.shared_bytes or not offsets:
        return []
    names = _FORWARD if kernel.role == "forward" else _BACKWARD
    starts = [(0, _first(kernel.source, offsets[0][1])), *((at, name[1:-6]) for at, name in offsets)]
    ends = [at for at, _ in starts[1:]] + [kernel.shared_bytes]
    regions: list[Region] = []
    for (begin, name), end in zip(starts, ends, strict=True):
        regions += _pieces(name, begin, end, known, kernel.source, names)
    return regions


def _first(source: str, first_offset: str) -> str:
    """What stands before the first named offset: the name of the bytes that this offset is made of."""
    formula = next(text for name, text in _CONSTANT.findall(source) if name == first_offset)
    found = re.search(r"k(\w+)Bytes", formula)
    return found[1] if found else "other"


def _pieces(name: str, begin: int, end: int, known: dict[str, int], source: str, names: dict[str, str]) -> list[Region]:
    """The stages of a region, or its parts by warpgroup; what is left over is padding."""
    size = known.get(f"k{name}Bytes", end - begin)
    parts = _parts(name, known, source)
    count = (end - begin) // size if size else 0
    regions: list[Region] = []
    for number in range(count):
        at = begin + number * size
        for part, part_bytes in parts or [(name, size)]:
            label = names.get(part, part.lower())
            regions.append(Region(f"{label} {number}" if count > 1 else label, at, part_bytes))
            at += part_bytes
    left = end - begin - count * size
    return [*regions, Region("padding", end - left, left)] if left > 0 else regions


def _parts(name: str, known: dict[str, int], source: str) -> list[tuple[str, int]]:
    """What a sum of bytes consists of: the rows of a warpgroup hold its Q and its output."""
    formula = next((text for constant, text in _CONSTANT.findall(source) if constant == f"k{name}Bytes"), "")
    inside = [] if _LARGER.fullmatch(formula) else re.findall(r"k(\w+)Bytes", formula)
    return [(part, known[f"k{part}Bytes"]) for part in inside if part != "Element"]
