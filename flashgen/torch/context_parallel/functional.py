"""`attention` of a sequence that is spread over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from flashgen.errors import ArgumentError
from flashgen.language.spec import AttentionSpec
from flashgen.ranks import SCHEMES, Layout, Plan, Sizes, plan_of
from flashgen.ranks.plan import replace_fields
from flashgen.runtime.remembered import Remembered
from flashgen.torch import autocast
from flashgen.torch.arguments import all_captures, named_captures
from flashgen.torch.context_parallel.agreement import agree
from flashgen.torch.context_parallel.distributed_tensors import taken_apart
from flashgen.torch.context_parallel.exchange import Exchange, to_heads, to_rows
from flashgen.torch.context_parallel.groups import Ranks, ranks_of
from flashgen.torch.context_parallel.inner import Call, Inner
from flashgen.torch.context_parallel.programs import captured_names
from flashgen.torch.context_parallel.replicated import replicated
from flashgen.torch.context_parallel.rerouting import rerouted, returned, route
from flashgen.torch.functional import is_deterministic
from flashgen.torch.table import is_emulated, outside_of_graphs, registered
from flashgen.torch.tensors import Tensor, bound_tensor, check_call

_PLANS: Remembered[Any, Plan] = Remembered(256)
_SEEDS = 2**62


@outside_of_graphs("context parallelism sends messages between ranks")
def attention(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    scheme: str = "ring",
    shards: str | Tensor = "zigzag",
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    emulate: bool | None = None,
    deterministic: bool | None = None,
    reduce_captures: bool = True,
    **captures: Any,
) -> Any:
    """Attention of a sequence of which each rank has a shard, differentiable; on P ranks what it is on one.

    Masks, scores, captures and dropout are functions of positions in the whole sequence. All ranks of the group call it
    alike, with as many rows each.

    Args:
        spec: an AttentionSpec of whole sequences.
        q, k, v: this rank's rows, (batch, heads, length / ranks, dim) or "bshd", as `shard` gives them; or DTensors
            that are sharded along the length, whose mesh is the group.
        group: a ProcessGroup or DeviceMesh; None is the default group. "ulysses_ring" takes a mesh of two dimensions,
            or a pair of groups: the ring, and those who exchange heads.
        scheme: "ring" sends keys and values from rank to rank while blocks are computed, and only those that are read;
            "all_gather" gathers them first; "ulysses" exchanges heads for rows, and computes whole sequences of some
            heads; "ulysses_ring" exchanges heads inside of a node, with a ring across.
        shards: which positions a rank has: "zigzag", which balances causal masks, "plain", or an integer tensor of the
            positions of this rank's rows, in any order.
        seed: of the dropout, the same on all ranks; None draws one on the first.
        return_lse: give the LSE of this rank's rows, float32 (batch, heads, rows), too; it is differentiable.
        emulate, deterministic: as of `flashgen.torch.attention`.
        reduce_captures: sum gradients of captured arrays and of sinks over the ranks, which all have the same arrays.
            False leaves to each its share, for what reduces gradients of parameters anyway.
        captures: of the whole sequence, the same on all ranks: they are indexed by positions, heads and batch as a
            whole.

    Returns the output of this rank's rows, or a pair with the LSE. Raises ArgumentError where something does not fit,
    or ranks do not make the same call; PeerError, which names it, where a rank does not answer.
    """
    if not isinstance(spec, AttentionSpec):
        raise ArgumentError(f"spec={spec!r}: give a flashgen.AttentionSpec")
    if scheme not in SCHEMES:
        raise ArgumentError(f"scheme={scheme!r} must be one of {', '.join(SCHEMES)}")
    if spec.is_ragged or spec.page_size:
        spec.shard()  # says why it has none
    q, k, v, group, put_together = taken_apart(spec, q, k, v, group)
    emulate, ranks = is_emulated(emulate), ranks_of(group, scheme)
    entry = registered(spec, emulate=emulate)
    if torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"):
        q, k, v = autocast.cast(entry, q, k, v)
    if "num_splits" in captures:
        raise ArgumentError(f"num_splits={captures['num_splits']!r}: no rank splits keys by it; leave it out")
    bound = {name: bound_tensor(array, q.device) for name, array in spec.bound.items()}
    arrays, integers, floats = all_captures(entry, captures, bound)
    check_call(entry, q, k, v, arrays, seed if isinstance(seed, torch.Tensor) else None)
    named = named_captures(entry, arrays, integers, floats)
    if reduce_captures:
        named |= {each.name: replicated(named[each.name], ranks.groups) for each in entry.learned}
    how = _How(spec, ranks, scheme, shards, q, k, emulate, is_deterministic(deterministic))
    out, *lse = how.run(q, k, v, named, _common_seed(spec, seed, ranks, q.device), return_lse)
    return (put_together(out), *lse) if return_lse else put_together(out)


class _How:
    """A call but for its tensors: layouts, plan, and the way there and back."""

    def __init__(
        self,
        spec: AttentionSpec,
        ranks: Ranks,
        scheme: str,
        shards: str | Tensor,
        q: Tensor,
        k: Tensor,
        emulate: bool,
        deterministic: bool,
    ) -> None:
        self.spec, self.ranks, self.scheme = spec, ranks, scheme
        self.emulate, self.deterministic = emulate, deterministic
        self.axis, self.of_heads = (2, 1) if spec.layout == "bhsd" else (1, 2)
        self.lengths = [tensor.shape[self.axis] * ranks.size for tensor in (q, k)]
        self.sizes = Sizes(q.shape[0], q.shape[self.of_heads], k.shape[self.of_heads])
        self.positions = shards if isinstance(shards, torch.Tensor) else None
        self.shards = shards if isinstance(shards, str) else _best(self.lengths, ranks.size)
        self.layouts = [Layout(ranks.size, length, self.shards) for length in self.lengths]
        what = f"{scheme} {self.shards} {'by positions ' if self.positions is not None else ''}of {self.sizes}"
        agree(ranks.groups, f"{what} {self.lengths} {deterministic} {spec.to_json()}", q.device)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, named: dict[str, Any], seed: Tensor | None, with_lse: bool
    ) -> list[Tensor]:
        """The output, and with_lse the LSE, of this rank's rows, in their order."""
        way = self._way()
        if way is not None:
            q, k, v = (rerouted(tensor, way, self.axis) for tensor in (q, k, v))
        exchange, heads = self._exchange(), self.ranks.heads_size
        plan = self._plan(named)  # which refuses heads that cannot be exchanged
        if heads > 1:
            q, k, v = (
                to_heads(tensor, exchange, layout)
                for tensor, layout in zip((q, k, v), (self.layouts[0], *self.layouts[1:] * 2), strict=True)
            )
        names = tuple(name for name in captured_names(self.spec) if isinstance(named[name], torch.Tensor))
        first_head = self.ranks.heads_rank * plan.sizes.heads_q
        numbers = {name: named[name] for name in captured_names(self.spec) if name not in names}
        call = Call(
            *(plan, self.ranks.ring_rank, self.ranks.ring, numbers, names, seed, first_head),
            *(self.emulate, self.deterministic),
        )
        out, lse = Inner.apply(call, q, k, v, *(named[name] for name in names))
        if self.spec.sink:
            sinks = named[self.spec.sink.name].narrow(0, first_head, plan.sizes.heads_q)
            out, lse = _with_sinks(out, lse, sinks, self.spec.layout)
        made = [(out, self.spec.layout), *([(lse[..., None], "bhsd")] if with_lse else [])]
        if heads > 1:
            made = [(to_rows(each, exchange._replace(layout=layout), self.layouts[0]), layout) for each, layout in made]
        if way is not None:
            made = [(returned(each, way, 2 if layout == "bhsd" else 1), layout) for each, layout in made]
        return [made[0][0], *(each[..., 0] for each, _ in made[1:])]

    def _way(self) -> Any:
        if self.positions is None:
            return None
        if self.lengths[0] != self.lengths[1]:
            raise ArgumentError(f"shards: positions are for as many keys as queries, not for {self.lengths}")
        if self.ranks.whole is None:
            raise ArgumentError("shards: positions take a device mesh of all ranks of the default group as `group`")
        return route(self.positions, self.layouts[0], self.ranks.rank, self.ranks.whole)

    def _exchange(self) -> Exchange:
        first = self.ranks.ring_rank * self.ranks.heads_size
        return Exchange(self.ranks.heads, self.ranks.heads_size, first, self.spec.layout)

    def _plan(self, named: Mapping[str, Any]) -> Plan:
        read = {each.name for each in self.spec.mask.captures if not each.ndim}
        numbers = {name: named[name] for name in sorted(read)}
        known = (self.spec, self.ranks.size, self.ranks.heads_size, *self.lengths, self.scheme, self.shards, self.sizes)
        make = partial(
            plan_of,
            replace_fields(self.spec),
            self.ranks.size,
            self.lengths[0],
            self.lengths[1],
            scheme=self.scheme,
            shards=self.shards,
            heads=self.ranks.heads_size,
            sizes=self.sizes,
            captures=numbers,
        )
        return _PLANS.get_or_make((*known, tuple(numbers.items())), make)


