"""The backward kernels that finish the gradients of captured arrays and of the sinks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from flashgen.codegen.arguments import (
    Field,
    capture_fields,
    capture_gradient,
    member_name,
    ordered,
    summed_gradient,
)
from flashgen.codegen.backward_kernels import (
    EXACT_LIMBS,
    NO_VARIANT,
    ROWS,
    STATISTICS,
    Block,
    Rendering,
    Rows,
    backward_kernel,
    numbers,
    row_values,
)
from flashgen.codegen.batches import batch_of
from flashgen.codegen.rendered_kernel import RenderedKernel, Workspace
from flashgen.codegen.shared_memory import slot_per_warp
from flashgen.codegen.sizes import ceil_div
from flashgen.codegen.targets import Target
from flashgen.codegen.tiling import WARP
from flashgen.codegen.variant import variant_of
from flashgen.dtypes import DTYPES
from flashgen.language.operations import Capture
from flashgen.language.spec import AttentionSpec

_CAPTURE_THREADS = 256
_SINK_THREADS = 1024


def capture_kernels(spec: AttentionSpec, target: Target, deterministic: bool) -> tuple[RenderedKernel, ...]:
    """Renders a kernel per captured array that converts sums to its gradient; float32 sums of float32 need none."""
    learned = [capture for capture in spec.captures if capture.grad and capture != spec.sink]
    summed = [capture for capture in learned if deterministic or capture.dtype != "float32"]
    return tuple(_capture(spec, target, capture, deterministic) for capture in summed)


def sink_kernels(spec: AttentionSpec, target: Target, rows: Rows) -> tuple[RenderedKernel, ...]:
    """Renders the kernel of the sinks' gradient; none if the spec does not ask for it. It is always deterministic."""
    capture = spec.sink
    if capture is None or not capture.grad:
        return ()
    gradient = Field(
        f"{DTYPES[capture.dtype].c_type}*", "gradient", comment=f"gradient of {capture.name}, {capture.dtype}"
    )
    sizes = numbers(*batch_of(spec).outer_sizes)
    layout = ordered([STATISTICS, gradient, *sizes, ROWS, *capture_fields((capture,))])
    context: dict[str, Any] = {"deterministic": False, "threads": _SINK_THREADS}
    context |= {"sink": f"load_{capture.name}", "round": _rounding(capture)}
    launch: dict[str, Any] = {
        "grid": lambda sizes: (sizes.heads_q, 1, 1),
        "values": partial(row_values, rows),
        "pointers": {
            "statistics": "statistics",
            "gradient": capture_gradient(capture),
            member_name(capture): member_name(capture),
        },
    }
    shared = slot_per_warp("warp sums", _SINK_THREADS // WARP)
    arrays = replace(variant_of(spec, score=False, sink=True), mask=None)
    arrays = replace(arrays, arrays=tuple(each for each in arrays.arrays if each.name == capture.name))
    block = Block(_SINK_THREADS, shared)
    return (backward_kernel("sink", spec, target, layout, context, block, launch, Rendering(arrays)),)


def _rounding(capture: Capture) -> str | None:
    """Returns the primitive that rounds a gradient to the dtype of the captured array; None for float32."""
    dtype = DTYPES[capture.dtype]
    return dtype.pack if dtype.suffix else None


def _capture(spec: AttentionSpec, target: Target, capture: Capture, deterministic: bool) -> RenderedKernel:
    summed = Field("const long long*" if deterministic else "const float*", "sums")
    gradient = Field(
        f"{DTYPES[capture.dtype].c_type}*", "gradient", comment=f"gradient of {capture.name}, {capture.dtype}"
    )
    context = {
        "deterministic": deterministic,
        "exact_sums": deterministic,
        "threads": _CAPTURE_THREADS,
        "round": _rounding(capture),
        "limbs": EXACT_LIMBS,
    }
    layout = ordered([summed, gradient, Field("long long", "count")])
    sums = summed_gradient(capture)
    dtype, limbs = ("int64", (EXACT_LIMBS,)) if deterministic else ("float32", ())
    launch: dict[str, Any] = {
        "grid": lambda sizes: (ceil_div(sizes.count, _CAPTURE_THREADS), 1, 1),
        "workspaces": (Workspace(sums, lambda sizes: limbs, dtype, zeroed=True, of_capture=capture.name),),
        "pointers": {"sums": sums, "gradient": capture_gradient(capture)},
    }
    block, rendering = Block(_CAPTURE_THREADS), Rendering(NO_VARIANT, suffix=capture.name)
    return backward_kernel("capture", spec, target, layout, context, block, launch, rendering)
