"""One sequence on several ranks: who has which rows, who computes what of the scores, and what is sent to whom.

All of it is known before anything runs, and of numbers alone: the engine of `flashgen.torch.context_parallel` carries a
plan out, and `flashgen show --ranks` draws it.
"""

from flashgen.ranks.blocks import Block, Step
from flashgen.ranks.halo import Halo, Rim
from flashgen.ranks.layout import SHARDS, Layout
from flashgen.ranks.plan import SCHEMES, Plan, Sizes, plan_of

__all__ = ["SCHEMES", "SHARDS", "Block", "Halo", "Layout", "Plan", "Rim", "Sizes", "Step", "plan_of"]
