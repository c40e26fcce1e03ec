"""Spec and plan -> the kernel of ragged batches over pages: prompts and sequences of few queries in one launch.

What a server has in a step is a mixture: prompts of hundreds of queries, and sequences that go on by one. Lengths are
the device's alone, so that a launch follows from tokens and sequences: as many blocks as prompts may have tiles, of
which those that are more than there are end at once, and columns that share the keys of all others (runs.py). A block
finds its tile or its run by a sum over the batch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from flashgen.codegen.arguments import ArgumentLayout, Field
from flashgen.codegen.assembly import assemble, check_spec
from flashgen.codegen.costs import mixed_cost
from flashgen.codegen.demand import divides_tiles
from flashgen.codegen.expressions.function_text import DEVICE_NAMES, Names
from flashgen.codegen.forward_kernel import forward_context, forward_kernel
from flashgen.codegen.header import header
from flashgen.codegen.mma_sync.decode import cache_context, cache_fields, share_workspaces
from flashgen.codegen.mma_sync.decode_plans import BEGINNING, MOST_SHARED_TILES, shared_tiles
from flashgen.codegen.mma_sync.mixed_plans import FEW, MixedPlan, choose_mixed_plan
from flashgen.codegen.mma_sync.runs import LAST_QUERY, even_columns, run_counters, share_places
from flashgen.codegen.mma_sync.splits import packed_heads, packs
from flashgen.codegen.ragged import EXTRA_SEQUENCES
from flashgen.codegen.rendered_kernel import Grid, RenderedKernel, entry_name, kernel_name
from flashgen.codegen.sizes import Sizes, ceil_div
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import layout_of
from flashgen.errors import UnsupportedError
from flashgen.language.operations import HEAD
from flashgen.language.spec import AttentionSpec

_STRUCT = "MixedArguments"
_NAMES: Names = {**DEVICE_NAMES, HEAD: "position.head_at(i, e / 2)"}
_QUERY = "position.query_at(i, e / 2)"
_RUNS = (
    "of few queries, columns of blocks have equal runs of the tiles of keys of all such sequences (Osama et al. 2023, "
    "stream-K), whose shares the last block merges (Dao et al. 2023, Flash-Decoding)"
)
_METHODS = {True: f"prompts by tiles of queries; {_RUNS}", False: _RUNS}  # by whether a plan has tiles of prompts
_GRIDS = {
    True: "one block per tile of queries of a head that prompts may have, and per column and group of heads; along x",
    False: "one block per column and group of heads, along x",
}
_TITLE = "attention forward of mixed batches"
_MOST_BLOCKS = 2**30 - 1
_OF_PROMPTS, _PLACES = 3, 4  # of the places for blocks, how many prompts begin with; on an H200 1/2 to 15/16 did alike


def mixed_layout(spec: AttentionSpec, plan: MixedPlan) -> ArgumentLayout:
    """The argument struct."""
    fields = [Field("const Element*", name) for name in "qkv"] + [Field("Element*", "o")]
    fields.append(Field("float*", "lse", comment="(heads_q, total_q), or null"))
    of = "of columns: (groups of heads, splits, 2, kTileQ"
    fields.append(Field("float*", "partial_outputs", comment=f"{of}, kValueDim)"))
    fields.append(Field("float*", "partial_states", comment=f"{of}, 2): row maximum and row sum"))
    fields.append(Field("unsigned*", "arrivals", comment="of each column and group of heads: 0, before and after"))
    fields.append(Field("const int*", "cu_seqlens_q", comment="(batch + 1): where sequences begin among the rows of q"))
    fields += cache_fields(spec)
    fields += [Field("Strides", f"{name}_strides") for name in "qkvo"]
    fields += [Field("int", "batch"), Field("int", "total_q", comment="rows of q")]
    fields += [Field("int", name, comment="of a sequence, at most") for name in ("len_q", "len_k")]
    fields.append(Field("int", "packed", comment="query heads that share tiles of rows of few queries"))
    fields.append(Field("int", "groups", comment="of such heads"))
    fields.append(Field("int", "splits", comment="columns, each of which has a run for each group"))
    if plan.prompt:
        fields.append(Field("int", "heads_q"))
        fields.append(Field("int", "prompts", comment="blocks for tiles of prompts: as many as there may be"))
        fields.append(Field("int", "first_prompts", comment="of them, those that begin before runs do"))
    fields.append(Field("unsigned", "kv_reciprocal", comment="2^31 / heads per head of K and V, rounded up"))
    return layout_of(spec, fields, lists=False, sink=True)


def render_mixed(spec: AttentionSpec, target: Target, plan: MixedPlan | None = None) -> tuple[RenderedKernel, ...]:
    """The kernel of a ragged spec over pages; UnsupportedError where the target or the plan cannot do it.

    Its role is "few" where the plan leaves prompts to another kernel of the call.
    """
    check_spec(spec, target)
    plan = plan or choose_mixed_plan(spec, target)
    plan.check(spec, target)
    layout, cost = mixed_layout(spec, plan), mixed_cost(spec, plan.few.tile_q)
    tiles, tiles_of_prompts = [plan.few.tile_k, *([plan.prompt.tile_k] if plan.prompt else [])], bool(plan.prompt)
    title = f"{_TITLE}, few queries" if plan.prompts_beside else _TITLE
    context = forward_context(
        spec,
        target,
        plan,
        layout,
        "scores[i][j][e]",
        _NAMES,
        LAST_QUERY,
        struct=_STRUCT,
        position=False,
        any_size=True,
    )
    context |= cache_context(spec, _NAMES) | {
        "mixed": True,
        "looks_ahead": False,
        "scheduled": True,
        "header": header(spec, target, plan, _GRIDS[tiles_of_prompts], _METHODS[tiles_of_prompts], title, cost),
        "score_query": _QUERY,
        "divides_tiles": all(divides_tiles(spec, tile_k) for tile_k in tiles),
        "beginning": BEGINNING,
        "shortest": plan.few.warps,
        "layouts": {"few_constants": plan.shared_memory(spec), "prompt_constants": plan.prompt_memory(spec)},
    }
    beside = {"name": kernel_name(FEW, target, spec), "entry": entry_name(f"attention_{FEW}", spec), "role": FEW}
    told: dict[str, Any] = beside if plan.prompts_beside else {}
    context |= {name: told[name] for name in told if name == "entry"}
    kernel = forward_kernel(
        spec,
        target,
        plan,
        layout,
        assemble("mma_sync/mixed.cu.jinja", context, target),
        grid=partial(_grid, spec, plan),
        values=partial(_values, spec, plan),
        counts=partial(run_counters, spec),
        workspaces=share_workspaces(spec, lambda sizes: (share_places(spec, sizes), plan.few.tile_q)),
    )
    return (replace(kernel, cost=cost, **told),)


def choose_mixed_columns(spec: AttentionSpec, plan: MixedPlan, sizes: Sizes) -> int:
    """Columns of the grid for each group of heads; UnsupportedError where they count more than an int32 does."""
    few = plan.few
    queries = min(plan.prompt_queries - 1, sizes.len_q) if plan.prompt_queries else sizes.len_q
    row_tiles = ceil_div(queries * packed_heads(spec, sizes), few.tile_q)
    tiles = shared_tiles(few, (sizes.batch + EXTRA_SEQUENCES) * row_tiles, sizes.len_k)
    if tiles > MOST_SHARED_TILES or _prompts(plan, sizes) > _MOST_BLOCKS:
        raise UnsupportedError(
            f"{sizes.batch} sequences, {sizes.total_q} queries in all and up to {sizes.len_k} keys of each, have more "
            f"tiles than {plan} counts: split the batch, or give max_seqlen_k=..."
        )
    honest = sizes.total_q * packed_heads(spec, sizes) // few.tile_q + sizes.batch + EXTRA_SEQUENCES
    return even_columns(spec, few, sizes, min(tiles, shared_tiles(few, honest, sizes.len_k)))


def _prompts(plan: MixedPlan, sizes: Sizes) -> Any:
    """Tiles of prompts that there may be: each has half of a tile's queries, or more."""
    return sizes.total_q // plan.prompt_queries * sizes.heads_q if plan.prompt else 0


def _grid(spec: AttentionSpec, plan: MixedPlan, sizes: Sizes) -> Grid:
    runs = sizes.splits * packs(spec, sizes)
    return _prompts(plan, sizes) + runs if plan.prompt else runs, 1, 1


def _values(spec: AttentionSpec, plan: MixedPlan, sizes: Sizes) -> dict[str, Any]:
    values = {"splits": sizes.splits, "packed": packed_heads(spec, sizes), "groups": packs(spec, sizes)}
    if not plan.prompt:
        return values
    first = sizes.multiprocessors * (plan.blocks * _OF_PROMPTS) // _PLACES
    return values | {"prompts": _prompts(plan, sizes), "first_prompts": first}
