"""Times calls of a spec on the current GPU, for the roofline of a report."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flashgen import attention as engine
from flashgen.codegen.plan import Plan
from flashgen.codegen.stages import Pass
from flashgen.codegen.targets import Target
from flashgen.errors import LaunchError
from flashgen.language.spec import AttentionSpec
from flashgen.runtime import gpu
from flashgen.runtime.timing import median_ms
from flashgen.verify import random_gradients, random_inputs
from flashgen.verify.problems import CaptureMaker, Shape


def runs_here(target: Target) -> bool:
    """Returns whether there is a GPU and it runs the target's kernels."""
    if importlib.util.find_spec("cupy") is None:
        return False
    try:
        return target.runs_on(*gpu.compute_capability())
    except LaunchError:
        return False


def seconds_of_calls(
    spec: AttentionSpec,
    target: Target,
    passes: Sequence[Pass],
    shape: Shape,
    deterministic: bool,
    captures: Mapping[str, Any],
    maker: CaptureMaker | None,
    plan: Plan | None,
) -> dict[Pass, float]:
    """Returns the median seconds of a call of each pass, with all its kernels, on random inputs and with a cold L2.

    captures: arrays by name; captures that are not given come from `maker`, or are random if it is None.
    """
    compiled = engine.compile(spec, target=target.name, deterministic=deterministic, plan=plan)
    inputs = random_inputs(spec, shape, 0, maker)
    given = {**inputs.captures, **inputs.ragged, **captures}
    q, k, v = (_to_gpu(array) for array in (inputs.q, inputs.k, inputs.v))
    options = {name: _to_gpu(value) for name, value in given.items()} | ({"seed": 0} if spec.dropout else {})
    d_out, _ = random_gradients(spec, shape, 0, False)
    out, lse = compiled(q, k, v, return_lse=True, **options)
    d_out = _to_gpu(d_out)
    runs: dict[Pass, Callable[[], Any]] = {
        "forward": lambda: compiled(q, k, v, **options),
        "backward": lambda: compiled.backward(d_out, q, k, v, out, lse, **options),
    }
    return {name: median_ms(runs[name]) / 1e3 for name in passes}


def _to_gpu(value: Any) -> Any:
    """Copies an array to the GPU; returns a number unchanged."""
    return gpu.cupy().asarray(value) if hasattr(value, "shape") and value.shape else value
