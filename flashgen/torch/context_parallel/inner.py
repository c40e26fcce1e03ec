"""A plan carried out, as autograd knows it: keys and values of other ranks come in, gradients go back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashgen.ranks import Plan
from flashgen.torch.context_parallel import gathering, halos, ring
from flashgen.torch.context_parallel.programs import Programs
from flashgen.torch.operators import no_second_derivative
from flashgen.torch.tensors import Tensor

_ENGINES: dict[str, Any] = {"ring": ring, "all_gather": gathering}


class Call(NamedTuple):
    """What autograd need not look at. captures: tensors and numbers by name; names: those that are given beside it."""

    plan: Plan
    rank: int
    group: Any
    captures: dict[str, Any]
    names: tuple[str, ...]
    seed: Tensor | None
    head: int
    emulate: bool
    deterministic: bool
    with_lse: bool

    def programs(self, arrays: tuple[Tensor, ...]) -> Programs:
        """The kernels of the call, with the captured tensors that autograd gave."""
        captures = self.captures | dict(zip(self.names, arrays, strict=True))
        return Programs(self.plan, captures, self.seed, self.head, self.emulate, self.deterministic)


class Inner(torch.autograd.Function):
    """(output, LSE or None) of a rank's rows. `arrays` are captured tensors, in the order of the call's names."""

    @staticmethod
    def forward(ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, *arrays: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        how = (call.plan, call.rank, call.group, call.programs(arrays), q, k, v)
        if call.plan.halos:
            out, lse, kept = halos.forward(*how, call.with_lse)
        else:
            out, lse = _ENGINES[call.plan.scheme].forward(*how)
            kept = [lse]
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, *arrays, *kept)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            no_second_derivative(ctx)
        call, (q, k, v, out, *rest) = ctx.call, ctx.saved_tensors
        arrays, kept = rest[: len(call.names)], rest[len(call.names) :]
        d_out = torch.zeros_like(out) if d_out is None else d_out.to(out.dtype)
        how = (call.plan, call.rank, call.group, call.programs(tuple(arrays)), d_out, d_lse, q, k, v, out)
        if call.plan.halos:
            rows, captured = halos.backward(*how, kept)
        else:
            rows, captured = _ENGINES[call.plan.scheme].backward(*how, kept[0])
        return (
            None,
            *rows,
            *(_of_capture(call, name, array, captured) for name, array in zip(call.names, arrays, strict=True)),
        )


def _of_capture(call: Call, name: str, array: Tensor, captured: dict[str, Tensor]) -> Tensor | None:
    """A captured array's gradient: of all blocks of this rank, 0 where none reads it."""
    grad = any(each.name == name and each.grad for each in call.plan.spec.captures)
    if not grad:
        return None
    found = captured.get(name)
    return torch.zeros_like(array) if found is None else found.to(array.dtype)
