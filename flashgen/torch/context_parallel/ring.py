"""The scheme "ring": keys and values are sent between ranks while blocks are computed; their gradients are sent back.

In step t each rank computes with the keys of the rank that is t steps before it in the ring. That rank sends only the
rows that are read, and nothing if the analysis has proven that no row is. Messages of the next steps overlap with the
computation. In the backward, the gradients of keys and values of a step are sent to the owner of the keys, which adds
them in the order of steps. They are in float32 if several blocks of the step add to a row. Otherwise they have the
dtype of the keys, and the block writes directly to the message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from flashgen.ranks import Plan, Step
from flashgen.torch.context_parallel.flat import elements, pairs_in
from flashgen.torch.context_parallel.partials import CaptureSums, Outputs, Sums
from flashgen.torch.context_parallel.programs import Programs, query_rows, rows_like, rows_of
from flashgen.torch.context_parallel.transfers import Transfers
from flashgen.torch.tensors import Tensor

_BUFFERS = 3  # for the keys of a step: one is read while two are filled
_RETURNS = 2  # messages of gradients that are in flight at once

Range = tuple[int, int]


class Arrived(NamedTuple):
    """The received rows of a step: (first row, end row), keys and values of each piece."""

    pieces: list[tuple[Range, Tensor, Tensor]]

    def rows(self, layout: str, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of rows, which must lie in one piece."""
        for (begin, end), k, v in self.pieces:
            if begin <= first and first + count <= end:
                return rows_of(k, layout, first - begin, count), rows_of(v, layout, first - begin, count)
        raise AssertionError("a block reads rows that its step did not receive")


class _Keys:
    """Sends and receives keys and values: an iterator over the steps with the rows that they read."""

    def __init__(self, plan: Plan, rank: int, transfers: Transfers, k: Tensor, v: Tensor) -> None:
        self._plan, self._rank, self._transfers, self._own = plan, rank, transfers, (k, v)
        self._layout, self._steps = plan.spec.layout, plan.steps(rank)
        size = elements(max(step.received for step in self._steps), (k, v), self._layout)
        ring = min(_BUFFERS, plan.ranks - 1)
        self._buffers = [k.new_empty(size) for _ in range(ring)]
        self._free: list[Any] = [None] * ring
        self._copies = self._copies_for_others()
        self._posted: dict[int, tuple[list[Any], Arrived]] = {}
        # The copies must be written, and kernels that used the memory of the buffers before must have ended.
        transfers.wait_for_current_stream()

    def __iter__(self) -> Iterator[tuple[int, Step, Arrived]]:
        """Yields (number, step, received rows). The rows are valid on the current stream until the next step."""
        k, v = self._own
        for ahead in range(1, _BUFFERS + 1):
            self._post(ahead)
        self._transfers.launch_after([work for posted, _ in self._posted.values() for work in posted])
        own = Arrived([((0, self._plan.keys.rows), k, v)])
        yield 0, self._steps[0], own
        for number in range(1, self._plan.ranks):
            posted, arrived = self._posted.pop(number)
            self._transfers.wait(posted)
            if number > 1:
                self._post(number + _BUFFERS - 1)
            yield number, self._steps[number], arrived
            self._free[(number - 1) % _BUFFERS] = self._transfers.event_of_current_stream()

    def _post(self, number: int) -> None:
        """Sends the rows that the rank `number` steps after this one reads, and receives those that this rank reads."""
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

    def _copies_for_others(self) -> dict[Range, tuple[Tensor, ...]]:
        """Returns contiguous copies of the rows that other ranks read."""
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
    """Returns the output and the LSE of a rank's rows of q over the keys of all ranks."""
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
    """Returns the gradients of a rank's rows of q, k and v, and its part of the gradients of captures by name."""
    layout, transfers = plan.spec.layout, Transfers(group, q.device)
    dq_sums, dkv_sums, captured = Sums(layout, q), Sums(layout, k, v), CaptureSums()
    returns = _GradientReturns(plan, rank, transfers, dkv_sums, k, v)
    for number, step, arrived in _Keys(plan, rank, transfers, k, v):
        step_gradients = returns.begin(number, step)
        for block in step.blocks:
            rows = (block.q, block.rows)
            d_rows, d_lse_rows, q_rows, out_rows = query_rows(block, layout, d_out, d_lse, q, out)
            keys = arrived.rows(layout, block.k, block.keys)
            read = (block, d_rows, d_lse_rows, q_rows, *keys, out_rows, lse.narrow(2, *rows))
            rooms = dq_sums.room(*rows), step_gradients.room(block.k, block.keys)
            into = (*(rooms[0] or [rows_like(q_rows)]), *(rooms[1] or map(rows_like, keys)))
            gradients, capture_gradients = programs.backward(*read, into=into)
            if rooms[0] is None:
                dq_sums.add(*rows, gradients[0])
            if rooms[1] is None:
                step_gradients.add(block.k, block.keys, gradients[1], gradients[2])
            captured.add(capture_gradients)
        returns.send(number, step)
    returns.finish()
    return [*dq_sums.rounded(), *dkv_sums.rounded()], captured.by_name


