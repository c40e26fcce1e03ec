"""Renders Hopper's backward kernels for rows of more than 256 columns, which run in clusters of two CTAs.

dK and dV of 64 keys and 512 columns would take all registers of an SM, and K, V, Q and dO all of its shared memory. So
one CTA of a cluster holds K, streams Q and accumulates dK, and the other holds V, streams dO and accumulates dV. The
first one computes S and P, and the second one dP and dS. They pass P and dS to each other through distributed shared
memory, in 16 bits, which the wgmma of dV and dK take. The kernel of dQ does the same with a query tile, so that seven
products are computed for five.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from flashgen.analysis.closed_forms.tile_ranges import key_range, query_range
from flashgen.codegen.arguments import Field
from flashgen.codegen.assembly import check_spec, is_masked, longest_last, suffix_of, visited_tiles
from flashgen.codegen.backward_kernels import (
    LSE_AND_D,
    ROWS,
    Block,
    DqAccumulation,
    Rendering,
    Rows,
    backward_kernel,
    preprocess,
    row_values,
    rows_of,
    varlen_context,
)
from flashgen.codegen.batches import batch_of
from flashgen.codegen.capture_gradient_kernels import capture_kernels, sink_kernels
from flashgen.codegen.demand import divides_tiles
from flashgen.codegen.expressions.derivative_text import score_gradient
from flashgen.codegen.expressions.uniform_text import uniform_text
from flashgen.codegen.hopper.cluster_plans import HopperClusterPlan, HopperClusterQueriesPlan
from flashgen.codegen.padding import padded_head_dim
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.sizes import Grid, Sizes
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import layout_of
from flashgen.codegen.varlen import MAP_ROWS
from flashgen.language.operations import QUERY
from flashgen.language.spec import AttentionSpec

_CTAS = 2  # of a cluster
_WARP_ROWS = 16
_OPTIONAL = ("len_q",)  # TMA clips rows beyond the last one


def render_cluster_backward(
    spec: AttentionSpec, target: Target, plan: HopperClusterPlan | None = None, deterministic: bool = False
) -> tuple[RenderedKernel, ...]:
    """Returns the backward kernels of a spec in launch order. Their gradients are the same in both modes.

    Args:
        plan: The plan of the kernel that computes dK and dV; None for the default plan.

    Raises:
        UnsupportedError: the target or the plan does not support the spec.
    """
    check_spec(spec, target)
    plan = plan or HopperClusterPlan()
    plan.check(spec, target)
    queries_plan = HopperClusterQueriesPlan(
        plan.stages, plan.tile_q
    )  # CTAs of both kernels stream tiles of as many rows
    queries_plan.check(spec, target)
    rows = rows_of(spec, plan.tile_q)
    kernels = (
        preprocess(spec, target, plan, rows, False, DqAccumulation(apart=True)),
        _dkdv(spec, target, plan, rows),
        _dq(spec, target, queries_plan, rows, plan.tile_q),
    )
    return (*kernels, *sink_kernels(spec, target, rows), *capture_kernels(spec, target, rows, deterministic))


def _maps(*names: str) -> list[Field]:
    return [Field("TensorMap", f"{name}_map") for name in names]


def _context(spec: AttentionSpec, plan: HopperClusterPlan | HopperClusterQueriesPlan) -> dict[str, Any]:
    """Returns the template context that both kernels share."""
    return {
        "plan": plan,
        "mask_alone": is_masked(spec),
        "deterministic": False,
        "dq_apart": True,
        "gathers": (),
        "suffix": suffix_of(spec),
        "head_panel": plan.panel(spec),
        "value_panel": plan.panel(spec),
        "map_rows": MAP_ROWS,
    }


def _boxes(
    spec: AttentionSpec, plan: HopperClusterPlan | HopperClusterQueriesPlan, *gradients: str
) -> dict[str, tuple[int, ...]]:
    """Returns the TMA boxes, as (columns, rows): tiles of the inputs, and a warp's rows of the gradients."""
    rows = {"q": plan.tile_q, "k": plan.tile_k, "v": plan.tile_k, "d_o": plan.tile_q}
    rows |= dict.fromkeys(gradients, _WARP_ROWS)
    return {name: (plan.panel(spec), count) for name, count in rows.items()}


