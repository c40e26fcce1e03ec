"""Checks and conversions of tensors: to arrays for the emulator, to rows that kernels read, to captured operands."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils.weak import WeakTensorKeyDictionary

from flashgen.attention.problem import checked_sizes
from flashgen.attention.row_arrays import arrays_of_rows
from flashgen.dtypes import CAPTURES, numpy_dtype
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.language.bound import BoundArray, dtype_read
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.arrays import inverse, nesting, overrides_functions
from flashgen.torch.table import Registered, constant

_ROW_BYTES = 16
_DIRECTLY_READ = frozenset(getattr(torch, name) for name in CAPTURES)
_MASKS = ("bool", "float16", "bfloat16", "float32")
NO_FORWARD_MODE = (
    "forward-mode differentiation (jvp, jacfwd, hessian, dual tensors) of flashgen's attention is not supported: take "
    "reverse-mode gradients, by backward, grad, vjp or jacrev"
)
Tensor: TypeAlias = torch.Tensor


PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


class _Shaped(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


def dtype_of(tensor: Tensor) -> str:
    """Returns the name of a tensor's dtype, as NumPy spells it."""
    return str(tensor.dtype).removeprefix("torch.")


def are_plain(a: Any, b: Any, c: Any) -> bool:
    """Whether values are dense tensors of torch, not of a subclass. `check_tensors` accepts some subclasses too."""
    if not type(a) is type(b) is type(c) is torch.Tensor and not {type(a), type(b), type(c)}.issubset(PLAIN_TENSORS):
        return False
    if not a.layout is b.layout is c.layout is torch.strided:
        return False
    return not (a.is_nested or b.is_nested or c.is_nested)


def check_tensors(**given: Any) -> None:
    """Raises ArgumentError for values that are not dense tensors of torch.

    It also refuses subclasses that override functions of torch, as their elements may have another meaning.
    """
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(
                f"{name} of type {type(value).__name__} is no tensor of torch: torch.from_numpy converts arrays of "
                "NumPy, and flashgen.compile(spec) takes them directly"
            )
        if value.is_nested or value.layout != torch.strided:
            kind = "nested" if value.is_nested else f"of layout {value.layout}"
            raise ArgumentError(
                f"{name} is {kind}: give a dense tensor; pack sequences of several lengths, and call "
                "flashgen.torch.varlen_attention or a spec of layout 'thd'"
            )
        cls = type(value)
        if cls not in PLAIN_TENSORS and overrides_functions(cls):
            raise ArgumentError(
                f"{name} of type {cls.__module__}.{cls.__name__}: the meaning of its elements is not known here; give "
                f"a torch.Tensor, such as {name}.as_subclass(torch.Tensor) if the plain elements are right"
            )


def causal_bias(mask: Any, len_q: int, len_k: int) -> str | None:
    """Returns the alignment of torch's CausalBias, "top_left" or "bottom_right"; None for all other masks.

    The memory of a CausalBias is not initialised; its attributes define it. Raises ArgumentError for other lengths.
    """
    if type(mask) in PLAIN_TENSORS or not isinstance(mask, torch.Tensor):
        return None
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(mask, CausalBias):
        return None
    if (mask.seq_len_q, mask.seq_len_kv) != (len_q, len_k):
        raise ArgumentError(
            f"attn_mask is a CausalBias of {mask.seq_len_q} queries and {mask.seq_len_kv} keys; query has {len_q} and "
            f"key {len_k}: make it for these lengths"
        )
    return "top_left" if mask.variant == CausalVariant.UPPER_LEFT else "bottom_right"


def check_mask(mask: Tensor) -> None:
    """Raises ArgumentError unless attn_mask is a tensor of booleans or floats. Integers would be ambiguous."""
    check_tensors(attn_mask=mask)
    if dtype_of(mask) not in _MASKS:
        raise ArgumentError(
            f"attn_mask is {dtype_of(mask)}: give booleans, attn_mask.bool() if 1 means that a query attends, or "
            f"numbers that are added to the scores, of {', '.join(_MASKS[1:])}"
        )


