"""jax.vmap over the calls: the mapped axis joins the batch where that changes nothing; else one call after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from flashgen.jax import calls
from flashgen.jax.calls import Numbers
from flashgen.jax.compiled import Compiled


def mapped_forward(entry: Compiled, numbers: Numbers) -> Callable[..., Any]:
    """`forward(q, k, v, seed, captures)`, with a rule for vmap."""
    return _mapped(entry, lambda q, k, v, seed, captures: calls.forward(entry, numbers, q, k, v, seed, captures))


def mapped_backward(entry: Compiled, numbers: Numbers) -> Callable[..., Any]:
    """`backward(rows, d_lse, seed, captures)`, likewise."""
    return _mapped(
        entry, lambda rows, d_lse, seed, captures: calls.backward(entry, numbers, rows, d_lse, seed, captures)
    )


def _mapped(entry: Compiled, function: Callable[..., Any]) -> Callable[..., Any]:
    call = custom_vmap(function)

    @call.def_vmap
    def rule(size: int, batched: Any, *arguments: Any) -> Any:
        """By the leaves that are mapped, along their first axis."""
        alone = jax.tree.leaves(batched[-2:])  # the seed, and captures
        together = not (any(alone) or entry.reads_batch or entry.learned or entry.spec.dropout)
        made = (_together if together else _one_by_one)(call, size, batched, arguments)
        return made, jax.tree.map(lambda _: True, made)

    return call


def _together(call: Callable[..., Any], size: int, batched: Any, arguments: Any) -> Any:
    *rows, seed, captures = arguments

    def join(array: Any, is_mapped: bool) -> Any:
        array = array if is_mapped else jnp.broadcast_to(array, (size, *array.shape))
        return array.reshape(-1, *array.shape[2:])

    made = call(*jax.tree.map(join, rows, list(batched[:-2])), seed, captures)
    return jax.tree.map(lambda array: array.reshape(size, -1, *array.shape[1:]), made)


def _one_by_one(call: Callable[..., Any], size: int, batched: Any, arguments: Any) -> Any:
    leaves, tree = jax.tree.flatten(arguments)
    flags = jax.tree.leaves(batched)
    mapped = [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]

    def one(taken: Any) -> Any:
        rest = iter(taken)
        given = [next(rest) if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]
        return call(*jax.tree.unflatten(tree, given))

    return jax.lax.map(one, mapped)
