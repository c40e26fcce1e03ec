"""The launches of a pass for calls of given sizes: grids, argument writers and workspaces."""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.attention.problem import INT32_MAX, Problem
from flashgen.codegen.arguments import QUERY_ARRAYS, ArgumentLayout, member_name
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import Kernels, struct_values
from flashgen.errors import ArgumentError
from flashgen.language.spec import AttentionSpec
from flashgen.launch.argument_writer import ArgumentWriter, Value
from flashgen.launch.engines import Launch
from flashgen.launch.memory import ArraySpec
from flashgen.launch.tensor_map_writer import TensorMapWriter, head_panels, map_shapes
from flashgen.runtime.arrays import View, byte_strides

_MAX_TILES = 2**30 - 1  # so that the index of a tile past the last one does not overflow


def launch_of(
    kernel: RenderedKernel, spec: AttentionSpec, problem: Problem, captured: Mapping[str, View], **own: Value
) -> Launch:
    """Returns the launch of a kernel for calls of these sizes and strides. `own`: additional members of the struct.

    Raises:
        ArgumentError: TMA does not support a stride, or the plan packs more heads than share a KV head.
    """
    _check_packing(kernel, problem)
    sizes = {**struct_values(kernel, spec, problem), **own}
    if sizes.get("packed", 0) * problem.len_q > INT32_MAX:
        raise ArgumentError(
            f"{sizes['packed']} heads of {problem.len_q} queries for a head of k and v are too many for {kernel.plan}; "
            "compile without a plan, or call it on parts of q"
        )
    tiles = sizes.get("tiles", 0)
    if tiles > _MAX_TILES:
        heads = problem.batch * problem.heads_q
        raise ArgumentError(f"{heads} heads in all of {problem.len_q} queries are too many tiles; split the batch")
    values = {f"{name}_strides": each for name, each in problem.strides.items()} | sizes
    values |= capture_values(kernel.layout, spec, captured)
    if spec.scales_kv:
        values |= dict(zip(("k_scales", "v_scales"), problem.scales, strict=True))
    if spec.page_size:
        values |= {"pages": problem.pages, "table_pitch": problem.table_pitch}
        values |= head_panels(spec, kernel, problem, problem.strides, problem.pages)
    counts = int(kernel.counts(problem)) if kernel.counts else 0
    if not kernel.boxes:
        return Launch(kernel.grid(problem), ArgumentWriter(kernel.layout, values), counts)
    has_keys = problem.rows_k and (problem.pages or not spec.page_size)
    empty = () if has_keys else [name for name in kernel.boxes if name not in QUERY_ARRAYS]
    shapes = map_shapes(spec, kernel, problem, problem.strides, problem.pages)
    return Launch(kernel.grid(problem), TensorMapWriter(kernel.layout, values, shapes, empty), counts)


def _check_packing(kernel: RenderedKernel, problem: Problem) -> None:
    packed = getattr(kernel.plan, "packed_heads", 1)
    if problem.heads_per_kv % packed and problem.heads_q:
        raise ArgumentError(
            f"q has {problem.heads_per_kv} heads for each head of k and v, no multiple of the {packed} that the plan "
            f"packs: {kernel.plan}; compile without a plan, or with another packed_heads"
        )


def capture_values(layout: ArgumentLayout, spec: AttentionSpec, arrays: Mapping[str, View]) -> dict[str, Value]:
    """Returns the strides in bytes and the sizes of those captured arrays that a struct holds."""
    values: dict[str, Value] = {}
    members = {field.name for field in layout.fields}
    for capture in spec.captures:
        name = member_name(capture)
        if capture.ndim and name in members:
            view = arrays[capture.name]
            values[f"{name}_stride"] = byte_strides(view)
            values[f"{name}_size"] = view.shape
    return values


def workspaces(kernels: Kernels, problem: Problem, captured: Mapping[str, View]) -> dict[str, ArraySpec]:
    """Returns the workspaces of a call by their names in the structs: linear in the lengths and the captures' sizes."""
    return {
        space.name: ArraySpec(
            (*(captured[space.of_capture].shape if space.of_capture else ()), *space.shape(problem)),
            space.dtype,
            space.zeroed,
        )
        for kernel in kernels.values()
        for space in kernel.workspaces
        if space.wanted(problem)
    }
