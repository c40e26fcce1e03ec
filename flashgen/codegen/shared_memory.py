"""The layout of a block's dynamic shared memory: named buffers and mbarriers, with their offsets and sizes.

The plan of a kernel states its layout once, as a `SharedMemoryLayout`. It gives the bytes that a launch requests, the
C++ constants (`kKeyBytes`, `kKeyOffset`) and the members of `SharedStorage` that the kernel's text is emitted with, and
the regions that `flashgen report` draws. Extents hold the name of their C++ constant and its value, so that emitted
constants are formulas of the plan's constants: a kernel that is edited by hand stays consistent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from flashgen.dtypes import DTYPES, DType

_CONSTANT = re.compile(r"\bk\w+(?:Bytes|Offset)\b")
_MBARRIER_BYTES = 8


class Extent(NamedTuple):
    """A count or a size in bytes: its expression in the kernel's text, and its value."""

    text: str
    value: int


def literal(value: int) -> Extent:
    """Returns an extent that the kernel's text writes as a number."""
    return Extent(str(value), value)


def size_of(dtype: DType) -> Extent:
    """Returns the size of an element; the text of a size of one byte is empty, as a factor that is left out."""
    return Extent(f"sizeof({dtype.c_type})" if dtype.bytes > 1 else "", dtype.bytes)


FLOAT, INT, BYTE = (size_of(DTYPES[name]) for name in ("float32", "int32", "uint8"))
FLOAT2 = Extent("sizeof(float2)", 8)
UINT4 = Extent("sizeof(uint4)", 16)


@dataclass(frozen=True)
class Buffer:
    """An array in shared memory, or several copies of one.

    By default a buffer begins where the one declared before it ends.

    Attributes:
        name: the stem of its constants: `Key` has `kKeyBytes`, the bytes of one copy, and `kKeyOffset`.
        label: its name in reports and comments: "K".
        shape: extents of one copy, outermost first; empty if it consists of `parts`.
        element: the size of an element; None if the buffer consists of `parts`.
        copies: how many copies follow each other: the stages of a pipeline, or one for each warpgroup.
        parts: arrays that make up one copy, one after the other.
        union: whether the parts begin at the same byte instead, because they are not used at the same time.
        alignment: bytes of which its offset is a multiple.
        reserves_alignment: whether the total counts `alignment` bytes for that, however few are skipped, so that the
            total does not depend on the buffers before it.
        overlays: the buffer at whose first byte it begins. It reuses that memory once the other buffer is not needed.
        at_end: whether it occupies the last bytes of the block's memory. It is then declared last.
        note: an addition to the comment in the kernel's text, such as how elements are arranged.
        member: the member of `SharedStorage` that returns its address: "keys". "" if the kernel's text has none.
        index: the parameter of that member, if there are several copies: what they are numbered by.
    """

    name: str
    label: str
    shape: tuple[Extent, ...] = ()
    element: Extent | None = None
    copies: Extent | None = None
    parts: tuple[Buffer, ...] = ()
    union: bool = False
    alignment: int = 1
    reserves_alignment: bool = False
    overlays: str = ""
    at_end: bool = False
    note: str = ""
    member: str = ""
    index: str = "stage"

    @property
    def copy_bytes(self) -> int:
        """Bytes of one copy."""
        if self.parts:
            sizes = [part.bytes for part in self.parts]
            return max(sizes) if self.union else sum(sizes)
        return math.prod(extent.value for extent in self._factors)

    @property
    def _factors(self) -> tuple[Extent, ...]:
        if self.element is None:
            raise TypeError(f"{self.name} must have the size of its elements")
        return (*self.shape, self.element)

    @property
    def bytes(self) -> int:
        """Bytes of all copies."""
        return self.copy_bytes * (self.copies.value if self.copies else 1)

    @property
    def copy_text(self) -> str:
        """The C++ expression of `copy_bytes`."""
        parts = [part.bytes_text for part in self.parts]
        if self.union:
            first, second = parts
            return f"{first} > {second} ? {first} : {second}"
        return " + ".join(parts) or " * ".join(each.text for each in self._factors if each.text)

    @property
    def bytes_text(self) -> str:
        """The C++ expression of `bytes`, by the constant of one copy."""
        return f"{self.copies.text} * k{self.name}Bytes" if self.copies else f"k{self.name}Bytes"


