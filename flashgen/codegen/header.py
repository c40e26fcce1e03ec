"""The comment at the top of an emitted kernel: what it is, how it divides the work, what it costs, who made it."""

from __future__ import annotations

import shlex

from flashgen.codegen.costs import forward_cost
from flashgen.codegen.plan import Plan
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

_ONLINE_SOFTMAX = (  # what the kernel and the paper call a row's state
    "online softmax (Milakov and Gimelshein 2018; Dao 2023, algorithm 1): "
    "reference is the paper's m, which may lag; sum is its l"
)
_BLOCK_PER_TILE = "one block per (tile of queries, head, batch), along x, y and z"


def show_command(plan: Plan) -> str:
    """What shows, or builds, the kernel of a default plan, or of one that packs; a target and a spec follow it."""
    return "flashgen show" + (f" --packed-heads {plan.packed_heads}" if plan.packed_heads > 1 else "")


def header(spec: AttentionSpec, target: Target, plan: Plan, grid: str = _BLOCK_PER_TILE, beside: str = "") -> str:
    """The forward kernel's header comment.

    grid: how many blocks a launch has. beside: its algorithm, beside the softmax.
    """
    depth, width, cost = spec.head_dim, spec.value_dim, forward_cost(spec)
    lines = [
        f"flashgen: attention forward, {spec.name}",
        "",
        f"mask     {spec.mask.name}",
        f"score    {spec.score.name if spec.score else 'none'}; scale {spec.scale:.9g}",
        f"dropout  {spec.dropout:g}",
        f"dims     head {depth}, value {width}; {spec.dtype}, accumulated in float32; heads_q a multiple of heads_kv",
        f"target   {target.name}, family {target.family}",
        f"plan     {plan.summary(spec)}",
        f"method   {_ONLINE_SOFTMAX}",
        *([f"         {beside}"] if beside else []),
        f"FLOPs    {cost.flops}",
        f"HBM      {cost.hbm}",
        "",
        f"Grid: {grid}. Made by",
        f"  {show_command(plan)} --target {target.name} {shlex.quote(spec.to_json())}",
    ]
    return "\n".join(f"// {line}".rstrip() for line in lines)
