"""The resources that a compiled kernel uses, parsed from the report of the assembler (ptxas)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)'")
_FRAME = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
_REGISTERS = re.compile(r"Used (?P<registers>\d+) registers")
_SHARED = re.compile(r"(?P<shared>\d+)(?:\+\d+)? bytes smem")
_COMPILE_TIME = re.compile(r"Compile time =")


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel: registers per thread, and bytes of spills, stack and static shared memory."""

    registers: int
    spill_stores: int = 0
    spill_loads: int = 0
    stack_frame: int = 0
    static_shared: int = 0

    @property
    def spills(self) -> int:
        """The bytes spilled to local memory for lack of registers: stores plus loads."""
        return self.spill_stores + self.spill_loads

    def to_dict(self) -> dict[str, int]:
        """Returns the fields by name, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, int]) -> Resources:
        """Inverts `to_dict`."""
        return cls(**{name: int(value) for name, value in fields.items()})


def parse_resources(log: str) -> dict[str, Resources]:
    """Returns the resources of each `__global__` function in a log of `ptxas -v`, by name.

    A function that was not inlined has its own stack frame and spills, which are added to the kernel that precedes it
    in the log.
    """
    found: dict[str, Resources] = {}
    for name, report in _reports(log):
        frames = [tuple(map(int, match.groups())) for match in _FRAME.finditer(report)]
        registers, shared = _REGISTERS.search(report), _SHARED.search(report)
        if registers is None:
            continue
        found[name] = Resources(
            registers=int(registers["registers"]),
            spill_stores=sum(frame[1] for frame in frames),
            spill_loads=sum(frame[2] for frame in frames),
            stack_frame=sum(frame[0] for frame in frames),
            static_shared=int(shared["shared"]) if shared else 0,
        )
    return found


def combined(resources: Mapping[str, Resources]) -> Resources:
    """Returns the maximum of each field over all kernels of a source."""
    if not resources:
        return Resources(registers=0)
    fields = [kernel.to_dict() for kernel in resources.values()]
    return Resources.from_dict({name: max(kernel[name] for kernel in fields) for name in fields[0]})


def without_timings(log: str) -> str:
    """Returns the log without the compile times, which differ between compilations."""
    return "\n".join(line.rstrip() for line in log.splitlines() if not _COMPILE_TIME.search(line)).strip()


def _reports(log: str) -> list[tuple[str, str]]:
    """Returns (kernel name, its section of the log) in the order of the log."""
    starts = list(_ENTRY.finditer(log))
    ends = [*(match.start() for match in starts[1:]), *([len(log)] if starts else [])]
    return [(match["name"], log[match.end() : end]) for match, end in zip(starts, ends, strict=True)]
