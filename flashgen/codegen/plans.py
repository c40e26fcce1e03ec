"""How a kernel divides its work: tile sizes, warps, stages. A plan is chosen by spec and target, never by lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy

from flashgen.codegen.targets import Target
from flashgen.errors import UnsupportedError
from flashgen.language.operations import KEY, QUERY, Load, Operation
from flashgen.language.spec import AttentionSpec

WARP = 32
MMA_ROWS = 16
MMA_DEPTH = 16
_RESERVED_SHARED = 1024  # bytes of each block's shared memory that the system takes


def padded(width: int) -> int:
    """A head dimension rounded up to the depth of an mma: what a row takes in shared memory, in elements."""
    return -(-width // MMA_DEPTH) * MMA_DEPTH


@dataclass(frozen=True)
class ForwardPlan:
    """The forward kernel's plan.

    Attributes:
        tile_q: queries of a tile; each warp owns tile_q / warps rows of it.
        tile_k: keys of a tile.
        warps: warps of a thread block.
        stages: tiles of K, and of V, that shared memory holds at once.
        blocks: thread blocks that should fit on a multiprocessor, which caps their registers.
    """

    tile_q: int
    tile_k: int
    warps: int
    stages: int = 1
    blocks: int = 1

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
        if self.stages == 2 and not target.asynchronous_copies:
            raise UnsupportedError(f"plan {self}: stages=2 needs asynchronous copies, which {target.name} has not")
        if self.shared_bytes(spec) > target.shared_per_block:
            raise UnsupportedError(
                f"plan {self} takes {self.shared_bytes(spec)} bytes of shared memory; "
                f"a block of {target.name} has {target.shared_per_block}: take smaller tiles or fewer stages"
            )


# (tile_q, tile_k, warps, stages) in the order of preference: by speed on an H200, then by what smaller GPUs hold.
_PREFERENCE = (
    (128, 128, 4, 2),
    (128, 64, 4, 2),
    (128, 32, 4, 2),
    (128, 64, 8, 2),
    (64, 64, 4, 2),
    (128, 64, 4, 1),
    (128, 32, 4, 1),
    (128, 64, 8, 1),
    (64, 64, 4, 1),
    (64, 32, 4, 1),
)

# What a thread can hold without spilling, by how much the variant itself needs: registers that accumulate scores and
# output, and the scores among them (an array element loaded per score takes several registers of its own). Held by a
# test that compiles every kind of spec for every target.
_ACCUMULATORS = {"plain": 160, "moderate": 160, "heavy": 96}
_SCORES = {"plain": 128, "moderate": 64, "heavy": 32}
_ACCUMULATORS_SM_90_PLAIN = 192  # its assembler gets by with fewer other registers
_PLAIN_MASK_OPERATIONS = 4  # causal's


def _loads_per_score(expression: sympy.Basic) -> bool:
    """Whether an array is read at indices that differ between the scores of a tile."""
    return any(load.has(QUERY, KEY) for load in expression.atoms(Load))


def _weight(spec: AttentionSpec) -> str:
    """How many registers the variant needs beside the accumulators: "plain", "moderate" or "heavy"."""
    mask, score = spec.mask.expression, spec.score.expression if spec.score else sympy.S.Zero
    wide_mask = sum(isinstance(node, Operation) for node in sympy.preorder_traversal(mask)) > _PLAIN_MASK_OPERATIONS
    burdens = sum((spec.score is not None, spec.dropout > 0, wide_mask))
    if _loads_per_score(score) or (_loads_per_score(mask) and burdens > 1):
        return "heavy"
    return "moderate" if burdens else "plain"


def _accumulators(plan: ForwardPlan, spec: AttentionSpec) -> tuple[int, int]:
    """Registers of a thread that hold scores, and scores and output: its warp's rows over 32 lanes."""
    rows = plan.tile_q // plan.warps
    return rows * plan.tile_k // WARP, rows * (plan.tile_k + padded(spec.value_dim)) // WARP


def _candidates(spec: AttentionSpec, target: Target) -> list[ForwardPlan]:
    """The preferred plans that fit the target's shared memory, with two blocks per multiprocessor where both fit."""
    fitting = []
    for tile_q, tile_k, warps, stages in _PREFERENCE:
        plan = ForwardPlan(tile_q, tile_k, warps, stages)
        shared = plan.shared_bytes(spec)
        if shared <= target.shared_per_block and (stages == 1 or target.asynchronous_copies):
            twice = 2 * (shared + _RESERVED_SHARED) <= target.shared_per_multiprocessor and warps == 4
            fitting.append(replace(plan, blocks=2 if twice else 1))
    return fitting


def choose_forward_plan(spec: AttentionSpec, target: Target) -> ForwardPlan:
    """The default plan of a spec on a target: the first preferred one whose accumulators leave registers to spare."""
    weight, candidates = _weight(spec), _candidates(spec, target)
    allowance = _ACCUMULATORS[weight]
    if weight == "plain" and target.compute_capability == 90:
        allowance = _ACCUMULATORS_SM_90_PLAIN
    for plan in candidates:
        scores, accumulators = _accumulators(plan, spec)
        if accumulators <= allowance and scores <= _SCORES[weight]:
            break
    else:
        plan = min(candidates, key=lambda plan: _accumulators(plan, spec)[1])
    plan.check(spec, target)
    return plan