class _StepGradients:
    """The gradients of the rows that a step reads, in one buffer."""

    def __init__(self, layout: str, step: Step, like: tuple[Tensor, Tensor]) -> None:
        self._layout, self._adds, pieces = layout, step.adds, step.pieces
        size = elements(sum(map(_count, pieces)), like, layout)
        self.flat = like[0].new_zeros(size, dtype=torch.float32) if step.adds else like[0].new_empty(size)
        pairs = pairs_in(self.flat, map(_count, pieces), like, layout)
        self.pieces = [(piece, *pair) for piece, pair in zip(pieces, pairs, strict=True)]

    def room(self, first: int, count: int) -> Sequence[Tensor] | None:
        """Returns memory that a block may write its gradients to directly; None if several blocks add to a row."""
        return None if self._adds else Arrived(self.pieces).rows(self._layout, first, count)

    def add(self, first: int, count: int, dk: Tensor, dv: Tensor) -> None:
        """Adds the gradients of a block."""
        for total, gradient in zip(Arrived(self.pieces).rows(self._layout, first, count), (dk, dv), strict=True):
            total.add_(gradient)


class _GradientReturns:
    """Sends gradients of keys and values to their owners, and adds those that arrive."""

    def __init__(self, plan: Plan, rank: int, transfers: Transfers, sums: Sums, k: Tensor, v: Tensor) -> None:
        self._plan, self._rank, self._transfers, self._sums, self._like = plan, rank, transfers, sums, (k, v)
        self._layout = plan.spec.layout
        self._current: _StepGradients | None = None
        self._in_flight: list[tuple[list[Any], _StepGradients, _StepGradients]] = []

    def begin(self, number: int, step: Step) -> Any:
        """Returns what a step adds its gradients to: in step 0, with the rank's own rows, the sums themselves."""
        if number == 0:
            return self._sums
        if len(self._in_flight) == _RETURNS:
            self._add_oldest()
        self._current = _StepGradients(self._layout, step, self._like)
        return self._current

    def send(self, number: int, step: Step) -> None:
        """Sends the gradients of a step, and receives those of this rank's rows from the same step of another rank."""
        if self._current is None:
            return
        source = (self._rank + number) % self._plan.ranks
        theirs = _StepGradients(self._layout, self._plan.steps(source)[number], self._like)
        self._transfers.wait_for_current_stream()
        posted = self._transfers.post([(step.owner, self._current.flat)], [(source, theirs.flat)])
        self._transfers.launch_after(posted)
        self._in_flight.append((posted, self._current, theirs))

    def finish(self) -> None:
        """Adds all gradients that are still in flight."""
        while self._in_flight:
            self._add_oldest()

    def _add_oldest(self) -> None:
        posted, _, theirs = self._in_flight.pop(0)
        self._transfers.wait(posted)
        for (begin, end), dk, dv in theirs.pieces:
            self._sums.add(begin, end - begin, dk, dv)
