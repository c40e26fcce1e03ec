"""The operators: `flashgen::forward` and `flashgen::backward`, as torch's dispatcher, autograd and compiler know them.

Both return tensors of their own, alias nothing and are traced without a look at data. The spec goes in as a key
(table.py). The LSE is an output, so that checkpointing policies that save outputs of operators save all that the
backward needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Optional

import torch
from torch.autograd import forward_ad

from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.torch import direct
from flashgen.torch.arguments import named_captures
from flashgen.torch.table import Registered, entry_of_call, entry_of_key, outside_of_graphs
from flashgen.torch.tensors import (
    NO_FORWARD_MODE,
    Tensor,
    check_call,
    empty_like,
    in_order_of,
    in_rows,
    output_shapes,
    refuse_gradients,
    refuse_tangents,
    to_array,
    to_tensor,
)

LIBRARY = torch.library.Library("flashgen", "FRAGMENT")  # the registrations live as long as it does


def as_operator(
    function: Callable[..., Any], name: str | None = None, written: Sequence[str] = ()
) -> Callable[..., Any]:
    """Registers a function as the kernel of an operator, on every device.

    name: of the operator; None is the function's. written: the arguments that it writes to.

    As torch.library.custom_op, but for a look at every call whether outputs alias inputs, and layers of Python, which
    take longer than all that the operator does: compiled graphs call it through the dispatcher.
    """
    schema = torch.library.infer_schema(function, mutates_args=written)
    name = name or function.__name__
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, outside_of_graphs("a kernel")(function), "CompositeExplicitAutograd")
    return function


# The schema is inferred from these annotations, which torch 2.6 reads as types alone: no strings, no `|`.
@as_operator
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    captures: Sequence[torch.Tensor],
    key: str,
    integers: Sequence[int],
    floats: Sequence[float],
    seed: Optional[torch.Tensor],  # noqa: UP045
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the LSE, float32 (batch, heads, queries), of a ragged batch (heads, tokens).

    captures, integers, floats: those of the table's entry in its order. seed: one int64, beside q or on the CPU.
    """
    entry, integers, floats = entry_of_call(key, integers, floats, q, k, captures)
    return run_forward(entry, q, k, v, captures, integers, floats, seed)


def run_forward(
    entry: Registered,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captures: Sequence[Tensor],
    integers: Sequence[int],
    floats: Sequence[float],
    seed: Tensor | None,
    with_lse: bool = True,
) -> Any:
    """What the operator does, for tensors that hold data; the output alone without `with_lse`."""
    if forward_ad._current_level >= 0:
        refuse_tangents(q, k, v, *captures)
    if entry.is_direct and q.is_cuda:
        made = direct.forward(entry.on(q.get_device()), q, k, v, with_lse)
        if made is not None:
            return made
    if q.is_meta:
        shaped = _shaped_forward(entry, q, k, v, captures, seed)
        return shaped if with_lse else shaped[0]
    options: dict[str, Any] = {} if seed is None else {"seed": seed_of(entry, seed)}
    if q.is_cuda and not entry.emulate:
        if captures or integers or floats:
            options |= named_captures(entry, captures, integers, floats)
        if q.stride(-1) != 1 or (not entry.cache and (k.stride(-1) != 1 or v.stride(-1) != 1)):
            rows = _in_rows(entry, q, k, v)
            made = run_forward(entry, *rows, captures, integers, floats, seed, with_lse)
            return _in_order_of_queries(q, made, with_lse)
        try:
            made = entry.on(q.get_device())(q, k, v, return_lse=with_lse, **options)
            if entry.is_direct:
                direct.learn_forward(entry.on(q.get_device()), q, k, v)
            return made
        except ArgumentError as error:
            aligned = _in_rows(entry, q, k, v)
            q, k, v = _put_right((q, k, v), aligned, error, partial(check_call, entry, q, k, v, captures, seed))
        return entry.on(q.get_device())(q, k, v, return_lse=with_lse, **options)
    check_call(entry, q, k, v, captures, seed)
    options |= named_captures(entry, [to_array(each) for each in captures], integers, floats)
    arrays = map(to_array, _in_rows(entry, q, k, v))
    made = entry.on(None)(*arrays, return_lse=with_lse, **options)
    return _in_order_of_queries(q, tuple(map(to_tensor, made)) if with_lse else to_tensor(made), with_lse)


def _in_order_of_queries(q: Tensor, made: Any, with_lse: bool) -> Any:
    """Results of a call, the output's axes nested as those of q."""
    return (in_order_of(q, made[0]), made[1]) if with_lse else in_order_of(q, made)


