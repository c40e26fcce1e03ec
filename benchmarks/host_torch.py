"""Measures the host time of flashgen's torch operator, beside that of the attention itself and of torch's SDPA."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import flashgen as fg
from benchmarks.host import CALLS, GROUPS, ONE_TILE, PASSES, HostRow, Run, Timed, costs_in_turns

ITSELF, OPERATOR, SDPA = "attention(...)", "flashgen.torch.attention", "torch's SDPA"
BY_HAND, EMPTY = "attention(...) in a function", "an empty function"
_GRAPH, _CALLER = ", with a graph", ", in the caller's thread"
_AUTOGRADS = ", in autograd's thread"
_CHAIN = 16  # calls in one backward, which share its start-up time like the layers of a model

Attend = Callable[[Any, Any, Any], Any]


def _in_either_thread(names: Iterable[str]) -> list[str]:
    """Returns each name twice: for a backward in autograd's thread, and for one in the thread of the caller."""
    return [name + where for name in names for where in ("", _CALLER)]


def operator_names(passes: Sequence[Timed] = PASSES) -> list[str]:
    """Returns the names of the rows of `operator_rows` in order."""
    forward = [ITSELF, OPERATOR, SDPA, *(f"{name}{_GRAPH}" for name in (OPERATOR, SDPA, BY_HAND, EMPTY))]
    return [
        *(forward if "forward" in passes else []),
        *([ITSELF, f"{ITSELF}{_AUTOGRADS}"] if "backward" in passes else []),
        *(_in_either_thread([OPERATOR, SDPA, BY_HAND, EMPTY]) if "backward" in passes else []),
    ]