class Barrier(NamedTuple):
    """An mbarrier: the member of `SharedStorage` that returns its address, and how many arrivals complete a phase."""

    name: str
    arrivals: str


@dataclass(frozen=True)
class BarrierGroup:
    """Adjacent mbarriers, which exist once or for each stage of a pipeline.

    Attributes:
        comment: a sentence, or several, for the kernel's text: what a completed phase of each means.
        barriers: their order within a stage.
        stages: stages of the pipeline; None for barriers that exist once.
        at_end: whether the group is placed after all others, although it is initialised in the order of declaration.
    """

    comment: str
    barriers: tuple[Barrier, ...]
    stages: Extent | None = None
    at_end: bool = False

    @property
    def stage_bytes(self) -> int:
        return _MBARRIER_BYTES * len(self.barriers)

    @property
    def count(self) -> int:
        return len(self.barriers) * (self.stages.value if self.stages else 1)


class Region(NamedTuple):
    """Bytes of shared memory from `offset` on that hold one thing: a stage of K, the Q of a warpgroup."""

    name: str
    offset: int
    bytes: int


class Member(NamedTuple):
    """A member function of the emitted `SharedStorage`, which returns the address of a buffer.

    Attributes:
        name: its name, such as "keys".
        parameter: the number of a copy, such as "stage", if the buffer has several copies; otherwise "".
        address: the C++ expression of the address, from `base`, where the block's memory begins, and the parameter.
    """

    name: str
    parameter: str
    address: str


