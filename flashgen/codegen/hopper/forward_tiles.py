"""The tiles of queries of Hopper's forward kernel, and how many CTAs process them."""

from __future__ import annotations

from typing import Any

from flashgen.codegen.arguments import ArgumentLayout, Field
from flashgen.codegen.batches import batch_of
from flashgen.codegen.costs import Cost, forward_cost, prefill_cost
from flashgen.codegen.hopper.plans import PREFILL_QUERIES, HopperPlan
from flashgen.codegen.sizes import Grid, Sizes, maximum, minimum
from flashgen.language.spec import AttentionSpec


class ForwardTiles:
    """The tiles of all queries of a call.

    Attributes:
        title: The first line of the kernel's header.
        prefill_queries: The minimum number of queries of a sequence that has tiles; 0 if every sequence has.
    """

    title = "attention forward"
    prefill_queries = 0

    def cost(self, spec: AttentionSpec) -> Cost:
        """Returns the cost of the kernel."""
        return forward_cost(spec)

    def fields(self, spec: AttentionSpec, heads: str) -> list[Field]:
        """Returns the members that count tiles. heads: "head" or "pack", what has tiles of its own."""
        what = f"query {batch_of(spec).tile}s"
        return [
            Field("int", "tiles", comment=f"{what} of all heads and batches"),
            Field("int", "tiles_q", comment=f"{what} of each {heads}"),
        ]

    def sequences(self, spec: AttentionSpec, struct: str, layout: ArgumentLayout) -> dict[str, Any]:
        """Returns the template context by which the kernel finds the sequence of a tile."""
        return batch_of(spec).sequences(struct, layout, "kTileQ")

    def count(self, spec: AttentionSpec, plan: HopperPlan, sizes: Sizes) -> Any:
        """Returns the number of tiles of a call."""
        return head_groups(spec, plan, sizes) * batch_of(spec).query_tiles(plan.tile_q, sizes)

    def grid(self, spec: AttentionSpec, plan: HopperPlan, sizes: Sizes) -> Grid:
        """Returns the grid: persistent CTAs, at most one per SM."""
        return maximum(self._blocks(spec, plan, sizes), 1), 1, 1

    def _blocks(self, spec: AttentionSpec, plan: HopperPlan, sizes: Sizes) -> Any:
        return minimum(self.count(spec, plan, sizes), sizes.multiprocessors)


class PrefillTiles(ForwardTiles):
    """The tiles of the prefill sequences of a mixed batch. The device counts them; another kernel has the others."""

    title = "attention forward of mixed batches, prompts"
    prefill_queries = PREFILL_QUERIES

    def cost(self, spec: AttentionSpec) -> Cost:
        return prefill_cost(spec)

    def fields(self, spec: AttentionSpec, heads: str) -> list[Field]:
        return []

    def sequences(self, spec: AttentionSpec, struct: str, layout: ArgumentLayout) -> dict[str, Any]:
        return {"scheduler_template": "hopper/prefill_scheduler.cuh.jinja"}

    def count(self, spec: AttentionSpec, plan: HopperPlan, sizes: Sizes) -> Any:
        """Returns the maximum number of tiles of prefill sequences; 0 if no sequence can be one."""
        prompts = minimum(sizes.len_q // self.prefill_queries, 1) * (sizes.total_q // self.prefill_queries)
        return prompts * sizes.heads_q

    def grid(self, spec: AttentionSpec, plan: HopperPlan, sizes: Sizes) -> Grid:
        return self._blocks(spec, plan, sizes), 1, 1


_ALL, _PREFILL = ForwardTiles(), PrefillTiles()


def forward_tiles(spec: AttentionSpec) -> ForwardTiles:
    """Returns the tiles of a spec's kernel."""
    return _PREFILL if spec.is_mixed else _ALL


def head_groups(spec: AttentionSpec, plan: HopperPlan, sizes: Sizes) -> Any:
    """Returns the number of query heads, or packs of heads, of all sequences that have tiles of their own."""
    heads = sizes.heads_q // plan.packed_heads if plan.packed_heads > 1 else sizes.heads_q
    return batch_of(spec).all_heads(heads, sizes)
