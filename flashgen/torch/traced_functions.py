"""Traces the functions of a call at that call: returns the text of each, and the arrays and numbers that it read.

The score function and the mask function run once in each call, with proxies of their indices. The call uses the values
that they read at that time: tensors become operands of the attention, with gradients by autograd, and numbers are kept
beside the text (`variants` decides which become constants of a kernel). Under torch.compile Dynamo runs the same
functions through `placeholders`, so that all that they read is guarded or becomes an input of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch._functorch.autograd_function import custom_function_call

from flashgen.errors import SpecError
from flashgen.language.calls import call_traced, check_signature
from flashgen.language.captures import element
from flashgen.language.closures import StandIns
from flashgen.language.elementary import where
from flashgen.language.modifiers import MASK_SYMBOLS, SCORE_SYMBOLS, Mask, Score, name_of
from flashgen.language.protocols import DTYPES, call_torch, leaf_of
from flashgen.language.trace import HANDLED, Traced, lift, traced_node, watch_gradient_mode
from flashgen.torch.autograd_functions import custom_function
from flashgen.torch.call_keys import ABSENT, distinct
from flashgen.torch.variants import TextOfMask

watch_gradient_mode(torch.is_grad_enabled)
DTYPES.update(bool=torch.bool, int=torch.int32, float=torch.float32)
HANDLED[torch.Tensor.where] = lambda x, condition, y: where(condition, x, y)
HANDLED[custom_function_call] = custom_function
_get_item = torch.Tensor.__getitem__


def _torch_function(_cls: Any, function: Any, _types: Any, arguments: Any = (), keywords: Any = None) -> Any:
    """Records a call of a function of torch with a traced value. Elements of tensors, the most common, come first."""
    if function is _get_item:
        tensor, index = arguments
        leaf = leaf_of(tensor.dtype, tensor.ndim, tensor.requires_grad)
        return element(leaf, tensor, index if type(index) is tuple else (index,))
    return call_torch(function, arguments, keywords or {})


Traced.__torch_function__ = MethodType(_torch_function, Traced)  # type: ignore[method-assign]  # bound once
_is_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled
_enter_vmap, _leave_vmap = torch._C._functorch._vmap_increment_nesting, torch._C._functorch._vmap_decrement_nesting
_MASK_LEAVES = tuple(traced_node(symbol) for symbol in MASK_SYMBOLS)
_SCORE_LEAVES = tuple(traced_node(symbol) for symbol in SCORE_SYMBOLS)


class TracedMask(NamedTuple):
    """A mask function as traced in one call: its text, and the arrays that the text reads."""

    text: TextOfMask
    arrays: list[Any]


def trace_mask_function(function: Callable[..., Any]) -> TracedMask:
    """Traces a mask function for a spec. Its numbers become constants."""
    _, traced = trace_functions(None, function)
    if traced.kind != "bool":
        raise SpecError(f"a mask function must return a boolean, got {traced.kind}: compare it, e.g. return x != 0")
    arrays, slots = distinct(traced.arrays)
    return TracedMask(TextOfMask(name_of(function, "mask"), traced.text, traced.numbers, slots), arrays)


def check_mask_function(function: Callable[..., Any]) -> None:
    """Raises SpecError if a mask function cannot be traced. Does nothing under torch.compile, which traces calls."""
    if not torch.compiler.is_compiling():
        trace_functions(None, function)


def trace_functions(
    score_mod: Callable[..., Any] | Score | None, mask_mod: Callable[..., Any] | Mask | None
) -> tuple[Traced, Traced]:
    """Returns the results of a score function and a mask function for their leaves; `ABSENT` for None.

    One level of torch.func.vmap is entered, in which no tensor is mapped: Function.apply then dispatches to the traced
    values, and tensors keep their autograd history. Gradients are enabled, so that tracing gives the same result with
    and without no_grad. Context managers would take twice as long.
    """
    grad_enabled = _is_grad_enabled()
    _set_grad_enabled(True)
    _enter_vmap(1, "same")
    try:
        score = ABSENT if score_mod is None else _trace(score_mod, _SCORE_LEAVES)
        return score, ABSENT if mask_mod is None else _trace(mask_mod, _MASK_LEAVES)
    finally:
        _leave_vmap()
        _set_grad_enabled(grad_enabled)


def _trace(function: Any, leaves: tuple[Traced, ...]) -> Traced:
    """Returns the result of a function for its leaves."""
    try:
        result = function(*leaves)
        if type(result) is Traced:
            return result
    except Exception:
        if isinstance(function, (Mask, Score)):
            raise
        result = _run_with_stand_ins(function, leaves)
    if isinstance(result, (Mask, Score)):
        result = result(*leaves)
    try:
        return lift(result)
    except SpecError as error:
        raise SpecError(f"{_kind_of(leaves)} function: {error}") from error


def _run_with_stand_ins(function: Any, leaves: tuple[Traced, ...]) -> Any:
    """Runs a function again after a failure, with stand-ins for arrays that traced values cannot index, as NumPy's."""
    name = f"{_kind_of(leaves)} {getattr(function, '__name__', _kind_of(leaves))!r}"
    check_signature(function, MASK_SYMBOLS if leaves is _MASK_LEAVES else SCORE_SYMBOLS, name)
    return call_traced(StandIns(function).function, leaves, name)


def _kind_of(leaves: tuple[Traced, ...]) -> str:
    return "mask" if leaves is _MASK_LEAVES else "score"
