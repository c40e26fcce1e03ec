"""Keys and values go from rank to rank while blocks are computed; gradients of theirs come back.

In step t each rank computes with the keys of the rank that is t before it, which sends them to it: just those rows
that it reads, and nothing where the analysis has shown that it reads none. Messages of the next steps travel meanwhile.
In the backward what a step found of gradients of keys and values goes back to their owner, who adds them in the order
of the steps: in float32 where several blocks of the step add to a row, else as the one block rounded them, which writes
to the message itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from flashgen.ranks import Plan, Step
from flashgen.torch.context_parallel.flat import elements, pairs_in
from flashgen.torch.context_parallel.partials import CaptureSums, Outputs, Sums
from flashgen.torch.context_parallel.programs import Programs, queries_of, rows_like, rows_of
from flashgen.torch.context_parallel.transfers import Transfers
from flashgen.torch.tensors import Tensor

_BUFFERS = 3  # of a step's keys: one that is read, and two that are filled
_RETURNS = 2  # of gradients that are on their way at once

Range = tuple[int, int]


class Arrived(NamedTuple):
    """The rows of an owner that a step reads: (first, behind the last), keys and values."""

    pieces: list[tuple[Range, Tensor, Tensor]]

    def rows(self, layout: str, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of rows that lie in one piece."""
        for (begin, end), k, v in self.pieces:
            if begin <= first and first + count <= end:
                return rows_of(k, layout, first - begin, count), rows_of(v, layout, first - begin, count)
        raise AssertionError("a block reads rows that its step did not ask for")


class _Keys:
    """Keys and values of a call on their way: gives those of each step once they are there."""

    def __init__(self, plan: Plan, rank: int, transfers: Transfers, k: Tensor, v: Tensor) -> None:
        self._plan, self._rank, self._transfers, self._own = plan, rank, transfers, (k, v)
        self._layout, self._steps = plan.spec.layout, plan.steps(rank)
        most = elements(max(step.received for step in self._steps), (k, v), self._layout)
        ring = min(_BUFFERS, plan.ranks - 1)
        self._buffers = [k.new_empty(most) for _ in range(ring)]
        self._free: list[Any] = [None] * ring
        self._copies = self._copied()
        self._posted: dict[int, tuple[list[Any], Arrived]] = {}
        transfers.after_this()  # the copies are there, and memory that the buffers had before is read no more

    def __iter__(self) -> Iterator[tuple[int, Step, Arrived]]:
        """(number, step, what has arrived): the current stream has waited for it, until the next is asked for."""
        k, v = self._own
        for ahead in range(1, _BUFFERS + 1):
            self._post(ahead)
        self._transfers.give_way([work for posted, _ in self._posted.values() for work in posted])
        own = Arrived([((0, self._plan.keys.rows), k, v)])
        yield 0, self._steps[0], own
        for number in range(1, self._plan.ranks):
            posted, arrived = self._posted.pop(number)
            self._transfers.wait(posted)
            if number > 1:
                self._post(number + _BUFFERS - 1)
            yield number, self._steps[number], arrived
            self._free[(number - 1) % _BUFFERS] = self._transfers.done()

    def _post(self, number: int) -> None:
        """Sends what the rank `number` behind reads, and receives what this one reads of the one before."""
        if number >= self._plan.ranks:
            return
        step, to = self._steps[number], (self._rank + number) % self._plan.ranks
        buffer = self._buffers[(number - 1) % _BUFFERS]
        pairs = pairs_in(buffer, map(_count, step.pieces), self._own, self._layout)
        receives = [(step.owner, tensor) for pair in pairs for tensor in pair]
        pieces = [(piece, *pair) for piece, pair in zip(step.pieces, pairs, strict=True)]
        sends = [(to, tensor) for piece in self._plan.steps(to)[number].pieces for tensor in self._copies[piece]]
        free = self._free[(number - 1) % _BUFFERS]
        self._posted[number] = self._transfers.post(sends, receives, free), Arrived(pieces)

    def _copied(self) -> dict[Range, tuple[Tensor, ...]]:
        """The rows that others read, contiguous."""
        wanted = {
            piece
            for number in range(1, self._plan.ranks)
            for piece in self._plan.steps((self._rank + number) % self._plan.ranks)[number].pieces
        }
        return {
            (begin, end): tuple(rows_of(own, self._layout, begin, end - begin).contiguous() for own in self._own)
            for begin, end in wanted
        }


def _count(piece: Range) -> int:
    first, end = piece
    return end - first


