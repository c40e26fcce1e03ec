"""The template context and the launch record that the forward kernels of all families share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import sympy

from flashgen.codegen.arguments import ArgumentLayout, Field
from flashgen.codegen.assembly import ENDS_OF_TILES, common_context, longest_last, visited_tiles
from flashgen.codegen.costs import forward_cost
from flashgen.codegen.demand import divides_tiles, is_clipped
from flashgen.codegen.expressions.function_text import DEVICE_NAMES, Names
from flashgen.codegen.expressions.row_elements import RowElement, paired_elements, paired_mask_elements
from flashgen.codegen.plan import Plan
from flashgen.codegen.rendered_kernel import RenderedKernel, entry_name, kernel_name
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import variant_of
from flashgen.codegen.visited import visited_keys
from flashgen.language.spec import AttentionSpec

_STRUCT = "ForwardArguments"
EIGHT_BIT_SUFFIXES = {"float8_e4m3fn": "e4m3", "int8": "int8"}
"""Dtypes of K and V of 8 bits -> the names of their conversions in primitives."""


class ElementTexts(NamedTuple):
    """An element that is loaded with its neighbour, and the text of its address at the call of the score function."""

    element: RowElement
    address: str


def page_fields(spec: AttentionSpec, strides: bool = True) -> list[Field]:
    """Returns the members that locate a sequence's keys in pages, if any. strides: Whether `k_strides` is a member."""
    if not spec.page_size:
        return []
    of_pages = "; k_strides.batch is the distance between pages" if strides else ""
    return [
        Field("const int*", "page_table", comment="(batch, len_k / kPageSize): page numbers"),
        Field("const int*", "seqused_k", comment="(batch): keys of each sequence"),
        Field("long long", "table_pitch", comment="distance between rows of page_table"),
        Field("int", "pages", comment=f"number of pages of k and v{of_pages}"),
    ]


def scale_fields() -> list[Field]:
    """Returns the members for the scales of K and V of 8 bits."""
    fields = [Field("const float*", f"{name}_scale", comment="one per KV head, or one for all") for name in "kv"]
    return fields + [
        Field(
            "int",
            f"{name}_scales",
            comment=f"from a KV head's {name}_scale to the next: 1 if each head has a scale, else 0",
        )
        for name in "kv"
    ]


def forward_context(
    spec: AttentionSpec,
    target: Target,
    plan: Plan,
    layout: ArgumentLayout,
    score: str,
    names: Names = DEVICE_NAMES,
    ends: Mapping[sympy.Symbol, str] = ENDS_OF_TILES,
    struct: str = _STRUCT,
    position: bool = True,
    any_size: bool = False,
    by_rows: bool = False,
    array_stages: int = 0,
) -> dict[str, Any]:
    """Returns the template context of a forward kernel, without its header.

    Args:
        score: Text of a score at the call of the score function.
        names: Texts of the score's indices at that call.
        ends: Declarations of the first and last query and key of a tile.
        struct: Name of the argument struct.
        position: Whether the common `Position` struct is used; otherwise the template declares its own.
        any_size: Whether tiles of keys have several sizes.
        by_rows: Whether elements of captured arrays that scores of a row read side by side are loaded in pairs.
        array_stages: Tiles of these elements in shared memory; 0 if pairs are loaded from global memory.
    """
    of_score = paired_elements(spec) if by_rows and not is_clipped(spec) else ()
    of_mask = paired_mask_elements(spec) if by_rows and not is_clipped(spec) else ()
    tiles, shared = visited_keys(spec), plan.shared_memory(spec)
    variant = variant_of(spec, sink=True, elements=of_score, mask_elements=of_mask)
    variant = replace(variant, in_pairs_alone=bool(array_stages))
    return common_context(spec, target, variant, struct, layout, position=position) | {
        "plan": plan,
        "entry": entry_name("attention_forward", spec),
        "key_tiles": visited_tiles(spec, tiles, struct, ends=ends, any_size=any_size),
        "memory": shared,
        "layouts": {"shared_constants": shared},
        "longest_first": longest_last(tiles),
        "score_operand": variant.score.operand_text(score) if variant.score else "",
        "score_call": variant.score.call(names, (each.loaded(names) for each in of_score)) if variant.score else "",
        "row_elements": [ElementTexts(each, each.address(names)) for each in of_score + of_mask],
        "score_call_of_pairs": variant.score.call(names, (each.of_pair for each in of_score)) if variant.score else "",
        "masks_by_elements": bool(of_mask),
        "array_stages": array_stages,
        "mask_call": variant.mask.call(elements=(each.loaded(names) for each in of_mask)) if variant.mask else "",
        "mask_call_of_pairs": variant.mask.call(elements=(each.of_pair for each in of_mask)) if variant.mask else "",
        "divides_tiles": divides_tiles(spec, plan.tile_k),
        "uniform": None,
        "split": False,
        "sink": f"load_{spec.sink.name}" if spec.sink else "",
        "sink_to_score": 1.0 if spec.score else 1 / spec.scale,
        "may_be_empty": variant.mask is not None or variant.score is not None,
    }


def forward_kernel(
    spec: AttentionSpec, target: Target, plan: Plan, layout: ArgumentLayout, source: str, **launch: Any
) -> RenderedKernel:
    """Returns the record of a forward kernel; `launch` holds the fields of `RenderedKernel` about its launch."""
    return RenderedKernel(
        kernel_name("fwd", target, spec),
        entry_name("attention_forward", spec),
        source,
        target,
        layout,
        plan.threads,
        plan.shared_memory(spec),
        plan=plan,
        role="forward",
        cost=forward_cost(spec),
        reads="keys" if visited_keys(spec) is None else None,
        **launch,
    )
