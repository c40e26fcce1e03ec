"""How a kernel divides its work: tile sizes, warps, stages. A plan is chosen by spec and target, never by lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import UnsupportedError
from ..language.spec import AttentionSpec
from .targets import Target

WARP = 32
MMA_ROWS = 16
MMA_DEPTH = 16
REGISTERS_PER_MULTIPROCESSOR = 65536


def padded(width: int) -> int:
    """A head dimension rounded up to the depth of an mma: what a row takes in shared memory, in elements."""
    return -(-width // MMA_DEPTH) * MMA_DEPTH


@dataclass(frozen=True)
class ForwardPlan:
    """The forward kernel's plan.

    tile_q x tile_k: queries x keys of a tile. Each of the `warps` owns tile_q / warps rows of it. `stages`: tiles of K and
    of V held in shared memory at once. `blocks`: thread blocks that should fit on a multiprocessor, which caps registers.
    `query_in_registers`: the fragments of Q are loaded once, not at every tile of keys.
    """

    tile_q: int
    tile_k: int
    warps: int
    stages: int = 1
    blocks: int = 1
    query_in_registers: bool = False

    @property
    def threads(self) -> int:
        return self.warps * WARP

    def shared_bytes(self, spec: AttentionSpec) -> int:
        """Dynamic shared memory of a block: Q, the stages of K and V; the output reuses it at the end."""
        head, value = padded(spec.head_dim), padded(spec.value_dim)
        tiles = self.tile_q * head + self.stages * self.tile_k * (head + value)
        return 2 * max(tiles, self.tile_q * value)

    def check(self, spec: AttentionSpec, target: Target) -> None:
        """UnsupportedError where the plan contradicts itself or does not fit the target."""
        rows = self.tile_q // self.warps
        if self.tile_q % self.warps or rows % MMA_ROWS:
            raise UnsupportedError(f"plan {self}: tile_q={self.tile_q} must be a multiple of 16 x warps={self.warps}")
        if self.tile_k % MMA_DEPTH or (spec.dropout and self.tile_k % 32):
            raise UnsupportedError(f"plan {self}: tile_k={self.tile_k} must be a multiple of 16, of 32 with dropout")
        if self.stages not in (1, 2):
            raise UnsupportedError(f"plan {self}: stages={self.stages} must be 1 or 2")
        if self.shared_bytes(spec) > target.shared_per_block:
            raise UnsupportedError(
                f"plan {self} takes {self.shared_bytes(spec)} bytes of shared memory; "
                f"a block of {target.name} has {target.shared_per_block}: take smaller tiles or fewer stages"
            )


# By the wider of the padded head and value dimensions.
_PLANS: dict[int, ForwardPlan] = {
    64: ForwardPlan(tile_q=128, tile_k=64, warps=4, stages=1, blocks=2),
    128: ForwardPlan(tile_q=128, tile_k=64, warps=4, stages=1, blocks=2),
    256: ForwardPlan(tile_q=128, tile_k=64, warps=8, stages=1),
}


def choose_forward_plan(spec: AttentionSpec, target: Target) -> ForwardPlan:
    """The default plan of a spec on a target."""
    width = max(padded(spec.head_dim), padded(spec.value_dim))
    plan = next(plan for limit, plan in _PLANS.items() if width <= limit)
    while plan.shared_bytes(spec) > target.shared_per_block and plan.tile_k > 32:
        plan = replace(plan, tile_k=plan.tile_k // 2)
    plan.check(spec, target)
    return plan
