"""Tensors as attentions take them: on a GPU as they stand, on the CPU copied to NumPy for the emulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from flashgen.attention.problem import checked_sizes, in_layout
from flashgen.errors import ArgumentError
from flashgen.language.bound import BoundArray
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.arrays import are_nested
from flashgen.torch.table import CaptureInfo, Registered

_ROW_BYTES = 16
Tensor: TypeAlias = torch.Tensor


class _Shaped(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


def dtype_of(tensor: Tensor) -> str:
    """NumPy's name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def check_call(
    entry: Registered, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor], seed: Tensor | None
) -> None:
    """ArgumentError where a call does not fit its spec; of shapes, dtypes and devices alone, so of fake tensors too."""
    spec = entry.spec
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_device(entry, name, tensor, q)
        if dtype_of(tensor) != spec.dtype:
            raise ArgumentError(
                f"{name} is {dtype_of(tensor)}; the spec is of {spec.dtype}: convert it, or call it under "
                f"torch.autocast('{q.device.type}', torch.{spec.dtype})"
            )
    checked_sizes(spec, {name: _Shaped(tuple(x.shape), dtype_of(x)) for name, x in (("q", q), ("k", k), ("v", v))})
    if len(captures) != len(entry.arrays):
        raise ArgumentError(f"{len(captures)} arrays are given; the spec captures {len(entry.arrays)}")
    for capture, tensor in zip(entry.arrays, captures, strict=True):
        check_device(entry, f"capture {capture.name!r}", tensor, q)
        if dtype_of(tensor) != capture.dtype or tensor.ndim != capture.ndim:
            raise ArgumentError(
                f"capture {capture.name!r} is {dtype_of(tensor)} of shape {tuple(tensor.shape)}; it was declared "
                f"{capture.dtype} of {capture.ndim} dimension(s)"
            )
    if seed is not None and (seed.dtype != torch.int64 or seed.numel() != 1):
        raise ArgumentError(f"seed is {dtype_of(seed)} of shape {tuple(seed.shape)}: give a number, or one int64")
    if seed is not None and seed.device not in (q.device, torch.device("cpu")):
        raise ArgumentError(f"seed is on {seed.device} and q on {q.device}: move it there, or give a number")


def check_device(entry: Registered, name: str, tensor: Tensor, q: Tensor) -> None:
    """ArgumentError for a tensor that is not where kernels run, or not where q is."""
    if tensor.device != q.device:
        raise ArgumentError(
            f"{name} is on {tensor.device} and q on {q.device}: move it there with .to({str(q.device)!r})"
        )
    if entry.emulate and tensor.device.type != "cpu":
        raise ArgumentError(
            f"{name} is on {tensor.device}; the emulator takes CPU tensors: call it without emulate=True"
        )
    if not entry.emulate and tensor.device.type == "cpu":
        raise ArgumentError(
            f"{name} is on the CPU: move it to a GPU with .cuda(), or say emulate=True to run it on the emulator"
        )
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        raise ArgumentError(f"{name} is on {tensor.device}; kernels run on NVIDIA GPUs: move it to one with .cuda()")