def _primitives(
    spec: AttentionSpec, plan: HopperClusterPlan | HopperClusterQueriesPlan, streamed_rows: int
) -> dict[str, Any]:
    """Returns the shapes of the products: scores of streamed rows, and both parts of a warpgroup's gradient."""
    first = plan.first_columns(spec)
    parts = dict.fromkeys((first, padded_head_dim(spec) // 2 - first))
    return {"shared_forms": [(streamed_rows, "false")], "register_forms": [(part, "true") for part in parts]}


def _dkdv(spec: AttentionSpec, target: Target, plan: HopperClusterPlan, rows: Rows) -> RenderedKernel:
    """Returns the kernel of dK and dV."""
    tiles, struct = query_range(spec.mask.expression), "BackwardDkdvArguments"
    fields = [*_maps("q", "k", "v", "d_o", "dk", "dv"), LSE_AND_D]
    fields += [*batch_of(spec).fields("heads_per_kv", "len_q", "len_k", ROWS)]
    layout = layout_of(spec, fields, lists=tiles is None)
    context = _context(spec, plan) | {
        "divides_columns": divides_tiles(spec, plan.tile_q, QUERY),
        "uniform": uniform_text(spec),
        "gradient": score_gradient(spec),
        "splits_tiles": False,
        "query_tiles": visited_tiles(spec, tiles, struct, queries=True),
    }
    context |= varlen_context(spec, struct, layout, plan.tile_q, "kTileK", of_keys=True, moves_rows=False)
    launch: dict[str, Any] = {"values": partial(row_values, rows), "reads": "queries" if tiles is None else None}
    launch["grid"] = partial(_key_grid, spec, plan.tile_k)
    launch["boxes"] = _boxes(spec, plan, "dk", "dv")
    rendering = Rendering(
        template="hopper/backward/cluster_dkdv.cu.jinja",
        primitives=_primitives(spec, plan, plan.tile_q),
        optional=_OPTIONAL,
    )
    block = Block(plan.threads, plan.shared_memory(spec))
    return backward_kernel("dkdv", spec, target, layout, context, block, launch, rendering)


def _key_grid(spec: AttentionSpec, tile: int, sizes: Sizes) -> Grid:
    """Returns the grid of a cluster per key tile, KV head and sequence."""
    tiles, heads, outer = batch_of(spec).key_grid(tile, sizes)
    return _CTAS * tiles, heads, outer


def _query_grid(spec: AttentionSpec, tile: int, sizes: Sizes) -> Grid:
    """Returns the grid of a cluster per query tile, query head and sequence."""
    tiles, heads, outer = batch_of(spec).query_grid(tile, sizes)
    return _CTAS * tiles, heads, outer


def _dq(
    spec: AttentionSpec, target: Target, plan: HopperClusterQueriesPlan, rows: Rows, multiple: int
) -> RenderedKernel:
    """Returns the kernel of dQ. multiple: The multiple of rows to which LSE and D are padded."""
    tiles, struct = key_range(spec.mask.expression), "BackwardDqArguments"
    fields = [*_maps("q", "k", "v", "d_o", "dq"), LSE_AND_D, *batch_of(spec).fields("len_q", "len_k", ROWS)]
    fields.append(Field("unsigned", "kv_reciprocal", comment="2^31 / (query heads per KV head), rounded up"))
    layout = layout_of(spec, fields, lists=tiles is None)
    context = _context(spec, plan) | {
        "divides_columns": divides_tiles(spec, plan.tile_k),
        "gradient": score_gradient(spec, with_gathers=False),
        "key_tiles": visited_tiles(spec, tiles, struct),
        "longest_first": longest_last(tiles),
    }
    context |= varlen_context(spec, struct, layout, multiple, "kTileQ")
    launch: dict[str, Any] = {"values": partial(row_values, rows), "reads": "keys" if tiles is None else None}
    launch["grid"] = partial(_query_grid, spec, plan.tile_q)
    launch["boxes"] = _boxes(spec, plan, "dq")
    rendering = Rendering(
        template="hopper/backward/cluster_dq.cu.jinja",
        primitives=_primitives(spec, plan, plan.tile_k),
        optional=_OPTIONAL,
    )
    block = Block(plan.threads, plan.shared_memory(spec))
    return backward_kernel("dq", spec, target, layout, context, block, launch, rendering)