def forward(
    plan: Plan, rank: int, group: Any, programs: Programs, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """The output and the LSE of a rank's rows of q over the keys of all ranks."""
    outputs = Outputs(programs, q)
    for _, step, arrived in _Keys(plan, rank, Transfers(group, q.device), k, v):
        for block in step.blocks:
            outputs.add(block, q, *arrived.rows(plan.spec.layout, block.k, block.keys))
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
    """The gradients of a rank's rows of q, k and v, and its share of those of captures by name."""
    layout, transfers = plan.spec.layout, Transfers(group, q.device)
    of_q, of_keys, captured = Sums(layout, q), Sums(layout, k, v), CaptureSums()
    returns = _Returns(plan, rank, transfers, of_keys, k, v)
    for number, step, arrived in _Keys(plan, rank, transfers, k, v):
        found = returns.begin(number, step)
        for block in step.blocks:
            rows = (block.q, block.rows)
            d_rows, of_lse, q_rows, out_rows = queries_of(block, layout, d_out, d_lse, q, out)
            keys = arrived.rows(layout, block.k, block.keys)
            read = (block, d_rows, of_lse, q_rows, *keys, out_rows, lse.narrow(2, *rows))
            rooms = of_q.room(*rows), found.room(block.k, block.keys)
            into = (*(rooms[0] or [rows_like(q_rows)]), *(rooms[1] or map(rows_like, keys)))
            made, learned = programs.backward(*read, into=into)
            if rooms[0] is None:
                of_q.add(*rows, made[0])
            if rooms[1] is None:
                found.add(block.k, block.keys, made[1], made[2])
            captured.add(learned)
        returns.send(number, step)
    returns.finish()
    return [*of_q.rounded(), *of_keys.rounded()], captured.by_name


class _Found:
    """Gradients of the rows of an owner that a step reads, in one buffer."""

    def __init__(self, layout: str, step: Step, like: tuple[Tensor, Tensor]) -> None:
        self._layout, self._adds, pieces = layout, step.adds, step.pieces
        size = elements(sum(map(_count, pieces)), like, layout)
        self.flat = like[0].new_zeros(size, dtype=torch.float32) if step.adds else like[0].new_empty(size)
        pairs = pairs_in(self.flat, map(_count, pieces), like, layout)
        self.pieces = [(piece, *pair) for piece, pair in zip(pieces, pairs, strict=True)]

    def room(self, first: int, count: int) -> Sequence[Tensor] | None:
        """Where a block writes its gradients of rows; None where several add to some."""
        return None if self._adds else Arrived(self.pieces).rows(self._layout, first, count)

    def add(self, first: int, count: int, dk: Tensor, dv: Tensor) -> None:
        """Adds a block's gradients of rows."""
        for total, gradient in zip(Arrived(self.pieces).rows(self._layout, first, count), (dk, dv), strict=True):
            total.add_(gradient)


class _Returns:
    """Gradients of keys and values on their way back to who owns these."""

    def __init__(self, plan: Plan, rank: int, transfers: Transfers, sums: Sums, k: Tensor, v: Tensor) -> None:
        self._plan, self._rank, self._transfers, self._sums, self._like = plan, rank, transfers, sums, (k, v)
        self._layout = plan.spec.layout
        self._found: _Found | None = None
        self._waiting: list[tuple[list[Any], _Found, _Found]] = []

    def begin(self, number: int, step: Step) -> Any:
        """What a step adds its gradients to: for its own rows, the sums themselves."""
        if number == 0:
            return self._sums
        if len(self._waiting) == _RETURNS:
            self._arrive()
        self._found = _Found(self._layout, step, self._like)
        return self._found

    def send(self, number: int, step: Step) -> None:
        """Sends what a step has found, and receives what was found for this rank in the same step."""
        if self._found is None:
            return
        by = (self._rank + number) % self._plan.ranks
        theirs = _Found(self._layout, self._plan.steps(by)[number], self._like)
        self._transfers.after_this()
        posted = self._transfers.post([(step.owner, self._found.flat)], [(by, theirs.flat)])
        self._transfers.give_way(posted)
        self._waiting.append((posted, self._found, theirs))

    def finish(self) -> None:
        """Adds what is still on its way."""
        while self._waiting:
            self._arrive()

    def _arrive(self) -> None:
        posted, _, theirs = self._waiting.pop(0)
        self._transfers.wait(posted)
        for (begin, end), dk, dv in theirs.pieces:
            self._sums.add(begin, end - begin, dk, dv)
