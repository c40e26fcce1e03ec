"""The operators `flashgen::forward` and `flashgen::backward`, registered for dispatch, autograd and torch.compile.

Both return new tensors that alias no input, and can be traced without data. The spec is passed as a key (table.py). The
LSE is an output, so that checkpointing policies that save the outputs of operators save all that the backward needs.
Where V is a part of K, v is an empty view of k, and so is its gradient: all specs share the schemas.
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
    refuse_values,
    to_array,
    to_tensor,
)

LIBRARY = torch.library.Library("flashgen", "FRAGMENT")  # registrations live as long as this object


def as_operator(
    function: Callable[..., Any], name: str | None = None, written: Sequence[str] = ()
) -> Callable[..., Any]:
    """Registers a function as the implementation of an operator on every device.

    torch.library.custom_op checks in each call whether outputs alias inputs and adds layers of Python, which take
    longer than the operator itself in a compiled graph. This registration has neither.

    name: the name of the operator; None is that of the function. written: the arguments that it mutates.
    """
    schema = torch.library.infer_schema(function, mutates_args=written)
    name = name or function.__name__
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, outside_of_graphs("a kernel")(function), "CompositeExplicitAutograd")
    return function


# torch infers the schema from these annotations. Some versions accept neither strings nor `|` in them.
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
    """Returns the output and the LSE, float32 (batch, heads, queries), or (heads, tokens) of a varlen batch.

    captures, integers, floats: in the order of the entry. seed: one int64, on the device of q or on the CPU.
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
    """Runs the forward. Returns the output, or the pair (output, LSE) with `with_lse`."""
    if forward_ad._current_level >= 0:
        refuse_tangents(q, k, v, *captures)
    if entry.is_direct and not integers and q.is_cuda:
        results = direct.forward(entry.on(q.get_device()), q, k, v, with_lse, sequences=captures)
        if results is not None:
            return results
    if q.is_meta:
        empty = _empty_forward(entry, q, k, v, captures, seed)
        return empty if with_lse else empty[0]
    if entry.shared_kv:
        refuse_values(entry, v)
        if entry.is_direct_shared and not integers and q.is_cuda:
            results = direct.forward_of_shared(entry.on(q.get_device()), q, k, with_lse)
            if results is not None:
                return results
    options: dict[str, Any] = {} if seed is None else {"seed": seed_of(entry, seed)}
    if q.is_cuda and not entry.emulate:
        if captures or integers or floats:
            options |= named_captures(entry, captures, integers, floats)
        if q.stride(-1) != 1 or (not entry.cache and (k.stride(-1) != 1 or v.stride(-1) != 1)):
            rows = _in_rows(entry, q, k, v)
            results = run_forward(entry, *rows, captures, integers, floats, seed, with_lse)
            return _in_order_of_q(q, results, with_lse)
        try:
            return entry.on(q.get_device())(q, k, None if entry.shared_kv else v, return_lse=with_lse, **options)
        except ArgumentError as error:
            aligned = _in_rows(entry, q, k, v)
            check = partial(check_call, entry, q, k, v, captures, seed)
            q, k, v = _copy_if_misaligned((q, k, v), aligned, error, check)
        return entry.on(q.get_device())(q, k, None if entry.shared_kv else v, return_lse=with_lse, **options)
    check_call(entry, q, k, v, captures, seed)
    options |= named_captures(entry, [to_array(each) for each in captures], integers, floats)
    arrays = map(to_array, _in_rows(entry, q, k, v)[: len(entry.spec.inputs)])
    results = entry.on(None)(*arrays, return_lse=with_lse, **options)
    return _in_order_of_q(q, tuple(map(to_tensor, results)) if with_lse else to_tensor(results), with_lse)


def _in_order_of_q(q: Tensor, results: Any, with_lse: bool) -> Any:
    """Returns the results of a call, with the axes of the output in the memory order of q."""
    return (in_order_of(q, results[0]), results[1]) if with_lse else in_order_of(q, results)


