"""Halos: rows of keys and values next to a rank's own chunks come from other ranks, and their gradients go back.

Each pass sends one message to each rank that reads rows, with keys and values together, row by row. The forward starts
it before any computation. The backward first computes the gradients that it sends, so that the rest overlaps with the
message. One copy writes each row directly to its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

import torch

from flashgen.ranks import Block, Halo, Plan
from flashgen.ranks.blocks import gaps
from flashgen.torch.context_parallel.collectives import begin_all_to_all, wait
from flashgen.torch.context_parallel.flat import PackedRows, Pair
from flashgen.torch.context_parallel.partials import CaptureSums, Sums
from flashgen.torch.context_parallel.programs import Programs, query_rows, rows_like, rows_of
from flashgen.torch.tensors import Tensor

Counts = Sequence[tuple[int, int]]
"""(rank, number of rows) of the rows that are sent to ranks or received from them, in the order of ranks."""


class _Message:
    """An exchange in flight of rows of keys and values, or of their gradients."""

    def __init__(
        self, plan: Plan, group: Any, sends: Counts, receives: Counts, rows: Iterable[Pair], like: Pair
    ) -> None:
        """sends: the destination of each of `rows`. receives: the sources."""
        self._like, self._layout, self._receives = like, plan.spec.layout, receives
        leaving = PackedRows.empty(sum(count for _, count in sends), like, self._layout)
        for target, pair in zip(_split(leaving, sends), rows, strict=True):
            target.fill(pair)
        sent, received = _by_rank(plan.ranks, sends), _by_rank(plan.ranks, receives)
        self._arriving, self._work = begin_all_to_all(leaving.buffer, sent, received, group)

    def received(self) -> list[PackedRows]:
        """Waits for the exchange and returns the received rows by source."""
        wait(self._work)
        return _split(PackedRows(self._arriving, self._like, self._layout), self._receives)


def _split(rows: PackedRows, counts: Counts) -> list[PackedRows]:
    ends = list(accumulate(count for _, count in counts))
    return [rows.rows_at(end - count, count) for end, (_, count) in zip(ends, counts, strict=True)]


def _by_rank(ranks: int, counts: Counts) -> list[int]:
    """Returns the number of rows for each rank."""
    sizes = [0] * ranks
    for rank, rows in counts:
        sizes[rank] += rows
    return sizes


def forward(
    plan: Plan, rank: int, group: Any, programs: Programs, q: Tensor, k: Tensor, v: Tensor, with_lse: bool
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Returns the output, the LSE with `with_lse` or None, and the tensors that `backward` needs (`saved`)."""
    halo, layout = _halo_of(plan, rank), plan.spec.layout
    sends, receives = _counts(halo)
    message = _Message(plan, group, sends, receives, (_rows((k, v), layout, *lent.rows) for lent in halo.lent), (k, v))
    joined = [
        PackedRows.empty(boundary.theirs.length + boundary.own.length, (k, v), layout)
        for boundary in halo.boundary_blocks
    ]
    for boundary, rows in zip(halo.boundary_blocks, joined, strict=True):
        rows.rows_at(boundary.own_at, boundary.own.length).fill(_rows((k, v), layout, *boundary.own))
    out, lses = q.new_empty((*q.shape[:-1], plan.spec.value_dim)), []

    def compute(block: Block, keys: Tensor, values: Tensor) -> None:
        rows = (block.q, block.rows)
        lses.append(programs.forward(block, rows_of(q, layout, *rows), keys, values, rows_of(out, layout, *rows)))

    for block in halo.own:
        compute(block, *_rows((k, v), layout, block.k, block.keys))
    pairs = [rows.pair() for rows in joined]
    for boundary, rows, pair, theirs in zip(halo.boundary_blocks, joined, pairs, message.received(), strict=True):
        rows.rows_at(boundary.theirs_at, boundary.theirs.length).buffer.copy_(theirs.buffer)
        compute(boundary.block, *pair)
    for first, end in _rows_without_block(plan, halo):
        rows_of(out, layout, first, end - first).zero_()
    return out, _joined_lse(plan, halo, lses, q) if with_lse else None, [*lses, *chain(*pairs)]


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
    saved: Sequence[Tensor],
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns the gradients of a rank's rows of q, k and v, and its part of the gradients of captures by name.

    saved: the tensors of the forward. Blocks with halo rows come first, so that sending their gradients overlaps with
    the other blocks.
    """
    halo, layout = _halo_of(plan, rank), plan.spec.layout
    lses, joined = dict(zip(halo.blocks, saved, strict=False)), saved[len(halo.blocks) :]
    dq_sums, dkv_sums, captured = Sums(layout, q), Sums(layout, k, v), CaptureSums()

    def compute(block: Block, keys: Tensor, values: Tensor, room: Sequence[Tensor] | None = None) -> Pair:
        d_rows, d_lse_rows, q_rows, out_rows = query_rows(block, layout, d_out, d_lse, q, out)
        dq_rows = dq_sums.room(block.q, block.rows)
        assert dq_rows, "each row of queries belongs to one block"
        dk, dv = room or (rows_like(keys), rows_like(values))
        read = (block, d_rows, d_lse_rows, q_rows, keys, values, out_rows, lses[block])
        captured.add(programs.backward(*read, into=(dq_rows[0], dk, dv))[1])
        return dk, dv

    boundary_gradients = [
        compute(boundary.block, joined[2 * n], joined[2 * n + 1]) for n, boundary in enumerate(halo.boundary_blocks)
    ]
    receives, sends = _counts(halo)
    halo_gradients = (
        _rows(pair, layout, boundary.theirs_at, boundary.theirs.length)
        for boundary, pair in zip(halo.boundary_blocks, boundary_gradients, strict=True)
    )
    message = _Message(plan, group, sends, receives, halo_gradients, (k, v))
    for block in halo.own:
        room = dkv_sums.room(block.k, block.keys)
        gradients = compute(block, *_rows((k, v), layout, block.k, block.keys), room=room)
        if room is None:
            dkv_sums.add(block.k, block.keys, *gradients)
    for boundary, pair in zip(halo.boundary_blocks, boundary_gradients, strict=True):
        if boundary.own.length:
            dkv_sums.add(*boundary.own, *_rows(pair, layout, boundary.own_at, boundary.own.length))
    for lent, rows in zip(halo.lent, message.received(), strict=True):
        dkv_sums.add(*lent.rows, *rows.pair())
    return [*dq_sums.rounded(), *dkv_sums.rounded()], captured.by_name


def _halo_of(plan: Plan, rank: int) -> Halo:
    assert plan.halos, "only plans that have halos come here"
    return plan.halos[rank]


def _counts(halo: Halo) -> tuple[Counts, Counts]:
    """Returns the counts of sent and of received rows of keys. For gradients they are exchanged."""
    return [(lent.to, lent.rows.length) for lent in halo.lent], [
        (boundary.owner, boundary.theirs.length) for boundary in halo.boundary_blocks
    ]


def _rows(pair: Pair, layout: str, first: int, count: int) -> Pair:
    keys, values = pair
    return rows_of(keys, layout, first, count), rows_of(values, layout, first, count)


def _rows_without_block(plan: Plan, halo: Halo) -> list[tuple[int, int]]:
    """Returns the ranges of rows that no block computes, as they see no keys."""
    return gaps(((block.q, block.q + block.rows) for block in halo.blocks), plan.queries.rows)


def _joined_lse(plan: Plan, halo: Halo, lses: Sequence[Tensor], q: Tensor) -> Tensor:
    """Joins the LSE of all blocks, with -inf for rows that no block computes."""
    parts = {block.q: lse for block, lse in zip(halo.blocks, lses, strict=True)}
    batch, heads = q.shape[0], q.shape[plan.spec.batch_layout.heads_axis]
    for first, end in _rows_without_block(plan, halo):
        parts[first] = torch.full((batch, heads, end - first), -torch.inf, dtype=torch.float32, device=q.device)
    return torch.cat([parts[first] for first in sorted(parts)], 2) if len(parts) > 1 else parts[0]
