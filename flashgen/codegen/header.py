"""The header comment of an emitted kernel: what it computes, its plan and grid, its cost, and how to reproduce it."""

from __future__ import annotations

import shlex
from typing import Protocol

from flashgen.codegen.costs import Cost, forward_cost
from flashgen.codegen.plan import Plan
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

_ONLINE_SOFTMAX = (  # names of the softmax state in the kernel and in the paper
    "online softmax (Milakov and Gimelshein 2018; Dao 2023, algorithm 1): "
    "row_max is the paper's m, which may lag; sum is its l"
)
_BLOCK_PER_TILE = "one block per (tile of queries, head, batch), along x, y and z"
_BLOCK_PER_SLOT = "one block per (slot of a tile of queries of some sequence, head), along x and y"
_DOES = {
    "preprocess": "of each row, its LSE to the base 2 and D = rowsum(dO * O) - dLSE",
    "dkdv": "dK and dV{}; a block iterates over the queries of a key tile",
    "dkdv of a head split": "partial sums of dK and dV{}; a block iterates over the queries of one head for a key tile",
    "postprocess": "dQ, converted from its accumulator",
    "postprocess_dk": "dK, converted from its sums over the query heads of a KV head",
    "postprocess_dv": "dV, converted from its sums over the query heads of a KV head",
    "dq": "dQ; a block iterates over the keys of a query tile",
    "sink": "the gradient of the sinks, from the rows' LSE and D",
    "d_": "the gradient of a captured array from its sums",
}
_GRIDS = {
    "preprocess": "(rows, head, batch)",
    "dkdv": "(tile of keys, head of K and V, batch)",
    "dkdv of a head split": "(tile of keys, query head, batch)",
    "postprocess": "(tile of queries, head, batch)",
    "postprocess_dk": "(tile of keys, head of K and V, batch)",
    "postprocess_dv": "(tile of keys, head of K and V, batch)",
    "dq": "(tile of queries, head, batch)",
    "sink": "head",
    "d_": "256 elements",
}


_VARLEN_GRIDS = {
    "preprocess": "(rows of all sequences, head)",
    "dkdv": "(slot of a tile of keys of some sequence, head of K and V)",
    "postprocess": "(tile of queries of all sequences, head)",
    "dq": "(slot of a tile of queries of some sequence, head)",
}


class BackwardPlan(Protocol):
    """The members of a backward plan that headers use."""

    @property
    def heads_apart(self) -> bool: ...

    @property
    def persistent(self) -> bool:
        """Whether a block of the main kernel (dK and dV) processes several tiles of keys, one after the other."""

    def summary(self, shared_bytes: int) -> str: ...


def show_command(plan: Plan, spec: AttentionSpec) -> str:
    """Returns the `flashgen show` command that selects the plan, without the target and the spec."""
    return f"flashgen show {plan.show_options(spec)}".rstrip()


def header(
    spec: AttentionSpec,
    target: Target,
    plan: Plan,
    grid: str = _BLOCK_PER_TILE,
    beside: str = "",
    title: str = "attention forward",
    cost: Cost | None = None,
    options: str = "",
) -> str:
    """Returns the header comment of a forward kernel.

    Args:
        beside: A further line about the algorithm, after the online softmax.
        cost: None selects `forward_cost`.
        options: Options of the `flashgen show` command, in addition to those of the plan.
    """
    cost = cost or forward_cost(spec)
    grid = _BLOCK_PER_SLOT if spec.is_varlen and grid == _BLOCK_PER_TILE else grid
    method = [f"method   {_ONLINE_SOFTMAX}", *([f"         {beside}"] if beside else [])]
    return _comment(
        [f"flashgen: {title}, {spec.name}"],
        [*_facts(spec, target, target.family, "; heads_q a multiple of heads_kv"), f"plan     {plan.summary(spec)}"],
        [*method, *_costs(cost)],
        grid,
        f"{show_command(plan, spec)}{options} --target {target.name} {shlex.quote(spec.to_json())}",
    )


def backward_header(
    part: str,
    spec: AttentionSpec,
    target: Target,
    plan: BackwardPlan | None,
    shared_bytes: int,
    cost: Cost,
    deterministic: bool,
    dq_apart: bool,
    finishes: bool,
) -> str:
    """Returns the header comment of a backward kernel.

    Args:
        part: Role of the kernel, as for `backward_cost`.
        dq_apart: Whether a kernel of its own computes dQ.
        finishes: Whether the main kernel converts the dQ accumulator itself.
    """
    apart = plan is not None and plan.heads_apart
    kind = "d_" if part.startswith("d_") else "dkdv of a head split" if apart and part == "dkdv" else part
    which = f"--kernel {part}{' --deterministic' if deterministic else ''}"
    which += " --heads-apart" if apart else ""
    does = _DOES[kind].format("" if dq_apart else ", and dQ" if finishes else ", and partial sums of dQ")
    persistent = part == "dkdv" and plan is not None and plan.persistent
    per = "one block per multiprocessor, one after the other" if persistent else "one block per"
    divided = [f"plan     {plan.summary(shared_bytes)}"] if plan else []
    return _comment(
        [f"flashgen: attention backward, {part}, {spec.name}", does],
        [*_facts(spec, target, target.backward_family), *divided],
        _costs(cost),
        f"{per} {_VARLEN_GRIDS.get(kind, _GRIDS[kind]) if spec.is_varlen else _GRIDS[kind]}",
        f"flashgen show --pass backward {which} --target {target.name} {shlex.quote(spec.to_json())}",
    )


def _costs(cost: Cost) -> list[str]:
    return [f"FLOPs    {cost.flops_text}", f"HBM      {cost.hbm_text}"]


def _facts(spec: AttentionSpec, target: Target, family: str, heads: str = "") -> list[str]:
    return [
        f"mask     {spec.mask.name}",
        f"score    {spec.score.name if spec.score else 'none'}; scale {spec.scale:.9g}",
        f"dropout  {spec.dropout:g}",
        f"dims     head {spec.head_dim}, value {spec.value_dim}; {spec.dtype}, accumulated in float32{heads}",
        f"target   {target.name}, family {family}",
    ]


def _comment(title: list[str], facts: list[str], costs: list[str], grid: str, command: str) -> str:
    lines = [*title, "", *facts, *costs, "", f"Grid: {grid}. Made by", f"  {command}"]
    return "\n".join(f"// {line}".rstrip() for line in lines)