@dataclass(frozen=True)
class SharedMemoryLayout:
    """The dynamic shared memory of a block.

    Attributes:
        buffers: in the order of their addresses; a buffer that overlays another is declared after all that it overlays.
        barriers: the mbarriers, which the buffer named "Barrier" holds; see `mbarriers`.
        min_bytes: the minimum bytes of the launch, if other blocks of the kernel need more.
    """

    buffers: tuple[Buffer, ...] = ()
    barriers: tuple[BarrierGroup, ...] = ()
    min_bytes: int = 0

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The first byte of each buffer."""
        return self._offsets_and_size[0]

    @cached_property
    def total_bytes(self) -> int:
        """The dynamic shared memory that a launch requests."""
        return self._offsets_and_size[1]

    @cached_property
    def _offsets_and_size(self) -> tuple[dict[str, int], int]:
        assert not any(buffer.at_end for buffer in self.buffers[:-1]), "a buffer at the end is declared last"
        offsets: dict[str, int] = {}
        cursor = end = reserved = 0
        for buffer in self.buffers:
            if buffer.at_end:
                end = max(end + buffer.bytes, self.min_bytes)
                offsets[buffer.name] = end - buffer.bytes
                continue
            cursor = offsets[buffer.overlays] if buffer.overlays else cursor
            skipped = -cursor % buffer.alignment
            reserved += buffer.alignment - skipped if buffer.reserves_alignment else 0
            offsets[buffer.name] = cursor + skipped
            cursor += skipped + buffer.bytes
            end = max(end, cursor)
        return offsets, max(end + reserved, self.min_bytes)

    # ---- the kernel's text

    def constants(self, text: str) -> str:
        """Returns the constants that a kernel's text uses, and assertions that they fit the launch's memory."""
        last = next((buffer for buffer in self.buffers if buffer.at_end), None)
        limit = f"k{last.name}Offset" if last else self.total_bytes
        checks = [f'static_assert({end} <= {limit}, "the shared memory of the launch");' for end in self._ends()]
        known = self._sizes() | self._formulas()
        wanted = _closure([text, *checks], known)
        declared = [f"constexpr int {name} = {formula};" for name, formula in known.items() if name in wanted]
        return "\n".join([*self._comment(), *declared, *checks])

    def _comment(self) -> Iterator[str]:
        yield f"// Shared memory of a CTA, {self.total_bytes} bytes, by offset:"
        for buffer in self.buffers:
            copies = f"{buffer.copies.value} x " if buffer.copies else ""
            parts = f" ({_list_of(buffer)})" if buffer.parts else ""
            over = f", overlays {self._buffer(buffer.overlays).label}" if buffer.overlays else ""
            note = f"; {buffer.note}" if buffer.note else ""
            size = f"{copies}{buffer.copy_bytes} bytes"
            yield f"//   {self.offsets[buffer.name]:6}  {buffer.label}{parts}, {size}{over}{note}"

    def _sizes(self) -> dict[str, str]:
        """Returns the constants of the buffers' sizes, each after the constants that it refers to."""
        return {f"k{each.name}Bytes": each.copy_text for buffer in self.buffers for each in (*buffer.parts, buffer)}

    def _formulas(self) -> dict[str, str]:
        """Returns the constants of the buffers' offsets, each after the constants that it refers to."""
        formulas: dict[str, str] = {}
        end = "0"
        for buffer in self.buffers:
            if buffer.at_end:
                formula = str(self.offsets[buffer.name])
            else:
                formula = _aligned(self._begin(buffer.overlays) or "0" if buffer.overlays else end, buffer.alignment)
            formulas[f"k{buffer.name}Offset"] = formula
            end = self._end(buffer)
        return formulas

    def _begin(self, name: str) -> str:
        return f"k{name}Offset" if self.offsets[name] else ""

    def _end(self, buffer: Buffer) -> str:
        """Returns the expression of the first byte after a buffer."""
        return " + ".join(filter(None, (self._begin(buffer.name), buffer.bytes_text)))

    def _ends(self) -> list[str]:
        """Returns the ends of the buffers, and of chains of overlays that may extend beyond the overlaid buffer."""
        chains: list[list[Buffer]] = [[]]
        for buffer in self.buffers:
            chains += [[]] if buffer.overlays or buffer.at_end else []
            chains[-1].append(buffer)
        return [self._end(chain[-1]) for chain in chains if chain and not self._stays_within(chain)]

    def _stays_within(self, chain: list[Buffer]) -> bool:
        """Whether a chain of overlays ends within the buffer that it overlays."""
        first, last = chain[0], chain[-1]
        if not first.overlays:
            return first.at_end
        over = self._buffer(first.overlays)
        return self.offsets[last.name] + last.bytes <= self.offsets[over.name] + over.bytes

    def members(self) -> Iterator[Member]:
        """Yields the members of the emitted `SharedStorage` that return the addresses of buffers."""
        for buffer in self.buffers:
            index = buffer.index if buffer.copies else ""
            terms = [self._begin(buffer.name), f"{index} * k{buffer.name}Bytes" if index else ""]
            for part in buffer.parts or (buffer,):
                if part.member:
                    offset = " + ".join(filter(None, terms))
                    address = f"base + ({offset})" if " + " in offset else f"base + {offset}" if offset else "base"
                    yield Member(part.member, index, address)
                terms += [] if buffer.union else [part.bytes_text]

    def barrier_address(self, name: str) -> str:
        """Returns the C++ expression of an mbarrier's address, from `barriers` and, for a pipeline, from `stage`."""
        fixed, terms = 0, ["barriers"]
        for group in self._barriers_by_address():
            names = [barrier.name for barrier in group.barriers]
            if name in names:
                fixed += _MBARRIER_BYTES * names.index(name)
                terms += [str(fixed)] if fixed else []
                terms += [f"stage * {group.stage_bytes}"] if group.stages else []
                return " + ".join(terms)
            if group.stages and not group.stages.text.isdigit():
                terms.append(f"{group.stages.text} * {group.stage_bytes}")
            else:
                fixed += _MBARRIER_BYTES * group.count
        raise KeyError(name)

    def _barriers_by_address(self) -> list[BarrierGroup]:
        return sorted(self.barriers, key=lambda group: group.at_end)

    # ---- regions for reports

    def regions(self) -> list[Region]:
        """Returns the memory from first byte to last: each copy of each buffer, or of its parts, and padding.

        Buffers that overlay others are not included: see `overlays`.
        """
        found: list[Region] = []
        at = 0
        over = self._over
        for buffer in self.buffers:
            if buffer.name in over:
                continue
            begin = self.offsets[buffer.name]
            found += [Region("padding", at, begin - at)] if begin > at else []
            found += _copies(buffer, begin)
            at = begin + buffer.bytes
        return [*found, Region("padding", at, self.total_bytes - at)] if at < self.total_bytes else found

    def overlays(self) -> list[Region]:
        """Returns the regions of buffers that overlay others, and of the buffers that follow them."""
        over = self._over
        return [
            region for each in self.buffers if each.name in over for region in _copies(each, self.offsets[each.name])
        ]

    @cached_property
    def _over(self) -> set[str]:
        """The buffers that overlay others, and those that follow these."""
        names: set[str] = set()
        over = False
        for buffer in self.buffers:
            over = (over or bool(buffer.overlays)) and not buffer.at_end
            names |= {buffer.name} if over else set()
        return names

    def barrier_offsets(self) -> dict[int, str]:
        """Returns byte offset in shared memory -> name of the mbarrier, with its stage if there are several."""
        found: dict[int, str] = {}
        at = self.offsets.get("Barrier", 0)
        for group in self._barriers_by_address():
            for stage in range(group.stages.value if group.stages else 1):
                for barrier in group.barriers:
                    found[at] = f"{barrier.name}({stage})" if group.stages else barrier.name
                    at += _MBARRIER_BYTES
        return found

    def _buffer(self, name: str) -> Buffer:
        return next(buffer for buffer in self.buffers if buffer.name == name)


