"""Runs the kernels of a spec once on the emulator, records them for timelines, and compares them with the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashgen import attention as engine
from flashgen.attention.gradients import gradients_of_rows
from flashgen.codegen.plan import Plan
from flashgen.codegen.stages import Pass
from flashgen.language.spec import AttentionSpec
from flashgen.reference import Verdict
from flashgen.runtime.timeline import Array, recording
from flashgen.verify import judged, judged_gradients, random_gradients, random_inputs
from flashgen.verify.problems import CaptureMaker, Shape

_STEPS = 5  # iterations of the main loop, enough to show the first, the last and the steady state between them


@dataclass(frozen=True, eq=False)
class Run:
    """The verdicts by output or gradient, and the events of each kernel's first launch by the name of its function."""

    shape: Shape
    verdicts: dict[str, Verdict]
    events: dict[str, Array]


def short_shape(tile_q: int, tile_k: int, along_keys: bool) -> Shape:
    """Returns a shape of one sequence and head, with equal lengths of full tiles and _STEPS iterations or more."""
    outer, inner = (tile_q, tile_k) if along_keys else (tile_k, tile_q)
    length = -(-max(_STEPS * inner, outer) // outer) * outer
    return Shape(length, length, batch=1, heads_q=1, heads_kv=1)


def run_once(
    spec: AttentionSpec,
    target: str,
    passes: Sequence[Pass],
    shape: Shape,
    captures: CaptureMaker | None = None,
    deterministic: bool = False,
    plan: Plan | None = None,
    seed: int = 0,
) -> Run:
    """Runs the passes on random inputs, and returns the events of the kernels and the verdicts on their results."""
    compiled = engine.compile(spec, target=target, emulate=True, deterministic=deterministic, plan=plan)
    inputs = random_inputs(spec, shape, seed, captures)
    call_arguments = {**inputs.captures, **inputs.ragged}
    given: dict[str, Any] = {**call_arguments, **({"seed": seed} if spec.dropout else {})}
    arrays = (inputs.q, inputs.k, inputs.v)
    verdicts: dict[str, Verdict] = {}
    with recording() as recorder:
        out, lse = compiled(*arrays, return_lse=True, **given)
        gradients: Any = None
        if "backward" in passes:
            d_out, _ = random_gradients(spec, shape, seed, False)
            gradients = compiled.backward(d_out, *arrays, out, lse, **given)
    if "forward" in passes:
        verdicts["out"] = judged(spec, *arrays, out, lse, call_arguments, seed=seed)
    if gradients is not None:
        names = (*gradients_of_rows(spec), *(f"d_{capture.name}" for capture in spec.captures if capture.grad))
        found = dict(zip(names, gradients, strict=True))
        verdicts |= judged_gradients(spec, *arrays, d_out, found, **given)
    events: dict[str, Array] = {}
    for name, recorded in recorder.launches:
        events.setdefault(name, recorded)
    return Run(shape, verdicts, events)