def _in_rows(entry: Registered, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v where kernels can read them, copied where need be; a cache of keys and values is never copied."""
    return (in_rows(q), k, v) if entry.cache else (in_rows(q), in_rows(k), in_rows(v))


def _put_right(
    rows: Sequence[Tensor], aligned: Sequence[Tensor], error: ArgumentError, check: Callable[[], None] | None = None
) -> Sequence[Tensor]:
    """Tensors that a kernel refused as `rows`, copied to where it can read them.

    To look at all strides of a tensor costs a call as much as its launch: most are as they should be, and are given as
    they stand. Where no copy helps the error is raised, or what `check` says of tensors.
    """
    if all(new is old for new, old in zip(aligned, rows, strict=True)):
        if check:
            check()
        raise error
    return aligned


def seed_of(entry: Registered, seed: Tensor) -> Any:
    """The dropout's seed as attentions take it: one that is where kernels run they read, and nobody waits for it."""
    if entry.emulate:
        return to_array(seed)
    return seed if seed.is_cuda else int(seed) & (2**64 - 1)


def _shaped_forward(
    entry: Registered, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output and the LSE of tensors that hold no data: fake ones, and those of the device "meta"."""
    check_call(entry, q, k, v, captures, seed)
    out, lse = output_shapes(entry.spec, q)
    return empty_like(q, out), q.new_empty(lse, dtype=torch.float32)


@torch.library.register_fake("flashgen::forward", lib=LIBRARY)
def _(q: Tensor, k: Tensor, v: Tensor, captures: Any, key: str, integers: Any, floats: Any, seed: Any) -> Any:
    return _shaped_forward(entry_of_key(key), q, k, v, captures, seed)


@as_operator
def backward(
    d_out: torch.Tensor,
    d_lse: Optional[torch.Tensor],  # noqa: UP045
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    captures: Sequence[torch.Tensor],
    key: str,
    integers: Sequence[int],
    floats: Sequence[float],
    seed: Optional[torch.Tensor],  # noqa: UP045
) -> list[torch.Tensor]:
    """The gradients of q, k, v, and of each captured array that was declared with grad=True."""
    entry, integers, floats = entry_of_call(key, integers, floats, q, k, captures)
    return list(run_backward(entry, d_out, d_lse, q, k, v, out, lse, captures, integers, floats, seed))


def run_backward(
    entry: Registered,
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    captures: Sequence[Tensor],
    integers: Sequence[int],
    floats: Sequence[float],
    seed: Tensor | None,
) -> Sequence[Tensor]:
    """What the operator does."""
    if entry.is_direct and q.is_cuda:
        found = direct.backward(entry.on(q.get_device()), (d_out, d_lse, q, k, v, out, lse))
        if found is not None:
            return found
    if q.is_meta:
        return _shaped_backward(entry, q, k, v, captures)
    made: Sequence[Tensor]
    options: dict[str, Any] = {} if seed is None else {"seed": seed_of(entry, seed)}
    lse = lse.contiguous()
    if not entry.emulate:
        if d_lse is not None:
            options["d_lse"] = d_lse.contiguous()
        if captures or integers or floats:
            options |= named_captures(entry, captures, integers, floats)
            options.pop("num_splits", None)  # of the forward alone
        if d_out.stride(-1) != 1 or q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
            d_out_rows, q_rows, k_rows, v_rows, out_rows = (in_rows(each) for each in (d_out, q, k, v, out))
            given: Any = (d_out_rows, d_lse, q_rows, k_rows, v_rows, out_rows, lse, captures, integers, floats, seed)
            made = run_backward(entry, *given)
            return _in_order_of_inputs(entry, (q, k, v), captures, made)
        try:
            made = entry.on(q.get_device()).backward(d_out, q, k, v, out, lse, **options)
            if entry.is_direct:
                read = (d_out, options.get("d_lse"), q, k, v, out, lse)
                direct.learn_backward(entry.on(q.get_device()), read)
                return made
        except ArgumentError as error:
            rows = (d_out, q, k, v, out)
            d_out, q, k, v, out = _put_right(rows, [in_rows(each) for each in rows], error)
            made = entry.on(q.get_device()).backward(d_out, q, k, v, out, lse, **options)
        return _in_order_of_inputs(entry, (q, k, v), captures, made) if entry.learned else made
    if d_lse is not None:
        options["d_lse"] = to_array(d_lse.contiguous())
    options |= named_captures(entry, [to_array(each) for each in captures], integers, floats)
    options.pop("num_splits", None)
    arrays: Any = [to_array(in_rows(tensor)) for tensor in (d_out, q, k, v, out)] + [to_array(lse)]
    found = entry.on(None).backward(*arrays, **options)
    return _in_order_of_inputs(entry, (q, k, v), captures, [to_tensor(gradient) for gradient in found])


def _in_order_of_inputs(
    entry: Registered, rows: Sequence[Tensor], captures: Sequence[Tensor], made: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients, the axes of each nested as those of what it is a gradient of."""
    of_rows = [in_order_of(tensor, gradient) for tensor, gradient in zip(rows, made, strict=False)]
    learned = [tensor for capture, tensor in zip(entry.arrays, captures, strict=False) if capture.grad]
    of_captures = [
        gradient if tensor.is_contiguous() else empty_like(tensor, gradient.shape).copy_(gradient)
        for tensor, gradient in zip(learned, made[3:], strict=True)
    ]
    return of_rows + of_captures


def _shaped_backward(entry: Registered, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of tensors that hold no data."""
    learned = [tensor for capture, tensor in zip(entry.arrays, captures, strict=False) if capture.grad]
    return [empty_like(tensor, tensor.shape) for tensor in (q, k, v, *learned)]


@torch.library.register_fake("flashgen::backward", lib=LIBRARY)
def _(
    d_out: Tensor, d_lse: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, captures: Any, key: str,
    integers: Any, floats: Any, seed: Any,
) -> list[Tensor]:  # fmt: skip
    return _shaped_backward(entry_of_key(key), q, k, v, captures)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps what the backward operator takes: tensors as autograd's, numbers as they are."""
    q, k, v, captures, ctx.key, ctx.integers, ctx.floats, seed = inputs
    refuse_gradients(entry_of_key(ctx.key), q, k, v, captures)
    ctx.set_materialize_grads(False)
    ctx.captured, ctx.seeded = len(captures), seed is not None
    ctx.save_for_backward(q, k, v, *captures, *output, *([seed] if ctx.seeded else []))


def gradients(
    ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, operator: Callable[..., Any] | None = None
) -> tuple[Any, ...]:
    """The gradient of each argument of the forward operator, lists as lists; `operator` in place of the backward's."""
    q, k, v, *rest = ctx.saved_tensors
    captures, (out, lse, *seed) = rest[: ctx.captured], rest[ctx.captured :]
    d_out = torch.zeros_like(out) if d_out is None else d_out.to(out.dtype)
    numbers = (ctx.key, ctx.integers, ctx.floats, seed[0] if seed else None)
    made = list((operator or torch.ops.flashgen.backward)(d_out, d_lse, q, k, v, out, lse, captures, *numbers))
    learned = iter(made[3:])
    of_captures = [next(learned) if each.grad else None for each in entry_of_key(ctx.key).arrays[: ctx.captured]]
    # torch takes an empty list for one of tensors, and one of numbers for a single argument.
    no_numbers: Any = (None if ctx.integers else [], None if ctx.floats else [])
    return (*made[:3], of_captures, None, *no_numbers, None)


def no_second_derivative(ctx: Any, *grad_outputs: Any) -> Any:
    """The gradient of a gradient, which there is none of."""
    raise UnsupportedError("flashgen's attention has no second derivative: take gradients of it once")


def no_forward_mode(ctx: Any, *grad_inputs: Any) -> Any:
    """The tangent of a result, which there is none of."""
    raise UnsupportedError(NO_FORWARD_MODE)


torch.library.register_autograd("flashgen::forward", gradients, setup_context=save, lib=LIBRARY)
torch.library.register_autograd("flashgen::backward", no_second_derivative, lib=LIBRARY)


class Plain(torch.autograd.Function):
    """The two operators by themselves, for calls that nobody looks at: a tenth of what the dispatcher takes.

    `about` is (entry, integers, floats, seed) of the call: what autograd need not look at.
    """

    @staticmethod
    def forward(ctx: Any, about: Any, q: Any, k: Any, v: Any, *captures: Any) -> Any:
        return _kept(ctx, about, q, k, v, captures)[0]

    jvp = staticmethod(no_forward_mode)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor | None = None) -> Any:
        q, k, v, out, lse, *captures = ctx.saved_tensors
        entry, *numbers = ctx.about
        if torch.is_grad_enabled():  # under create_graph=True the operator says that it has no gradient itself
            given = (d_out, d_lse, q, k, v, out, lse, captures, entry.key, *numbers)
            made = torch.ops.flashgen.backward(*given)
        else:
            made = run_backward(entry, d_out, d_lse, q, k, v, out, lse, captures, *numbers)
        if not captures:
            return (None, *made)
        learned = iter(made[3:])
        return (None, *made[:3], *(next(learned) if each.grad else None for each in entry.arrays[: len(captures)]))


class PlainWithLse(Plain):
    """`Plain`, which gives the LSE, too."""

    @staticmethod
    def forward(ctx: Any, about: Any, q: Any, k: Any, v: Any, *captures: Any) -> Any:
        ctx.set_materialize_grads(False)
        return _kept(ctx, about, q, k, v, captures)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None = None) -> Any:
        d_out = torch.zeros_like(ctx.saved_tensors[3]) if d_out is None else d_out
        return Plain.backward(ctx, d_out, d_lse)


def _kept(ctx: Any, about: Any, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    entry, integers, floats, seed = ctx.about = about
    made: tuple[Tensor, Tensor] = run_forward(entry, q, k, v, captures, integers, floats, seed)
    ctx.save_for_backward(q, k, v, *made, *captures)
    return made
