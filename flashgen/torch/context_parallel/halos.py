"""Rows of keys and values beside a rank's own come from its neighbours; their gradients go back.

One message each way and pass, of all that a rank sends: keys and values together. The forward waits for it first: it is
small, and NCCL holds multiprocessors while it waits for a neighbour, which a kernel of one long block on each of them
would miss to its end. The backward computes what it sends first, so that the rest is computed meanwhile. Each row is
written by one kernel to where it belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashgen.ranks import Block, Halo, Plan
from flashgen.torch.context_parallel.collectives import begin_all_to_all, wait
from flashgen.torch.context_parallel.partials import CaptureSums, Sums
from flashgen.torch.context_parallel.programs import Programs, queries_of, rows_of
from flashgen.torch.tensors import Tensor

Range = tuple[int, int]  # of rows: the first, and how many


class _Message:
    """Rows of keys and values, or of their gradients, on their way between neighbours."""

    def __init__(self, plan: Plan, rank: int, group: Any, to: Sequence[Range], of: Sequence[int], rows: Any) -> None:
        """to: what is sent to the ranks before and behind; of: how many rows they send. rows: pairs to send from."""
        self._layout, self._group, self._of = plan.spec.layout, group, of
        self._like = rows[0]
        before, behind = (sum(_size(each, self._layout, count) for each in self._like) for _, count in to)
        parts = self._like[0].new_empty(before + behind)
        place = 0
        for (first, count), pair in zip(to, rows, strict=True):
            for each in pair if count else ():
                place = self._copied(each, first, count, parts, place)
        sizes = [sum(_size(each, self._layout, count) for each in self._like) for count in of]
        ranks = (rank, plan.ranks)
        sent, received = _by_rank(*ranks, (before, behind)), _by_rank(*ranks, sizes)
        self._received, self._work = begin_all_to_all(parts, sent, received, group)

    def _copied(self, rows: Tensor, first: int, count: int, parts: Tensor, place: int) -> int:
        shape = _shape(rows, self._layout, count)
        size = _size(rows, self._layout, count)
        parts.narrow(0, place, size).view(shape).copy_(rows_of(rows, self._layout, first, count))
        return place + size

    def received(self) -> list[tuple[Tensor, Tensor]]:
        """Rows of the ranks before and behind, once they are there; of none an empty pair."""
        wait(self._work, self._group)
        place, made = 0, []
        for count in self._of:
            pair = []
            for each in self._like:
                size = _size(each, self._layout, count)
                pair.append(self._received.narrow(0, place, size).view(_shape(each, self._layout, count)))
                place += size
            made.append((pair[0], pair[1]))
        return made


def forward(
    plan: Plan, rank: int, group: Any, programs: Programs, q: Tensor, k: Tensor, v: Tensor, with_lse: bool
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """The output and, if it is wanted, the LSE of a rank's rows of q; and what `backward` takes of it."""
    halo, layout = _halo_of(plan, rank), plan.spec.layout
    message = _Message(plan, rank, group, _own_rims(plan, halo), (halo.before, halo.behind), [(k, v), (k, v)])
    out, lses, joined = q.new_empty((*q.shape[:-1], plan.spec.value_dim)), [], []

    def compute(block: Block, keys: Tensor, values: Tensor) -> None:
        rows = (block.q, block.rows)
        lses.append(programs.forward(block, rows_of(q, layout, *rows), keys, values, rows_of(out, layout, *rows)))

    received = message.received()
    for block in halo.own:
        compute(block, *(rows_of(each, layout, block.k, block.keys) for each in (k, v)))
    for block, pair in _joined(halo, received):
        keys, values = (_beside(block, own, other, layout) for own, other in zip((k, v), pair, strict=True))
        compute(block, keys, values)
        joined += [keys, values]
    for first, count in _left_out(halo.blocks, plan.queries.rows):
        rows_of(out, layout, first, count).zero_()
    return out, _together(halo, lses, plan.queries.rows, q) if with_lse else None, [*lses, *joined]


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

    kept: of the forward. Rows that neighbours own are first, so that their gradients travel meanwhile.
    """
    halo, layout = _halo_of(plan, rank), plan.spec.layout
    lses, joined = kept[: len(halo.blocks)], kept[len(halo.blocks) :]
    dq, of_keys, captured = torch.empty_like(q), Sums(layout, k, v), CaptureSums()

    def compute(number: int, block: Block, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        d_rows, of_lse, q_rows, out_rows = queries_of(block, layout, d_out, d_lse, q, out)
        dq_rows = rows_of(dq, layout, block.q, block.rows)
        made, learned = programs.backward(
            block, d_rows, of_lse, q_rows, keys, values, out_rows, lses[number], dq=dq_rows
        )
        captured.add(learned)
        return made[1], made[2]

    found = [compute(len(halo.own) + i, block, joined[2 * i], joined[2 * i + 1]) for i, block in enumerate(halo.joined)]
    message = _returned(plan, rank, group, halo, found, (k, v))
    for number, block in enumerate(halo.own):
        keys, values = (rows_of(each, layout, block.k, block.keys) for each in (k, v))
        of_keys.add(block.k, block.keys, *compute(number, block, keys, values))
    for block, made in zip(halo.joined, found, strict=True):
        first, end = max(block.k, 0), min(block.k + block.keys, plan.keys.rows)
        if end > first:
            of_keys.add(first, end - first, *(rows_of(each, layout, first - block.k, end - first) for each in made))
    for (first, count), made in zip(_own_rims(plan, halo), message.received(), strict=True):
        if count:
            of_keys.add(first, count, *made)
    for first, count in _left_out(halo.blocks, plan.queries.rows):
        rows_of(dq, layout, first, count).zero_()
    return [dq, *of_keys.rounded()], captured.by_name


def _returned(plan: Plan, rank: int, group: Any, halo: Halo, found: Any, like: tuple[Tensor, Tensor]) -> _Message:
    """Gradients of rows that neighbours own, on their way to them."""
    of_before, of_behind = (0, halo.before), (0, halo.behind)
    sources = dict(zip(halo.joined, found, strict=True))
    before = sources[halo.with_before] if halo.with_before else like
    if halo.with_behind:
        of_behind = (halo.with_behind.keys - halo.behind, halo.behind)
    behind = sources[halo.with_behind] if halo.with_behind else like
    return _Message(plan, rank, group, (of_before, of_behind), (halo.first, halo.last), [before, behind])


def _halo_of(plan: Plan, rank: int) -> Halo:
    assert plan.halos, "only plans that have halos come here"
    return plan.halos[rank]


def _own_rims(plan: Plan, halo: Halo) -> tuple[Range, Range]:
    """The rows that the ranks before and behind read."""
    return (0, halo.first), (plan.keys.rows - halo.last, halo.last)


def _joined(halo: Halo, received: Sequence[Any]) -> list[tuple[Block, Any]]:
    return [(block, pair) for block, pair in zip((halo.with_before, halo.with_behind), received, strict=True) if block]


def _beside(block: Block, own: Tensor, other: Tensor, layout: str) -> Tensor:
    """The rows that a block reads: a neighbour's, and this rank's own beside them."""
    axis = 2 if layout == "bhsd" else 1
    first, end = max(block.k, 0), min(block.k + block.keys, own.shape[axis])
    parts = [rows_of(own, layout, first, end - first)] if end > first else []
    parts.insert(0 if block.k < 0 else len(parts), other)
    return torch.cat(parts, axis) if len(parts) > 1 else other


def _left_out(blocks: Sequence[Block], rows: int) -> list[Range]:
    """The rows that no block computes, as they see no keys."""
    made, first = [], 0
    for begin, end in [*sorted((block.q, block.q + block.rows) for block in blocks), (rows, rows)]:
        if begin > first:
            made.append((first, begin - first))
        first = max(first, end)
    return made


def _together(halo: Halo, lses: Sequence[Tensor], rows: int, q: Tensor) -> Tensor:
    """The LSE of all rows: that of a block if it has them all, -inf of rows that none computes."""
    parts = {block.q: lse for block, lse in zip(halo.blocks, lses, strict=True)}
    for first, count in _left_out(halo.blocks, rows):
        batch, heads = lses[0].shape[:2] if lses else (0, 0)
        parts[first] = torch.full((batch, heads, count), -torch.inf, dtype=torch.float32, device=q.device)
    return torch.cat([parts[first] for first in sorted(parts)], 2) if len(parts) > 1 else parts[0]


def _by_rank(rank: int, ranks: int, sizes: Sequence[int]) -> list[int]:
    """Sizes for each rank of those for the ones before and behind."""
    made = [0] * ranks
    for other, size in zip((rank - 1, rank + 1), sizes, strict=True):
        if size:
            made[other] = size
    return made


def _shape(like: Tensor, layout: str, rows: int) -> tuple[int, ...]:
    batch, second, third, dim = like.shape
    return (batch, second, rows, dim) if layout == "bhsd" else (batch, rows, third, dim)


def _size(like: Tensor, layout: str, rows: int) -> int:
    batch, second, third, dim = like.shape
    return batch * (second if layout == "bhsd" else third) * rows * dim
