"""How many blocks of a kernel fit on a multiprocessor, and what keeps more from fitting."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flashgen.codegen.targets import Target

# (threads, blocks) of a multiprocessor by compute capability: CUDA programming guide, technical specifications.
_MOST = {
    75: (1024, 16), 80: (2048, 32), 86: (1536, 16), 87: (1536, 16), 89: (1536, 24), 90: (2048, 32),
    100: (2048, 32), 103: (2048, 32), 120: (1536, 24), 121: (1536, 24),
}  # fmt: skip
_REGISTERS, _REGISTER_STEP, _WARP = 65536, 8, 32
_RESERVED = 1024  # bytes of shared memory that the system keeps of each block, from sm_80 on


@dataclass(frozen=True)
class Occupancy:
    """Blocks that fit on a multiprocessor, the share of its warps that they are, and what limits them."""

    blocks: int
    warps: int
    share: float
    limit: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def occupancy(target: Target, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Of a kernel with so many threads a block, registers a thread and bytes of shared memory a block."""
    most_threads, most_blocks = _MOST[target.compute_capability]
    reserved = _RESERVED if target.compute_capability >= 80 else 0
    by_register = -(-registers // _REGISTER_STEP) * _REGISTER_STEP * threads
    limits = {
        "threads": most_threads // threads,
        "blocks": most_blocks,
        "registers": _REGISTERS // by_register if by_register else most_blocks,
        "shared memory": target.shared_per_multiprocessor // (shared_bytes + reserved or 1),
    }
    limit = min(limits, key=lambda name: limits[name])
    blocks = limits[limit]
    return Occupancy(blocks, blocks * threads // _WARP, blocks * threads / most_threads, limit)
