"""Rows of keys and values beside a rank's own come from other ranks; their gradients go back.

Keys and values of a row travel together, in the forward a message for each rim, which arrives beside own rows in the
buffer that the rim's kernel reads. Messages are started before anything is computed, and copies of own rows stand
between: in their time NCCL's kernel gets its multiprocessors, which one with a long block on each of them would keep to
its end. The backward computes what it sends first, so that the rest is computed meanwhile. Each row is written by one
kernel to where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from flashgen.ranks import Block, Halo, Plan
from flashgen.ranks.blocks import gaps
from flashgen.torch.context_parallel.collectives import begin_all_to_all, wait
from flashgen.torch.context_parallel.flat import ByRows, Pair, elements, pairs_in
from flashgen.torch.context_parallel.partials import CaptureSums, Sums
from flashgen.torch.context_parallel.programs import Programs, queries_of, rows_of
from flashgen.torch.context_parallel.transfers import Transfers
from flashgen.torch.tensors import Tensor

Counts = Sequence[tuple[int, int]]
"""How many rows go to ranks, or come from them, in the order of ranks: (rank, rows)."""


class _Message:
    """Rows of keys and values, or of their gradients, on their way."""

    def __init__(self, plan: Plan, group: Any, to: Counts, of: Counts, rows: Iterable[Pair], like: Pair) -> None:
        """to: where each of `rows` goes. of: where rows come from."""
        self._layout, self._group, self._of, self._like = plan.spec.layout, group, of, like
        sent, received = (self._by_rank(plan.ranks, counts) for counts in (to, of))
        parts = like[0].new_empty(sum(sent))
        for places, pair in zip(self._pairs(parts, to), rows, strict=True):
            for place, each in zip(places, pair, strict=True):
                place.copy_(each)
        self._received, self._work = begin_all_to_all(parts, sent, received, group)

    def received(self) -> list[Pair]:
        """The rows that came, once they are there."""
        wait(self._work, self._group)
        return self._pairs(self._received, self._of)

    def _pairs(self, flat: Tensor, counts: Counts) -> list[Pair]:
        return pairs_in(flat, (rows for _, rows in counts), self._like, self._layout)

    def _by_rank(self, ranks: int, counts: Counts) -> list[int]:
        """Elements for each rank."""
        sizes = [0] * ranks
        for rank, rows in counts:
            sizes[rank] += elements(rows, self._like, self._layout)
        return sizes


def forward(
    plan: Plan, rank: int, group: Any, programs: Programs, q: Tensor, k: Tensor, v: Tensor, with_lse: bool
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """The output and, if it is wanted, the LSE of a rank's rows of q; and what `backward` takes of it."""
    halo, layout = _halo_of(plan, rank), plan.spec.layout
    joined = [ByRows(rim.theirs.length + rim.own.length, (k, v), layout) for rim in halo.rims]
    transfers, posted = _sent(halo, group, joined, (k, v), layout)
    for rim, rows in zip(halo.rims, joined, strict=True):
        rows.fill(rim.own_at, _rows((k, v), layout, *rim.own))
    out, lses = q.new_empty((*q.shape[:-1], plan.spec.value_dim)), []

    def compute(block: Block, keys: Tensor, values: Tensor) -> None:
        rows = (block.q, block.rows)
        lses.append(programs.forward(block, rows_of(q, layout, *rows), keys, values, rows_of(out, layout, *rows)))

    for block in halo.own:
        compute(block, *_rows((k, v), layout, block.k, block.keys))
    transfers.wait(posted)
    pairs = [rows.pair() for rows in joined]
    for rim, pair in zip(halo.rims, pairs, strict=True):
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
        dk, dv = room or (torch.empty_like(keys), torch.empty_like(values))
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
    for lent, pair in zip(halo.lent, message.received(), strict=True):
        of_keys.add(*lent.rows, *pair)
    return [*of_q.rounded(), *of_keys.rounded()], captured.by_name


def _sent(halo: Halo, group: Any, joined: Sequence[ByRows], own: Pair, layout: str) -> tuple[Transfers, list[Any]]:
    """What others read of own rows is on its way to them, and what rims read of others' to its places in `joined`."""
    sends = []
    for lent in halo.lent:
        rows = ByRows(lent.rows.length, own, layout)
        rows.fill(0, _rows(own, layout, *lent.rows))
        sends.append((lent.to, rows.run(0, lent.rows.length)))
    receives = [
        (rim.owner, rows.run(rim.theirs_at, rim.theirs.length)) for rim, rows in zip(halo.rims, joined, strict=True)
    ]
    transfers = Transfers(group, own[0].device)
    return transfers, transfers.post(sends, receives)


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
