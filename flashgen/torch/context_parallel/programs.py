"""The kernels of a plan's blocks, called on rows of tensors: on a GPU as they stand, on the CPU by the emulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flashgen.analysis.intervals.evaluation import PARTIAL
from flashgen.attention.merging import merge_states
from flashgen.language.shards import SHARD_NUMBERS
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Numbers
from flashgen.ranks import Block, Plan
from flashgen.runtime.remembered import Remembered
from flashgen.torch import direct
from flashgen.torch.operators import seed_of
from flashgen.torch.table import Registered, registered
from flashgen.torch.tensors import Tensor, in_rows, to_array, to_tensor


def rows_of(tensor: Tensor, layout: str, first: int, count: int) -> Tensor:
    """Rows of q, k, v or an output along its length: itself, if these are all."""
    axis = 2 if layout == "bhsd" else 1
    return tensor if count == tensor.shape[axis] else tensor.narrow(axis, first, count)


def rows_like(tensor: Tensor) -> Tensor:
    """Memory for gradients of rows: contiguous rows, whatever the tensor's are, in the order of its heads and rows."""
    return torch.empty_like(in_rows(tensor))


def queries_of(
    block: Block, layout: str, d_out: Tensor, d_lse: Tensor | None, q: Tensor, out: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Of what a backward reads of a rank's rows of queries, those of a block."""
    d_rows, q_rows, out_rows = (rows_of(tensor, layout, block.q, block.rows) for tensor in (d_out, q, out))
    return d_rows, None if d_lse is None else d_lse.narrow(2, block.q, block.rows), q_rows, out_rows


class _Given(NamedTuple):
    """What computes a block, what it is given by name, and that as `direct` takes it where it is numbers alone."""

    entry: Registered
    named: dict[str, Any]
    numbers: Numbers | None


_GIVEN: Remembered[Any, _Given] = Remembered(1024)


class Programs:
    """The kernels of a call: one for blocks that the mask cuts, and one for those that it leaves whole.

    captures: tensors and numbers of the call, by name. head: where the first head of this rank stands in the whole.
    """

    def __init__(
        self,
        plan: Plan,
        captures: Mapping[str, Any],
        seed: Tensor | None,
        head: int,
        emulate: bool,
        deterministic: bool,
    ) -> None:
        self.plan, self.emulate, self._head, self._deterministic = plan, emulate, head, deterministic
        self._seed = {} if seed is None else {"seed": seed_of(self._entry(plan.masked), seed)}
        self._there = {name: self._brought(value) for name, value in captures.items()}

    def forward(self, block: Block, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        """Writes the output of a block to `out`, and gives its LSE. q, k, v: the rows of the block."""
        given = self._given(block)
        if self.emulate:
            arrays = [to_array(in_rows(tensor)) for tensor in (q, k, v)]
            made, lse = given.entry.on(None)(*arrays, return_lse=True, **given.named)
            out.copy_(to_tensor(made))
            return to_tensor(lse)
        attention = given.entry.on(q.get_device())
        into = (out, torch.empty(_lse_shape(self.plan.spec, q), dtype=torch.float32, device=q.device))
        if given.numbers is not None and direct.forward(attention, q, k, v, True, into, given.numbers):
            return into[1]
        q, k, v = in_rows(q), in_rows(k), in_rows(v)
        attention(q, k, v, return_lse=True, out=into, **given.named)
        if given.numbers is not None:
            direct.learn_forward(attention, q, k, v, into, given.numbers)
        return into[1]

    def backward(
        self,
        block: Block,
        d_out: Tensor,
        d_lse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        into: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Sequence[Tensor], dict[str, Tensor]]:
        """The gradients of q, k and v of a block, and those of captures by name. out, lse: of all keys.

        into: where those of q, k and v are written; None makes new ones.
        """
        given = self._given(block)
        lse, d_lse = lse.contiguous(), None if d_lse is None else d_lse.contiguous()
        if not self.emulate and given.numbers is not None:
            return self._plain_backward(given, (d_out, d_lse, q, k, v, out, lse), into), {}
        named = given.named if d_lse is None else given.named | {"d_lse": self._brought(d_lse)}
        d_out, q, k, v, out = (self._brought(in_rows(tensor)) for tensor in (d_out, q, k, v, out))
        attention = given.entry.on(None if self.emulate else q.get_device())
        names, there = [each.name for each in given.entry.learned], None
        if into is not None and not self.emulate:
            there = (*into, *(torch.empty_like(named[name], memory_format=torch.contiguous_format) for name in names))
        made = attention.backward(d_out, q, k, v, out, self._brought(lse), into=there, **named)
        tensors = [to_tensor(each) for each in made] if self.emulate else list(made)
        if into is not None and self.emulate:
            assert all(each.stride(-1) == 1 for each in into), "on a GPU kernels write there themselves"
            tensors[:3] = [mine.copy_(each) for mine, each in zip(into, tensors[:3], strict=True)]
        return tensors[:3], dict(zip(names, tensors[3:], strict=True))

    def _plain_backward(
        self, given: _Given, read: direct.Read, into: tuple[Tensor, Tensor, Tensor] | None
    ) -> Sequence[Tensor]:
        """On a GPU, where nothing is captured but numbers."""
        attention = given.entry.on(read[2].get_device())
        made = direct.backward(attention, read, into, given.numbers or direct.NO_NUMBERS)
        if made is None:
            d_out, d_lse, q, k, v, out, lse = read
            d_out, q, k, v, out = in_rows(d_out), in_rows(q), in_rows(k), in_rows(v), in_rows(out)
            read, named = (d_out, d_lse, q, k, v, out, lse), given.named | {"d_lse": d_lse}
            made = attention.backward(d_out, q, k, v, out, lse, into=into, **named)
            direct.learn_backward(attention, read, into, given.numbers or direct.NO_NUMBERS)
        return made

    def merged(self, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The output and the LSE over the keys of all parts."""
        layout = self.plan.spec.layout
        if not self.emulate:
            return tuple(merge_states(outs, lses, layout=layout))
        arrays = [[to_array(tensor) for tensor in tensors] for tensors in (outs, lses)]
        return tuple(map(to_tensor, merge_states(*arrays, layout=layout, emulate=True)))  # type: ignore[return-value]

    def _given(self, block: Block) -> _Given:
        """What computes a block, and what it is given beside tensors: remembered, if it is the same in each call."""
        if self._there or self._seed:
            return self._made(block)
        known = (self.plan, block, self._head, self.emulate, self._deterministic)
        return _GIVEN.get(known) or _GIVEN.get_or_make(known, lambda: self._made(block))

    def _made(self, block: Block) -> _Given:
        entry = self._entry(self.plan.masked if block.kind == PARTIAL else self.plan.unmasked)
        plan = self.plan
        places = {
            "shard_b": 0,
            "shard_h": self._head,
            "shard_q": block.shard_q,
            "shard_k": block.shard_k,
            "whole_q": plan.queries.length,
            "whole_k": plan.keys.length,
        }
        given = self._there | (places if entry.spec.sharded else {})
        named = {each.name: given[each.name] for each in entry.spec.captures}
        if self.emulate or self._seed or any(each.ndim for each in entry.spec.captures):
            return _Given(entry, named | self._seed, None)
        return _Given(entry, named, direct.numbers_of(entry.on(torch.cuda.current_device()), named))

    def _entry(self, spec: AttentionSpec) -> Registered:
        return registered(spec, emulate=self.emulate, deterministic=self._deterministic)

    def _brought(self, value: Any) -> Any:
        return to_array(value) if self.emulate and isinstance(value, torch.Tensor) else value


def captured_names(spec: AttentionSpec) -> list[str]:
    """The captures of a spec that are no place of a shard, and not its sinks, in their order."""
    sink = spec.sink.name if spec.sink else None
    return [each.name for each in spec.captures if each.name not in SHARD_NUMBERS and each.name != sink]


def _lse_shape(spec: AttentionSpec, q: Tensor) -> tuple[int, ...]:
    batch, second, third, _ = q.shape
    return (batch, second, third) if spec.layout == "bhsd" else (batch, third, second)