def _best(lengths: list[int], ranks: int) -> str:
    """The layout in which rows of any order are computed."""
    return "plain" if any(length % (2 * ranks) for length in lengths) else "zigzag"


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The output and the LSE with a score more in each row, counted once for all keys, by torch's own operations."""
    both = torch.logaddexp(lse, sinks.float()[None, :, None])
    weight = torch.exp(lse - both)[..., None]
    return (out.float() * (weight if layout == "bhsd" else weight.transpose(1, 2))).to(out.dtype), both


def _common_seed(spec: AttentionSpec, seed: Any, ranks: Ranks, device: torch.device) -> Tensor | None:
    """The dropout's seed: as it is given, or drawn by the first rank for all."""
    if not spec.dropout:
        if seed is not None:
            raise ArgumentError(f"seed={seed!r} is given, and the spec has no dropout: leave it out")
        return None
    if isinstance(seed, torch.Tensor):
        return seed
    if seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ArgumentError(f"seed={seed!r} must be an integer from 0 to {2**63 - 1}, or a tensor that holds one")
        return torch.tensor(seed, dtype=torch.int64)
    drawn = torch.randint(_SEEDS, (), dtype=torch.int64, device=device)
    for group in reversed(ranks.groups):  # first to those of the first rank's own exchange, then each along its ring
        dist.broadcast(drawn, group=group, group_src=0)
    return drawn
