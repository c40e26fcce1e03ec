"""Partial results of blocks: outputs that are merged by their LSE, and gradients that are summed in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashgen.language.batch_layout import BATCH_LAYOUTS
from flashgen.ranks import Block
from flashgen.ranks.blocks import gaps, joined_ranges
from flashgen.torch.context_parallel.programs import Programs, rows_like, rows_of
from flashgen.torch.tensors import Tensor

_MAX_SLOTS = 8  # when all are in use, they are merged into one
_BOUNDARY = 4  # a block with at most 1 / 4 of the rows is a boundary block: only its own rows are merged or added

Range = tuple[int, int]


class Outputs:
    """Outputs of blocks for rows of q. A slot holds an output and an LSE of all rows, from blocks with distinct rows.

    Rows of a slot that no block has written have an LSE of -inf and do not count. One kernel merges all slots in
    float32 and reads each once, whereas merging block by block would read and write all rows for each block. Boundary
    blocks, which windows have, are merged into their own rows afterwards.
    """

    def __init__(self, programs: Programs, q: Tensor) -> None:
        spec = programs.plan.spec
        self._programs, self._layout = programs, spec.layout
        self._shape = (*q.shape[:-1], spec.value_dim)
        self._rows = q.shape[spec.batch_layout.rows_axis]
        self._like = q
        self._slots: list[tuple[Tensor, Tensor, list[Range]]] = []
        self._boundaries: list[tuple[Range, Tensor, Tensor]] = []

    def add(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Computes a block. q: all rows. k, v: the rows of the block."""
        own = rows_of(q, self._layout, block.q, block.rows)
        if block.rows * _BOUNDARY <= self._rows:
            out = own.new_empty((*own.shape[:-1], self._shape[-1]))
            block_lse = self._programs.forward(block, own, k, v, out)
            self._boundaries.append(((block.q, block.q + block.rows), out, block_lse))
            return
        out, lse = self._slot(block.q, block.q + block.rows)
        block_lse = self._programs.forward(block, own, k, v, rows_of(out, self._layout, block.q, block.rows))
        lse.narrow(2, block.q, block.rows).copy_(block_lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """Returns the output and the LSE over all blocks: 0 and -inf in rows without a block."""
        if len(self._slots) > 1:
            self._merge()
        if not self._slots:
            self._slots.append((*self._empty(), []))
        out, lse, taken = self._slots[0]
        for (first, end), part, state in self._boundaries:
            rows = rows_of(out, self._layout, first, end - first)
            states = lse.narrow(2, first, end - first)
            merged = self._programs.merged([rows.contiguous(), part], [states.contiguous(), state])
            rows.copy_(merged[0])
            states.copy_(merged[1])
            taken.append((first, end))
        for first, end in gaps(taken, self._rows):
            rows_of(out, self._layout, first, end - first).zero_()
        return out, lse

    def _slot(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        for out, lse, taken in self._slots:
            if all(end <= other_first or first >= other_end for other_first, other_end in taken):
                taken.append((first, end))
                return out, lse
        if len(self._slots) == _MAX_SLOTS:
            self._merge()
        out, lse = self._empty()
        self._slots.append((out, lse, [(first, end)]))
        return out, lse

    def _merge(self) -> None:
        out, lse = self._programs.merged([each[0] for each in self._slots], [each[1] for each in self._slots])
        self._slots = [(out, lse, [(0, self._rows)])]

    def _empty(self) -> tuple[Tensor, Tensor]:
        shape = BATCH_LAYOUTS[self._layout].lse_shape(self._shape)
        lse = torch.full(shape, -torch.inf, dtype=torch.float32, device=self._like.device)
        return self._like.new_empty(self._shape), lse


class Sums:
    """Sums of the gradients of rows in float32. like: q, or k and v.

    A float32 buffer is allocated only if some rows have three or more gradients. The first gradient of a row is kept as
    it is, and the second is added when results are rounded, which rounds once, as a sum in float32 would. The gradients
    of boundary blocks, which windows have, need no buffer either.
    """

    def __init__(self, layout: str, *like: Tensor) -> None:
        self._layout, self._like = layout, like
        self._rows = like[0].shape[BATCH_LAYOUTS[layout].rows_axis]
        self._first: Sequence[Tensor] | None = None
        self._written: list[Range] = []  # the rows of `_first` that blocks have written
        self._added: list[tuple[Range, Sequence[Tensor]]] = []
        self._sums: list[Tensor] | None = None

    def room(self, first: int, count: int) -> list[Tensor] | None:
        """Returns memory that a block may write its gradients to directly; None if the rows already have gradients."""
        if self._sums is not None or any(first < end and begin < first + count for begin, end in self._written):
            return None
        if self._first is None:
            self._first = [rows_like(each) for each in self._like]
        self._written.append((first, first + count))
        return [rows_of(each, self._layout, first, count) for each in self._first]

    def add(self, first: int, count: int, *gradients: Tensor) -> None:
        """Adds gradients of `count` rows from row `first` on."""
        if self._sums is None and self._first is None and count == self._rows:
            self._first, self._written = gradients, [(0, count)]
        elif self._sums is None and self._first is not None and self._may_wait(first, count):
            self._added.append(((first, first + count), gradients))
        else:
            self._add(self.tensors, first, count, gradients)

    def _may_wait(self, first: int, count: int) -> bool:
        """Whether these are gradients of a boundary block, or the second gradients of all their rows."""
        return count * _BOUNDARY <= self._rows or not any(
            first < end and begin < first + count for (begin, end), _ in self._added
        )

    @property
    def tensors(self) -> list[Tensor]:
        """The sums in float32."""
        if self._sums is None:
            begin = self._complete() or [torch.zeros((), device=each.device) for each in self._like]
            self._sums = [
                torch.empty(each.shape, dtype=torch.float32, device=each.device).copy_(start)
                for each, start in zip(self._like, begin, strict=True)
            ]
            for (first, end), gradients in self._added:
                self._add(self._sums, first, end - first, gradients)
            self._first, self._added = None, []  # frees their memory
        return self._sums

    def rounded(self) -> list[Tensor]:
        """Returns the sums in the dtypes of `like`, each rounded once."""
        totals = self._complete() if self._sums is None else None
        if totals is None:
            totals = self.tensors
        else:
            self._add_second(totals)
        return [total.to(each.dtype) for total, each in zip(totals, self._like, strict=True)]

    def _complete(self) -> Sequence[Tensor] | None:
        """Returns the first gradients with zeros in rows without any; None if there are none."""
        for each in self._first or ():
            for first, end in gaps(self._written, self._rows):
                rows_of(each, self._layout, first, end - first).zero_()
        return self._first

    def _add_second(self, totals: Sequence[Tensor]) -> None:
        """Adds the second gradients. Rows with several of them are summed in float32, so that each is rounded once."""
        shared = []
        for number, ((first, end), gradients) in enumerate(self._added):
            others = (rows for other, (rows, _) in enumerate(self._added) if other != number)
            if any(first < last and begin < end for begin, last in others):
                shared.append(((first, end), gradients))
                continue
            for each, gradient in zip(totals, gradients, strict=True):
                rows_of(each, self._layout, first, end - first).add_(gradient)
        for first, end in joined_ranges(rows for rows, _ in shared):
            several = [rows_of(each, self._layout, first, end - first) for each in totals]
            sums = [each.float() for each in several]
            for (begin, last), gradients in shared:
                if first <= begin < end:
                    self._add(sums, begin - first, last - begin, gradients)
            for each, total in zip(several, sums, strict=True):
                each.copy_(total)

    def _add(self, sums: Sequence[Tensor], first: int, count: int, gradients: Sequence[Tensor]) -> None:
        for total, gradient in zip(sums, gradients, strict=True):
            rows_of(total, self._layout, first, count).add_(gradient)


class CaptureSums:
    """Sums of the gradients of captures over all blocks, by name, in float32."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}

    def add(self, gradients: dict[str, Tensor]) -> None:
        """Adds the gradients of a block."""
        for name, gradient in gradients.items():
            total = self.by_name.get(name)
            self.by_name[name] = gradient.float() if total is None else total.add_(gradient)
