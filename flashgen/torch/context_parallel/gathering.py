"""All keys and values on every rank, in the order of positions; gradients of theirs summed over the ranks."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.ranks import Layout, Plan
from flashgen.torch.context_parallel.collectives import all_gather, reduce_scatter
from flashgen.torch.context_parallel.partials import CaptureSums, Outputs, Sums
from flashgen.torch.context_parallel.programs import Programs, queries_of, rows_of
from flashgen.torch.tensors import Tensor


def forward(
    plan: Plan, rank: int, group: Any, programs: Programs, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """The output and the LSE of a rank's rows of q over the keys of all ranks."""
    layout, outputs = plan.spec.layout, Outputs(programs, q)
    whole = [gathered(tensor, plan.keys, layout, group) for tensor in (k, v)]
    for block in plan.steps(rank)[0].blocks:
        outputs.add(block, q, *(rows_of(tensor, layout, block.k, block.keys) for tensor in whole))
    return outputs.result()


def backward(
    plan: Plan,
    rank: int,
    group: Any,
    programs: Programs,
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The gradients of a rank's rows of q, k and v, and its share of those of captures by name.

    Keys and values are gathered anew, so that none but its own stay with a rank between the passes.
    """
    layout = plan.spec.layout
    whole = [gathered(tensor, plan.keys, layout, group) for tensor in (k, v)]
    of_q, of_keys, captured = Sums(layout, q), Sums(layout, *whole), CaptureSums()
    for block in plan.steps(rank)[0].blocks:
        rows = (block.q, block.rows)
        d_rows, of_lse, q_rows, out_rows = queries_of(block, layout, d_out, d_lse, q, out)
        keys = [rows_of(tensor, layout, block.k, block.keys) for tensor in whole]
        made, learned = programs.backward(
            block, d_rows, of_lse, q_rows, keys[0], keys[1], out_rows, lse.narrow(2, *rows)
        )
        of_q.add(*rows, made[0])
        of_keys.add(block.k, block.keys, made[1], made[2])
        captured.add(learned)
    summed = [scattered(each, plan.keys, layout, group).to(k.dtype) for each in of_keys.tensors]
    return [*of_q.rounded(), *summed], captured.by_name


def gathered(rows: Tensor, keys: Layout, layout: str, group: Any) -> Tensor:
    """The rows of all ranks, in the order of positions."""
    if keys.ranks == 1:
        return rows
    every = all_gather(rows, group)
    return torch.cat([rows_of(every[of], layout, first, keys.chunk) for of, first in keys.in_order()], _axis(layout))


def scattered(whole: Tensor, keys: Layout, layout: str, group: Any) -> Tensor:
    """The sum over all ranks of what each has of all positions: this rank's rows of it."""
    if keys.ranks == 1:
        return whole
    chunks = [
        torch.cat([rows_of(whole, layout, start, keys.chunk) for start in keys.starts(rank)], _axis(layout))
        for rank in range(keys.ranks)
    ]
    return reduce_scatter(torch.stack(chunks), group)


def _axis(layout: str) -> int:
    return 2 if layout == "bhsd" else 1
