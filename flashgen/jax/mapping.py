"""The rules of jax.vmap: the mapped axis joins the batch if this gives the same result, else calls run in sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from flashgen.jax import calls
from flashgen.jax.calls import Numbers
from flashgen.jax.compiled import CompiledSpec


def mapped_forward(entry: CompiledSpec, numbers: Numbers) -> Callable[..., Any]:
    """Returns `forward(q, k, v, seed, captures)` with a vmap rule."""
    return _mapped(entry, lambda q, k, v, seed, captures: calls.forward(entry, numbers, q, k, v, seed, captures))


def mapped_backward(entry: CompiledSpec, numbers: Numbers) -> Callable[..., Any]:
    """Returns `backward(rows, d_lse, seed, captures)` with a vmap rule."""
    return _mapped(
        entry, lambda rows, d_lse, seed, captures: calls.backward(entry, numbers, rows, d_lse, seed, captures)
    )


def _mapped(entry: CompiledSpec, function: Callable[..., Any]) -> Callable[..., Any]:
    call = custom_vmap(function)

    @call.def_vmap
    def rule(size: int, batched: Any, *arguments: Any) -> Any:
        """Maps over the first axis of the leaves that `batched` marks."""
        unbatchable = jax.tree.leaves(batched[-2:])  # the seed and the captures have no batch axis
        joins = not (any(unbatchable) or entry.reads_batch or entry.differentiated or entry.spec.dropout)
        results = (_join_batch if joins else _sequentially)(call, size, batched, arguments)
        return results, jax.tree.map(lambda _: True, results)

    return call


def _join_batch(call: Callable[..., Any], size: int, batched: Any, arguments: Any) -> Any:
    *rows, seed, captures = arguments

    def join(array: Any, is_mapped: bool) -> Any:
        array = array if is_mapped else jnp.broadcast_to(array, (size, *array.shape))
        return array.reshape(-1, *array.shape[2:])

    results = call(*jax.tree.map(join, rows, list(batched[:-2])), seed, captures)
    return jax.tree.map(lambda array: array.reshape(size, -1, *array.shape[1:]), results)


def _sequentially(call: Callable[..., Any], size: int, batched: Any, arguments: Any) -> Any:
    leaves, tree = jax.tree.flatten(arguments)
    flags = jax.tree.leaves(batched)
    mapped = [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]

    def one(taken: Any) -> Any:
        rest = iter(taken)
        given = [next(rest) if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]
        return call(*jax.tree.unflatten(tree, given))

    return jax.lax.map(one, mapped)
