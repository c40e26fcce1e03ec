"""Traces the functions of a call at that call: returns the key that identifies the kernel, and its operands.

The score function and the mask function run once in each call, with proxies of their indices. The call uses the values
that they read at that time: tensors become operands of the attention, with gradients by autograd, and numbers are kept
beside the key (`variants` decides which become constants of a kernel). Under torch.compile Dynamo runs the same
functions through `placeholders`, so that all that they read is guarded or becomes an input of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashgen.errors import SpecError
from flashgen.language.bound import dtype_read
from flashgen.language.calls import call_traced, check_signature
from flashgen.language.captures import Leaf, array_leaf, element
from flashgen.language.closures import StandIns
from flashgen.language.elementary import where
from flashgen.language.modifiers import MASK_SYMBOLS, SCORE_SYMBOLS, Mask, Score, name_of
from flashgen.language.protocols import DTYPES
from flashgen.language.trace import HANDLED, Traced, lift, traced_node, watch_gradient_mode
from flashgen.torch.autograd_functions import enter_tracing, leave_tracing
from flashgen.torch.call_keys import NamedTrace, call_key, distinct
from flashgen.torch.placeholders import TracedCall
from flashgen.torch.tensors import dtype_of, operands
from flashgen.torch.variants import TextOfMask

watch_gradient_mode(torch.is_grad_enabled)
DTYPES.update(bool=torch.bool, int=torch.int32, float=torch.float32)
_LEAVES: dict[tuple[torch.dtype, int, bool], Leaf] = {}


def _tensor_element(tensor: torch.Tensor, index: Any) -> Any:
    """Returns the element of a tensor at traced indices."""
    kind = (tensor.dtype, tensor.ndim, tensor.requires_grad)
    leaf = _LEAVES.get(kind)
    if leaf is None:
        dtype = dtype_read(dtype_of(tensor), "table")
        leaf = _LEAVES[kind] = array_leaf(dtype, tensor.ndim, tensor.requires_grad)
    return element(leaf, tensor, index if isinstance(index, tuple) else (index,))


HANDLED[torch.Tensor.__getitem__] = _tensor_element
HANDLED[torch.Tensor.where] = lambda x, condition, y: where(condition, x, y)
_MASK_LEAVES = tuple(traced_node(symbol) for symbol in MASK_SYMBOLS)
_SCORE_LEAVES = tuple(traced_node(symbol) for symbol in SCORE_SYMBOLS)


def trace_call(
    score_mod: Callable[..., Any] | Score | None,
    mask_mod: Callable[..., Any] | Mask | None,
    spec: str,
    device: torch.device,
) -> TracedCall:
    """Traces the functions of a call.

    Args:
        score_mod: f(score, b, h, q, k) -> score, or None.
        mask_mod: f(b, h, q, k) -> bool, or None.
        spec: the other fields of the spec as JSON without brackets (`variants.spec_text`).
        device: the device that operands are moved to.
    """
    score, mask = _trace_functions(score_mod, mask_mod)
    key, arrays, numbers = call_key(score, mask, spec)
    integers: list[int] = []
    floats: list[float] = []
    for number in numbers:
        (floats if isinstance(number, float) else integers).append(number)
    return key, operands(arrays, device), integers, floats


class TracedMask(NamedTuple):
    """A mask function as traced in one call: its text, and the arrays that the text reads."""

    text: TextOfMask
    arrays: list[Any]


def trace_mask_function(function: Callable[..., Any]) -> TracedMask:
    """Traces a mask function for a spec. Its numbers become constants."""
    _, mask = _trace_functions(None, function)
    assert mask is not None
    traced, _ = mask
    if traced.kind != "bool":
        raise SpecError(f"a mask function must return a boolean, got {traced.kind}: compare it, e.g. return x != 0")
    arrays, slots = distinct(traced.arrays)
    return TracedMask(TextOfMask(name_of(function, "mask"), traced.text, traced.numbers, slots), arrays)


def check_mask_function(function: Callable[..., Any]) -> None:
    """Raises SpecError if a mask function cannot be traced. Does nothing under torch.compile, which traces calls."""
    if not torch.compiler.is_compiling():
        _trace_functions(None, function)


def _trace_functions(score_mod: Any, mask_mod: Any) -> tuple[NamedTrace | None, NamedTrace | None]:
    """Returns the results of the functions for their leaves; None for None."""
    grad_enabled = enter_tracing()
    try:
        score = None if score_mod is None else _trace(score_mod, _SCORE_LEAVES, "score_mod")
        mask = None if mask_mod is None else _trace(mask_mod, _MASK_LEAVES, "mask_mod")
    finally:
        leave_tracing(grad_enabled)
    return score, mask


def _trace(function: Any, leaves: tuple[Traced, ...], name: str) -> NamedTrace:
    """Returns the result of a function for its leaves. name: that of a function without its own."""
    if isinstance(function, (Mask, Score)):
        return function(*leaves), function.name
    try:
        result = function(*leaves)
        if type(result) is Traced:
            return result, name
    except Exception:
        result = _run_with_stand_ins(function, leaves)
    if isinstance(result, (Mask, Score)):
        result = result(*leaves)
    try:
        return lift(result), name
    except SpecError as error:
        raise SpecError(f"{_kind_of(leaves)} function: {error}") from error


def _run_with_stand_ins(function: Any, leaves: tuple[Traced, ...]) -> Any:
    """Runs a function again after a failure, with stand-ins for arrays that traced values cannot index, as NumPy's."""
    name = f"{_kind_of(leaves)} {getattr(function, '__name__', _kind_of(leaves))!r}"
    check_signature(function, MASK_SYMBOLS if leaves is _MASK_LEAVES else SCORE_SYMBOLS, name)
    return call_traced(StandIns(function).function, leaves, name)


def _kind_of(leaves: tuple[Traced, ...]) -> str:
    return "mask" if leaves is _MASK_LEAVES else "score"
