"""Support for torch.func's transforms: grad, vjp, vmap and their compositions.

Operators that take lists of tensors do not support transforms, so calls under them go through an autograd Function,
which calls the operators at each level of a transform.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.torch import operators
from flashgen.torch.table import constant, outside_of_graphs
from flashgen.torch.tensors import Tensor
from flashgen.torch.vmap import vmap_backward, vmap_forward


class Transformed(torch.autograd.Function):
    """The forward operator as a Function, with captures as separate arguments."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, seed: Any, key: str, numbers: Any, *captures: Tensor) -> Any:
        with torch._C._AutoDispatchBelowAutograd():  # the operator's own autograd does not support transforms
            out, lse = torch.ops.flashgen.forward(q, k, v, list(captures), key, *map(list, numbers), seed)
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        q, k, v, seed, key, numbers, *captures = inputs
        operators.save(ctx, (q, k, v, captures, key, *map(list, numbers), seed), output)

    @staticmethod
    def backward(ctx: Any, d_out: Any, d_lse: Any) -> Any:
        dq, dk, dv, capture_gradients, *_ = operators.gradients(ctx, d_out, d_lse, _backward)
        return dq, dk, dv, None, None, None, *capture_gradients

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        q, k, v, seed, key, numbers, *captures = arguments
        operands = (q, k, v, captures, key, *map(list, numbers), seed)
        dims = (*in_dims[:3], list(in_dims[6:]), None, None, None, in_dims[3])
        return vmap_forward(info, dims, *operands, operator=transformed)  # outer transforms apply to this operator too

    jvp = staticmethod(operators.no_forward_mode)


class _TransformedBackward(torch.autograd.Function):
    """The backward operator as a Function, which has no derivative."""

    @staticmethod
    def forward(d_lse: Any, seed: Any, key: str, numbers: Any, *tensors: Tensor) -> Any:
        d_out, q, k, v, out, lse, *captures = tensors
        rest = (captures, key, *map(list, numbers), seed)
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(torch.ops.flashgen.backward(d_out, d_lse, q, k, v, out, lse, *rest))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    backward = staticmethod(operators.no_second_derivative)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        d_lse, seed, key, numbers, d_out, *rows_and_captures = arguments
        rows, captures = rows_and_captures[:5], rows_and_captures[5:]
        operands = (d_out, d_lse, *rows, captures, key, *map(list, numbers), seed)
        dims = (in_dims[4], in_dims[0], *in_dims[5:10], list(in_dims[10:]), None, None, None, in_dims[1])
        results, out_dims = vmap_backward(info, dims, *operands, operator=_backward)
        return tuple(results), tuple(out_dims)

    jvp = staticmethod(operators.no_forward_mode)


def _backward(d_out: Any, d_lse: Any, *arguments: Any) -> Any:
    q, k, v, out, lse, captures, key, integers, floats, seed = arguments
    numbers = (tuple(integers), tuple(floats))
    return _TransformedBackward.apply(d_lse, seed, key, numbers, d_out, q, k, v, out, lse, *captures)


def transformed(
    q: Tensor, k: Tensor, v: Tensor, captures: Any, key: str, integers: Any, floats: Any, seed: Tensor | None
) -> Any:
    """Returns the output and the LSE. Takes the arguments of the forward operator."""
    return Transformed.apply(q, k, v, seed, key, (tuple(integers), tuple(floats)), *captures)


outside_transformed = outside_of_graphs("torch.func's derivatives of attention are no part of a compiled graph")(
    transformed
)


@constant
def is_differentiating() -> bool:
    """Whether a transform of torch.func other than vmap is active."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(each.key() != torch._C._functorch.TransformType.Vmap for each in stack)