def operator_rows(
    passes: Sequence[Timed] = PASSES,
    target: str | None = None,
    groups: int = GROUPS,
    calls: int = CALLS,
    chain: int = _CHAIN,
    **engine: Any,
) -> Iterator[HostRow]:
    """Measures a causal call of one tile with torch tensors: the attention itself, the operator, and SDPA.

    The forward is measured without gradients and with an autograd graph. The time of a backward is its share of a
    backward through `chain` calls, as through the layers of a model. Two autograd functions serve as references. Both
    save five tensors, like the operator: one calls the attention and does nothing else, the other computes nothing,
    which is the overhead of autograd.

    Autograd runs a backward in a thread of its own, where everything may take longer, since the core of that thread
    sleeps in between. The attention itself is therefore also measured in that thread, by `chain` calls in one function,
    and the others also in the caller's thread, under torch.autograd.set_multithreading_enabled(False). The groups of
    all calls of a pass are interleaved.

    The arguments are those of `host_rows`; with emulate=True the tensors are on the CPU.
    """
    import torch

    from flashgen.torch.tensors import to_array

    device = "cpu" if engine.get("emulate") else "cuda"
    spec = fg.AttentionSpec(64, "float16", mask=fg.causal())
    compiled = fg.compile(spec, target=target, **engine)
    q, k, v, d_out = (torch.randn((*ONE_TILE, 64), device=device, dtype=torch.float16) for _ in range(4))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    attends: dict[str, Attend] = {OPERATOR: _operator(spec, compiled, target, engine), SDPA: _sdpa}
    attends |= {BY_HAND: _by_hand(compiled), EMPTY: _empty()}

    given = [x if device == "cuda" else to_array(x) for x in (q, k, v, d_out)]
    learned = q.clone().requires_grad_()

    def rows(timed: Timed, runs: Mapping[str, Run], of: Mapping[str, int]) -> Iterator[HostRow]:
        """Measures runs; `of` has the number of calls of a run if it is not one."""
        times = [of.get(name, 1) for name in runs]
        costs = costs_in_turns([*runs.values()], wait, groups, [max(calls // each, 1) for each in times])
        for name, each, cost in zip(runs, times, costs, strict=True):
            parts = {part: spent / each for part, spent in cost.parts.items()}
            where = compiled.target.name, "torch", timed, ONE_TILE
            yield HostRow(name, *where, cost.median / each, cost.minimum / each, parts)

    if "forward" in passes:
        runs: dict[str, Run] = {ITSELF: partial(compiled, *given[:3])}
        runs |= {name: partial(attends[name], q, k, v) for name in (OPERATOR, SDPA)}
        runs |= {f"{name}{_GRAPH}": partial(attend, learned, k, v) for name, attend in attends.items()}
        yield from rows("forward", runs, {})
    if "backward" in passes:
        itself = partial(compiled.backward, given[3], *given[:3], *compiled(*given[:3], return_lse=True))
        runs = _backward_runs(itself, attends, (learned, k, v, d_out), chain)
        yield from rows("backward", runs, dict.fromkeys([*runs][1:], chain))


def _backward_runs(
    itself: Run, attends: Mapping[str, Attend], tensors: tuple[Any, Any, Any, Any], chain: int
) -> dict[str, Run]:
    """Returns the runs of the backward. All but the first, the attention itself, go through `chain` calls."""
    learned, k, v, d_out = tensors
    inside = _within_autograd(itself, chain)(learned)
    runs: dict[str, Run] = {ITSELF: itself, f"{ITSELF}{_AUTOGRADS}": partial(_backward, inside, learned, d_out)}
    for name, attend in attends.items():
        out: Any = learned
        for _ in range(chain):
            out = attend(out, k, v)
        runs[name] = partial(_backward, out, learned, d_out)
        runs[f"{name}{_CALLER}"] = partial(_backward_in_caller, out, learned, d_out)
    return runs


def _backward(out: Any, learned: Any, d_out: Any) -> Any:
    import torch

    return torch.autograd.grad(out, learned, d_out, retain_graph=True)


def _backward_in_caller(out: Any, learned: Any, d_out: Any) -> Any:
    import torch

    with torch.autograd.set_multithreading_enabled(False):
        return _backward(out, learned, d_out)


def _operator(spec: Any, compiled: Any, target: str | None, engine: dict[str, Any]) -> Attend:
    """Returns the operator of a spec, as users call it, or of the compiled attention if a target or engine is given."""
    from flashgen.torch import attention

    return partial(attention, compiled if target or engine else spec)


def _sdpa(q: Any, k: Any, v: Any) -> Any:
    import torch

    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def operator_summary(rows: Sequence[HostRow]) -> list[str]:
    """Returns lines with the overhead of the operator over the attention in the same thread, and that of autograd."""
    lines = []
    for timed in dict.fromkeys(row.timed for row in rows):
        of = {row.name.removesuffix(_GRAPH): row.median for row in rows if row.timed == timed}
        where = {"": _AUTOGRADS, _CALLER: ""} if timed == "backward" else {"": ""}
        for thread, itself in where.items():
            if {f"{ITSELF}{itself}", f"{OPERATOR}{thread}", f"{EMPTY}{thread}"} <= of.keys():
                more = of[f"{OPERATOR}{thread}"] - of[f"{ITSELF}{itself}"]
                lines.append(
                    f"{timed}, with gradients{thread or itself}: {OPERATOR} takes {more:+.1f} us beside {ITSELF}; "
                    f"{EMPTY} takes {of[f'{EMPTY}{thread}']:.1f}"
                )
    return lines


def _within_autograd(run: Run, times: int) -> Callable[[Any], Any]:
    """Returns an autograd function whose backward calls `run` that many times."""
    import torch

    class Within(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, d_x: Any) -> Any:
            for _ in range(times):
                run()
            return d_x

    apply: Callable[[Any], Any] = Within.apply
    return apply


def _by_hand(compiled: Any) -> Attend:
    """Returns a minimal autograd function around an attention, for tensors of a GPU or for the emulator."""
    import torch

    from flashgen.torch.tensors import to_array, to_tensor

    def around(call: Callable[..., Any], *tensors: Any) -> Any:
        if tensors[0].is_cuda:
            return call(*tensors)
        return tuple(to_tensor(made) for made in call(*map(to_array, tensors)))

    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            out, lse = around(partial(compiled, return_lse=True), q, k, v)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, d_out: Any) -> Any:
            return tuple(around(compiled.backward, d_out, *ctx.saved_tensors))

    apply: Attend = ByHand.apply
    return apply


def _empty() -> Attend:
    """Returns an autograd function that saves five tensors and computes nothing."""
    import torch

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, about: Any, q: Any, k: Any, v: Any) -> Any:
            out, ctx.about = q.detach(), about
            ctx.save_for_backward(q, k, v, out, v)
            return out

        @staticmethod
        def backward(ctx: Any, d_out: Any) -> Any:
            _, k, v, *_ = ctx.saved_tensors
            return None, d_out, k, v

    # The operator also skips the preparation for torch.func's transforms that `apply` makes.
    return partial(super(torch.autograd.Function, Empty).apply, ())
