"""From a spec to a ready callable, once per process and configuration."""

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
from flashgen.runtime.remembered import Remembered
from flashgen.runtime.schedule import Schedule

_MOST_KEPT = 1024
_COMPILED: Remembered[Any, Attention] = Remembered(_MOST_KEPT)
_IN_USE: weakref.WeakValueDictionary[Any, Attention] = weakref.WeakValueDictionary()
"""Callables that are still referenced: a spec keeps one callable while it is in use, also after an eviction."""


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
    """The callable of a spec: `out = attention(q, k, v, seed=..., **captures)`; `attention.backward` has its gradients.

    Args:
        spec: the variant.
        target: an architecture such as "sm_80". None is that of the current GPU, on the emulator sm_80. On an H100 or
            H200 it is "sm_90a", whose kernels are of that generation's own instructions; "sm_90" has those that all
            GPUs from sm_80 on run.
        emulate: run the emitted kernel on the CPU.
        plan: tile sizes and warps of the forward to use instead of the default ones. Where target is None the plan's
            kind chooses the target that takes it.
        deterministic: whether gradients are bitwise equal from run to run, also those of captures. On Hopper blocks
            add to dq in turns, elsewhere, and where they cannot, it costs another pass over the scores; without it dq
            and gradients of captures are sums in an order that differs.
        backward_plan: the same of the backward's kernel that walks tiles of keys, of the target's own kind.
        source: an edited kernel, to run in place of the emitted one: the text of the forward kernel, or of any other
            that this spec launches, found by its entry point; a pathlib.Path of such a text, or of a folder as
            `flashgen show --output DIR/` writes it; or a mapping from kernels' names, those of `attention.sources` and
            `attention.backward_sources`, or "forward", "lists", "prepare", "keys", "finish", ..., to texts or paths.
            Plans, grids and arguments stay as they are, so that calls do not take other plans: not tuned ones, nor
            those that pack heads. Files are read now.
        sanitize: on the emulator, check every access ("address") or every pair of accesses ("thread").
        schedule: on the emulator, the order in which threads run and copies land.

    Raises:
        SpecError: `spec` is no AttentionSpec, or emulator options are given without emulate=True.
        ArgumentError: `source` cannot be read, is of no kernel of the spec, or is seen to need another launch than that
            of the plan: its entry point, its struct or a constant such as kTileQ is another.
        UnsupportedError: the target, or the plan, cannot run the spec, or the plan is of another family.
        BuildError: the kernel does not compile (at which file and line is said), or a compiler is missing.
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
    made_of = (spec, chosen, engine, plan, bool(deterministic), backward_plan, texts_of(source))
    attention = _COMPILED.get_or_make(made_of, partial(_found_or_made, made_of))
    return BoundAttention(attention, spec.bound) if spec.bound else attention


def _target(name: str | None, emulate: bool, plan: Plan | None) -> Target:
    if name is not None:
        return target_named(name)
    return emulated_target(plan) if emulate else target_of_gpu(*gpu.compute_capability(), plan)


def _found_or_made(made_of: Any) -> Attention:
    found = _IN_USE.get(made_of)
    if found is None:
        found = _IN_USE[made_of] = _made(*made_of)
    return found


def _made(
    spec: AttentionSpec,
    target: Target,
    engine: Engine,
    plan: Plan | None,
    deterministic: bool,
    backward_plan: Any | None,
    texts: tuple[GivenText, ...],
) -> Attention:
    edits = _edits(texts, spec, target, plan, deterministic, backward_plan) if texts else NO_EDITS
    return Attention(spec, target, engine, plan, deterministic, backward_plan, edits=edits)


def _edits(texts: tuple[GivenText, ...], *what: Any) -> Edits:
    from flashgen.attention.edit_matching import Emitted, edits_of

    return edits_of(texts, Emitted(*what))


def _written(attention: Attention) -> tuple[Any, ...]:
    """How pickle writes an attention: as what makes it again. UnsupportedError where more than its spec made it."""
    if attention.edited:
        raise UnsupportedError(
            f"pickling {attention.name} is not supported: its kernels are edited; pickle the spec and the texts, and "
            "compile(spec, source=...) where they are loaded"
        )
    engine = attention.engine
    of_engine = (True, engine.sanitize, engine.schedule) if isinstance(engine, Emulator) else (False, None, None)
    return _compiled_again, (attention.spec.to_json(), attention.target.name, attention.compiled_with, of_engine)


def _compiled_again(spec: str, target: str, compiled_with: Any, of_engine: Any) -> Attention:
    (plan, deterministic, backward_plan), (emulate, sanitize, schedule) = compiled_with, of_engine
    options: Any = {"plan": plan, "deterministic": deterministic, "backward_plan": backward_plan}
    return compile(AttentionSpec.from_json(spec), target, emulate, **options, sanitize=sanitize, schedule=schedule)


def _not_written(attention: BoundAttention) -> tuple[Any, ...]:
    raise UnsupportedError(
        f"pickling {attention.name} is not supported: its functions close over {', '.join(sorted(attention.bound))}, "
        "which is no part of its spec; pickle what makes it, or declare captures and give them to each call"
    )


copyreg.pickle(Attention, _written)
copyreg.pickle(BoundAttention, _not_written)


def clear() -> Any:
    """Forgets the callables of this process; what is on disk stays."""
    _COMPILED.forget()
    _IN_USE.clear()