def _in_rows(entry: Registered, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v with rows that kernels can read, copied if necessary. A KV cache is never copied."""
    return (in_rows(q), k, v) if entry.cache else (in_rows(q), in_rows(k), in_rows(v))


def _copy_if_misaligned(
    rows: Sequence[Tensor], aligned: Sequence[Tensor], error: ArgumentError, check: Callable[[], None] | None = None
) -> Sequence[Tensor]:
    """Returns `aligned`, copies of tensors that a kernel refused as `rows`.

    Checking all strides of a tensor takes as long as a launch. So tensors are passed unchecked first, and copied only
    after an error. If no tensor had to be copied, raises the error of `check`, or else `error`.
    """
    if all(new is old for new, old in zip(aligned, rows, strict=True)):
        if check:
            check()
        raise error
    return aligned


def seed_of(entry: Registered, seed: Tensor) -> Any:
    """Returns the seed as attentions take it. A seed on a GPU is read by kernels, without synchronisation."""
    if entry.emulate:
        return to_array(seed)
    return seed if seed.is_cuda else int(seed) & (2**64 - 1)


def _empty_forward(
    entry: Registered, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns an empty output and LSE for tensors without data: fake tensors, and those of the device "meta"."""
    check_call(entry, q, k, v, captures, seed)
    out, lse = output_shapes(entry.spec, q)
    return empty_like(q, out, entry.out_dtype), q.new_empty(lse, dtype=torch.float32)


@torch.library.register_fake("flashgen::forward", lib=LIBRARY)
def _(q: Tensor, k: Tensor, v: Tensor, captures: Any, key: str, integers: Any, floats: Any, seed: Any) -> Any:
    return _empty_forward(entry_of_key(key), q, k, v, captures, seed)


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
    """Returns the gradients of q, k, v, and of each captured array that was declared with grad=True."""
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
    """Runs the backward. Returns the gradients of q, k, v and of captures with grad=True."""
    if entry.is_direct and q.is_cuda and not (integers and entry.keys_optional):
        given: direct.Read = (d_out, d_lse, q, k, v, out, lse)
        found = direct.backward(entry.on(q.get_device()), given, sequences=captures)
        if found is not None:
            return found
    elif entry.is_direct_shared and q.is_cuda:
        shared = direct.backward_of_shared(entry.on(q.get_device()), d_out, d_lse, q, k, out, lse)
        if shared is not None:
            return _with_values(v, shared)
    if q.is_meta:
        return _empty_backward(entry, q, k, v, captures)
    results: Sequence[Tensor]
    if entry.spec.out_dtype:
        d_out = d_out.to(q.dtype)  # autograd gives it the dtype of the output
    options: dict[str, Any] = {} if seed is None else {"seed": seed_of(entry, seed)}
    lse = lse.contiguous()
    if not entry.emulate:
        if d_lse is not None:
            options["d_lse"] = d_lse.contiguous()
        if captures or integers or floats:
            options |= named_captures(entry, captures, integers, floats)
            options.pop("num_splits", None)  # an argument of the forward only
        if d_out.stride(-1) != 1 or q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
            d_out_rows, q_rows, k_rows, v_rows, out_rows = (in_rows(each) for each in (d_out, q, k, v, out))
            rest: Any = (d_out_rows, d_lse, q_rows, k_rows, v_rows, out_rows, lse, captures, integers, floats, seed)
            results = run_backward(entry, *rest)
            return _in_order_of_inputs(entry, (q, k, v), captures, results)
        try:
            values = None if entry.shared_kv else v
            results = entry.on(q.get_device()).backward(d_out, q, k, values, out, lse, **options)
        except ArgumentError as error:
            rows = (d_out, q, k, v, out)
            d_out, q, k, v, out = _copy_if_misaligned(rows, [in_rows(each) for each in rows], error)
            values = None if entry.shared_kv else v
            results = entry.on(q.get_device()).backward(d_out, q, k, values, out, lse, **options)
        if entry.shared_kv:
            results = _with_values(v, results)
        return _in_order_of_inputs(entry, (q, k, v), captures, results) if entry.learned else results
    return _emulate_backward(entry, (d_out, q, k, v, out, lse), d_lse, captures, integers, floats, options)


def _emulate_backward(
    entry: Registered,
    rows: Sequence[Tensor],
    d_lse: Tensor | None,
    captures: Sequence[Tensor],
    integers: Sequence[int],
    floats: Sequence[float],
    options: dict[str, Any],
) -> Sequence[Tensor]:
    """Runs the backward on the emulator. rows: d_out, q, k, v, out, lse. options: further keyword arguments."""
    d_out, q, k, v, out, lse = rows
    if d_lse is not None:
        options["d_lse"] = to_array(d_lse.contiguous())
    options |= named_captures(entry, [to_array(each) for each in captures], integers, floats)
    options.pop("num_splits", None)
    arrays: Any = [to_array(in_rows(tensor)) for tensor in (d_out, q, k, v, out)] + [to_array(lse)]
    if entry.shared_kv:
        arrays[3] = None
    results = [to_tensor(gradient) for gradient in entry.on(None).backward(*arrays, **options)]
    if entry.shared_kv:
        results = _with_values(v, results)
    return _in_order_of_inputs(entry, (q, k, v), captures, results)


def _with_values(v: Tensor, results: Sequence[Tensor]) -> list[Tensor]:
    """Adds an empty gradient of v to the gradients of q, k and captures."""
    return [*results[:2], empty_like(v, v.shape), *results[2:]]


def _in_order_of_inputs(
    entry: Registered, rows: Sequence[Tensor], captures: Sequence[Tensor], results: Sequence[Tensor]
) -> list[Tensor]:
    """Returns gradients with their axes in the memory order of the tensors that they belong to."""
    row_gradients = [in_order_of(tensor, gradient) for tensor, gradient in zip(rows, results, strict=False)]
    learned = [tensor for capture, tensor in zip(entry.arrays, captures, strict=False) if capture.grad]
    capture_gradients = [
        gradient if tensor.is_contiguous() else empty_like(tensor, gradient.shape).copy_(gradient)
        for tensor, gradient in zip(learned, results[3:], strict=True)
    ]
    return row_gradients + capture_gradients


def _empty_backward(entry: Registered, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor]) -> list[Tensor]:
    """Returns empty gradients for tensors without data."""
    learned = [tensor for capture, tensor in zip(entry.arrays, captures, strict=False) if capture.grad]
    return [empty_like(tensor, tensor.shape) for tensor in (q, k, v, *learned)]


