"""Renders the source of Hopper's decode kernel, and the kernel that merges its partial outputs.

The text is deterministic on every machine.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from flashgen.codegen.arguments import ArgumentLayout, Field, output_field
from flashgen.codegen.assembly import assemble, check_spec, suffix_of
from flashgen.codegen.batches import describe_maps
from flashgen.codegen.costs import decode_cost
from flashgen.codegen.forward_kernel import forward_context, forward_kernel, page_fields
from flashgen.codegen.header import header
from flashgen.codegen.hopper.decode_plans import HopperDecodePlan, rest_columns
from flashgen.codegen.hopper.pages import box_keys
from flashgen.codegen.mma_sync.decode import (
    DECODE_GRID,
    DECODE_NAMES,
    DECODE_QUERY,
    STREAM_K_GRID,
    UNMERGED_SPLITS,
    UNMERGED_STREAM_K,
    decode_grid,
    decode_values,
    lse_field,
    partial_fields,
    partial_rows,
    partial_workspaces,
    schedule_fields,
    split_fields,
)
from flashgen.codegen.mma_sync.merge_splits import render_merge_splits
from flashgen.codegen.mma_sync.stream_k import LAST_QUERY, work_unit_context
from flashgen.codegen.rendered_kernel import RenderedKernel, entry_name, kernel_name
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import layout_of
from flashgen.language.spec import AttentionSpec

_STRUCT = "DecodeArguments"
_FIXED: dict[str, Any] = {
    "score_query": DECODE_QUERY,
    "output_columns": "kOutputColumns",
    "softmax_beside_pv": True,
    "packed": False,
    "joined": {"k": False, "v": False},
    "split_depth": False,
    "widen": None,
}
"""The part of the context that is the same for all kernels. Templates of other kernels read it too."""


def hopper_decode_layout(spec: AttentionSpec, scheduled: bool) -> ArgumentLayout:
    """Returns the argument struct of the decode kernel. It has the tensor maps of k and v, or a pointer to records."""
    fields = [Field("TensorMap", f"{name}_map") for name in spec.inputs[1:]]
    if spec.kv_record:
        fields = [Field("const Element*", "k"), Field("Strides", "k_strides")]
    fields += [Field("const Element*", "q"), output_field(spec), lse_field(), *partial_fields(scheduled)]
    fields += [*schedule_fields(scheduled), *page_fields(spec, strides=bool(spec.kv_record))]
    fields += [Field("Strides", f"{name}_strides") for name in "qo"]
    fields += [Field("int", name) for name in ("heads_q", "len_q", "len_k")]
    fields += split_fields(scheduled)
    if not spec.kv_record:  # which have one KV head
        fields.append(Field("unsigned", "kv_reciprocal", comment="2^31 / (query heads per KV head), rounded up"))
    return layout_of(spec, fields, lists=False, sink=True)


def _register_changes(spec: AttentionSpec, plan: HopperDecodePlan) -> dict[str, str]:
    """Returns the function by which each kind of warpgroup takes or gives up registers, without its parentheses."""
    launched = Target.registers_of_launch(plan.launched_threads(spec))
    counts = plan.warpgroup_registers(spec).items()
    return {kind: f"registers_{'increase' if count > launched else 'decrease'}<{count}>" for kind, count in counts}


def render_hopper_decode(spec: AttentionSpec, target: Target, plan: HopperDecodePlan) -> tuple[RenderedKernel, ...]:
    """Returns the decode kernel of a spec on Hopper, and the kernel that merges the splits of the keys.

    Raises:
        UnsupportedError: the target or the plan does not support the spec.
    """
    check_spec(spec, target)
    plan.check(spec, target)
    tiles, entry = plan.panels, entry_name("attention_decode", spec)
    panels = {"k": tiles.head_panel(spec), "v": tiles.value_panel(spec)}
    boxes = {name: (panels[name], box_keys(spec, plan.tile_k)) for name in spec.inputs[1:] if not spec.kv_record}
    layout = describe_maps(spec, hopper_decode_layout(spec, plan.scheduled), boxes)
    cost = decode_cost(spec, plan.tile_q, plan.scheduled)
    grid, method = (STREAM_K_GRID, UNMERGED_STREAM_K) if plan.scheduled else (DECODE_GRID, UNMERGED_SPLITS)
    common = forward_context(
        spec, target, plan, layout, "scores[n]", DECODE_NAMES, LAST_QUERY, struct=_STRUCT, position=False
    )
    context = (
        common
        | _FIXED
        | work_unit_context(plan)
        | {
            "entry": entry,
            "header": header(spec, target, plan, grid, method, "attention decode", cost),
            "head_panel": tiles.head_panel(spec),
            "value_panel": tiles.value_panel(spec),
            "passed_panel": tiles.passed_panel(spec),
            "held_columns": plan.held_columns(spec),
            "rest_columns": rest_columns(spec),
            "values": "keys" if spec.shared_kv else "values",
            "registers": _register_changes(spec, plan),
            "suffix": suffix_of(spec),
            "page_size": spec.page_size,
            "box_keys": box_keys(spec, plan.tile_k),
        }
    )
    scores = (plan.tile_k, "false")
    columns = (tiles.output_columns(spec) // (2 if spec.kv_record else 1), "true")
    products = {"shared_forms": [scores, columns], "register_forms": [scores]}
    kernel = forward_kernel(
        spec,
        target,
        plan,
        layout,
        assemble("hopper/decode.cu.jinja", context, target, products),
        boxes=boxes,
        l2_promotion=128,
        grid=partial(decode_grid, spec, plan),
        values=partial(decode_values, spec, plan),
        workspaces=partial_workspaces(spec, partial(partial_rows, spec, plan)),
    )
    name = kernel_name("decode", target, spec) + plan.part(spec).removeprefix("decode").replace("_", "-")
    kernel = replace(kernel, name=name, entry=entry, cost=cost, threads=plan.launched_threads(spec))
    return kernel, render_merge_splits(spec, target, plan)
