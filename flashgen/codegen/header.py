"""The comment at the top of an emitted kernel: what it is, how it divides the work, what it costs, who made it."""

from __future__ import annotations

import shlex
from typing import Protocol

from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec


class Plan(Protocol):
    """A plan that says in a line what it is."""

    def summary(self, spec: AttentionSpec) -> str: ...


_BLOCK_PER_TILE = "one block per (tile of queries, head, batch), along x, y and z"


def header(
    spec: AttentionSpec, target: Target, plan: Plan, grid: str = _BLOCK_PER_TILE, shown_by: str = "flashgen show"
) -> str:
    """The forward kernel's header comment; `grid` says how many blocks a launch has, `shown_by` how it is shown."""
    depth, width = spec.head_dim, spec.value_dim
    element = 2
    lines = [
        f"flashgen: attention forward, {spec.name}",
        "",
        f"mask     {spec.mask.name}",
        f"score    {spec.score.name if spec.score else 'none'}; scale {spec.scale:.9g}",
        f"dropout  {spec.dropout:g}",
        f"dims     head {depth}, value {width}; {spec.dtype}, accumulated in float32; heads_q a multiple of heads_kv",
        f"target   {target.name}, family {target.family}",
        f"plan     {plan.summary(spec)}",
        f"FLOPs    {2 * (depth + width)} * batch * heads_q * len_q * len_k * (share of tiles visited)",
        f"HBM      {element} * batch * (heads_q * len_q * {depth + width} + heads_kv * len_k * {depth + width}) bytes, "
        "at least; + 4 * batch * heads_q * len_q for the LSE",
        "",
        f"Grid: {grid}. Made by",
        f"  {shown_by} --target {target.name} {shlex.quote(spec.to_json())}",
    ]
    return "\n".join(f"// {line}".rstrip() for line in lines)
