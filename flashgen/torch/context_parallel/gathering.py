"""The scheme "all_gather": all keys and values on every rank; their gradients are reduce-scattered."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.language.batch_layout import BATCH_LAYOUTS
from flashgen.ranks import Layout, Plan
from flashgen.torch.context_parallel.collectives import all_gather, reduce_scatter
from flashgen.torch.context_parallel.partials import CaptureSums, Outputs, Sums
from flashgen.torch.context_parallel.programs import Programs, query_rows, rows_of
from flashgen.torch.tensors import Tensor


def forward(
    plan: Plan, rank: int, group: Any, programs: Programs, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the output and the LSE of a rank's rows of q over the keys of all ranks."""
    layout, outputs = plan.spec.layout, Outputs(programs, q)
    keys_and_values = [gather_rows(tensor, plan.keys, layout, group) for tensor in (k, v)]
    for block in plan.steps(rank)[0].blocks:
        outputs.add(block, q, *(rows_of(tensor, layout, block.k, block.keys) for tensor in keys_and_values))
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
    """Returns the gradients of a rank's rows of q, k and v, and its part of the gradients of captures by name.

    Keys and values are gathered again, so that a rank keeps only its own rows between the passes.
    """
    layout = plan.spec.layout
    keys_and_values = [gather_rows(tensor, plan.keys, layout, group) for tensor in (k, v)]
    dq_sums, dkv_sums, captured = Sums(layout, q), Sums(layout, *keys_and_values), CaptureSums()
    for block in plan.steps(rank)[0].blocks:
        rows = (block.q, block.rows)
        d_rows, d_lse_rows, q_rows, out_rows = query_rows(block, layout, d_out, d_lse, q, out)
        keys = [rows_of(tensor, layout, block.k, block.keys) for tensor in keys_and_values]
        gradients, capture_gradients = programs.backward(
            block, d_rows, d_lse_rows, q_rows, keys[0], keys[1], out_rows, lse.narrow(2, *rows)
        )
        dq_sums.add(*rows, gradients[0])
        dkv_sums.add(block.k, block.keys, gradients[1], gradients[2])
        captured.add(capture_gradients)
    summed = [reduce_rows(each, plan.keys, layout, group).to(k.dtype) for each in dkv_sums.tensors]
    return [*dq_sums.rounded(), *summed], captured.by_name


def gather_rows(rows: Tensor, keys: Layout, layout: str, group: Any) -> Tensor:
    """Gathers the rows of all ranks in the order of positions."""
    if keys.ranks == 1:
        return rows
    parts = all_gather(rows, group)
    return torch.cat(
        [rows_of(parts[owner], layout, first, keys.chunk) for owner, first in keys.in_order()],
        BATCH_LAYOUTS[layout].rows_axis,
    )


def reduce_rows(tensor: Tensor, keys: Layout, layout: str, group: Any) -> Tensor:
    """Sums tensors of all positions over the ranks and returns this rank's rows."""
    if keys.ranks == 1:
        return tensor
    chunks = [
        torch.cat(
            [rows_of(tensor, layout, start, keys.chunk) for start in keys.starts(rank)], BATCH_LAYOUTS[layout].rows_axis
        )
        for rank in range(keys.ranks)
    ]
    return reduce_scatter(torch.stack(chunks), group)
