"""Traces the functions of a call at that call: gives the text that identifies the kernel, and its operands.

A score function and a mask function run once for each call, with proxies of their indices. What they read then is what
the call means: tensors become operands of the attention, with the gradients that autograd gives them; numbers stand
beside the text (`variants` decides which are constants of a kernel). Under torch.compile Dynamo runs the same
functions, by `placeholders`, so that whatever they read is guarded, or an input of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from flashgen.errors import SpecError
from flashgen.language.bound import BoundArray, dtype_read
from flashgen.language.calls import call_traced, check_signature
from flashgen.language.captures import Leaf, array_leaf, element
from flashgen.language.closures import StandIns
from flashgen.language.dtypes import CAPTURES
from flashgen.language.elementary import where
from flashgen.language.modifiers import MASK_SYMBOLS, SCORE_SYMBOLS, Mask, Score, name_of
from flashgen.language.protocols import DTYPES
from flashgen.language.trace import HANDLED, Traced, lift, traced_node, watch_gradient_mode
from flashgen.torch.autograd_functions import tracing
from flashgen.torch.call_keys import call_key, distinct
from flashgen.torch.placeholders import traced_by_dynamo
from flashgen.torch.table import constant
from flashgen.torch.tensors import Tensor, dtype_of, to_tensor
from flashgen.torch.tensors import operand as as_operand
from flashgen.torch.variants import TextOfMask

watch_gradient_mode(torch.is_grad_enabled)
DTYPES.update(bool=torch.bool, int=torch.int32, float=torch.float32)
_LEAVES: dict[tuple[torch.dtype, int, bool], Leaf] = {}


def _tensor_element(tensor: Tensor, index: Any) -> Any:
    """An element of a tensor at traced indices."""
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


TracedCall: TypeAlias = tuple[str, list[Tensor], list[int], list[float]]
"""The key of a call, its arrays, its integers and its floats. No named tuple: Dynamo guards its class in every call."""


def trace_call(
    score_mod: Callable[..., Any] | Score | None,
    mask_mod: Callable[..., Any] | Mask | None,
    spec: str,
    device: torch.device,
) -> TracedCall:
    """Traces the functions of a call.

    Args:
        score_mod: f(score, b, h, q, k) -> score; mask_mod: f(b, h, q, k) -> bool; None is no function.
        spec: JSON of what else the spec is made of, without brackets, as `variants.Variant` reads it.
        device: where operands are moved that are elsewhere.
    """
    if torch.compiler.is_compiling():
        key, arrays, integers, floats = traced_by_dynamo(score_mod, mask_mod, spec)
        return key, [operand(array, device) for array in arrays], integers, floats
    with tracing():
        score, mask = _trace(score_mod, _SCORE_LEAVES), _trace(mask_mod, _MASK_LEAVES)
    key, arrays, numbers = call_key(score, _name(score_mod, "score_mod"), mask, _name(mask_mod, "mask_mod"), spec)
    integers = [number for number in numbers if not isinstance(number, float)]
    floats = [number for number in numbers if isinstance(number, float)]
    return key, [operand(array, device) for array in arrays], integers, floats


class TracedMask(NamedTuple):
    """A mask function as it is at one call: its text, and the arrays that this reads."""

    text: TextOfMask
    arrays: list[Any]


def trace_mask_function(function: Callable[..., Any]) -> TracedMask:
    """Traces a mask function, for a spec that is made of it; its numbers are constants."""
    with tracing():
        traced = _trace(function, _MASK_LEAVES)
    assert traced is not None
    if traced.kind != "bool":
        raise SpecError(f"a mask function must return a boolean, got {traced.kind}: compare it, e.g. return x != 0")
    arrays, slots = distinct(traced.arrays)
    return TracedMask(TextOfMask(name_of(function, "mask"), traced.text, traced.numbers, tuple(slots)), arrays)


def check_mask_function(function: Callable[..., Any]) -> None:
    """SpecError where a mask function cannot be traced; not under torch.compile, which traces it where it is called."""
    if not torch.compiler.is_compiling():
        with tracing():
            _trace(function, _MASK_LEAVES)


def _name(function: Any, plain: str) -> str:
    return function.name if isinstance(function, (Mask, Score)) else plain


def _trace(function: Any, leaves: tuple[Traced, ...]) -> Traced | None:
    """What a function returns for its leaves."""
    if function is None:
        return None
    return function(*leaves) if isinstance(function, (Mask, Score)) else _run(function, leaves)


def _run(function: Any, leaves: tuple[Traced, ...]) -> Traced:
    try:
        result = function(*leaves)
        if type(result) is Traced:
            return result
    except Exception:
        result = _run_with_stand_ins(function, leaves)
    if isinstance(result, (Mask, Score)):
        result = result(*leaves)
    try:
        return lift(result)
    except SpecError as error:
        raise SpecError(f"{_what(leaves)} function: {error}") from error


def _run_with_stand_ins(function: Any, leaves: tuple[Traced, ...]) -> Any:
    """The result of a function that failed: with stand-ins for arrays that traced values cannot index, as NumPy's."""
    name = f"{_what(leaves)} {getattr(function, '__name__', _what(leaves))!r}"
    check_signature(function, MASK_SYMBOLS if leaves is _MASK_LEAVES else SCORE_SYMBOLS, name)
    return call_traced(StandIns(function).function, leaves, name)


def _what(leaves: tuple[Traced, ...]) -> str:
    return "mask" if leaves is _MASK_LEAVES else "score"


_AS_THEY_ARE = frozenset(getattr(torch, name) for name in CAPTURES)


@constant
def is_read_as_it_stands(dtype: torch.dtype) -> bool:
    """Whether kernels read arrays of a dtype without a conversion."""
    return dtype in _AS_THEY_ARE


def operand(array: Any, device: torch.device) -> Tensor:
    """An array as kernels read it."""
    if not isinstance(array, torch.Tensor):
        array = to_tensor(np.ascontiguousarray(BoundArray(array, "table").on_host()))
    if is_read_as_it_stands(array.dtype) and array.ndim and array.device == device:
        return array
    return as_operand(array, dtype_read(dtype_of(array), "table"), device)
