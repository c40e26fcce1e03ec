"""Spec and plan -> the text of the decode kernel of mma.sync. The same bytes on every machine."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from flashgen.analysis.closed_forms.inequalities import Q_LAST
from flashgen.codegen.arguments import ArgumentLayout, Field
from flashgen.codegen.assembly import ENDS_OF_TILES, assemble, check_spec, suffix_of
from flashgen.codegen.costs import decode_cost
from flashgen.codegen.demand import demand_of
from flashgen.codegen.expressions.function_text import DEVICE_NAMES, Names
from flashgen.codegen.forward_kernel import forward_context, forward_kernel
from flashgen.codegen.header import header
from flashgen.codegen.mma_sync.decode_plans import FEW_ROWS, SHARE_PADDING, DecodePlan, choose_decode_plan
from flashgen.codegen.mma_sync.forward import page_fields
from flashgen.codegen.mma_sync.splits import all_tiles, packed_heads, packs, row_tiles
from flashgen.codegen.rendered_kernel import Grid, RenderedKernel, Workspace, entry_name, kernel_name
from flashgen.codegen.sizes import Sizes
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import layout_of, variant_of
from flashgen.errors import UnsupportedError
from flashgen.language.operations import HEAD
from flashgen.language.spec import AttentionSpec

_STRUCT = "DecodeArguments"
_METHOD = (
    "keys split over warps and blocks; the last block to arrive merges their shares (Dao et al. 2023, Flash-Decoding)"
)
_GRID = "one block per (tile of rows and split, heads that share rows, batch), along x, y and z"
_NAMES: Names = {**DEVICE_NAMES, HEAD: "position.head[i][e / 2]"}
_WIDENS = {"float8_e4m3fn": "e4m3", "int8": "int8"}
_QUERY = "position.query[i][e / 2]"


def decode_layout(spec: AttentionSpec, lists: bool) -> ArgumentLayout:
    """The argument struct of the decode kernel."""
    fields = [Field("const Element*", name) for name in "qkv"] + [Field("Element*", "o")]
    fields.append(Field("float*", "lse", comment="(batch, heads_q, len_q), or null"))
    fields.append(Field("float*", "partial_outputs", comment="of splits: (tiles of rows, splits, kTileQ, kValueDim)"))
    fields.append(Field("float*", "partial_states", comment="(tiles of rows, splits, kTileQ, 2): reference and sum"))
    fields.append(Field("unsigned*", "arrivals", comment="of each tile of rows: 0, before and after; null for 1 split"))
    fields += page_fields(spec)
    if spec.kv_dtype:
        fields += [Field("const float*", f"{name}_scale", comment="of each head, or of all") for name in "kv"]
        fields += [Field("int", f"{name}_scales", comment="1 where each head has its own, else 0") for name in "kv"]
    fields += [Field("Strides", f"{name}_strides") for name in "qkvo"]
    fields += [Field("int", name) for name in ("heads_q", "len_q", "len_k")]
    fields.append(Field("int", "packed", comment="query heads that share tiles of rows"))
    fields.append(Field("int", "rows", comment="of them: queries x heads"))
    fields.append(Field("int", "row_tiles", comment="that these are"))
    fields.append(Field("int", "splits", comment="parts of the keys"))
    fields.append(Field("unsigned", "kv_reciprocal", comment="2^31 / heads per head of K and V, rounded up"))
    return layout_of(spec, fields, lists, sink=True)


def render_decode(spec: AttentionSpec, target: Target, plan: DecodePlan | None = None) -> tuple[RenderedKernel, ...]:
    """The decode kernel of a spec on a target; UnsupportedError where the target or the plan cannot do it."""
    check_spec(spec, target)
    if spec.is_ragged:
        raise UnsupportedError("layout='thd': the decode kernel takes no ragged batches; take layout='bshd'")
    plan = plan or choose_decode_plan(spec, target)
    plan.check(spec, target)
    layout = decode_layout(spec, demand_of(spec).listed)
    ends = ENDS_OF_TILES | {Q_LAST: "const int q_last = work.last_query;"}
    entry = entry_name("attention_decode", spec)
    common = forward_context(
        spec, target, plan, layout, "scores[i][j][e]", _NAMES, ends, struct=_STRUCT, position=False
    )
    mask, cost = variant_of(spec).mask, decode_cost(spec, plan.tile_q)
    context = common | {
        "entry": entry,
        "mask_call": mask.call(_NAMES) if mask else "",
        "header": header(spec, target, plan, _GRID, _METHOD, "attention forward of few queries", cost),
        "score_query": _QUERY,
        "share_padding": SHARE_PADDING,
        "page_size": spec.page_size,
        "widen": f"widen_{_WIDENS[spec.kv_dtype]}_{suffix_of(spec)}" if spec.kv_dtype else None,
    }
    kernel = forward_kernel(
        spec,
        target,
        plan,
        layout,
        assemble("mma_sync/decode.cu.jinja", context, target),
        grid=partial(_grid, spec, plan),
        values=partial(_values, spec, plan),
        counts=partial(_counters, spec, plan),
        workspaces=_workspaces(spec, plan),
    )
    rows = f"-rows{plan.tile_q}" if plan.tile_q != FEW_ROWS else ""
    return (replace(kernel, name=f"{kernel_name('decode', target, spec)}{rows}", entry=entry, cost=cost),)


def _grid(spec: AttentionSpec, plan: DecodePlan, sizes: Sizes) -> Grid:
    return row_tiles(spec, plan, sizes) * sizes.splits, packs(spec, sizes), sizes.batch


def _values(spec: AttentionSpec, plan: DecodePlan, sizes: Sizes) -> dict[str, Any]:
    packed = packed_heads(spec, sizes)
    return {
        "packed": packed,
        "rows": sizes.len_q * packed,
        "row_tiles": row_tiles(spec, plan, sizes),
        "splits": sizes.splits,
    }


def _counters(spec: AttentionSpec, plan: DecodePlan, sizes: Sizes) -> int:
    return int(all_tiles(spec, plan, sizes)) if sizes.splits > 1 else 0


def _workspaces(spec: AttentionSpec, plan: DecodePlan) -> tuple[Workspace, ...]:
    """The shares of splits, where there are several."""

    def space(name: str, columns: int) -> Workspace:
        def shape(sizes: Sizes) -> tuple[int, ...]:
            return all_tiles(spec, plan, sizes), sizes.splits, plan.tile_q, columns

        return Workspace(name, shape, "float32", wanted=lambda sizes: bool(sizes.splits > 1))

    return space("partial_outputs", spec.value_dim), space("partial_states", 2)