def empty_like(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Memory of a shape, in the order in which results are made: the axes nested as the tensor's."""
    if not are_nested(tensor.stride()):
        return tensor.new_empty(shape)
    return tensor.new_empty((shape[0], shape[2], shape[1], shape[3])).transpose(1, 2)


def in_rows(tensor: Tensor) -> Tensor:
    """The tensor with rows that kernels read, contiguous and at multiples of 16 bytes: itself, or a copy as nested."""
    size = tensor.element_size()
    strides = tensor.stride()
    if strides[-1] == 1 or tensor.shape[-1] == 1:
        misplaced = sum(
            stride * size % _ROW_BYTES
            for stride, length in zip(strides[:-1], tensor.shape[:-1], strict=True)
            if length > 1
        )
        if not misplaced and tensor.data_ptr() % _ROW_BYTES == 0 and strides[-1] == 1:
            return tensor
    nested = are_nested(strides)
    rows = tensor.transpose(1, 2) if nested else tensor
    rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.transpose(1, 2) if nested else rows


def to_array(tensor: Tensor) -> Any:
    """A CPU tensor as an array of NumPy: a copy, as memory that NumPy shares can no longer be freed by FSDP."""
    tensor = tensor.detach().clone(memory_format=torch.preserve_format)
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def to_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """An array of NumPy as a CPU tensor that shares its memory."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def named_captures(entry: Registered, captures: Sequence[Any], integers: Sequence[int], floats: Sequence[float]) -> Any:
    """The captures of a call by name."""
    named: dict[str, Any] = {capture.name: array for capture, array in zip(entry.arrays, captures, strict=True)}
    named |= {capture.name: int(number) for capture, number in zip(entry.integers, integers, strict=True)}
    named |= {capture.name: float(number) for capture, number in zip(entry.floats, floats, strict=True)}
    return named


def output_shapes(spec: AttentionSpec, q: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the output and the LSE."""
    batch, heads, length, _ = in_layout(tuple(q.shape), spec.layout)
    return in_layout((batch, heads, length, spec.value_dim), spec.layout), (batch, heads, length)


def bound_tensor(bound: BoundArray, device: torch.device) -> Tensor:
    """An array that a function closed over, as a tensor on a device: itself, or a copy that is made once.

    One that wants a gradient is moved by each call, so that its gradient finds back.
    """
    array = bound.current()
    if isinstance(array, torch.Tensor):
        if array.device == device:
            return array
        return array.to(device) if bound.grad else bound.moved(device, lambda it: it.to(device))
    return bound.moved(device, lambda _: to_tensor(np.ascontiguousarray(bound.on_host())).to(device))


def all_captures(entry: Registered, given: Mapping[str, Any], bound: Mapping[str, Tensor]) -> Any:
    """(arrays, integers, floats) of a call as operators take them; ArgumentError where one is missing or unknown."""
    declared = {capture.name for capture in (*entry.arrays, *entry.integers, *entry.floats)}
    for name in given:
        if name not in declared:
            known = ", ".join(sorted(declared)) or "none"
            raise ArgumentError(f"unknown argument {name!r}; the spec declares these captures: {known}")
    arrays = [_array(capture, given, bound) for capture in entry.arrays]
    return arrays, [_number(each, given) for each in entry.integers], [_number(each, given) for each in entry.floats]


def _array(capture: CaptureInfo, given: Mapping[str, Any], bound: Mapping[str, Tensor]) -> Tensor:
    value = given.get(capture.name)
    if value is None and capture.name in bound:
        return bound[capture.name]
    if not isinstance(value, torch.Tensor):
        what = "is missing" if value is None else f"of type {type(value).__name__} is no tensor"
        raise ArgumentError(f"capture {capture.name!r} {what}: give {capture.name}=<{capture.dtype} tensor>")
    if value.requires_grad and not capture.grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"capture {capture.name!r} requires a gradient and was declared without: declare it with grad=True, or "
            f"give {capture.name}.detach()"
        )
    if capture.dtype == "int32" and value.dtype == torch.int64:
        return _narrowed(value)
    return value


def _narrowed(value: Tensor) -> Tensor:
    """int64 values as int32's; one that does not fit stops the device, as torch's own wrong indices do."""
    narrow = value.to(torch.int32)
    torch._assert_async((narrow == value).all(), "a captured array declared int32 has int64 values that do not fit")
    return narrow


def _number(capture: CaptureInfo, given: Mapping[str, Any]) -> Any:
    if capture.name not in given:
        raise ArgumentError(f"capture {capture.name!r} is missing: give {capture.name}=<{capture.dtype} number>")
    value = given[capture.name]
    if isinstance(value, torch.Tensor) or (capture.kind == "int" and isinstance(value, float) and value != int(value)):
        raise ArgumentError(f"capture {capture.name!r} is {value!r}; it was declared {capture.dtype}: give a number")
    return value