@torch.library.register_fake("flashgen::backward", lib=LIBRARY)
def _(
    d_out: Tensor, d_lse: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, captures: Any, key: str,
    integers: Any, floats: Any, seed: Any,
) -> list[Tensor]:  # fmt: skip
    return _empty_backward(entry_of_key(key), q, k, v, captures)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Saves the arguments of the backward operator in the context of autograd."""
    q, k, v, captures, ctx.key, ctx.integers, ctx.floats, seed = inputs
    refuse_gradients(entry_of_key(ctx.key), q, k, v, captures)
    ctx.set_materialize_grads(False)
    ctx.captured, ctx.seeded = len(captures), seed is not None
    ctx.save_for_backward(q, k, v, *captures, *output, *([seed] if ctx.seeded else []))


def gradients(
    ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, operator: Callable[..., Any] | None = None
) -> tuple[Any, ...]:
    """Returns the gradient of each argument of the forward operator. operator: replaces the backward operator."""
    q, k, v, *rest = ctx.saved_tensors
    captures, (out, lse, *seed) = rest[: ctx.captured], rest[ctx.captured :]
    d_out = torch.zeros_like(out) if d_out is None else d_out.to(out.dtype)  # autocast changes its dtype
    numbers = (ctx.key, ctx.integers, ctx.floats, seed[0] if seed else None)
    results = list((operator or torch.ops.flashgen.backward)(d_out, d_lse, q, k, v, out, lse, captures, *numbers))
    learned = iter(results[3:])
    capture_gradients = [next(learned) if each.grad else None for each in entry_of_key(ctx.key).arrays[: ctx.captured]]
    # torch treats an empty list as a list of tensors, with a list of gradients, and a list of numbers as one argument.
    no_numbers: Any = (None if ctx.integers else [], None if ctx.floats else [])
    return (*results[:3], capture_gradients, None, *no_numbers, None)


def no_second_derivative(ctx: Any, *grad_outputs: Any) -> Any:
    """Raises UnsupportedError: there is no second derivative."""
    raise UnsupportedError("flashgen's attention has no second derivative: take gradients of it once")


def no_forward_mode(ctx: Any, *grad_inputs: Any) -> Any:
    """Raises UnsupportedError: there is no forward-mode derivative."""
    raise UnsupportedError(NO_FORWARD_MODE)


torch.library.register_autograd("flashgen::forward", gradients, setup_context=save, lib=LIBRARY)
torch.library.register_autograd("flashgen::backward", no_second_derivative, lib=LIBRARY)


class Plain(torch.autograd.Function):
    """Forward and backward without the dispatcher, in a tenth of its time, for calls that nothing intercepts.

    options: (entry, integers, floats, seed) of the call, which autograd does not track.
    """

    @staticmethod
    def forward(ctx: Any, options: Any, q: Any, k: Any, v: Any, *captures: Any) -> Any:
        return _run_and_save(ctx, options, q, k, v, captures)[0]

    jvp = staticmethod(no_forward_mode)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor | None = None) -> Any:
        q, k, v, out, lse, *captures = ctx.saved_tensors
        entry, *numbers = ctx.options
        if torch.is_grad_enabled():  # create_graph=True: the operator raises if it is differentiated
            given = (d_out, d_lse, q, k, v, out, lse, captures, entry.key, *numbers)
            results = torch.ops.flashgen.backward(*given)
        else:
            results = run_backward(entry, d_out, d_lse, q, k, v, out, lse, captures, *numbers)
        if not captures:
            return (None, *results)
        learned = iter(results[3:])
        return (None, *results[:3], *(next(learned) if each.grad else None for each in entry.arrays[: len(captures)]))


class PlainWithLse(Plain):
    """`Plain`, with the LSE as a second output."""

    @staticmethod
    def forward(ctx: Any, options: Any, q: Any, k: Any, v: Any, *captures: Any) -> Any:
        ctx.set_materialize_grads(False)
        return _run_and_save(ctx, options, q, k, v, captures)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None = None) -> Any:
        d_out = torch.zeros_like(ctx.saved_tensors[3]) if d_out is None else d_out
        return Plain.backward(ctx, d_out, d_lse)


def _run_and_save(ctx: Any, options: Any, q: Tensor, k: Tensor, v: Tensor, captures: Any) -> tuple[Tensor, Tensor]:
    entry, integers, floats, seed = ctx.options = options
    results: tuple[Tensor, Tensor] = run_forward(entry, q, k, v, captures, integers, floats, seed)
    ctx.save_for_backward(q, k, v, *results, *captures)
    return results
