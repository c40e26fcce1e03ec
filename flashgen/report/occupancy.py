"""Occupancy: the number of blocks of a kernel that fit on a multiprocessor, and the resource that limits it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flashgen.codegen.targets import Target


@dataclass(frozen=True)
class Occupancy:
    """The occupancy of a multiprocessor by one kernel.

    Attributes:
        blocks: resident blocks.
        warps: resident warps.
        share: resident warps as a fraction of the maximum of the target.
        limit: the resource that limits the number of resident blocks.
    """

    blocks: int
    warps: int
    share: float
    limit: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def occupancy(target: Target, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Computes the occupancy of a kernel.

    Args:
        threads: threads of a block.
        registers: registers of a thread.
        shared_bytes: static and dynamic shared memory of a block.
    """
    max_threads, max_blocks = target.threads_per_multiprocessor, target.blocks_per_multiprocessor
    step = target.register_granularity
    block_registers = -(-registers // step) * step * threads
    block_shared = shared_bytes + target.reserved_shared_per_block
    limits = {
        "threads": max_threads // threads,
        "blocks": max_blocks,
        "registers": target.registers_per_multiprocessor // block_registers if block_registers else max_blocks,
        "shared memory": target.shared_per_multiprocessor // (block_shared or 1),
    }
    limit = min(limits, key=lambda name: limits[name])
    blocks = limits[limit]
    return Occupancy(blocks, blocks * threads // target.threads_per_warp, blocks * threads / max_threads, limit)
