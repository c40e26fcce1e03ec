"""Rows of keys and values beside a rank's own come from other ranks; their gradients go back.

One message to each other rank and pass, of all that it reads: keys and values together, row by row. The forward starts
it before anything is computed; the backward computes what it sends first, so that the rest is computed meanwhile. Each
row is written by one kernel to where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

import torch

from flashgen.ranks import Block, Halo, Plan
from flashgen.ranks.blocks import gaps
from flashgen.torch.context_parallel.collectives import begin_all_to_all, wait
from flashgen.torch.context_parallel.flat import ByRows, Pair
from flashgen.torch.context_parallel.partials import CaptureSums, Sums
from flashgen.torch.context_parallel.programs import Programs, queries_of, rows_like, rows_of
from flashgen.torch.tensors import Tensor

Counts = Sequence[tuple[int, int]]
"""How many rows go to ranks, or come from them, in the order of ranks: (rank, rows)."""


class _Message:
    """Rows of keys and values, or of their gradients, on their way."""

    def __init__(self, plan: Plan, group: Any, to: Counts, of: Counts, rows: Iterable[Pair], like: Pair) -> None:
        """to: where each of `rows` goes. of: where rows come from."""
        self._like, self._layout, self._of = like, plan.spec.layout, of
        leaving = ByRows.empty(sum(count for _, count in to), like, self._layout)
        for place, pair in zip(_runs(leaving, to), rows, strict=True):
            place.fill(pair)
        sent, received = _by_rank(plan.ranks, to), _by_rank(plan.ranks, of)
        self._arriving, self._work = begin_all_to_all(leaving.buffer, sent, received, group)

    def received(self) -> list[ByRows]:
        """The rows that came, once they are there."""
        wait(self._work)
        return _runs(ByRows(self._arriving, self._like, self._layout), self._of)


def _runs(rows: ByRows, counts: Counts) -> list[ByRows]:
    ends = list(accumulate(count for _, count in counts))
    return [rows.run(end - count, count) for end, (_, count) in zip(ends, counts, strict=True)]


def _by_rank(ranks: int, counts: Counts) -> list[int]:
    """Rows for each rank."""
    sizes = [0] * ranks
    for rank, rows in counts:
        sizes[rank] += rows
    return sizes


def forward(
    plan: Plan, rank: int, group: Any, programs: Programs, q: Tensor, k: Tensor, v: Tensor, with_lse: bool
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """The output and, if it is wanted, the LSE of a rank's rows of q; and what `backward` takes of it."""
    halo, layout = _halo_of(plan, rank), plan.spec.layout
    to, of = _counts(halo)
    message = _Message(plan, group, to, of, (_rows((k, v), layout, *lent.rows) for lent in halo.lent), (k, v))
    joined = [ByRows.empty(rim.theirs.length + rim.own.length, (k, v), layout) for rim in halo.rims]
    for rim, rows in zip(halo.rims, joined, strict=True):
        rows.run(rim.own_at, rim.own.length).fill(_rows((k, v), layout, *rim.own))
    out, lses = q.new_empty((*q.shape[:-1], plan.spec.value_dim)), []

    def compute(block: Block, keys: Tensor, values: Tensor) -> None:
        rows = (block.q, block.rows)
        lses.append(programs.forward(block, rows_of(q, layout, *rows), keys, values, rows_of(out, layout, *rows)))

    for block in halo.own:
        compute(block, *_rows((k, v), layout, block.k, block.keys))
    pairs = [rows.pair() for rows in joined]
    for rim, rows, pair, theirs in zip(halo.rims, joined, pairs, message.received(), strict=True):
        rows.run(rim.theirs_at, rim.theirs.length).buffer.copy_(theirs.buffer)
        compute(rim.block, *pair)
    for first, end in _left_out(plan, halo):
        rows_of(out, layout, first, end - first).zero_()
    return out, _together(plan, halo, lses, q) if with_lse else None, [*lses, *chain(*pairs)]


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
    kept: Sequence[Tensor],
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The gradients of a rank's rows of q, k and v, and its share of those of captures by name.

    kept: of the forward. Rims are first, so that the gradients of other ranks' rows travel meanwhile.
    """
    halo, layout = _halo_of(plan, rank), plan.spec.layout
    lses, joined = dict(zip(halo.blocks, kept, strict=False)), kept[len(halo.blocks) :]
    of_q, of_keys, captured = Sums(layout, q), Sums(layout, k, v), CaptureSums()

    def compute(block: Block, keys: Tensor, values: Tensor, room: Sequence[Tensor] | None = None) -> Pair:
        d_rows, of_lse, q_rows, out_rows = queries_of(block, layout, d_out, d_lse, q, out)
        of_rows = of_q.room(block.q, block.rows)
        assert of_rows, "no row of queries is of two blocks"
        dk, dv = room or (rows_like(keys), rows_like(values))
        read = (block, d_rows, of_lse, q_rows, keys, values, out_rows, lses[block])
        captured.add(programs.backward(*read, into=(of_rows[0], dk, dv))[1])
        return dk, dv

    found = [compute(rim.block, joined[2 * n], joined[2 * n + 1]) for n, rim in enumerate(halo.rims)]
    of, to = _counts(halo)
    theirs = (_rows(pair, layout, rim.theirs_at, rim.theirs.length) for rim, pair in zip(halo.rims, found, strict=True))
    message = _Message(plan, group, to, of, theirs, (k, v))
    for block in halo.own:
        room = of_keys.room(block.k, block.keys)
        made = compute(block, *_rows((k, v), layout, block.k, block.keys), room=room)
        if room is None:
            of_keys.add(block.k, block.keys, *made)
    for rim, pair in zip(halo.rims, found, strict=True):
        if rim.own.length:
            of_keys.add(*rim.own, *_rows(pair, layout, rim.own_at, rim.own.length))
    for lent, rows in zip(halo.lent, message.received(), strict=True):
        of_keys.add(*lent.rows, *rows.pair())
    return [*of_q.rounded(), *of_keys.rounded()], captured.by_name


def _halo_of(plan: Plan, rank: int) -> Halo:
    assert plan.halos, "only plans that have halos come here"
    return plan.halos[rank]


def _counts(halo: Halo) -> tuple[Counts, Counts]:
    """Of keys: how many rows go where, and come whence; of their gradients the other way round."""
    return [(lent.to, lent.rows.length) for lent in halo.lent], [(rim.owner, rim.theirs.length) for rim in halo.rims]


def _rows(pair: Pair, layout: str, first: int, count: int) -> Pair:
    keys, values = pair
    return rows_of(keys, layout, first, count), rows_of(values, layout, first, count)


def _left_out(plan: Plan, halo: Halo) -> list[tuple[int, int]]:
    """The rows that no block computes, as they see no keys."""
    return gaps(((block.q, block.q + block.rows) for block in halo.blocks), plan.queries.rows)


def _together(plan: Plan, halo: Halo, lses: Sequence[Tensor], q: Tensor) -> Tensor:
    """The LSE of all rows: that of a block if it has them all, -inf of rows that none computes."""
    parts = {block.q: lse for block, lse in zip(halo.blocks, lses, strict=True)}
    batch, heads = q.shape[0], q.shape[1 if plan.spec.layout == "bhsd" else 2]
    for first, end in _left_out(plan, halo):
        parts[first] = torch.full((batch, heads, end - first), -torch.inf, dtype=torch.float32, device=q.device)
    return torch.cat([parts[first] for first in sorted(parts)], 2) if len(parts) > 1 else parts[0]
