"""What torch's operator costs its host thread beside the attention itself and torch's own: `flashgen bench host`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import flashgen as fg
from flashgen.bench.host import CALLS, GROUPS, ONE_TILE, PASSES, HostRow, Run, Timed, cost_of

ITSELF, OPERATOR, SDPA = "attention(...)", "flashgen.torch.attention", "torch's SDPA"
BY_HAND, EMPTY = "attention(...) in a function", "an empty function"
_GRAPH, _CALLER = ", with a graph", ", in the caller's thread"
_CHAIN = 16  # calls that one backward goes through, so that what it costs to begin is shared as by a model's layers

Attend = Callable[[Any, Any, Any], Any]


def _in_either_thread(names: Iterable[str]) -> list[str]:
    """What is measured of backwards: each in autograd's own thread, and then in that of its caller."""
    return [name + where for name in names for where in ("", _CALLER)]


def operator_names(passes: Sequence[Timed] = PASSES) -> list[str]:
    """The names of the rows of `operator_rows`, in their order."""
    forward = [ITSELF, OPERATOR, SDPA, *(f"{name}{_GRAPH}" for name in (OPERATOR, SDPA, BY_HAND, EMPTY))]
    return [
        *(forward if "forward" in passes else []),
        *([ITSELF, *_in_either_thread([OPERATOR, SDPA, BY_HAND, EMPTY])] if "backward" in passes else []),
    ]


def operator_rows(
    passes: Sequence[Timed] = PASSES,
    target: str | None = None,
    groups: int = GROUPS,
    calls: int = CALLS,
    chain: int = _CHAIN,
    **engine: Any,
) -> Iterator[HostRow]:
    """Measures a causal call of one tile with torch's tensors: by itself, by the operator, and by SDPA.

    The forward without gradients, and where autograd keeps what they need. The backward of the operator is a call's
    share of one that goes through `chain` of them, as through the layers of a model. Two functions have the operator's
    graph, which keeps five tensors: one calls the attention itself and does no more, the other computes nothing, which
    is what autograd takes. It runs a backward in a thread of its own, where launches may take longer than in the
    caller's: of the operator's time there, what it adds itself is what it takes more than the first. Each is also timed
    in the caller's thread, under torch.autograd.set_multithreading_enabled(False).

    Args: those of `host_rows`; with emulate=True tensors are the CPU's.
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

    def row(name: str, timed: Timed, run: Run, of: int = 1) -> HostRow:
        cost = cost_of(run, wait, groups, max(calls // of, 1))
        parts = {part: spent / of for part, spent in cost.parts.items()}
        return HostRow(name, compiled.target.name, "torch", timed, ONE_TILE, cost.median / of, cost.minimum / of, parts)

    given = [x if device == "cuda" else to_array(x) for x in (q, k, v, d_out)]
    learned = q.clone().requires_grad_()
    if "forward" in passes:
        yield row(ITSELF, "forward", partial(compiled, *given[:3]))
        for name in (OPERATOR, SDPA):
            yield row(name, "forward", partial(attends[name], q, k, v))
        for name, attend in attends.items():
            yield row(f"{name}{_GRAPH}", "forward", partial(attend, learned, k, v))
    if "backward" in passes:
        kept = compiled(*given[:3], return_lse=True)
        yield row(ITSELF, "backward", partial(compiled.backward, given[3], *given[:3], *kept))
        for name, attend in attends.items():
            out: Any = learned
            for _ in range(chain):
                out = attend(out, k, v)
            run = partial(_backward, out, learned, d_out)
            yield row(name, "backward", run, chain)
            with torch.autograd.set_multithreading_enabled(False):
                yield row(f"{name}{_CALLER}", "backward", run, chain)


def _backward(out: Any, learned: Any, d_out: Any) -> Any:
    import torch

    return torch.autograd.grad(out, learned, d_out, retain_graph=True)


def _operator(spec: Any, compiled: Any, target: str | None, engine: dict[str, Any]) -> Attend:
    """The operator as users call it, by a spec; by what is compiled where a call must say for what."""
    from flashgen.torch import attention

    return partial(attention, compiled if target or engine else spec)


def _sdpa(q: Any, k: Any, v: Any) -> Any:
    import torch

    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def operator_summary(rows: Sequence[HostRow]) -> list[str]:
    """How much more the operator takes than the attention itself, and what of it is autograd's own."""
    lines = []
    for timed in dict.fromkeys(row.timed for row in rows):
        of = {row.name.removesuffix(_GRAPH): row.median for row in rows if row.timed == timed}
        if {ITSELF, OPERATOR, BY_HAND, EMPTY} <= of.keys():
            more, own = (of[OPERATOR] - of[name] for name in (ITSELF, BY_HAND))
            line = (
                f"{timed}, with gradients: {OPERATOR} takes {more:+.1f} us beside {ITSELF}, and {own:+.1f} beside "
                f"{BY_HAND}; {EMPTY} takes {of[EMPTY]:.1f}"
            )
            if called := of.get(f"{OPERATOR}{_CALLER}"):
                line += f"; in the caller's thread {called - of[ITSELF]:+.1f} us beside {ITSELF}"
            lines.append(line)
    return lines


def _by_hand(compiled: Any) -> Attend:
    """What one writes around an attention to have gradients, on a GPU's tensors or by the emulator."""
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

    # As the operator calls it: without what `apply` does first for torch.func's transforms.
    return partial(super(torch.autograd.Function, Empty).apply, ())
