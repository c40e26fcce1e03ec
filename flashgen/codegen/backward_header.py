"""The comment at the top of an emitted backward kernel: what it is, its division of work, its cost, who made it."""

from __future__ import annotations

import shlex
from typing import Protocol

from flashgen.codegen.rendered_kernel import Cost
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

_DOES = {
    "prepare": "of each row, its LSE to the base 2 and D = rowsum(dO * O) - dLSE",
    "keys": "dK and dV{}; a block walks the queries of a tile of keys",
    "finish": "dQ from the sums of its shares",
    "queries": "dQ; a block walks the keys of a tile of queries",
    "d_": "the gradient of a captured array from its sums",
}
_GRIDS = {
    "prepare": "(rows, head, batch)",
    "keys": "(tile of keys, head of K and V, batch)",
    "finish": "(tile of queries, head, batch)",
    "queries": "(tile of queries, head, batch)",
    "d_": "256 elements",
}


class BackwardPlan(Protocol):
    """A plan of the backward pass that says in a line what it is."""

    def summary(self, shared_bytes: int) -> str: ...


def backward_header(
    part: str,
    spec: AttentionSpec,
    target: Target,
    plan: BackwardPlan | None,
    shared_bytes: int,
    cost: Cost,
    deterministic: bool,
) -> str:
    """The header comment of the kernel of that part: "prepare", "keys", "queries", "finish" or "d_" and a capture."""
    kind = "d_" if part.startswith("d_") else part
    which = f"--kernel {part}{' --deterministic' if deterministic else ''}"
    lines = [
        f"flashgen: attention backward, {part}, {spec.name}",
        _DOES[kind].format("" if deterministic else ", and shares of dQ"),
        "",
        f"mask     {spec.mask.name}",
        f"score    {spec.score.name if spec.score else 'none'}; scale {spec.scale:.9g}",
        f"dropout  {spec.dropout:g}",
        f"dims     head {spec.head_dim}, value {spec.value_dim}; {spec.dtype}, accumulated in float32",
        f"target   {target.name}, family {target.backward_family}",
        *([f"plan     {plan.summary(shared_bytes)}"] if plan else []),
        f"FLOPs    {cost.flops}",
        f"HBM      {cost.hbm} bytes, at least",
        "",
        f"Grid: one block per {_GRIDS[kind]}. Made by",
        f"  flashgen show --pass backward {which} --target {target.name} {shlex.quote(spec.to_json())}",
    ]
    return "\n".join(f"// {line}".rstrip() for line in lines)
