"""Outputs of blocks, until they are merged; gradients of blocks, summed in float32."""

from __future__ import annotations

import torch

from flashgen.ranks import Block
from flashgen.torch.context_parallel.programs import Programs, rows_of
from flashgen.torch.tensors import Tensor

_MOST_SLOTS = 8  # held at once: then they become one


class Outputs:
    """What blocks gave for rows of q. A slot holds an output and an LSE of all rows, of blocks that share none.

    Rows of a slot that no block has written have an LSE of -inf, so that what stands there does not count. All slots
    are merged by one kernel, in float32, which reads each once: to merge block by block would read and write a sum of
    all rows for each.
    """

    def __init__(self, programs: Programs, q: Tensor) -> None:
        spec = programs.plan.spec
        self._programs, self._layout = programs, spec.layout
        self._shape = (*q.shape[:-1], spec.value_dim)
        self._like = q
        self._slots: list[tuple[Tensor, Tensor, list[tuple[int, int]]]] = []

    def add(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Computes a block of all rows q, and rows k and v that are the block's."""
        out, lse = self._slot(block.q, block.q + block.rows)
        rows = rows_of(out, self._layout, block.q, block.rows)
        made = self._programs.forward(block, rows_of(q, self._layout, block.q, block.rows), k, v, rows)
        lse.narrow(2, block.q, block.rows).copy_(made)

    def result(self) -> tuple[Tensor, Tensor]:
        """The output and the LSE over all blocks: 0 and -inf where none was."""
        if len(self._slots) > 1:
            self._merge()
        if not self._slots:
            out, lse = self._empty()
            return out.zero_(), lse
        out, lse, taken = self._slots[0]
        first = 0
        for start, end in [*sorted(taken), (lse.shape[2], lse.shape[2])]:
            if start > first:
                rows_of(out, self._layout, first, start - first).zero_()
            first = max(first, end)
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
        self._slots = [(out, lse, [(0, lse.shape[2])])]

    def _empty(self) -> tuple[Tensor, Tensor]:
        batch, second, third, _ = self._shape
        heads, rows = (second, third) if self._layout == "bhsd" else (third, second)
        lse = torch.full((batch, heads, rows), -torch.inf, dtype=torch.float32, device=self._like.device)
        return self._like.new_empty(self._shape), lse


class Sums:
    """Gradients of rows, summed in float32: those of q, or of k and v, which `like` are."""

    def __init__(self, layout: str, *like: Tensor) -> None:
        self._layout, self._like = layout, like
        self._rows = like[0].shape[2 if layout == "bhsd" else 1]
        self._made: list[Tensor] | None = None

    def add(self, first: int, count: int, *gradients: Tensor) -> None:
        """Adds gradients of rows. The first of all rows are the sums so far, without zeros to be added to."""
        if self._made is None and count == self._rows:
            self._made = [gradient.to(torch.float32, copy=True) for gradient in gradients]
            return
        for total, gradient in zip(self.tensors, gradients, strict=True):
            rows_of(total, self._layout, first, count).add_(gradient)

    @property
    def tensors(self) -> list[Tensor]:
        """The sums."""
        if self._made is None:
            self._made = [torch.zeros(each.shape, dtype=torch.float32, device=each.device) for each in self._like]
        return self._made


class CaptureSums:
    """Gradients of captures by name, of all blocks, in float32."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}

    def add(self, gradients: dict[str, Tensor]) -> None:
        """Adds the gradients that a block gave."""
        for name, gradient in gradients.items():
            known = self.by_name.get(name)
            self.by_name[name] = gradient.float() if known is None else known.add_(gradient)
