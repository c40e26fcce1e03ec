"""`attention` over a sequence that is sharded over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from flashgen.errors import ArgumentError
from flashgen.language.batch_layout import BATCH_LAYOUTS
from flashgen.language.spec import AttentionSpec, without_shards
from flashgen.ranks import SCHEMES, Layout, Plan, Sizes, plan_of
from flashgen.ranks.plan import replace_fields
from flashgen.runtime.caching import Cache
from flashgen.torch import autocast
from flashgen.torch.arguments import all_captures, named_captures
from flashgen.torch.context_parallel.agreement import check_same_call
from flashgen.torch.context_parallel.distributed_tensors import local_tensors
from flashgen.torch.context_parallel.exchange import Exchange, to_heads, to_rows
from flashgen.torch.context_parallel.failures import peer_errors
from flashgen.torch.context_parallel.groups import Ranks, ranks_of
from flashgen.torch.context_parallel.plan_function import Call, PlanFunction
from flashgen.torch.context_parallel.programs import captured_names
from flashgen.torch.context_parallel.replicated import replicated
from flashgen.torch.context_parallel.rerouting import rerouted, returned, route
from flashgen.torch.functional import SEEDS, is_deterministic
from flashgen.torch.table import is_emulated, outside_of_graphs, registered
from flashgen.torch.tensors import Tensor, bound_tensor, check_call, check_tensors

_MAX_CALLS, _MAX_PLANS = 256, 64  # cached calls of a group, and cached plans of a call by captured numbers


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
    """Computes attention over a sequence that is sharded over ranks, with the result of one rank and all gradients.

    Masks, scores, captures and dropout are functions of positions in the whole sequence. All ranks of the group must
    make the same call, with equal numbers of rows.

    Args:
        spec: the AttentionSpec of the whole sequence.
        q, k, v: this rank's rows, (batch, heads, length / ranks, dim) or in layout "bshd", as `shard` returns them; or
            DTensors that are sharded along the length, whose mesh is the group.
        group: a ProcessGroup or DeviceMesh; None is the default group. "ulysses_ring" takes a mesh of two dimensions or
            a pair of groups: that of the ring, and that which exchanges heads.
        scheme: "ring" sends the keys and values that are read from rank to rank while blocks are computed;
            "all_gather" gathers them first; "ulysses" exchanges heads for rows and computes whole sequences of some
            heads; "ulysses_ring" exchanges heads within a node and uses a ring across nodes.
        shards: the positions of each rank: "zigzag", which balances causal masks; "plain", consecutive parts; or an
            integer tensor of the positions of this rank's rows, in any order.
        seed: the seed of the dropout, the same on all ranks; None lets the first rank draw one.
        return_lse: also return the LSE of this rank's rows, float32 (batch, heads, rows), which is differentiable.
        emulate, deterministic: as in `flashgen.torch.attention`.
        reduce_captures: sum gradients of captured arrays and of sinks over the ranks. False leaves each rank its part,
            for wrappers such as DDP that reduce gradients of parameters.
        captures: the captures of the whole sequence, the same on all ranks. They are indexed by global positions,
            heads and batch.

    Returns:
        The output of this rank's rows, or the pair (output, LSE).

    Raises:
        ArgumentError: an argument does not fit, or the ranks do not make the same call.
        PeerError: a message failed or took longer than the timeout of the process group.
    """
    if not isinstance(spec, AttentionSpec):
        raise ArgumentError(f"spec={spec!r}: give a flashgen.AttentionSpec")
    if scheme not in SCHEMES:
        raise ArgumentError(f"scheme={scheme!r} must be one of {', '.join(SCHEMES)}")
    if without_shards(spec.layout, spec.page_size):
        spec.shard()  # raises the error that names the reason
    if spec.kv_dtype:
        raise ArgumentError(
            f"kv_dtype={spec.kv_dtype!r} is not supported on several ranks: give k and v in {spec.dtype}"
        )
    for name in ("out_dtype", "grad_dtype", "shared_kv"):
        if given := getattr(spec, name):
            raise ArgumentError(f"{name}={given!r} is not supported on several ranks: leave it out")
    check_tensors(q=q, k=k, v=v)
    q, k, v, group, wrap = local_tensors(spec, q, k, v, group)
    emulate, ranks = is_emulated(emulate), ranks_of(group, scheme)
    entry = registered(spec, emulate=emulate)
    if torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"):
        q, k, v = autocast.cast(entry, q, k, v)
    if "num_splits" in captures:
        raise ArgumentError(
            f"num_splits={captures['num_splits']!r}: it is not supported on several ranks; leave it out"
        )
    named: dict[str, Any] = {}
    if captures or spec.captures or isinstance(seed, torch.Tensor):
        bound = {name: bound_tensor(array, q.device) for name, array in spec.bound.items()}
        arrays, integers, floats = all_captures(entry, captures, bound)
        check_call(entry, q, k, v, arrays, seed if isinstance(seed, torch.Tensor) else None)
        named = named_captures(entry, arrays, integers, floats)
        if reduce_captures:
            named |= {each.name: replicated(named[each.name], ranks.groups) for each in entry.learned}
    options = _Options(entry.spec, scheme, shards, emulate, is_deterministic(deterministic))
    prepared = _prepared_call(options, ranks, q, k, v)
    out, *lse = prepared.run(ranks, shards, q, k, v, named, _common_seed(spec, seed, ranks, q.device), return_lse)
    return (wrap(out), *lse) if return_lse else wrap(out)


class _Options:
    """The options of a call beside its tensors."""

    def __init__(
        self, spec: AttentionSpec, scheme: str, shards: str | Tensor, emulate: bool, deterministic: bool
    ) -> None:
        self.spec, self.scheme, self.emulate, self.deterministic = spec, scheme, emulate, deterministic
        self.shards = None if isinstance(shards, torch.Tensor) else shards

    @property
    def key(self) -> tuple[Any, ...]:
        return self.spec, self.scheme, self.shards, self.emulate, self.deterministic


_CALLS: weakref.WeakKeyDictionary[Any, Cache[Any, _PreparedCall]] = weakref.WeakKeyDictionary()


def _prepared_call(options: _Options, ranks: Ranks, q: Tensor, k: Tensor, v: Tensor) -> _PreparedCall:
    """Returns the prepared call for these options and tensors, which is checked on all ranks and cached by group."""
    group = ranks.groups[0]
    calls = _CALLS.get(group)
    if calls is None:
        calls = _CALLS.setdefault(group, Cache(_MAX_CALLS))
    like = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
    key = (*options.key, ranks.size, ranks.heads_size, *like)
    return calls.get(key) or calls.get_or_make(key, lambda: _PreparedCall(options, ranks, q, k, v))


class _PreparedCall:
    """A checked call without its tensors: layouts and plans. `run` also exchanges rows and heads as needed."""

    def __init__(self, options: _Options, ranks: Ranks, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.spec, self.scheme = options.spec, options.scheme
        self.emulate, self.deterministic = options.emulate, options.deterministic
        if not self.spec.captures:  # calls with captures are checked each time
            check_call(registered(self.spec, emulate=self.emulate), q, k, v, [], None)
        self.axis, self.head_axis = self.spec.batch_layout.rows_axis, self.spec.batch_layout.heads_axis
        self.lengths = [tensor.shape[self.axis] * ranks.size for tensor in (q, k)]
        self.sizes = Sizes(q.shape[0], q.shape[self.head_axis], k.shape[self.head_axis])
        self.shards = options.shards or _default_shards(self.lengths, ranks.size)
        self.layouts = [Layout(ranks.size, length, self.shards) for length in self.lengths]
        self._captured = captured_names(self.spec)
        self._plan_captures = sorted({each.name for each in self.spec.mask.captures if not each.ndim})
        self._plans: Cache[Any, Plan] = Cache(_MAX_PLANS)
        call = f"{options.scheme} {self.shards} {'' if options.shards else 'by positions '}of {self.sizes}"
        check_same_call(ranks.groups, f"{call} {self.lengths} {options.deterministic} {self.spec.to_json()}", q.device)

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
        """Returns the output, and the LSE with `with_lse`, of this rank's rows in their given order."""
        path = self._route(ranks, shards) if isinstance(shards, torch.Tensor) else None
        if path is not None:
            q, k, v = (rerouted(tensor, path, self.axis) for tensor in (q, k, v))
        heads = ranks.heads_size
        plan = self._plan(ranks, named)  # raises if heads cannot be exchanged
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
        out, lse = PlanFunction.apply(call, q, k, v, *(named[name] for name in names))
        if self.spec.sink:
            sinks = named[self.spec.sink.name].narrow(0, first_head, plan.sizes.heads_q)
            out, lse = _with_sinks(out, lse, sinks, self.spec.layout)
        results = [(out, self.spec.layout), *([(lse[..., None], "bhsd")] if with_lse else [])]
        if heads > 1:
            rows = self.layouts[0]
            results = [(to_rows(each, exchange._replace(layout=layout), rows), layout) for each, layout in results]
        if path is not None:
            results = [(returned(each, path, BATCH_LAYOUTS[layout].rows_axis), layout) for each, layout in results]
        return [results[0][0], *(each[..., 0] for each, _ in results[1:])]

    def _route(self, ranks: Ranks, positions: Tensor) -> Any:
        if self.lengths[0] != self.lengths[1]:
            raise ArgumentError(f"shards: positions need equal numbers of queries and keys, not {self.lengths}")
        if ranks.world is None:
            raise ArgumentError("shards: positions take a device mesh of all ranks of the default group as `group`")
        return route(positions, self.layouts[0], ranks.rank, ranks.world)

    def _exchange(self, ranks: Ranks) -> Exchange:
        return Exchange(ranks.heads, ranks.heads_size, ranks.ring_rank * ranks.heads_size, self.spec.layout)

    def _plan(self, ranks: Ranks, named: Mapping[str, Any]) -> Plan:
        numbers = {name: named[name] for name in self._plan_captures}
        key = tuple(numbers.values())
        return self._plans.get(key) or self._plans.get_or_make(
            key,
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


def _default_shards(lengths: list[int], ranks: int) -> str:
    """Returns the layout for rows in any order: zigzag if the lengths allow it."""
    return "plain" if any(length % (2 * ranks) for length in lengths) else "zigzag"


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Adds the sinks, one extra score per row, to an output and its LSE, by operations of torch."""
    both = torch.logaddexp(lse, sinks.float()[None, :, None])
    weight = BATCH_LAYOUTS[layout].swap_heads(torch.exp(lse - both)[..., None])
    return (out.float() * weight).to(out.dtype), both


def _common_seed(spec: AttentionSpec, seed: Any, ranks: Ranks, device: torch.device) -> Tensor | None:
    """Returns the seed of the dropout: the given one, or one that the first rank draws for all."""
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
    drawn = torch.randint(SEEDS, (), dtype=torch.int64, device=device)
    for group in reversed(ranks.groups):  # first within the heads group of the first rank, then along each ring
        with peer_errors():
            dist.broadcast(drawn, group=group, group_src=0)
    return drawn
