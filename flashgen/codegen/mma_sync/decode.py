"""Renders the source of the decode kernel that uses mma.sync. The text is deterministic on every machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from flashgen.codegen.arguments import ArgumentLayout, Field, output_field
from flashgen.codegen.assembly import assemble, check_spec
from flashgen.codegen.costs import decode_cost
from flashgen.codegen.demand import demand_of
from flashgen.codegen.expressions.function_text import DEVICE_NAMES, Names
from flashgen.codegen.forward_kernel import (
    EIGHT_BIT_SUFFIXES,
    forward_context,
    forward_kernel,
    page_fields,
    scale_fields,
)
from flashgen.codegen.header import header
from flashgen.codegen.mma_sync.decode_plans import PARTIAL_PADDING, DecodePlan, choose_decode_plan
from flashgen.codegen.mma_sync.splits import SplitPlan, all_tiles, head_groups, row_tiles
from flashgen.codegen.mma_sync.stream_k import (
    LAST_QUERY,
    arrival_counters,
    partial_slots,
    work_unit_context,
    work_unit_fields,
    work_unit_values,
)
from flashgen.codegen.padding import is_wide
from flashgen.codegen.rendered_kernel import RenderedKernel, Workspace, entry_name, kernel_name
from flashgen.codegen.sizes import Grid, Sizes, minimum
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import layout_of, variant_of
from flashgen.errors import UnsupportedError
from flashgen.language.operations import HEAD
from flashgen.language.spec import AttentionSpec

_STRUCT = "DecodeArguments"
PARTIALS_AT_ONCE = 16  # 6 registers each; those of scores and output are free when partial outputs are merged
DECODE_METHOD = (
    "split-KV over warps and CTAs; the last CTA to arrive combines partial outputs (Dao et al. 2023, Flash-Decoding)"
)
DECODE_GRID = "one CTA per (output tile and split, group of heads, batch), along x, y and z"
STREAM_K_METHOD = (
    "stream-K work units: equal parts of the key tiles of all sequences (Osama et al. 2023); the last CTA of an output "
    "tile to arrive combines the partial outputs (Dao et al. 2023, Flash-Decoding)"
)
UNMERGED_SPLITS = "split-KV over CTAs (Dao et al. 2023, Flash-Decoding)"
UNMERGED_STREAM_K = (
    "stream-K work units: equal parts of the key tiles of all sequences (Osama et al. 2023; Dao et al. 2023, "
    "Flash-Decoding)"
)
"""The methods of kernels of which another one merges the partial outputs (merge_splits.py)."""
STREAM_K_GRID = "one CTA per (work unit, group of heads), along x and y"
DECODE_NAMES: Names = {**DEVICE_NAMES, HEAD: "position.head_at(Scores::row_index(n))"}
DECODE_QUERY = "position.query_at(Scores::row_index(n))"
_SPLIT_FIELDS = [
    Field("int", "packed", comment="query heads that share a tile of rows"),
    Field("int", "rows", comment="of a group of such heads: queries x heads"),
    Field("int", "row_tiles", comment="tiles of these rows"),
    Field("int", "splits", comment="splits of the keys of an output tile"),
]


def cache_fields(spec: AttentionSpec) -> list[Field]:
    """Returns the struct members for the addresses of keys and values, and for the scales of 8-bit ones."""
    return page_fields(spec) + (scale_fields() if spec.scales_kv else [])


def partial_fields(scheduled: bool) -> list[Field]:
    """Returns the struct members for the partial outputs of splits and their softmax states."""
    shape = "groups of heads, work units, 2 slots" if scheduled else "output tiles, splits"
    return [
        Field("float*", "partial_outputs", comment=f"({shape}, kTileQ, kValueDim)"),
        Field("float*", "partial_states", comment=f"({shape}, kTileQ, 2): row maximum and row sum"),
    ]


def lse_field() -> Field:
    """Returns the struct member for the LSE."""
    return Field("float*", "lse", comment="(batch, heads_q, len_q), or null")


def schedule_fields(scheduled: bool) -> list[Field]:
    """Returns the struct member for the schedule of work units."""
    return [Field("const int*", "schedule", comment="null if each CTA finds its own work unit")] if scheduled else []


def split_fields(scheduled: bool) -> list[Field]:
    """Returns the struct members from which a kernel finds its output tile and the splits of the keys."""
    return work_unit_fields() if scheduled else _SPLIT_FIELDS


def cache_context(spec: AttentionSpec, names: Names) -> dict[str, Any]:
    """Returns the template context for a KV cache, partial outputs and the mask.

    Args:
        names: names of the indices in the emitted text.
    """
    mask = variant_of(spec).mask
    return {
        "mask_call": mask.call(names) if mask else "",
        "partial_padding": PARTIAL_PADDING,
        "partials_at_once": PARTIALS_AT_ONCE,
        "page_size": spec.page_size,
        "split_depth": is_wide(spec),  # plans check that it is so
        "widen": f"widen_{EIGHT_BIT_SUFFIXES[spec.kv_dtype]}" if spec.kv_dtype and spec.scales_kv else None,
    }


def partial_workspaces(spec: AttentionSpec, rows: Callable[[Sizes], tuple[int, ...]]) -> tuple[Workspace, ...]:
    """Returns the workspaces of partial outputs and of their softmax states, which calls with several splits need.

    Args:
        rows: returns the shape of the workspaces without the last axis.
    """

    def space(name: str, columns: int) -> Workspace:
        return Workspace(name, lambda sizes: (*rows(sizes), columns), "float32", wanted=lambda sizes: sizes.splits - 1)

    return space("partial_outputs", spec.value_dim), space("partial_states", 2)


def decode_layout(spec: AttentionSpec, lists: bool, scheduled: bool = False) -> ArgumentLayout:
    """Returns the argument struct of the decode kernel."""
    fields = [Field("const Element*", name) for name in spec.inputs] + [output_field(spec)]
    fields += [lse_field(), *partial_fields(scheduled)]
    if not spec.kv_record:  # whose splits another kernel merges
        counted = "groups of heads, work units" if scheduled else "output tiles"
        comment = f"({counted}): 0 before and after a launch; null for 1 split"
        fields.append(Field("unsigned*", "arrivals", comment=comment))
    fields += schedule_fields(scheduled)
    fields += cache_fields(spec)
    fields += [Field("Strides", f"{name}_strides") for name in (*spec.inputs, "o")]
    fields += [Field("int", name) for name in ("heads_q", "len_q", "len_k")]
    fields += split_fields(scheduled)
    fields.append(Field("unsigned", "kv_reciprocal", comment="2^31 / (query heads per KV head), rounded up"))
    return layout_of(spec, fields, lists, sink=True)


def render_decode(spec: AttentionSpec, target: Target, plan: DecodePlan | None = None) -> tuple[RenderedKernel, ...]:
    """Returns the decode kernel of a spec on a target.

    Raises:
        UnsupportedError: the target or the plan does not support the spec.
    """
    check_spec(spec, target)
    if not spec.batch_layout.supports("decode kernels"):
        raise UnsupportedError(f"layout={spec.layout!r}: the decode kernel takes no varlen batches; take layout='bshd'")
    plan = plan or choose_decode_plan(spec, target)
    plan.check(spec, target)
    layout = decode_layout(spec, demand_of(spec).listed, plan.scheduled)
    entry = entry_name("attention_decode", spec)
    common = forward_context(
        spec, target, plan, layout, "scores[n]", DECODE_NAMES, LAST_QUERY, struct=_STRUCT, position=False
    )
    cost = decode_cost(spec, plan.tile_q, plan.scheduled)
    grid, method = (STREAM_K_GRID, STREAM_K_METHOD) if plan.scheduled else (DECODE_GRID, DECODE_METHOD)
    if spec.kv_record:
        method = UNMERGED_STREAM_K if plan.scheduled else UNMERGED_SPLITS
    context = (
        common
        | work_unit_context(plan)
        | cache_context(spec, DECODE_NAMES)
        | {
            "entry": entry,
            "header": header(spec, target, plan, grid, method, "attention decode", cost),
            "score_query": DECODE_QUERY,
            "looks_up_ahead": (spec.page_size or 1) % plan.tile_k == 0,  # a tile lies in one page
        }
    )
    kernel = forward_kernel(
        spec,
        target,
        plan,
        layout,
        assemble("mma_sync/decode.cu.jinja", context, target),
        grid=partial(decode_grid, spec, plan),
        values=partial(decode_values, spec, plan),
        counts=None if spec.kv_record else partial(_counters, spec, plan),
        workspaces=partial_workspaces(spec, partial(partial_rows, spec, plan)),
    )
    name = kernel_name("decode", target, spec) + plan.part(spec).removeprefix("decode").replace("_", "-")
    return (replace(kernel, name=name, entry=entry, cost=cost),)


def decode_grid(spec: AttentionSpec, plan: SplitPlan, sizes: Sizes) -> Grid:
    """Returns the grid of a decode kernel."""
    if plan.scheduled:
        return sizes.splits, head_groups(spec, sizes), 1
    return row_tiles(spec, plan, sizes) * sizes.splits, head_groups(spec, sizes), sizes.batch


def decode_values(spec: AttentionSpec, plan: SplitPlan, sizes: Sizes) -> dict[str, Any]:
    """Returns the values of struct members that are computed from the sizes."""
    values = work_unit_values(spec, plan, sizes)
    return values if plan.scheduled else {name: value for name, value in values.items() if name != "tiles"}


def _counters(spec: AttentionSpec, plan: DecodePlan, sizes: Sizes) -> Any:
    if plan.scheduled:
        return arrival_counters(spec, sizes)
    return all_tiles(spec, plan, sizes) * minimum(sizes.splits - 1, 1)


def partial_rows(spec: AttentionSpec, plan: SplitPlan, sizes: Sizes) -> tuple[int, ...]:
    """Returns the shape of the workspaces of partial outputs without the last axis."""
    if plan.scheduled:
        return partial_slots(spec, sizes), plan.tile_q
    return all_tiles(spec, plan, sizes), sizes.splits, plan.tile_q
