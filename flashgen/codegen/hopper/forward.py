"""Renders the source of Hopper's forward kernel. The text is deterministic on every machine."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import sympy

from flashgen.analysis.closed_forms.inequalities import Q_FIRST, Q_LAST
from flashgen.analysis.closed_forms.tile_ranges import key_range
from flashgen.codegen.arguments import ArgumentLayout, Field, output_field
from flashgen.codegen.assembly import (
    ENDS_OF_TILES,
    assemble,
    check_spec,
    factor_suffix_of,
    longest_last,
    suffix_of,
)
from flashgen.codegen.batches import batch_of, describe_maps
from flashgen.codegen.expressions.function_text import DEVICE_NAMES, FunctionText, Names
from flashgen.codegen.expressions.row_elements import paired_elements, with_parameters
from flashgen.codegen.expressions.uniform_text import uniform_text
from flashgen.codegen.forward_kernel import (
    EIGHT_BIT_SUFFIXES,
    forward_context,
    forward_kernel,
    page_fields,
    scale_fields,
)
from flashgen.codegen.header import header
from flashgen.codegen.hopper.array_tiles import array_tile
from flashgen.codegen.hopper.batch_traits import batch_traits
from flashgen.codegen.hopper.forward_tiles import forward_tiles, head_groups
from flashgen.codegen.hopper.measured_plans import choose_hopper_plan
from flashgen.codegen.hopper.pages import GROUP_ROWS, box_keys, panels_joined
from flashgen.codegen.hopper.plans import HopperPlan, panel_columns
from flashgen.codegen.hopper.smaller_tiles import smaller_option
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.sizes import Sizes, maximum, minimum, reciprocal
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import layout_of
from flashgen.codegen.varlen import MAP_ROWS
from flashgen.codegen.visited import visited_keys
from flashgen.language.operations import HEAD, KEY, QUERY
from flashgen.language.spec import AttentionSpec

_WARPGROUP_ROWS, _WARP_ROWS, _LANE_ROWS = 64, 16, 8  # the last: distance of a lane's rows
_SECTION_BYTES = 32 * 2**20  # of K and V, which concurrent CTAs should find in L2

_METHOD = "a producer warp loads; the softmax of a warpgroup overlaps products of another (Shah et al. 2024)"
_CONVERTING_METHOD = (
    "a producer warpgroup converts K and V to 16 bits; the softmax of a warpgroup overlaps products of another (Shah "
    "et al. 2024)"
)
_GRID = "persistent, one CTA per multiprocessor; work tiles are (query tile, query head, batch)"


def hopper_layout(spec: AttentionSpec, lists: bool, packed: bool = False) -> ArgumentLayout:
    """Returns the argument struct, which begins with the tensor maps. `packed`: a tile has rows of several heads."""
    heads = "packs" if packed else "heads"
    arrays = (*_loaded_by_tma(spec), *(() if spec.out_dtype else ("o",)))
    fields = [Field("TensorMap", f"{name}_map") for name in arrays]
    fields += _converted_fields(spec) if spec.kv_dtype else []
    fields += [output_field(spec), Field("Strides", "o_strides")] if spec.out_dtype else []
    fields.append(batch_of(spec).lse)
    fields.append(
        Field(
            "unsigned*",
            "next_tile",
            comment="counts fetched work tiles: 0 before and after a launch; null if each CTA has one work tile",
        )
    )
    fields += batch_of(spec).search_fields(keys=not spec.page_size)
    fields += page_fields(spec, strides=False)
    fields += [
        Field("int", f"{name}_head_panels", comment=f"distance of two heads of {name}, in panels of columns")
        for name in "kv"
        if _joined(spec, name) > 1
    ]
    fields += forward_tiles(spec).fields(spec, heads[:-1])
    fields.append(Field("int", "heads", comment=f"{heads if packed else 'query heads'} of all batch entries"))
    fields.append(
        Field("int", "section", comment=f"{heads} whose tiles are interleaved, so few that their K and V stay in L2")
    )
    fields += batch_of(spec).size_fields("len_q", "len_k")
    per_kv = heads if packed else "query heads"
    fields.append(Field("unsigned", "kv_reciprocal", comment=f"2^31 / ({per_kv} per KV head), rounded up"))
    return layout_of(spec, fields, lists, sink=True)


def _loaded_by_tma(spec: AttentionSpec) -> tuple[str, ...]:
    """Returns the inputs that are loaded by TMA: all but K and V of 8 bits, which pass through registers."""
    return spec.inputs[:1] if spec.kv_dtype else spec.inputs


def _converted_fields(spec: AttentionSpec) -> list[Field]:
    """Returns the members for K and V of 8 bits, and their scales."""
    pages = "; batch is the distance between pages" if spec.page_size else ""
    fields = [Field("const Element*", name, comment="two elements of 8 bits in each") for name in "kv"]
    fields += [Field("Strides", f"{name}_strides", comment=f"in Elements{pages}") for name in "kv"]
    return fields + scale_fields()


def render_hopper(spec: AttentionSpec, target: Target, plan: HopperPlan | None = None) -> tuple[RenderedKernel, ...]:
    """Returns the forward kernel of a spec on Hopper.

    Raises:
        UnsupportedError: the target or the plan does not support the spec.
    """
    check_spec(spec, target)
    plan = plan or choose_hopper_plan(spec, target)
    plan.check(spec, target)
    keys, tiles, packed = visited_keys(spec), forward_tiles(spec), plan.packed_heads > 1
    layout, longest_first = hopper_layout(spec, keys is None, packed), longest_last(keys)
    boxes, bounds = _boxes(spec, plan), _tile_bounds(longest_first, plan)
    layout = describe_maps(spec, layout, boxes)
    producer_registers, consumer_registers = plan.warpgroup_registers(spec)
    cost, option = tiles.cost(spec), smaller_option(plan, spec, target)
    names, stages = _device_names(plan), plan.array_stages(spec)
    method = _CONVERTING_METHOD if spec.kv_dtype else _METHOD
    held = plan.held_columns(spec)
    by_rows: dict[str, Any] = {"by_rows": True, "array_stages": stages}
    context = forward_context(spec, target, plan, layout, "scores[n]", names, bounds, **by_rows) | {
        "header": header(spec, target, plan, _GRID, method, tiles.title, cost, option),
        "own_tiles": _has_own_tiles(spec, plan),
        "head_panel": plan.head_panel(spec),
        "value_panel": plan.value_panel(spec),
        **_split_context(spec, plan),
        **_array_context(spec, plan),
        "drawn_steps": plan.drawn_steps(spec),
        "producer_registers": producer_registers,
        "consumer_registers": consumer_registers,
        "output_apart": plan.output_apart(spec),
        "packed": packed,
        "uniform": _uniformity_test(spec, plan),
        "map_rows": MAP_ROWS,
        "suffix": factor_suffix_of(spec),
        "page_size": spec.page_size,
        "prefill_queries": tiles.prefill_queries,
        "box_keys": box_keys(spec, plan.tile_k),
        "joined": {name: _joined(spec, name) > 1 for name in "kv"},
        "scaled_exponent": bool(spec.kv_dtype) and not spec.score,
        "convert": f"convert_{EIGHT_BIT_SUFFIXES[spec.kv_dtype]}" if spec.kv_dtype else None,
        "converts_queries": factor_suffix_of(spec) != suffix_of(spec),
        "held_columns": held,
        "pages_of_tile": plan.pages_of_tile(spec) if spec.scales_kv else None,
    }
    context |= tiles.sequences(spec, context["struct"], layout)
    of_output = (plan.output_columns(spec), "true")
    of_scores = (plan.tile_k, "false")
    shared_forms = [*([of_scores] if held < context["head_padded"] else []), *([of_output] if plan.split > 1 else [])]
    sizes = {"shared_forms": shared_forms, "register_forms": [*([of_scores] if held else []), of_output]}
    kernel = forward_kernel(
        spec,
        target,
        plan,
        layout,
        assemble("hopper/forward.cu.jinja", context, target, sizes),
        boxes=boxes,
        grid=partial(tiles.grid, spec, plan),
        values=partial(_values, spec, plan, longest_first),
        counts=partial(_counters, spec, plan),
    )
    name = kernel.name + option.replace(" --", "-") + (f"-packed{plan.packed_heads}" if packed else "")
    return (replace(kernel, name=name, cost=cost),)


def _has_own_tiles(spec: AttentionSpec, plan: HopperPlan) -> bool:
    """Whether the queries of a warpgroup may attend to fewer tiles of keys than those of the CTA."""
    ranged = key_range(spec.mask.expression) is not None and spec.mask.expression != sympy.true
    return ranged and plan.split == 1


def _array_context(spec: AttentionSpec, plan: HopperPlan) -> dict[str, Any]:
    """Returns the context about tiles of a captured array in shared memory.

    If sequences share the array, work tiles of one head in different sequences follow each other: they find the
    elements that another one has read in the L2.
    """
    tile = array_tile(spec, plan.tile_k) if plan.array_stages(spec) else None
    return {
        "array_tile": tile,
        "batch_fastest": bool(tile and tile.of_all_sequences) and batch_traits(spec).has_equal_tiles,
    }


def _split_context(spec: AttentionSpec, plan: HopperPlan) -> dict[str, Any]:
    """Returns the context about warpgroups with the same rows, and about where V is."""
    split = plan.split > 1
    return {
        "row_groups": plan.group_constant,
        "output_columns": "kOutputColumns" if split else "kValueDimPadded",
        "passed_panel": plan.passed_panel(spec),
        "passed_stages": plan.passed_stages(spec),
        "values": "keys" if spec.shared_kv else "values",
        "keys_in_two_parts": split and spec.shared_kv,
        "tiles_in_parts": plan.tiles_in_parts(spec),
        "key_parts": plan.key_parts(spec),
        "softmax_beside_pv": split or not _scores_are_steady(spec, plan),
    }


def _scores_are_steady(spec: AttentionSpec, plan: HopperPlan) -> bool:
    """Whether row maxima of earlier tiles mostly serve later ones, and scores take few instructions.

    That holds without a score function, and if it depends on the positions only by the elements of an array in shared
    memory.
    """
    if spec.score is None or not (plan.array_stages(spec) and (elements := paired_elements(spec))):
        return spec.score is None
    (alone,), _ = with_parameters((spec.score.expression,), elements)
    return not alone.has(QUERY, KEY)


def _values(spec: AttentionSpec, plan: HopperPlan, longest_first: bool, sizes: Sizes) -> dict[str, Any]:
    """Returns the values of struct members that are computed from the sizes."""
    packed, heads = plan.packed_heads, head_groups(spec, plan, sizes)
    per_kv = sizes.heads_per_kv // packed if packed > 1 else sizes.heads_per_kv
    return {
        "tiles": forward_tiles(spec).count(spec, plan, sizes),
        "tiles_q": batch_of(spec).query_tiles(plan.tile_q, sizes),
        "heads": heads,
        "section": _section(spec, sizes, heads, per_kv) if longest_first else 1,
        "kv_reciprocal": reciprocal(maximum(per_kv, 1)),
    }


def _counters(spec: AttentionSpec, plan: HopperPlan, sizes: Sizes) -> Any:
    """Returns 1, for the tile scheduler, if there are more tiles than multiprocessors; otherwise 0."""
    tiles = maximum(forward_tiles(spec).count(spec, plan, sizes), sizes.multiprocessors)
    return minimum(tiles - sizes.multiprocessors, 1)


def _section(spec: AttentionSpec, sizes: Sizes, heads: Any, per_kv: Any) -> Any:
    """Returns the number of heads, or packs, whose tiles are interleaved, longest first.

    It is the number whose K and V fit in L2 together. If all tiles have equal lengths, heads are not interleaved.
    """
    head_bytes = spec.kv_element.bytes * spec.kv_columns * maximum(sizes.len_k, 1)
    fitting = maximum(_SECTION_BYTES // head_bytes, 1) * per_kv
    return maximum(minimum(fitting, heads), 1)


def _boxes(spec: AttentionSpec, plan: HopperPlan) -> dict[str, tuple[int, ...]]:
    """Returns the TMA boxes: the rows of a warpgroup for q, the keys of a copy for k and v, a warp's rows for o.

    An output of another dtype than q's is stored without TMA.
    """
    head, value = plan.head_panel(spec), plan.value_panel(spec)
    keys = box_keys(spec, plan.tile_k)
    of_keys = _loaded_by_tma(spec)[1:]
    rows = {"q": _box_rows(_WARPGROUP_ROWS, plan)} | dict.fromkeys(of_keys, (keys,))
    for name in of_keys:
        if (joined := _joined(spec, name)) > 1:
            rows[name] = (GROUP_ROWS, joined, keys // GROUP_ROWS)
    if not spec.out_dtype:
        rows["o"] = _box_rows(_WARP_ROWS, plan)
    return {name: ((head if name in "qk" else value), *box) for name, box in rows.items()}


def _joined(spec: AttentionSpec, name: str) -> int:
    """Returns the number of panels of k or v that one copy loads."""
    if spec.kv_dtype:
        return 1
    width = spec.head_dim if name == "k" else spec.value_dim
    return panels_joined(spec, width, panel_columns(width, spec.element_of(name)))


def _box_rows(rows: int, plan: HopperPlan) -> tuple[int, ...]:
    """Returns the shape of a box with `rows` rows of a tile: (queries,), or (heads, queries) if heads are packed."""
    heads = min(plan.packed_heads, rows)
    return (rows,) if plan.packed_heads == 1 else (heads, rows // heads)


def _uniformity_test(spec: AttentionSpec, plan: HopperPlan) -> FunctionText | None:
    """Returns the test whether all scores of a lane read the same array elements; None if it differs between rows."""
    test = uniform_text(spec)
    return None if test and HEAD in test.used and plan.packed_heads > _LANE_ROWS else test


def _device_names(plan: HopperPlan) -> Names:
    """Returns the emitted arguments of a score function. With packed heads the head may depend on the row."""
    if plan.packed_heads <= _LANE_ROWS:  # both rows of a lane, 8 apart, belong to one head
        return DEVICE_NAMES
    return {**DEVICE_NAMES, HEAD: "position.head + Scores::row(n)"}


def _tile_bounds(longest_first: bool, plan: HopperPlan) -> dict[sympy.Symbol, str]:
    """Returns the emitted bounds of a tile's queries. The first tile may begin before query 0."""
    if plan.split > 1:  # all warpgroups have the rows of the tile, which begins at a query
        return ENDS_OF_TILES
    ends = ENDS_OF_TILES | {Q_LAST: "const int q_last = min(work.first_query + work.queries, arguments.len_q) - 1;"}
    return ends | ({Q_FIRST: "const int q_first = max(work.first_query, 0);"} if longest_first else {})