def check_call(
    entry: Registered, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], seed: Tensor | None
) -> None:
    """Raises ArgumentError if shapes, dtypes or devices do not fit the spec. Works for fake tensors too."""
    spec = entry.spec
    if spec.shared_kv:
        refuse_values(entry, v)
    for name, tensor in zip(spec.inputs, (q, k, v), strict=False):
        check_device(entry, name, tensor, q)
        if dtype_of(tensor) != spec.dtype and (name == "q" or not spec.of_cache):
            raise ArgumentError(
                f"{name} is {dtype_of(tensor)}; the spec is of {spec.dtype}: convert it, or call it under "
                f"torch.autocast('{q.device.type}', torch.{spec.dtype})"
            )
    min_arrays = len(entry.arrays) - entry.keys_optional
    if not min_arrays <= len(captures) <= len(entry.arrays):
        raise ArgumentError(f"{len(captures)} arrays are given; calls of the spec take {len(entry.arrays)}")
    for capture, tensor in zip(entry.arrays, captures, strict=False):
        is_own = capture in entry.own_arrays
        what = capture.name if is_own else f"capture {capture.name!r}"
        check_tensors(**{what: tensor})
        check_device(entry, what, tensor, q)
        if dtype_of(tensor) != capture.dtype or tensor.ndim != capture.ndim:
            raise ArgumentError(
                f"{what} is {dtype_of(tensor)} of shape {tuple(tensor.shape)}; "
                f"{'calls take it' if is_own else 'it was declared'} {capture.dtype} of {capture.ndim} dimension(s): "
                "convert it"
            )
    _check_shapes(entry, q, k, v, captures)
    if seed is not None and (seed.dtype != torch.int64 or seed.numel() != 1):
        raise ArgumentError(f"seed is {dtype_of(seed)} of shape {tuple(seed.shape)}: give a number, or one int64")
    if seed is not None and seed.device not in (q.device, torch.device("cpu")):
        raise ArgumentError(f"seed is on {seed.device} and q on {q.device}: move it there, or give a number")


def _check_shapes(entry: Registered, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor]) -> None:
    """Raises ArgumentError if the sizes of a call do not fit together."""
    captured = len(entry.arrays) - len(entry.own_arrays)
    own = {each.name: tensor for each, tensor in zip(entry.own_arrays, captures[captured:], strict=False)}
    rows = dict(zip(entry.spec.inputs, (q, k, v), strict=False))
    checked_sizes(entry.spec, {name: _Shaped(tuple(x.shape), dtype_of(x)) for name, x in {**rows, **own}.items()})


def values_of_call(entry: Registered, k: Tensor, v: Any) -> Tensor:
    """Returns the operand v of operators. Where V is a part of K, it is an empty view of k, so that all specs share the
    schemas of the operators.

    Raises ArgumentError if v is missing, is not a tensor, or is given although V is a part of K.
    """
    if entry.shared_kv and v is None:
        return k.detach().narrow(-1, 0, 0)
    arrays_of_rows(entry.spec, None, k, v)  # raises the error that names the reason
    check_tensors(v=v)
    return v


def refuse_values(entry: Registered, v: Tensor) -> None:
    """Raises ArgumentError if the operand v of an operator has elements although V is a part of K."""
    if v.shape[-1]:
        arrays_of_rows(entry.spec, None, None, v)


def refuse_gradients(entry: Registered, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor]) -> None:
    """Raises UnsupportedError if a tensor requires a gradient in a call that has no backward."""
    if not entry.cache:
        return
    names = ("q", "k", "v", *(capture.name for capture in entry.arrays))
    for name, tensor in zip(names, (q, k, v, *captures), strict=False):
        if tensor.requires_grad:
            raise UnsupportedError(
                f"{name} requires a gradient, and a call with {entry.cache} has none: give {name}.detach(), or "
                "call it under torch.no_grad()"
            )


