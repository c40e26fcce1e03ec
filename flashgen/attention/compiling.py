"""From a spec to a ready callable, once per process and configuration."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from flashgen.attention.callable import Attention
from flashgen.attention.engines import Emulator, Engine, Gpu
from flashgen.codegen.families import AnyForwardPlan
from flashgen.codegen.targets import Target, target_named, target_of_capability
from flashgen.errors import SpecError
from flashgen.language.spec import AttentionSpec
from flashgen.runtime import gpu
from flashgen.runtime.schedule import Schedule

if TYPE_CHECKING:
    from flashgen.codegen.backward import BackwardPlan

_EMULATED_TARGET = "sm_80"


def compile(
    spec: AttentionSpec,
    target: str | None = None,
    emulate: bool = False,
    *,
    plan: AnyForwardPlan | None = None,
    deterministic: bool = False,
    backward_plan: BackwardPlan | None = None,
    sanitize: Literal["address", "thread"] | None = None,
    schedule: Schedule | None = None,
) -> Attention:
    """The callable of a spec: `out = attention(q, k, v, seed=..., **captures)`; `attention.backward` has its gradients.

    Args:
        spec: the variant.
        target: an architecture such as "sm_80"; None is the current GPU's, or sm_80 on the emulator.
        emulate: run the emitted kernel on the CPU.
        plan: tile sizes and warps to use instead of the default ones.
        deterministic: whether gradients are bitwise equal from run to run, also those of captures. It costs another
            pass over the scores for dq; without it dq and gradients of captures are sums in an order that differs.
        backward_plan: the same of the backward's kernel that walks tiles of keys.
        sanitize: on the emulator, check every access ("address") or every pair of accesses ("thread").
        schedule: on the emulator, the order in which threads run and copies land.

    Raises:
        SpecError: `spec` is no AttentionSpec, or emulator options are given without emulate=True.
        UnsupportedError: the target, or the plan, cannot run the spec.
        BuildError: the kernel does not compile, or a compiler is missing.
        LaunchError: target is None and there is no GPU.
    """
    if not isinstance(spec, AttentionSpec):
        raise SpecError(f"spec={spec!r} must be a flashgen.AttentionSpec")
    if not emulate and (sanitize or schedule):
        raise SpecError(f"sanitize={sanitize!r} and schedule={schedule!r} are the emulator's: add emulate=True")
    engine = Emulator(sanitize, schedule or Schedule()) if emulate else Gpu()
    return _compiled(spec, _target(target, emulate), engine, plan, bool(deterministic), backward_plan)


def _target(name: str | None, emulate: bool) -> Target:
    if name is not None:
        return target_named(name)
    return target_named(_EMULATED_TARGET) if emulate else target_of_capability(*gpu.compute_capability())


@cache
def _compiled(
    spec: AttentionSpec,
    target: Target,
    engine: Engine,
    plan: AnyForwardPlan | None,
    deterministic: bool,
    backward_plan: BackwardPlan | None,
) -> Attention:
    return Attention(spec, target, engine, plan, deterministic, backward_plan)


def clear() -> Any:
    """Forgets the callables of this process; what is on disk stays."""
    _compiled.cache_clear()
