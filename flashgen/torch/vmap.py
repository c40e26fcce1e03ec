"""torch.func.vmap over the operators: the mapped dimension is folded into the batch where results are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashgen.errors import ArgumentError
from flashgen.torch import operators
from flashgen.torch.table import entry_of_key
from flashgen.torch.tensors import Tensor


def vmap_forward(info: Any, in_dims: Any, *arguments: Any, operator: Callable[..., Any] | None = None) -> Any:
    """Runs the forward over a mapped dimension, as torch.library.register_vmap calls it.

    operator: replaces the forward operator, with the same arguments.
    """
    return _mapped(operator or torch.ops.flashgen.forward, info, in_dims, arguments, rows=3, key=4, captures=3)


def vmap_backward(info: Any, in_dims: Any, *arguments: Any, operator: Callable[..., Any] | None = None) -> Any:
    """Runs the backward over a mapped dimension; see `vmap_forward`."""
    return _mapped(operator or torch.ops.flashgen.backward, info, in_dims, arguments, rows=7, key=8, captures=7)


def _mapped(
    operator: Callable[..., Any],
    info: Any,
    in_dims: Any,
    arguments: tuple[Any, ...],
    rows: int,
    key: int,
    captures: int,
) -> Any:
    """Runs one call with a larger batch, or one per index if captures are mapped or the batch index matters."""
    entry = entry_of_key(arguments[key])
    if entry.spec.dropout and info.randomness == "error":
        raise ArgumentError("vmap of attention with dropout: say randomness='same' or 'different'")
    separate = entry.reads_batch or entry.learned or entry.spec.dropout or entry.own_arrays
    mapped_captures = any(dim is not None for dim in in_dims[captures] or ())
    return (_one_by_one if mapped_captures or separate else _by_batch)(operator, info, in_dims, arguments, rows)


def _by_batch(operator: Callable[..., Any], info: Any, in_dims: Any, arguments: tuple[Any, ...], rows: int) -> Any:
    size = info.batch_size
    joined = [
        None if tensor is None else _mapped_first(tensor, dim, size).flatten(0, 1)
        for tensor, dim in zip(arguments[:rows], in_dims, strict=False)
    ]
    results = operator(*joined, *arguments[rows:])
    separate = [tensor.unflatten(0, (size, tensor.shape[0] // size)) for tensor in results]
    return _as_list_or_tuple(results, separate), _as_list_or_tuple(results, [0] * len(separate))


def _one_by_one(operator: Callable[..., Any], info: Any, in_dims: Any, arguments: tuple[Any, ...], rows: int) -> Any:
    def at(value: Any, dim: Any, index: int) -> Any:
        if isinstance(value, (list, tuple)):
            dims = dim if isinstance(dim, (list, tuple)) else [dim] * len(value)
            return [at(each, own, index) for each, own in zip(value, dims, strict=True)]
        return value.select(dim, index) if isinstance(value, torch.Tensor) and dim is not None else value

    results = [
        operator(*(at(value, dim, index) for value, dim in zip(arguments, in_dims, strict=True)))
        for index in range(info.batch_size)
    ]
    stacked = [torch.stack(each) for each in zip(*results, strict=True)]
    return _as_list_or_tuple(results[0], stacked), _as_list_or_tuple(results[0], [0] * len(stacked))


def _mapped_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _as_list_or_tuple(results: Any, values: list[Any]) -> Any:
    return values if isinstance(results, list) else tuple(values)


torch.library.register_vmap("flashgen::forward", vmap_forward, lib=operators.LIBRARY)
torch.library.register_vmap("flashgen::backward", vmap_backward, lib=operators.LIBRARY)
