"""Plans for context parallelism: how one sequence is sharded over ranks, what each rank computes, and what it sends.

A plan holds numbers alone and is complete before anything runs. `flashgen.torch.context_parallel` executes a plan, and
`flashgen show --ranks` draws it.
"""

from flashgen.ranks.blocks import Block, Step
from flashgen.ranks.halo import BoundaryBlock, Halo
from flashgen.ranks.layout import SHARDS, Layout
from flashgen.ranks.plan import SCHEMES, Plan, Sizes, plan_of

__all__ = ["SCHEMES", "SHARDS", "Block", "BoundaryBlock", "Halo", "Layout", "Plan", "Sizes", "Step", "plan_of"]
