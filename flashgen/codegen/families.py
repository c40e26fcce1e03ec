"""The kernel families, and which of them a target uses for each pass.

A new family is a folder here, a folder in templates/ and an entry below; its targets are rows of targets.py.
"""

from __future__ import annotations

from flashgen.codegen.family import BackwardFamily, ForwardFamily
from flashgen.codegen.hopper import family as hopper
from flashgen.codegen.mma_sync import family as mma_sync
from flashgen.codegen.plan import Plan
from flashgen.codegen.targets import TARGETS, Target, target_of_capability

_MMA_SYNC = mma_sync.MmaSyncForward()
_MMA_SYNC_BACKWARD = mma_sync.MmaSyncBackward()
_FORWARD: dict[str, ForwardFamily] = {"turing": _MMA_SYNC, "ampere": _MMA_SYNC, "hopper": hopper.HopperForward()}
_BACKWARD: dict[str, BackwardFamily] = {
    "turing": _MMA_SYNC_BACKWARD,
    "ampere": _MMA_SYNC_BACKWARD,
    "hopper": hopper.HopperBackward(),
}
_EMULATED_TARGET = "sm_80"


def forward_family(target: Target) -> ForwardFamily:
    """Returns the family of a target's forward kernels."""
    return _FORWARD[target.family]


def backward_family(target: Target) -> BackwardFamily:
    """Returns the family of a target's backward kernels."""
    return _BACKWARD[target.backward_family]


def target_of_gpu(major: int, minor: int, plan: Plan | None = None) -> Target:
    """Returns the target of a GPU's compute capability: its newest family, or the family that `plan` belongs to."""
    target = target_of_capability(major, minor)
    own = (other for other in targets_of(plan) if other.compute_capability == target.compute_capability)
    return target if plan is None else next(own, target)


def emulated_target(plan: Plan | None = None) -> Target:
    """Returns the default target of the emulator, or one that takes `plan`."""
    target, takers = TARGETS[_EMULATED_TARGET], targets_of(plan)
    return takers[0] if takers and target not in takers else target


def targets_of(plan: Plan | None) -> list[Target]:
    """Returns the targets whose forward family has plans of this class."""
    return [target for target in TARGETS.values() if type(plan) in forward_family(target).plan_kinds]
