"""Renders the kernel of varlen batches over a paged KV cache, with prefill and decode sequences in one launch.

A server's batch mixes prompts of hundreds of queries (prefill) with sequences of one or few new queries (decode). Only
the device knows the lengths, so the launch follows from the numbers of tokens and sequences. It has a CTA for each tile
that prompts can have at most, and the surplus CTAs exit at once. The other CTAs process stream-K work units on the keys
of all other sequences (stream_k.py). A CTA finds its tile or work unit by a prefix sum over the batch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from flashgen.codegen.arguments import ArgumentLayout, Field, output_field
from flashgen.codegen.assembly import assemble, check_spec
from flashgen.codegen.costs import mixed_cost
from flashgen.codegen.demand import divides_tiles
from flashgen.codegen.expressions.function_text import DEVICE_NAMES, Names
from flashgen.codegen.forward_kernel import forward_context, forward_kernel
from flashgen.codegen.header import header
from flashgen.codegen.mma_sync.decode import cache_context, cache_fields, partial_workspaces
from flashgen.codegen.mma_sync.decode_plans import MAX_STREAM_K_TILES, stream_k_tiles
from flashgen.codegen.mma_sync.mixed_plans import FEW, MixedPlan, choose_mixed_plan
from flashgen.codegen.mma_sync.splits import head_groups, packed_heads
from flashgen.codegen.mma_sync.stream_k import LAST_QUERY, arrival_counters, full_wave_work_units, partial_slots
from flashgen.codegen.rendered_kernel import RenderedKernel, entry_name, kernel_name
from flashgen.codegen.sizes import Grid, Sizes, ceil_div
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import layout_of
from flashgen.codegen.varlen import EXTRA_SEQUENCES
from flashgen.errors import UnsupportedError
from flashgen.language.operations import HEAD
from flashgen.language.spec import AttentionSpec

_STRUCT = "MixedArguments"
_NAMES: Names = {**DEVICE_NAMES, HEAD: "position.head_at(Scores::row_index(n))"}
_QUERY = "position.query_at(Scores::row_index(n))"
_DECODE_METHOD = (
    "decode by stream-K work units, equal parts of the key tiles of all decode sequences (Osama et al. 2023); the last "
    "CTA of an output tile to arrive combines the partial outputs (Dao et al. 2023, Flash-Decoding)"
)
# Keys: whether the plan has prefill tiles.
_METHODS = {True: f"prefill by tiles of queries; {_DECODE_METHOD}", False: _DECODE_METHOD}
_GRIDS = {
    True: "one CTA per (prefill tile, head), as many as there may be, and per (work unit, group of heads); along x",
    False: "one CTA per (work unit, group of heads), along x",
}
_TITLE = "attention forward of mixed batches"
_MAX_BLOCKS = 2**30 - 1
# Prefill tiles start first on 3 of 4 CTA slots. On an H200 fractions from 1/2 to 15/16 were equally fast.
_PREFILL_SLOTS, _SLOTS = 3, 4


def mixed_layout(spec: AttentionSpec, plan: MixedPlan) -> ArgumentLayout:
    """Returns the argument struct of the mixed kernel."""
    fields = [Field("const Element*", name) for name in spec.inputs] + [output_field(spec)]
    fields.append(Field("float*", "lse", comment="(heads_q, total_q), or null"))
    shape = "(groups of heads, work units, 2 slots, kTileQ"
    fields.append(Field("float*", "partial_outputs", comment=f"{shape}, kValueDim)"))
    fields.append(Field("float*", "partial_states", comment=f"{shape}, 2): row maximum and row sum"))
    fields.append(Field("unsigned*", "arrivals", comment="(groups of heads, work units): 0 before and after a launch"))
    fields.append(Field("const int*", "cu_seqlens_q", comment="(batch + 1): first row of each sequence in q"))
    fields += cache_fields(spec)
    fields += [Field("Strides", f"{name}_strides") for name in (*spec.inputs, "o")]
    fields += [Field("int", "batch"), Field("int", "total_q", comment="rows of q")]
    fields += [Field("int", name, comment="maximum over the sequences") for name in ("len_q", "len_k")]
    fields.append(Field("int", "packed", comment="query heads that share a tile of rows in decode"))
    fields.append(Field("int", "groups", comment="groups of such heads"))
    fields.append(Field("int", "splits", comment="work units of each group of heads"))
    if plan.prompt:
        fields.append(Field("int", "heads_q"))
        fields.append(Field("int", "prompts", comment="CTAs for prefill tiles, as many as there may be"))
        fields.append(Field("int", "first_prefill_tiles", comment="CTAs of these that start before the work units"))
    fields.append(Field("unsigned", "kv_reciprocal", comment="2^31 / (query heads per KV head), rounded up"))
    return layout_of(spec, fields, lists=False, sink=True)


def render_mixed(spec: AttentionSpec, target: Target, plan: MixedPlan | None = None) -> tuple[RenderedKernel, ...]:
    """Returns the kernel of a varlen spec with a paged KV cache. Its role is "few" if another kernel has the prefill.

    Raises:
        UnsupportedError: the target or the plan does not support the spec.
    """
    check_spec(spec, target)
    plan = plan or choose_mixed_plan(spec, target)
    plan.check(spec, target)
    layout, cost = mixed_layout(spec, plan), mixed_cost(spec, plan.few.tile_q, partial(head_groups, spec))
    key_tiles, has_prefill = [plan.few.tile_k, *([plan.prompt.tile_k] if plan.prompt else [])], bool(plan.prompt)
    title = f"{_TITLE}, decode" if plan.prompts_beside else _TITLE
    context = forward_context(
        spec,
        target,
        plan,
        layout,
        "scores[n]",
        _NAMES,
        LAST_QUERY,
        struct=_STRUCT,
        position=False,
        any_size=True,
    )
    context |= cache_context(spec, _NAMES) | {
        "mixed": True,
        "split": plan.prompt is not None and plan.prompt.split > 1,
        "looks_up_ahead": False,
        "stream_k": True,
        "header": header(spec, target, plan, _GRIDS[has_prefill], _METHODS[has_prefill], title, cost),
        "score_query": _QUERY,
        "divides_tiles": all(divides_tiles(spec, tile_k) for tile_k in key_tiles),
        "tile_overhead": plan.few.tile_overhead,
        "min_length": plan.few.min_length,
        "min_unit_tiles": plan.few.groups,
        "layouts": {"decode_constants": plan.shared_memory(spec), "prefill_constants": plan.prefill_memory(spec)},
    }
    few = {"name": kernel_name(FEW, target, spec), "entry": entry_name(f"attention_{FEW}", spec), "role": FEW}
    identity: dict[str, Any] = few if plan.prompts_beside else {}
    context |= {name: identity[name] for name in identity if name == "entry"}
    kernel = forward_kernel(
        spec,
        target,
        plan,
        layout,
        assemble("mma_sync/mixed.cu.jinja", context, target),
        grid=partial(_grid, spec, plan),
        values=partial(_values, spec, plan),
        counts=partial(arrival_counters, spec),
        workspaces=partial_workspaces(spec, lambda sizes: (partial_slots(spec, sizes), plan.few.tile_q)),
    )
    return (replace(kernel, cost=cost, **identity),)


def choose_mixed_work_units(spec: AttentionSpec, plan: MixedPlan, sizes: Sizes) -> int:
    """Returns the number of stream-K work units for each group of heads.

    Raises:
        UnsupportedError: the batch may have more tiles than an int32 counts.
    """
    few = plan.few
    queries = min(plan.prefill_queries - 1, sizes.len_q) if plan.prefill_queries else sizes.len_q
    row_tiles = ceil_div(queries * packed_heads(spec, sizes), few.tile_q)
    tiles = stream_k_tiles(few, (sizes.batch + EXTRA_SEQUENCES) * row_tiles, sizes.len_k)
    if tiles > MAX_STREAM_K_TILES or _prefill_tiles(plan, sizes) > _MAX_BLOCKS:
        raise UnsupportedError(
            f"{sizes.batch} sequences, {sizes.total_q} queries in all and up to {sizes.len_k} keys of each, have more "
            f"tiles than {plan} counts: split the batch, or give max_seqlen_k=..."
        )
    by_tokens = sizes.total_q * packed_heads(spec, sizes) // few.tile_q + sizes.batch + EXTRA_SEQUENCES
    return full_wave_work_units(spec, few, sizes, min(tiles, stream_k_tiles(few, by_tokens, sizes.len_k)))


def _prefill_tiles(plan: MixedPlan, sizes: Sizes) -> Any:
    """Returns the maximum number of prefill tiles, given that each has at least half of its queries."""
    return sizes.total_q // plan.prefill_queries * sizes.heads_q if plan.prompt else 0


def _grid(spec: AttentionSpec, plan: MixedPlan, sizes: Sizes) -> Grid:
    work_units = sizes.splits * head_groups(spec, sizes)
    return _prefill_tiles(plan, sizes) + work_units if plan.prompt else work_units, 1, 1


def _values(spec: AttentionSpec, plan: MixedPlan, sizes: Sizes) -> dict[str, Any]:
    values = {"splits": sizes.splits, "packed": packed_heads(spec, sizes), "groups": head_groups(spec, sizes)}
    if not plan.prompt:
        return values
    first = sizes.multiprocessors * (plan.blocks * _PREFILL_SLOTS) // _SLOTS
    return values | {"prompts": _prefill_tiles(plan, sizes), "first_prefill_tiles": first}
