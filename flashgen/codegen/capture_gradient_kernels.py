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
    LSE_AND_D,
    NO_VARIANT,
    ROWS,
    Block,
    Rendering,
    Rows,
    backward_kernel,
    numbers,
    row_values,
)
from flashgen.codegen.batches import batch_of
from flashgen.codegen.expressions.row_elements import dense_loads
from flashgen.codegen.mma_sync.dense_gradient import dense_gradient_kernel, gradient_parts, parts_of_gradient
from flashgen.codegen.padding import WARP
from flashgen.codegen.rendered_kernel import RenderedKernel, Workspace
from flashgen.codegen.shared_memory import slot_per_warp
from flashgen.codegen.sizes import ceil_div, minimum
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import variant_of
from flashgen.dtypes import DTYPES
from flashgen.language.operations import Capture, Load
from flashgen.language.spec import AttentionSpec

_CAPTURE_THREADS = 256
_SINK_THREADS = 1024


def capture_kernels(spec: AttentionSpec, target: Target, rows: Rows, deterministic: bool) -> tuple[RenderedKernel, ...]:
    """Renders a kernel for each captured array whose gradient the kernel of dK and dV does not complete.

    It computes the gradient of a dense array. Of another array it converts the sums; float32 sums of float32 need none.
    """
    kernels: list[RenderedKernel] = []
    dense = {load.capture: load for load in dense_loads(spec)}
    for capture in spec.captures:
        if not capture.grad or capture == spec.sink:
            continue
        if capture in dense:
            kernels += _dense(spec, target, dense[capture], rows)
        elif deterministic or capture.dtype != "float32":
            kernels.append(_capture(spec, target, capture, deterministic))
    return tuple(kernels)


def sink_kernels(spec: AttentionSpec, target: Target, rows: Rows) -> tuple[RenderedKernel, ...]:
    """Renders the kernel of the sinks' gradient; none if the spec does not ask for it. It is always deterministic."""
    capture = spec.sink
    if capture is None or not capture.grad:
        return ()
    gradient = _gradient_field(capture)
    sizes = numbers(*batch_of(spec).outer_sizes)
    layout = ordered([LSE_AND_D, gradient, *sizes, ROWS, *capture_fields((capture,))])
    context: dict[str, Any] = {"deterministic": False, "threads": _SINK_THREADS}
    context |= {"sink": f"load_{capture.name}", "round": rounding(capture)}
    launch: dict[str, Any] = {
        "grid": lambda sizes: (sizes.heads_q, 1, 1),
        "values": partial(row_values, rows),
        "pointers": {
            "lse_and_d": "lse_and_d",
            "gradient": capture_gradient(capture),
            member_name(capture): member_name(capture),
        },
    }
    shared = slot_per_warp("warp sums", _SINK_THREADS // WARP)
    arrays = replace(variant_of(spec, score=False, sink=True), mask=None)
    arrays = replace(arrays, arrays=tuple(each for each in arrays.arrays if each.name == capture.name))
    block = Block(_SINK_THREADS, shared)
    return (backward_kernel("sink", spec, target, layout, context, block, launch, Rendering(arrays)),)


def rounding(capture: Capture) -> str | None:
    """Returns the primitive that rounds a gradient to the dtype of the captured array; None for float32."""
    dtype = DTYPES[capture.dtype]
    return dtype.pack if dtype.suffix else None


def _dense(spec: AttentionSpec, target: Target, load: Load, rows: Rows) -> list[RenderedKernel]:
    """Returns the kernel of a dense gradient, and the one that adds its parts, if the call has several."""
    capture = load.capture
    kernel = dense_gradient_kernel(spec, target, load, rows, rounding(capture))
    if kernel is None:
        return []
    fields = [Field("const float*", "sums"), _gradient_field(capture), Field("long long", "count"), *numbers("parts")]
    parts = partial(gradient_parts, spec, kernel.plan, load)
    launch: dict[str, Any] = {
        "grid": lambda sizes: (ceil_div(sizes.count, _CAPTURE_THREADS) * minimum(parts(sizes) - 1, 1), 1, 1),
        "values": lambda sizes: {"parts": parts(sizes)},
        "pointers": {"sums": parts_of_gradient(capture), "gradient": capture_gradient(capture)},
        "counts_elements": capture.name,
    }
    context: dict[str, Any] = {"deterministic": False, "exact_sums": False, "threads": _CAPTURE_THREADS}
    context |= {"round": rounding(capture), "parts": True}
    block, rendering = Block(_CAPTURE_THREADS), Rendering(NO_VARIANT, suffix=capture.name)
    return [kernel, backward_kernel("capture", spec, target, ordered(fields), context, block, launch, rendering)]


def _gradient_field(capture: Capture) -> Field:
    return Field(f"{DTYPES[capture.dtype].c_type}*", "gradient", comment=f"gradient of {capture.name}, {capture.dtype}")


def _capture(spec: AttentionSpec, target: Target, capture: Capture, deterministic: bool) -> RenderedKernel:
    summed = Field("const long long*" if deterministic else "const float*", "sums")
    gradient = _gradient_field(capture)
    context = {
        "deterministic": deterministic,
        "exact_sums": deterministic,
        "threads": _CAPTURE_THREADS,
        "round": rounding(capture),
        "limbs": EXACT_LIMBS,
        "parts": False,
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
