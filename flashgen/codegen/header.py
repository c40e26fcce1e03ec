"""The header comment of an emitted kernel: what it computes, its plan and grid, its cost, and how to reproduce it."""

from __future__ import annotations

import shlex
from typing import Protocol

from flashgen.codegen.batches import batch_of
from flashgen.codegen.costs import Cost, forward_cost
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

_ONLINE_SOFTMAX = (  # names of the softmax state in the kernel and in the paper
    "online softmax (Milakov and Gimelshein 2018; Dao 2023, algorithm 1): "
    "row_max is the paper's running maximum m, which may lag; sum is its row sum l"
)
_DOES = {
    "preprocess": "Computes the base-2 LSE and D = rowsum(dO * O) - dLSE of each row.",
    "dkdv": "Computes dK and dV{}; a CTA iterates over the queries of a key tile.",
    "dkdv of a head split": "Accumulates dK and dV{}; a CTA iterates over the queries of one head for a key tile.",
    "postprocess": "Converts the dQ accumulator to dQ.",
    "postprocess_dk": "Converts dK from the sums over the query heads of a KV head.",
    "postprocess_dv": "Converts dV from the sums over the query heads of a KV head.",
    "dq": "Computes dQ; a CTA iterates over the keys of a query tile.",
    "sink": "Computes the gradient of the sinks from the LSE and D of each row.",
    "d_": "Converts the accumulated gradient of a captured array to its type.",
    "dense": "Computes the gradient of a captured array; a CTA iterates over the heads and batches that read a tile.",
}
_BLOCKS = {  # the tile and the head of a block; {tile} is what the batch layout calls a tile of a sequence
    "preprocess": ("group of rows", "query head"),
    "dkdv": ("key {tile}", "KV head"),
    "dkdv of a head split": ("key {tile}", "query head"),
    "postprocess": ("query tile", "query head"),
    "postprocess_dk": ("key tile", "KV head"),
    "postprocess_dv": ("key tile", "KV head"),
    "dq": ("query {tile}", "query head"),
}
_OTHER_GRIDS = {"sink": "query head", "d_": "256 elements of the array", "dense": "tiles of the array"}


class Described(Protocol):
    """The members of a forward plan that headers use."""

    def summary(self, spec: AttentionSpec) -> str: ...

    def show_options(self, spec: AttentionSpec) -> str: ...


class BackwardPlan(Protocol):
    """The members of a backward plan that headers use."""

    @property
    def heads_apart(self) -> bool: ...

    @property
    def persistent(self) -> bool:
        """Whether the main kernel (dK and dV) is persistent: its blocks process several key tiles each."""

    def summary(self, shared_bytes: int) -> str: ...


def show_command(plan: Described, spec: AttentionSpec) -> str:
    """Returns the `flashgen show` command that selects the plan, without the target and the spec."""
    return f"flashgen show {plan.show_options(spec)}".rstrip()


def header(
    spec: AttentionSpec,
    target: Target,
    plan: Described,
    grid: str = "",
    beside: str = "",
    title: str = "attention forward",
    cost: Cost | None = None,
    options: str = "",
) -> str:
    """Returns the header comment of a forward kernel.

    Args:
        grid: The grid in words; "" for one CTA per tile, head and sequence.
        beside: A further line about the algorithm, after the online softmax.
        cost: None selects `forward_cost`.
        options: Options of the `flashgen show` command, in addition to those of the plan.
    """
    cost = cost or forward_cost(spec)
    batch = batch_of(spec)
    tiles = f"{batch.grid_text(f'query {batch.tile}', 'query head')}, along {batch.grid_axes}"
    method = [f"method   {_ONLINE_SOFTMAX}", *([f"         {beside}"] if beside else [])]
    return _comment(
        [f"flashgen: {title}, {spec.name}"],
        [*_facts(spec, target, target.family, "; heads_q a multiple of heads_kv"), f"plan     {plan.summary(spec)}"],
        [*method, *_costs(cost)],
        grid or f"one CTA per {tiles}",
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
    kind = "dkdv of a head split" if apart and part == "dkdv" else part
    if part.startswith(("d_", "dense_")):
        kind = "d_" if part.startswith("d_") else "dense"
    which = f"--kernel {part}{' --deterministic' if deterministic else ''}"
    which += " --heads-apart" if apart else ""
    does = _DOES[kind].format("" if dq_apart else ", and dQ" if finishes else ", and accumulates dQ")
    persistent = part == "dkdv" and plan is not None and plan.persistent
    per = "persistent, one CTA per multiprocessor; work tiles are" if persistent else "one CTA per"
    per = "persistent, as many CTAs as run at once; work tiles are" if kind == "dense" else per
    divided = [f"plan     {plan.summary(shared_bytes)}"] if plan else []
    return _comment(
        [f"flashgen: attention backward, {part}, {spec.name}", does],
        [*_facts(spec, target, target.backward_family), *divided],
        _costs(cost),
        f"{per} {_grid_text(spec, kind)}",
        f"flashgen show --pass backward {which} --target {target.name} {shlex.quote(spec.to_json())}",
    )


def _grid_text(spec: AttentionSpec, kind: str) -> str:
    """Returns what a block of a backward kernel has one of, in words."""
    if kind in _OTHER_GRIDS:
        return _OTHER_GRIDS[kind]
    tile, heads = _BLOCKS[kind]
    batch = batch_of(spec)
    return batch.grid_text(tile.format(tile=batch.tile), heads)


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
    lines = [*title, "", *facts, *costs, "", f"Grid: {grid}. Reproduce with", f"  {command}"]
    return "\n".join(f"// {line}".rstrip() for line in lines)
