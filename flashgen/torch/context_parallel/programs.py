"""The kernels of a plan's blocks, called on rows of tensors: on a GPU as they stand, on the CPU by the emulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashgen.analysis.intervals.evaluation import PARTIAL
from flashgen.attention.merging import merge_states
from flashgen.language.shards import PLACES
from flashgen.language.spec import AttentionSpec
from flashgen.ranks import Block, Plan
from flashgen.torch.operators import seed_of
from flashgen.torch.table import Registered, registered
from flashgen.torch.tensors import Tensor, in_rows, to_array, to_tensor


def rows_of(tensor: Tensor, layout: str, first: int, count: int) -> Tensor:
    """Rows of q, k, v or an output along its length."""
    return tensor.narrow(2 if layout == "bhsd" else 1, first, count)


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
        self.plan, self.emulate, self._captures, self._head = plan, emulate, captures, head
        self._masked = registered(plan.masked, emulate=emulate, deterministic=deterministic)
        self._unmasked = registered(plan.unmasked, emulate=emulate, deterministic=deterministic)
        self._seed = {} if seed is None else {"seed": seed_of(self._masked, seed)}
        self._there = {name: self._brought(value) for name, value in captures.items()}

    def forward(self, block: Block, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        """Writes the output of a block to `out`, and gives its LSE. q, k, v: the rows of the block."""
        entry, named = self._of(block)
        q, k, v = (self._brought(in_rows(tensor)) for tensor in (q, k, v))
        if self.emulate:
            made, lse = entry.on(None)(q, k, v, return_lse=True, **named)
            out.copy_(to_tensor(made))
            return to_tensor(lse)
        lse = torch.empty(_lse_shape(self.plan.spec, q), dtype=torch.float32, device=q.device)
        entry.on(q.get_device())(q, k, v, return_lse=True, out=(out, lse), **named)
        return lse

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
    ) -> tuple[Sequence[Tensor], dict[str, Tensor]]:
        """The gradients of q, k and v of a block, and those of captures by name. out, lse: of all keys."""
        entry, named = self._of(block)
        if d_lse is not None:
            named["d_lse"] = self._brought(d_lse.contiguous())
        d_out, q, k, v, out = (self._brought(in_rows(tensor)) for tensor in (d_out, q, k, v, out))
        attention = entry.on(None if self.emulate else q.get_device())
        made = attention.backward(d_out, q, k, v, out, self._brought(lse.contiguous()), **named)
        tensors = [to_tensor(each) for each in made] if self.emulate else list(made)
        return tensors[:3], dict(zip([each.name for each in entry.learned], tensors[3:], strict=True))

    def merged(self, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The output and the LSE over the keys of all parts."""
        layout = self.plan.spec.layout
        if not self.emulate:
            return tuple(merge_states(outs, lses, layout=layout))
        arrays = [[to_array(tensor) for tensor in tensors] for tensors in (outs, lses)]
        return tuple(map(to_tensor, merge_states(*arrays, layout=layout, emulate=True)))  # type: ignore[return-value]

    def _of(self, block: Block) -> tuple[Registered, dict[str, Any]]:
        """What computes a block, and what it is given beside tensors."""
        entry = self._masked if block.kind == PARTIAL else self._unmasked
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
        names = [each.name for each in entry.spec.captures]
        return entry, {name: given[name] for name in names} | self._seed

    def _brought(self, value: Any) -> Any:
        return to_array(value) if self.emulate and isinstance(value, torch.Tensor) else value


def captured_names(spec: AttentionSpec) -> list[str]:
    """The captures of a spec that are no place of a shard, and not its sinks, in their order."""
    sink = spec.sink.name if spec.sink else None
    return [each.name for each in spec.captures if each.name not in PLACES and each.name != sink]


def _lse_shape(spec: AttentionSpec, q: Tensor) -> tuple[int, ...]:
    batch, second, third, _ = q.shape
    return (batch, second, third) if spec.layout == "bhsd" else (batch, third, second)
