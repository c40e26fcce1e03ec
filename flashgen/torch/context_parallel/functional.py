"""`attention` of a sequence that is spread over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
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
from flashgen.torch.context_parallel.failures import peer_errors
from flashgen.torch.context_parallel.groups import Ranks, ranks_of
from flashgen.torch.context_parallel.inner import Call, Inner
from flashgen.torch.context_parallel.programs import captured_names
from flashgen.torch.context_parallel.replicated import replicated
from flashgen.torch.context_parallel.rerouting import rerouted, returned, route
from flashgen.torch.functional import is_deterministic
from flashgen.torch.table import is_emulated, outside_of_graphs, registered
from flashgen.torch.tensors import Tensor, bound_tensor, check_call, check_tensors

_SEEDS = 2**62
_MOST_CALLS, _MOST_PLANS = 256, 64  # remembered of a group, and by captured numbers of calls of a kind


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
    or ranks do not make the same call, and PeerError if a message fails or takes longer than the group's timeout.
    """
    if not isinstance(spec, AttentionSpec):
        raise ArgumentError(f"spec={spec!r}: give a flashgen.AttentionSpec")
    if scheme not in SCHEMES:
        raise ArgumentError(f"scheme={scheme!r} must be one of {', '.join(SCHEMES)}")
    if spec.is_ragged or spec.page_size:
        spec.shard()  # says why it has none
    if spec.kv_dtype:
        raise ArgumentError(
            f"kv_dtype={spec.kv_dtype!r} is not supported on several ranks: give k and v in {spec.dtype}"
        )
    check_tensors(q=q, k=k, v=v)
    q, k, v, group, put_together = taken_apart(spec, q, k, v, group)
    emulate, ranks = is_emulated(emulate), ranks_of(group, scheme)
    entry = registered(spec, emulate=emulate)
    if torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"):
        q, k, v = autocast.cast(entry, q, k, v)
    if "num_splits" in captures:
        raise ArgumentError(f"num_splits={captures['num_splits']!r}: no rank splits keys by it; leave it out")
    named: dict[str, Any] = {}
    if captures or spec.captures or isinstance(seed, torch.Tensor):
        bound = {name: bound_tensor(array, q.device) for name, array in spec.bound.items()}
        arrays, integers, floats = all_captures(entry, captures, bound)
        check_call(entry, q, k, v, arrays, seed if isinstance(seed, torch.Tensor) else None)
        named = named_captures(entry, arrays, integers, floats)
        if reduce_captures:
            named |= {each.name: replicated(named[each.name], ranks.groups) for each in entry.learned}
    how = _how(_Kind(entry.spec, scheme, shards, emulate, is_deterministic(deterministic)), ranks, q, k, v)
    out, *lse = how.run(ranks, shards, q, k, v, named, _common_seed(spec, seed, ranks, q.device), return_lse)
    return (put_together(out), *lse) if return_lse else put_together(out)


class _Kind:
    """What a caller says of a call beside its tensors."""

    def __init__(
        self, spec: AttentionSpec, scheme: str, shards: str | Tensor, emulate: bool, deterministic: bool
    ) -> None:
        self.spec, self.scheme, self.emulate, self.deterministic = spec, scheme, emulate, deterministic
        self.shards = None if isinstance(shards, torch.Tensor) else shards

    @property
    def known(self) -> tuple[Any, ...]:
        return self.spec, self.scheme, self.shards, self.emulate, self.deterministic


_CALLS: weakref.WeakKeyDictionary[Any, Remembered[Any, _How]] = weakref.WeakKeyDictionary()


def _how(kind: _Kind, ranks: Ranks, q: Tensor, k: Tensor, v: Tensor) -> _How:
    """How calls of a kind and of such tensors go: checked, agreed on by all ranks, and remembered by the group."""
    group = ranks.groups[0]
    calls = _CALLS.get(group)
    if calls is None:
        calls = _CALLS.setdefault(group, Remembered(_MOST_CALLS))
    like = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
    known = (*kind.known, ranks.size, ranks.heads_size, *like)
    return calls.get(known) or calls.get_or_make(known, lambda: _How(kind, ranks, q, k, v))