def refuse_tangents(*tensors: Tensor) -> None:
    """Raises UnsupportedError for dual tensors of forward-mode differentiation, which would lose their tangents."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(each).tangent is not None for each in tensors):
        raise UnsupportedError(NO_FORWARD_MODE)


def check_device(entry: Registered, name: str, tensor: Tensor, q: Tensor) -> None:
    """Raises ArgumentError for a tensor that is not on the device of q, or on one without kernels."""
    if tensor.device != q.device:
        raise ArgumentError(
            f"{name} is on {tensor.device} and q on {q.device}: move it there with .to({str(q.device)!r})"
        )
    if entry.emulate and tensor.device.type not in ("cpu", "meta"):
        raise ArgumentError(
            f"{name} is on {tensor.device}; the emulator takes CPU tensors: call it without emulate=True"
        )
    if not entry.emulate and tensor.device.type == "cpu":
        raise ArgumentError(
            f"{name} is on the CPU: move it to a GPU with .cuda(), or say emulate=True to run it on the emulator, as "
            "all calls inside of flashgen.torch.emulated() do"
        )
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        raise ArgumentError(f"{name} is on {tensor.device}; kernels run on NVIDIA GPUs: move it to one with .cuda()")


def empty_like(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Returns an empty tensor of a shape, dense, with its axes in the memory order of `tensor`.

    dtype: None is that of `tensor`.
    """
    order = nesting(tensor.stride())
    return tensor.new_empty([shape[axis] for axis in order], dtype=dtype).permute(inverse(order))


def in_rows(tensor: Tensor) -> Tensor:
    """Returns the tensor if its rows are contiguous and start at multiples of 16 bytes; otherwise a copy.

    The axes of the copy keep the memory order of the tensor, except that the last axis becomes the innermost.
    """
    size = tensor.element_size()
    strides = tensor.stride()
    if strides[-1] == 1 or tensor.shape[-1] == 1:
        misalignment = sum(
            stride * size % _ROW_BYTES
            for stride, length in zip(strides[:-1], tensor.shape[:-1], strict=True)
            if length > 1
        )
        if not misalignment and tensor.data_ptr() % _ROW_BYTES == 0 and strides[-1] == 1:
            return tensor
    order = (*nesting(strides[:-1]), tensor.ndim - 1)
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse(order))


def in_order_of(tensor: Tensor, result: Tensor) -> Tensor:
    """Returns a result with the innermost axis of `tensor`: itself, or a copy with the axes in that order."""
    if tensor.stride(-1) == 1 or nesting(tensor.stride())[-1] == tensor.ndim - 1:
        return result
    return empty_like(tensor, result.shape, result.dtype).copy_(result)


def to_array(tensor: Tensor) -> Any:
    """Copies a CPU tensor to an array of NumPy. FSDP could not free memory that NumPy shares."""
    tensor = tensor.detach().clone(memory_format=torch.preserve_format)
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy().view(numpy_dtype("float8_e4m3fn"))
    return tensor.numpy()


def to_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """Returns an array of NumPy as a CPU tensor that shares its memory."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def output_shapes(spec: AttentionSpec, q: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of the output and the LSE."""
    return (*q.shape[:-1], spec.value_dim), spec.batch_layout.lse_shape(tuple(q.shape))


def bound_tensor(bound: BoundArray, device: torch.device) -> Tensor:
    """Returns an array that a spec's function closes over as a tensor with its present values, converted and moved.

    Under torch.compile the array is an input of the graph.
    """
    array = bound.original
    if not isinstance(array, torch.Tensor):
        if torch.compiler.is_compiling():
            array = torch.as_tensor(array)
        elif device.type == "cpu":
            return to_tensor(np.ascontiguousarray(bound.on_host()))
        else:
            moved: Tensor = bound.moved(
                device, lambda here, there: _uploaded(to_tensor(np.ascontiguousarray(here)), there, device)
            )
            return moved
    return operand(array, bound.dtype, device)


