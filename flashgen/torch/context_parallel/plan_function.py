"""`PlanFunction`: an autograd Function that runs the forward and the backward of a plan."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashgen.ranks import Plan
from flashgen.torch.context_parallel import gathering, halos, ring
from flashgen.torch.context_parallel.programs import Programs
from flashgen.torch.operators import no_second_derivative
from flashgen.torch.tensors import Tensor

_SCHEMES: dict[str, Any] = {"ring": ring, "all_gather": gathering}


class Call(NamedTuple):
    """A call without the tensors that autograd tracks. names: the captured tensors that are passed separately."""

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
        """Returns the kernels of the call. arrays: the captured tensors, in the order of `names`."""
        captures = self.captures | dict(zip(self.names, arrays, strict=True))
        return Programs(self.plan, captures, self.seed, self.head, self.emulate, self.deterministic)


class PlanFunction(torch.autograd.Function):
    """Returns (output, LSE or None) of a rank's rows. arrays: captured tensors, in the order of `call.names`."""

    @staticmethod
    def forward(ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, *arrays: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        arguments = (call.plan, call.rank, call.group, call.programs(arrays), q, k, v)
        if call.plan.halos:
            out, lse, saved = halos.forward(*arguments, call.with_lse)
        else:
            out, lse = _SCHEMES[call.plan.scheme].forward(*arguments)
            saved = [lse]
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, *arrays, *saved)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            no_second_derivative(ctx)
        call, (q, k, v, out, *rest) = ctx.call, ctx.saved_tensors
        arrays, saved = rest[: len(call.names)], rest[len(call.names) :]
        d_out = torch.zeros_like(out) if d_out is None else d_out.to(out.dtype)
        arguments = (call.plan, call.rank, call.group, call.programs(tuple(arrays)), d_out, d_lse, q, k, v, out)
        if call.plan.halos:
            rows, captured = halos.backward(*arguments, saved)
        else:
            rows, captured = _SCHEMES[call.plan.scheme].backward(*arguments, saved[0])
        return (
            None,
            *rows,
            *(_capture_gradient(call, name, array, captured) for name, array in zip(call.names, arrays, strict=True)),
        )


def _capture_gradient(call: Call, name: str, array: Tensor, captured: dict[str, Tensor]) -> Tensor | None:
    """Returns the gradient of a captured array over all blocks of this rank, or None if it has no gradient."""
    grad = any(each.name == name and each.grad for each in call.plan.spec.captures)
    if not grad:
        return None
    found = captured.get(name)
    return torch.zeros_like(array) if found is None else found.to(array.dtype)