class _How:
    """A call but for its tensors and its group: layouts, plan, and the way there and back."""

    def __init__(self, kind: _Kind, ranks: Ranks, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.spec, self.scheme = kind.spec, kind.scheme
        self.emulate, self.deterministic = kind.emulate, kind.deterministic
        if not self.spec.captures:  # others are checked with what is captured, in each call
            check_call(registered(self.spec, emulate=self.emulate), q, k, v, [], None)
        self.axis, self.of_heads = (2, 1) if self.spec.layout == "bhsd" else (1, 2)
        self.lengths = [tensor.shape[self.axis] * ranks.size for tensor in (q, k)]
        self.sizes = Sizes(q.shape[0], q.shape[self.of_heads], k.shape[self.of_heads])
        self.shards = kind.shards or _best(self.lengths, ranks.size)
        self.layouts = [Layout(ranks.size, length, self.shards) for length in self.lengths]
        self._captured = captured_names(self.spec)
        self._read = sorted({each.name for each in self.spec.mask.captures if not each.ndim})
        self._plans: Remembered[Any, Plan] = Remembered(_MOST_PLANS)
        what = f"{kind.scheme} {self.shards} {'' if kind.shards else 'by positions '}of {self.sizes}"
        agree(ranks.groups, f"{what} {self.lengths} {kind.deterministic} {self.spec.to_json()}", q.device)

    def run(
        self,
        ranks: Ranks,
        shards: str | Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        named: dict[str, Any],
        seed: Tensor | None,
        with_lse: bool,
    ) -> list[Tensor]:
        """The output, and with_lse the LSE, of this rank's rows, in their order."""
        way = self._way(ranks, shards) if isinstance(shards, torch.Tensor) else None
        if way is not None:
            q, k, v = (rerouted(tensor, way, self.axis) for tensor in (q, k, v))
        heads = ranks.heads_size
        plan = self._plan(ranks, named)  # which refuses heads that cannot be exchanged
        if heads > 1:
            exchange = self._exchange(ranks)
            q, k, v = (
                to_heads(tensor, exchange, layout)
                for tensor, layout in zip((q, k, v), (self.layouts[0], *self.layouts[1:] * 2), strict=True)
            )
        names = tuple(name for name in self._captured if isinstance(named[name], torch.Tensor))
        first_head = ranks.heads_rank * plan.sizes.heads_q
        numbers = {name: named[name] for name in self._captured if name not in names}
        call = Call(
            *(plan, ranks.ring_rank, ranks.ring, numbers, names, seed, first_head),
            *(self.emulate, self.deterministic, with_lse or self.spec.sink is not None),
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

    def _way(self, ranks: Ranks, positions: Tensor) -> Any:
        if self.lengths[0] != self.lengths[1]:
            raise ArgumentError(f"shards: positions are for as many keys as queries, not for {self.lengths}")
        if ranks.whole is None:
            raise ArgumentError("shards: positions take a device mesh of all ranks of the default group as `group`")
        return route(positions, self.layouts[0], ranks.rank, ranks.whole)

    def _exchange(self, ranks: Ranks) -> Exchange:
        return Exchange(ranks.heads, ranks.heads_size, ranks.ring_rank * ranks.heads_size, self.spec.layout)

    def _plan(self, ranks: Ranks, named: Mapping[str, Any]) -> Plan:
        numbers = {name: named[name] for name in self._read}
        known = tuple(numbers.values())
        return self._plans.get(known) or self._plans.get_or_make(
            known,
            lambda: plan_of(
                replace_fields(self.spec),
                ranks.size,
                self.lengths[0],
                self.lengths[1],
                scheme=self.scheme,
                shards=self.shards,
                heads=ranks.heads_size,
                sizes=self.sizes,
                captures=numbers,
            ),
        )


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
        with peer_errors():
            dist.broadcast(drawn, group=group, group_src=0)
    return drawn