def operands(arrays: Sequence[Any], device: torch.device) -> list[Tensor]:
    """Returns the arrays of any library that a traced function read as tensors that kernels can read."""
    return [
        each if _is_read_directly(each.dtype) and each.ndim and each.device == device else _operand_of(each, device)
        for each in arrays
    ]


def distinct_operands(held: Sequence[Any], device: torch.device) -> tuple[list[Tensor], tuple[int, ...], bool]:
    """Returns the distinct arrays of `held` as tensors that kernels can read.

    It does in one loop what `call_keys.distinct` and `operands` do, for each call without torch.compile. Also returns
    the position of each array of `held` among the tensors, and whether no tensor is of a subclass.
    """
    positions: dict[int, int] = {}
    tensors: list[Tensor] = []
    slots = []
    are_plain = True
    for array in held:
        slot = positions.setdefault(id(array), len(tensors))
        if slot == len(tensors):
            if array.dtype not in _DIRECTLY_READ or not array.ndim or array.device != device:
                array = _operand_of(array, device)
            if type(array) not in PLAIN_TENSORS:
                are_plain = False
            tensors.append(array)
        slots.append(slot)
    return tensors, tuple(slots), are_plain


@constant
def _is_read_directly(dtype: Any) -> bool:
    """Whether kernels read tensors of a dtype without conversion."""
    return dtype in _DIRECTLY_READ


def _operand_of(array: Any, device: torch.device) -> Tensor:
    if not isinstance(array, torch.Tensor):
        array = to_tensor(np.ascontiguousarray(BoundArray(array, "table").on_host()))
    return operand(array, dtype_read(dtype_of(array), "table"), device)


def operand(array: Tensor, read: str, device: torch.device) -> Tensor:
    """Returns a captured tensor as kernels read it: on the device, of the dtype `read`, with at least one dimension."""
    if array.device != device and _is_copied_once(array):
        array = _copies_of(array).on(device, array)
    given = dtype_of(array)
    if read != given:
        array = narrowed(array) if (read, given) == ("int32", "int64") else array.to(getattr(torch, read))
    if array.ndim == 0:
        array = array.reshape(1)
    return array if array.device == device else array.to(device)


def _is_copied_once(array: Tensor) -> bool:
    """Whether a copy of a CPU tensor may be reused while its values are the same, which autograd does not allow."""
    return array.device.type == "cpu" and not array.requires_grad and not torch.compiler.is_compiling()


def _uploaded(values: Tensor, copy: Tensor | None, device: torch.device) -> Tensor:
    """Copies values to a GPU: to a new tensor, or to `copy` after all streams have finished reading it.

    Captured graphs read the memory of the copy, which therefore keeps its address.
    """
    if copy is None:
        return values.to(device)
    torch.cuda.synchronize(device)
    with torch.no_grad():
        return copy.copy_(values)


class _Copies:
    """Copies of a CPU tensor on GPUs, which calls reuse while its values are the same."""

    def __init__(self) -> None:
        self._copies: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device, array: Tensor) -> Tensor:
        """Returns the present values of the tensor on a device."""
        values = array.detach().reshape(-1).contiguous().view(torch.uint8)
        seen, copy = self._copies.get(device, (None, None))
        if seen is None or copy is None or not torch.equal(seen, values):
            same = copy is not None and (copy.shape, copy.dtype) == (array.shape, array.dtype)
            copy = _uploaded(array.detach(), copy if same else None, device)
            self._copies[device] = values.clone(), copy
        return copy


_COPIES: MutableMapping[Tensor, _Copies] = WeakTensorKeyDictionary()


def _copies_of(array: Tensor) -> _Copies:
    found = _COPIES.get(array)
    if found is None:
        found = _COPIES[array] = _Copies()
    return found


def narrowed(value: Tensor) -> Tensor:
    """Converts int64 to int32. A value that does not fit fails a device assertion, as torch's wrong indices do."""
    narrow = value.to(torch.int32)
    torch._assert_async((narrow == value).all(), "a captured array declared int32 has int64 values that do not fit")
    return narrow
