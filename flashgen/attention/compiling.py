"""`compile`: builds the callable of a spec, once for each process and configuration."""

from __future__ import annotations

import copyreg
import weakref
from functools import partial
from typing import Any, Literal

from flashgen.attention.bound import BoundAttention
from flashgen.attention.callable import Attention
from flashgen.attention.edits import NO_EDITS, Edits
from flashgen.attention.given_sources import GivenText, Source, texts_of
from flashgen.codegen.families import emulated_target, target_of_gpu
from flashgen.codegen.plan import Plan
from flashgen.codegen.targets import Target, target_named
from flashgen.errors import SpecError, UnsupportedError
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Emulator, Engine, Gpu
from flashgen.runtime import gpu
from flashgen.runtime.caching import Cache
from flashgen.runtime.schedule import Schedule

_MAX_CACHED = 1024
_COMPILED: Cache[Any, Attention] = Cache(_MAX_CACHED)
_IN_USE: weakref.WeakValueDictionary[Any, Attention] = weakref.WeakValueDictionary()
"""Callables that are still referenced: a configuration keeps its callable while it is in use, even if evicted."""


def compile(
    spec: AttentionSpec,
    target: str | None = None,
    emulate: bool = False,
    *,
    plan: Plan | None = None,
    deterministic: bool = False,
    backward_plan: Any | None = None,
    source: Source | None = None,
    sanitize: Literal["address", "thread"] | None = None,
    schedule: Schedule | None = None,
) -> Attention:
    """Compiles a spec and returns its callable: `out = attention(q, k, v, seed=..., **captures)`.

    `attention.backward` and `attention.vjp` compute gradients.

    Args:
        spec: the attention variant.
        target: an architecture such as "sm_80". None chooses that of the current GPU, and sm_80 on the emulator. On an
            H100 or H200 this is "sm_90a", with kernels that use Hopper's own instructions (wgmma, TMA); "sm_90" selects
            the kernels that run on all GPUs from sm_80 on.
        emulate: run the emitted kernels on the CPU.
        plan: tile sizes and warps of the forward kernel; None for the default plan. If target is None, the class of the
            plan decides which target is chosen.
        deterministic: make gradients bitwise equal from run to run, including those of captures. Where possible, CTAs
            on Hopper then add to dQ in a fixed order, guarded by semaphores; otherwise it costs another pass over the
            scores. If false, dQ and the gradients of captures are summed in an order that differs.
        backward_plan: the plan of the backward's main kernel, of the target's own class; None for the default plan.
        source: edited kernels to run instead of the emitted ones. Either the text of a kernel that this spec launches,
            which is identified by its entry point; or a pathlib.Path of such a text, or of a folder as written by
            `flashgen show --output DIR/`; or a mapping from kernels to texts or paths, with the names in
            `attention.sources` and `attention.backward_sources`, or the roles "forward", "lists", "preprocess", "dkdv",
            "postprocess", ..., as its keys. Files are read now. Plans, grids and arguments stay the same, so calls of
            an edited kernel use neither tuned plans nor packed heads.
        sanitize: on the emulator, check every access ("address") or every pair of accesses ("thread").
        schedule: on the emulator, the order in which threads run and copies complete.

    Raises:
        SpecError: `spec` is not an AttentionSpec, or emulator options are given without emulate=True.
        ArgumentError: `source` cannot be read, matches no kernel of the spec, or visibly needs another launch than that
            of the plan because its entry point, its struct or a constant such as kTileQ differs.
        UnsupportedError: the target or the plan cannot run the spec, or the plan is for another kernel family.
        BuildError: a kernel does not compile (the message gives file and line), or a compiler is missing.
        LaunchError: target is None and there is no GPU.
    """
    if not isinstance(spec, AttentionSpec):
        raise SpecError(
            f"spec={spec!r} must be a flashgen.AttentionSpec, such as AttentionSpec(64, 'float16', mask=causal())"
        )
    if not emulate and (sanitize or schedule):
        raise SpecError(f"sanitize={sanitize!r} and schedule={schedule!r} are the emulator's: add emulate=True")
    engine = Emulator(sanitize, schedule or Schedule()) if emulate else Gpu()
    chosen = _target(target, emulate, plan)
    configuration = (spec, chosen, engine, plan, bool(deterministic), backward_plan, texts_of(source))
    attention = _COMPILED.get_or_make(configuration, partial(_find_or_create, configuration))
    return BoundAttention(attention, spec.bound) if spec.bound else attention


def _target(name: str | None, emulate: bool, plan: Plan | None) -> Target:
    if name is not None:
        return target_named(name)
    return emulated_target(plan) if emulate else target_of_gpu(*gpu.compute_capability(), plan)


def _find_or_create(configuration: Any) -> Attention:
    found = _IN_USE.get(configuration)
    if found is None:
        found = _IN_USE[configuration] = _create(*configuration)
    return found


def _create(
    spec: AttentionSpec,
    target: Target,
    engine: Engine,
    plan: Plan | None,
    deterministic: bool,
    backward_plan: Any | None,
    texts: tuple[GivenText, ...],
) -> Attention:
    edits = _match_edits(texts, spec, target, plan, deterministic, backward_plan) if texts else NO_EDITS
    return Attention(spec, target, engine, plan, deterministic, backward_plan, edits=edits)


def _match_edits(texts: tuple[GivenText, ...], *arguments: Any) -> Edits:
    from flashgen.attention.edit_matching import Emitted, match_edits

    return match_edits(texts, Emitted(*arguments))


def _reduce(attention: Attention) -> tuple[Any, ...]:
    """Returns what pickle stores: the arguments that compile it again. Raises UnsupportedError for edited kernels."""
    if attention.edited:
        raise UnsupportedError(
            f"pickling {attention.name} is not supported: its kernels are edited; pickle the spec and the texts, and "
            "compile(spec, source=...) where they are loaded"
        )
    engine = attention.engine
    emulation = (True, engine.sanitize, engine.schedule) if isinstance(engine, Emulator) else (False, None, None)
    return _compiled_again, (attention.spec.to_json(), attention.target.name, attention.compiled_with, emulation)


def _compiled_again(spec: str, target: str, compiled_with: Any, emulation: Any) -> Attention:
    """Unpickles an attention. Pickles name this function, so it keeps its name."""
    (plan, deterministic, backward_plan), (emulate, sanitize, schedule) = compiled_with, emulation
    options: Any = {"plan": plan, "deterministic": deterministic, "backward_plan": backward_plan}
    return compile(AttentionSpec.from_json(spec), target, emulate, **options, sanitize=sanitize, schedule=schedule)


def _refuse_to_reduce(attention: BoundAttention) -> tuple[Any, ...]:
    raise UnsupportedError(
        f"pickling {attention.name} is not supported: its functions close over {', '.join(sorted(attention.bound))}, "
        "which is no part of its spec; pickle what makes it, or declare captures and give them to each call"
    )


copyreg.pickle(Attention, _reduce)
copyreg.pickle(BoundAttention, _refuse_to_reduce)


def clear() -> Any:
    """Removes the callables of this process from memory; kernels on disk stay."""
    _COMPILED.clear()
    _IN_USE.clear()
