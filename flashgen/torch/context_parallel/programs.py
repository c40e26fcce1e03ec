"""`Programs`: runs the kernels of a plan's blocks on rows of tensors, on a GPU or on the emulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flashgen.analysis.intervals.evaluation import PARTIAL
from flashgen.attention.merging import merge_states
from flashgen.language.batch_layout import BATCH_LAYOUTS
from flashgen.language.shards import SHARD_NUMBERS
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import ScalarArguments
from flashgen.ranks import Block, Plan
from flashgen.runtime.caching import Cache
from flashgen.torch import direct
from flashgen.torch.operators import seed_of
from flashgen.torch.table import Registered, registered
from flashgen.torch.tensors import Tensor, in_rows, to_array, to_tensor


def rows_of(tensor: Tensor, layout: str, first: int, count: int) -> Tensor:
    """Returns rows of q, k, v or an output along its length: a view, or the tensor if these are all rows."""
    axis = BATCH_LAYOUTS[layout].rows_axis
    return tensor if count == tensor.shape[axis] else tensor.narrow(axis, first, count)


def rows_like(tensor: Tensor) -> Tensor:
    """Returns memory for gradients, with contiguous rows and the tensor's order of heads and rows."""
    return torch.empty_like(in_rows(tensor))


def query_rows(
    block: Block, layout: str, d_out: Tensor, d_lse: Tensor | None, q: Tensor, out: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Returns the rows of a block of d_out, d_lse, q and out."""
    d_rows, q_rows, out_rows = (rows_of(tensor, layout, block.q, block.rows) for tensor in (d_out, q, out))
    return d_rows, None if d_lse is None else d_lse.narrow(2, block.q, block.rows), q_rows, out_rows


class _BlockCall(NamedTuple):
    """The entry that computes a block, its named arguments, and these for `direct` if all are numbers."""

    entry: Registered
    named: dict[str, Any]
    numbers: ScalarArguments | None


_BLOCK_CALLS: Cache[Any, _BlockCall] = Cache(1024)


class Programs:
    """The kernels of a call: one for blocks that need the mask, and one without mask code for full blocks.

    captures: tensors and numbers of the call by name. head: the index of this rank's first head among all heads.
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
        self._captures = {name: self._converted(value) for name, value in captures.items()}

    def forward(self, block: Block, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        """Writes the output of a block to `out` and returns its LSE. q, k, v: the rows of the block."""
        call = self._block_call(block)
        if self.emulate:
            arrays = [to_array(in_rows(tensor)) for tensor in (q, k, v)]
            result, lse = call.entry.on(None)(*arrays, return_lse=True, **call.named)
            out.copy_(to_tensor(result))
            return to_tensor(lse)
        attention = call.entry.on(q.get_device())
        into = (out, torch.empty(self.plan.spec.batch_layout.lse_shape(q.shape), dtype=torch.float32, device=q.device))
        if call.numbers is not None and direct.forward(attention, q, k, v, True, into, call.numbers):
            return into[1]
        q, k, v = in_rows(q), in_rows(k), in_rows(v)
        attention(q, k, v, return_lse=True, out=into, **call.named)
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
        """Returns the gradients of q, k and v of a block, and those of captures by name.

        out, lse: the merged results over all keys. into: tensors that gradients of q, k and v are written to, or None.
        """
        call = self._block_call(block)
        lse, d_lse = lse.contiguous(), None if d_lse is None else d_lse.contiguous()
        if not self.emulate and call.numbers is not None:
            return self._plain_backward(call, (d_out, d_lse, q, k, v, out, lse), into), {}
        named = call.named if d_lse is None else call.named | {"d_lse": self._converted(d_lse)}
        d_out, q, k, v, out = (self._converted(in_rows(tensor)) for tensor in (d_out, q, k, v, out))
        attention = call.entry.on(None if self.emulate else q.get_device())
        names, into_all = [each.name for each in call.entry.learned], None
        if into is not None and not self.emulate:
            captured = (torch.empty_like(named[name], memory_format=torch.contiguous_format) for name in names)
            into_all = (*into, *captured)
        results = attention.backward(d_out, q, k, v, out, self._converted(lse), into=into_all, **named)
        tensors = [to_tensor(each) for each in results] if self.emulate else list(results)
        if into is not None and self.emulate:
            assert all(each.stride(-1) == 1 for each in into), "on a GPU kernels write there themselves"
            tensors[:3] = [mine.copy_(each) for mine, each in zip(into, tensors[:3], strict=True)]
        return tensors[:3], dict(zip(names, tensors[3:], strict=True))

    def _plain_backward(
        self, call: _BlockCall, read: direct.Read, into: tuple[Tensor, Tensor, Tensor] | None
    ) -> Sequence[Tensor]:
        """Runs the backward on a GPU, with no captures but numbers."""
        attention = call.entry.on(read[2].get_device())
        results = direct.backward(attention, read, into, call.numbers or direct.NO_NUMBERS)
        if results is None:
            d_out, d_lse, q, k, v, out, lse = read
            d_out, q, k, v, out = in_rows(d_out), in_rows(q), in_rows(k), in_rows(v), in_rows(out)
            results = attention.backward(d_out, q, k, v, out, lse, d_lse=d_lse, into=into, **call.named)
        return results

    def merged(self, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Merges partial outputs and LSEs."""
        layout = self.plan.spec.layout
        if not self.emulate:
            return tuple(merge_states(outs, lses, layout=layout))
        arrays = [[to_array(tensor) for tensor in tensors] for tensors in (outs, lses)]
        return tuple(map(to_tensor, merge_states(*arrays, layout=layout, emulate=True)))  # type: ignore[return-value]

    def _block_call(self, block: Block) -> _BlockCall:
        """Returns the call of a block. It is cached if it does not depend on captures or a seed."""
        if self._captures or self._seed:
            return self._build_block_call(block)
        key = (self.plan, block, self._head, self.emulate, self._deterministic)
        return _BLOCK_CALLS.get(key) or _BLOCK_CALLS.get_or_make(key, lambda: self._build_block_call(block))

    def _build_block_call(self, block: Block) -> _BlockCall:
        entry = self._entry(self.plan.masked if block.kind == PARTIAL else self.plan.unmasked)
        plan = self.plan
        positions = {
            "shard_b": 0,
            "shard_h": self._head,
            "shard_q": block.shard_q,
            "shard_k": block.shard_k,
            "whole_q": plan.queries.length,
            "whole_k": plan.keys.length,
        }
        given = self._captures | (positions if entry.spec.sharded else {})
        named = {each.name: given[each.name] for each in entry.spec.captures}
        if self.emulate or self._seed or any(each.ndim for each in entry.spec.captures):
            return _BlockCall(entry, named | self._seed, None)
        return _BlockCall(entry, named, direct.numbers_of(entry.on(torch.cuda.current_device()), named))

    def _entry(self, spec: AttentionSpec) -> Registered:
        return registered(spec, emulate=self.emulate, deterministic=self._deterministic)

    def _converted(self, value: Any) -> Any:
        return to_array(value) if self.emulate and isinstance(value, torch.Tensor) else value


def captured_names(spec: AttentionSpec) -> list[str]:
    """Returns the names of captures in order, without the sink and the positions of shards."""
    sink = spec.sink.name if spec.sink else None
    return [each.name for each in spec.captures if each.name not in SHARD_NUMBERS and each.name != sink]
