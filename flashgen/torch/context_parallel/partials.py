"""Outputs of blocks, until they are merged; gradients of blocks, summed in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashgen.ranks import Block
from flashgen.ranks.blocks import gaps, joined_ranges
from flashgen.torch.context_parallel.programs import Programs, rows_like, rows_of
from flashgen.torch.tensors import Tensor

_MOST_SLOTS = 8  # held at once: then they become one
_RIM = 4  # a block of at most a quarter of the rows is a rim, whose rows alone are merged or added to

Range = tuple[int, int]


class Outputs:
    """What blocks gave for rows of q. A slot holds an output and an LSE of all rows, of blocks that share none.

    Rows of a slot that no block has written have an LSE of -inf, so that what stands there does not count. All slots
    are merged by one kernel, in float32, which reads each once: to merge block by block would read and write a sum of
    all rows for each. Rims, as windows have them, are merged into their rows afterwards.
    """

    def __init__(self, programs: Programs, q: Tensor) -> None:
        spec = programs.plan.spec
        self._programs, self._layout = programs, spec.layout
        self._shape = (*q.shape[:-1], spec.value_dim)
        self._rows = q.shape[2 if spec.layout == "bhsd" else 1]
        self._like = q
        self._slots: list[tuple[Tensor, Tensor, list[Range]]] = []
        self._rims: list[tuple[Range, Tensor, Tensor]] = []

    def add(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Computes a block of all rows q, and rows k and v that are the block's."""
        own = rows_of(q, self._layout, block.q, block.rows)
        if block.rows * _RIM <= self._rows:
            out = own.new_empty((*own.shape[:-1], self._shape[-1]))
            made = self._programs.forward(block, own, k, v, out)
            self._rims.append(((block.q, block.q + block.rows), out, made))
            return
        out, lse = self._slot(block.q, block.q + block.rows)
        made = self._programs.forward(block, own, k, v, rows_of(out, self._layout, block.q, block.rows))
        lse.narrow(2, block.q, block.rows).copy_(made)

    def result(self) -> tuple[Tensor, Tensor]:
        """The output and the LSE over all blocks: 0 and -inf where none was."""
        if len(self._slots) > 1:
            self._merge()
        if not self._slots:
            self._slots.append((*self._empty(), []))
        out, lse, taken = self._slots[0]
        for (first, end), part, state in self._rims:
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
        if len(self._slots) == _MOST_SLOTS:
            self._merge()
        out, lse = self._empty()
        self._slots.append((out, lse, [(first, end)]))
        return out, lse

    def _merge(self) -> None:
        out, lse = self._programs.merged([each[0] for each in self._slots], [each[1] for each in self._slots])
        self._slots = [(out, lse, [(0, self._rows)])]

    def _empty(self) -> tuple[Tensor, Tensor]:
        batch, second, third, _ = self._shape
        heads = second if self._layout == "bhsd" else third
        shape = (batch, heads, self._rows)
        lse = torch.full(shape, -torch.inf, dtype=torch.float32, device=self._like.device)
        return self._like.new_empty(self._shape), lse


class Sums:
    """Gradients of rows, summed in float32: those of q, or of k and v, which `like` are.

    First gradients of rows are kept as they came, and second ones until a third comes: two are added when they are
    rounded, by the sum's own rounding, so that no sum in float32 is made of them. Nor is one of rims, as windows have.
    """

    def __init__(self, layout: str, *like: Tensor) -> None:
        self._layout, self._like = layout, like
        self._rows = like[0].shape[2 if layout == "bhsd" else 1]
        self._first: Sequence[Tensor] | None = None
        self._written: list[Range] = []  # the rows of these that a block has given
        self._added: list[tuple[Range, Sequence[Tensor]]] = []
        self._sums: list[Tensor] | None = None

    def room(self, first: int, count: int) -> list[Tensor] | None:
        """Where a block writes gradients of rows, in place of having them added; None if others did before it."""
        if self._sums is not None or any(first < end and begin < first + count for begin, end in self._written):
            return None
        if self._first is None:
            self._first = [rows_like(each) for each in self._like]
        self._written.append((first, first + count))
        return [rows_of(each, self._layout, first, count) for each in self._first]

    def add(self, first: int, count: int, *gradients: Tensor) -> None:
        """Adds gradients of rows."""
        if self._sums is None and self._first is None and count == self._rows:
            self._first, self._written = gradients, [(0, count)]
        elif self._sums is None and self._first is not None and self._may_wait(first, count):
            self._added.append(((first, first + count), gradients))
        else:
            self._add(self.tensors, first, count, gradients)

    def _may_wait(self, first: int, count: int) -> bool:
        """Whether these gradients are a rim's, or the second ones of all their rows."""
        return count * _RIM <= self._rows or not any(
            first < end and begin < first + count for (begin, end), _ in self._added
        )

    @property
    def tensors(self) -> list[Tensor]:
        """The sums, float32."""
        if self._sums is None:
            begin = self._complete() or [torch.zeros((), device=each.device) for each in self._like]
            self._sums = [
                torch.empty(each.shape, dtype=torch.float32, device=each.device).copy_(start)
                for each, start in zip(self._like, begin, strict=True)
            ]
            for (first, end), gradients in self._added:
                self._add(self._sums, first, end - first, gradients)
            self._first, self._added = None, []  # whose memory is needed no more
        return self._sums

    def rounded(self) -> list[Tensor]:
        """The sums in the dtype of what they are gradients of, each rounded once."""
        made = self._complete() if self._sums is None else None
        if made is None:
            made = self.tensors
        else:
            self._add_second(made)
        return [total.to(each.dtype) for total, each in zip(made, self._like, strict=True)]

    def _complete(self) -> Sequence[Tensor] | None:
        """First gradients, if there are any, with zeros where none was given."""
        for each in self._first or ():
            for first, end in gaps(self._written, self._rows):
                rows_of(each, self._layout, first, end - first).zero_()
        return self._first

    def _add_second(self, made: Sequence[Tensor]) -> None:
        """Adds what came second, and rounds each row once: where that is several gradients of a row, by float32."""
        shared = []
        for number, ((first, end), gradients) in enumerate(self._added):
            others = (rows for other, (rows, _) in enumerate(self._added) if other != number)
            if any(first < last and begin < end for begin, last in others):
                shared.append(((first, end), gradients))
                continue
            for each, gradient in zip(made, gradients, strict=True):
                rows_of(each, self._layout, first, end - first).add_(gradient)
        for first, end in joined_ranges(rows for rows, _ in shared):
            several = [rows_of(each, self._layout, first, end - first) for each in made]
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
    """Gradients of captures by name, of all blocks, in float32."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}

    def add(self, gradients: dict[str, Tensor]) -> None:
        """Adds the gradients that a block gave."""
        for name, gradient in gradients.items():
            known = self.by_name.get(name)
            self.by_name[name] = gradient.float() if known is None else known.add_(gradient)
