"""Spec and plan -> the text of Hopper's forward kernel. The same bytes on every machine."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import sympy

from flashgen.analysis.closed_forms.inequalities import Q_FIRST, Q_LAST
from flashgen.analysis.closed_forms.tile_ranges import key_range
from flashgen.codegen.arguments import ArgumentLayout, Field
from flashgen.codegen.assembly import (
    ENDS_OF_TILES,
    assemble,
    check_spec,
    longest_last,
    suffix_of,
)
from flashgen.codegen.costs import forward_cost, prefill_cost
from flashgen.codegen.expressions.function_text import DEVICE_NAMES, FunctionText, Names
from flashgen.codegen.expressions.uniform_text import uniform_text
from flashgen.codegen.forward_kernel import forward_context, forward_kernel, page_fields
from flashgen.codegen.header import header
from flashgen.codegen.hopper.measured_plans import choose_hopper_plan
from flashgen.codegen.hopper.pages import GROUP_ROWS, box_keys, panels_joined
from flashgen.codegen.hopper.plans import PROMPT_QUERIES, HopperPlan, panel_columns
from flashgen.codegen.hopper.smaller_tiles import smaller_option
from flashgen.codegen.ragged import MAP_ROWS, sequences_text, slots, varlen_fields
from flashgen.codegen.rendered_kernel import Grid, RenderedKernel
from flashgen.codegen.sizes import Sizes, ceil_div, maximum, minimum, reciprocal
from flashgen.codegen.targets import Target
from flashgen.codegen.tiling import ELEMENT_BYTES, padded
from flashgen.codegen.variant import layout_of
from flashgen.codegen.visited import visited_keys
from flashgen.language.operations import HEAD
from flashgen.language.spec import AttentionSpec

_WARPGROUP_ROWS, _WARP_ROWS, _LANE_ROWS = 64, 16, 8  # the last: from a row of a lane to its next


_SECTION_BYTES = 32 * 2**20  # of K and V, which blocks that run side by side should find in the L2

_METHOD = "a warpgroup loads; the others overlap products with softmax (Shah et al. 2024, algorithm 2)"
_GRID = "one block per multiprocessor; each takes tiles of queries until none is left"


def hopper_layout(spec: AttentionSpec, lists: bool, packed: bool = False) -> ArgumentLayout:
    """The argument struct: maps of the arrays first. packed: tiles are of packs of heads."""
    heads = "packs" if packed else "heads"
    fields = [Field("TensorMap", f"{name}_map") for name in "qkvo"]
    fields.append(Field("float*", "lse", comment="(batch, heads_q, len_q), or null"))
    fields.append(
        Field("unsigned*", "next_tile", comment="0, before and after; null: no tiles beside each block's first")
    )
    ragged = spec.is_ragged
    if ragged:
        fields[-2] = Field("float*", "lse", comment="(heads_q, total_q), or null")
        fields += varlen_fields(keys=not spec.page_size)
    fields += page_fields(spec, strides=False)
    fields += [
        Field("int", f"{name}_head_panels", comment=f"from a head of {name} to the next, in panels of columns")
        for name in "kv"
        if _joined(spec, name) > 1
    ]
    if not (ragged and spec.page_size):  # where the device counts those of prompts
        what = "slots of queries" if ragged else "of queries"
        fields.append(Field("int", "tiles", comment=f"{what}, of all heads and batches"))
        fields.append(Field("int", "tiles_q", comment=f"of each {heads[:-1]}"))
    fields.append(Field("int", "heads", comment=f"{heads if packed else 'of queries'}, of all batches"))
    fields.append(Field("int", "section", comment=f"{heads} that take turns with their tiles"))
    fields += [Field("int", name) for name in (*(() if ragged else ("heads_q",)), "len_q", "len_k")]
    fields.append(Field("unsigned", "kv_reciprocal", comment=f"2^31 / {heads} per head of K and V, rounded up"))
    return layout_of(spec, fields, lists, sink=True)


def render_hopper(spec: AttentionSpec, target: Target, plan: HopperPlan | None = None) -> tuple[RenderedKernel, ...]:
    """The forward kernel of a spec on Hopper; UnsupportedError where the target or the plan cannot do it."""
    check_spec(spec, target)
    plan = plan or choose_hopper_plan(spec, target)
    plan.check(spec, target)
    tiles, packed = visited_keys(spec), plan.packed_heads > 1
    layout, longest_first = hopper_layout(spec, tiles is None, packed), longest_last(tiles)
    ends = _ends_of_tiles(longest_first)
    producer_registers, consumer_registers = plan.warpgroup_registers(spec)
    mixed = spec.is_ragged and spec.page_size is not None
    cost = prefill_cost(spec) if mixed else forward_cost(spec)
    told: dict[str, Any] = {"title": "attention forward of mixed batches, prompts", "cost": cost} if mixed else {}
    told["options"] = smaller_option(plan, spec, target)
    context = forward_context(spec, target, plan, layout, "scores[n]", _names(plan), ends) | {
        "header": header(spec, target, plan, _GRID, _METHOD, **told),
        "own_tiles": key_range(spec.mask.expression) is not None and spec.mask.expression != sympy.true,
        "head_panel": panel_columns(spec.head_dim),
        "value_panel": panel_columns(spec.value_dim),
        "drawn_steps": plan.drawn_steps(spec),
        "producer_registers": producer_registers,
        "consumer_registers": consumer_registers,
        "output_apart": plan.output_apart(spec),
        "packed": packed,
        "alike": _alike(spec, plan),
        "map_rows": MAP_ROWS,
        "suffix": suffix_of(spec),
        "page_size": spec.page_size,
        "prompt_queries": PROMPT_QUERIES if mixed else 0,
        "box_keys": box_keys(spec, plan.tile_k),
        "joined": {name: _joined(spec, name) > 1 for name in "kv"},
    }
    if spec.is_ragged and not mixed:
        context["sequences"] = sequences_text(context["struct"], layout, "kTileQ")
    sizes = {"shared_forms": [(plan.tile_k, "false")], "register_forms": [(padded(spec.value_dim), "true")]}
    kernel = forward_kernel(
        spec,
        target,
        plan,
        layout,
        assemble("hopper/forward.cu.jinja", context, target, sizes),
        boxes=_boxes(spec, plan),
        grid=partial(_grid, spec, plan),
        values=partial(_values, spec, plan, longest_first),
        counts=lambda sizes: sizes.multiprocessors < _tiles(spec, plan, sizes),
    )
    name = kernel.name + told["options"].replace(" --", "-") + (f"-packed{plan.packed_heads}" if packed else "")
    return (replace(kernel, name=name, cost=cost),)


def _packs(spec: AttentionSpec, plan: HopperPlan, sizes: Sizes) -> Any:
    """Query heads, or packs of them, of all batches; of a ragged batch those of its slots."""
    if spec.is_ragged:
        return sizes.heads_q
    return sizes.batch * (sizes.heads_q // plan.packed_heads) if plan.packed_heads > 1 else sizes.batch * sizes.heads_q


def _grid(spec: AttentionSpec, plan: HopperPlan, sizes: Sizes) -> Grid:
    blocks = minimum(_tiles(spec, plan, sizes), sizes.multiprocessors)
    return blocks if spec.is_ragged and spec.page_size else maximum(blocks, 1), 1, 1


def _tiles(spec: AttentionSpec, plan: HopperPlan, sizes: Sizes) -> Any:
    """Tiles of queries; of a mixed batch as many as prompts may have, none where no sequence may be one."""
    if spec.is_ragged and spec.page_size:
        return minimum(sizes.len_q // PROMPT_QUERIES, 1) * (sizes.total_q // PROMPT_QUERIES) * sizes.heads_q
    return _packs(spec, plan, sizes) * _tiles_of_head(spec, plan, sizes)


def _tiles_of_head(spec: AttentionSpec, plan: HopperPlan, sizes: Sizes) -> Any:
    return slots(sizes.total_q, sizes, plan.tile_q) if spec.is_ragged else ceil_div(sizes.len_q, plan.tile_q)


def _values(spec: AttentionSpec, plan: HopperPlan, longest_first: bool, sizes: Sizes) -> dict[str, Any]:
    """What the struct holds beside the sizes themselves."""
    packed, heads = plan.packed_heads, _packs(spec, plan, sizes)
    per_kv = sizes.heads_per_kv // packed if packed > 1 else sizes.heads_per_kv
    return {
        "tiles": _tiles(spec, plan, sizes),
        "tiles_q": _tiles_of_head(spec, plan, sizes),
        "heads": heads,
        "section": _section(spec, sizes, heads, per_kv) if longest_first else 1,
        "kv_reciprocal": reciprocal(maximum(per_kv, 1)),
    }


def _section(spec: AttentionSpec, sizes: Sizes, heads: Any, per_kv: Any) -> Any:
    """Query heads, or packs, whose longest tiles run first together: as many as share the L2 with K and V of theirs.

    Where all tiles are alike a head's tiles run after another's.
    """
    head_bytes = ELEMENT_BYTES * (spec.head_dim + spec.value_dim) * maximum(sizes.len_k, 1)
    fitting = maximum(_SECTION_BYTES // head_bytes, 1) * per_kv
    return maximum(minimum(fitting, heads), 1)


def _boxes(spec: AttentionSpec, plan: HopperPlan) -> dict[str, tuple[int, ...]]:
    """What one copy moves of q (rows of a warpgroup), k, v (keys of a step) and o (rows of a warp)."""
    head, value = panel_columns(spec.head_dim), panel_columns(spec.value_dim)
    keys = box_keys(spec, plan.tile_k)
    rows = {"q": _box_rows(_WARPGROUP_ROWS, plan), "k": (keys,), "v": (keys,)}
    for name in "kv":
        if (joined := _joined(spec, name)) > 1:
            rows[name] = (GROUP_ROWS, joined, keys // GROUP_ROWS)
    rows["o"] = _box_rows(_WARP_ROWS, plan)
    return {name: ((head if name in "qk" else value), *rows[name]) for name in "qkvo"}


def _joined(spec: AttentionSpec, name: str) -> int:
    """Panels of k or v that one copy brings."""
    width = spec.head_dim if name == "k" else spec.value_dim
    return panels_joined(spec, width, panel_columns(width))


def _box_rows(rows: int, plan: HopperPlan) -> tuple[int, ...]:
    """So many rows of a tile as a box has them: queries, or heads and queries."""
    heads = min(plan.packed_heads, rows)
    return (rows,) if plan.packed_heads == 1 else (heads, rows // heads)


def _alike(spec: AttentionSpec, plan: HopperPlan) -> FunctionText | None:
    """When a lane's scores read the same elements of captured arrays, where that is one question for all of them."""
    alike = uniform_text(spec)
    return None if alike and HEAD in alike.used and plan.packed_heads > _LANE_ROWS else alike


def _names(plan: HopperPlan) -> Names:
    """What a score function is called with: of packed heads, the one of each row."""
    if plan.packed_heads <= _LANE_ROWS:  # a lane's rows, 8 apart, are of one head
        return DEVICE_NAMES
    return {**DEVICE_NAMES, HEAD: "position.head + n / 2 % 2 * 8"}


def _ends_of_tiles(longest_first: bool) -> dict[sympy.Symbol, str]:
    """The ends of the queries that work is of: those of a block, or of a warpgroup. A first tile may begin before 0."""
    ends = ENDS_OF_TILES | {Q_LAST: "const int q_last = min(work.first_query + work.queries, arguments.len_q) - 1;"}
    return ends | ({Q_FIRST: "const int q_first = max(work.first_query, 0);"} if longest_first else {})
