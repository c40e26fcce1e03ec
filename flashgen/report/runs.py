"""A spec's kernels run once on the emulator: recorded for their timelines, and judged by the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashgen import attention as engine
from flashgen.codegen.plan import Plan
from flashgen.codegen.stages import Pass
from flashgen.language.spec import AttentionSpec
from flashgen.reference import Verdict
from flashgen.runtime.timeline import Array, recording
from flashgen.verify import judged, judged_gradients, random_gradients, random_inputs
from flashgen.verify.problems import CaptureMaker, Shape

_STEPS = 5  # of the inner loop, so that its first, its last and what repeats between them show


@dataclass(frozen=True, eq=False)
class Run:
    """Verdicts by output or gradient, and the events of each kernel's first launch by its function's name."""

    shape: Shape
    verdicts: dict[str, Verdict]
    events: dict[str, Array]


def short_shape(tile_q: int, tile_k: int, along_keys: bool) -> Shape:
    """One sequence and head, equal lengths, of whole tiles and some steps of the inner loop."""
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
    """Runs the passes on random inputs: their kernels' events, and what the oracle says of their results."""
    compiled = engine.compile(spec, target=target, emulate=True, deterministic=deterministic, plan=plan)
    inputs = random_inputs(spec, shape, seed, captures)
    of_call = {**inputs.captures, **inputs.ragged}
    given: dict[str, Any] = {**of_call, **({"seed": seed} if spec.dropout else {})}
    arrays = (inputs.q, inputs.k, inputs.v)
    verdicts: dict[str, Verdict] = {}
    with recording() as recorder:
        out, lse = compiled(*arrays, return_lse=True, **given)
        gradients: Any = None
        if "backward" in passes:
            d_out, _ = random_gradients(spec, shape, seed, False)
            gradients = compiled.backward(d_out, *arrays, out, lse, **given)
    if "forward" in passes:
        verdicts["out"] = judged(spec, *arrays, out, lse, of_call, seed=seed)
    if gradients is not None:
        names = ("dq", "dk", "dv", *(f"d_{capture.name}" for capture in spec.captures if capture.grad))
        found = dict(zip(names, gradients, strict=True))
        verdicts |= judged_gradients(spec, *arrays, d_out, found, **given)
    events: dict[str, Array] = {}
    for name, recorded in recorder.launches:
        events.setdefault(name, recorded)
    return Run(shape, verdicts, events)