NO_SHARED_MEMORY = SharedMemoryLayout()


def slot_per_warp(label: str, warps: int) -> SharedMemoryLayout:
    """Returns the layout of kernels whose warps exchange a word of 4 bytes each."""
    return SharedMemoryLayout((Buffer("Slot", label, (Extent("kWarps", warps),), INT),))


@cache
def mbarriers(groups: tuple[BarrierGroup, ...]) -> Buffer:
    """Returns the buffer that holds mbarriers. Its layout must be given the same groups."""
    terms = []
    for group in groups:
        factors = [str(len(group.barriers))] if len(group.barriers) > 1 or not group.stages else []
        terms.append(" * ".join([*factors, *([group.stages.text] if group.stages else [])]))
    total = Extent(f"({' + '.join(terms)})", sum(group.count for group in groups))
    return Buffer("Barrier", "mbarriers", (total,), literal(_MBARRIER_BYTES))


def _copies(buffer: Buffer, begin: int) -> Iterator[Region]:
    """Yields each copy of a buffer, or each part of each copy."""
    count = buffer.copies.value if buffer.copies else 1
    for number in range(count):
        at = begin + number * buffer.copy_bytes
        named = [(_list_of(buffer), buffer.copy_bytes)] if buffer.union else []
        for label, size in named or [(each.label, each.bytes) for each in buffer.parts or (buffer,)]:
            size = size if buffer.parts and not buffer.union else buffer.copy_bytes
            yield Region(f"{label} {number}" if count > 1 else label, at, size)
            at += size


def _list_of(buffer: Buffer) -> str:
    """Returns the labels of a buffer's parts as a list in words."""
    return (", then " if buffer.union else ", ").join(part.label for part in buffer.parts)


def _aligned(formula: str, alignment: int) -> str:
    return formula if alignment == 1 else f"({formula} + {alignment - 1}) / {alignment} * {alignment}"


def _closure(texts: list[str], known: dict[str, str]) -> set[str]:
    """Returns the constants that texts mention, and the constants that those refer to, transitively."""
    wanted: set[str] = set()
    found = {name for text in texts for name in _CONSTANT.findall(text)} & known.keys()
    while found:
        wanted |= found
        found = {name for each in found for name in _CONSTANT.findall(known[each])} & known.keys() - wanted
    return wanted
