"""`dot_product_attention`, with the signature and meaning of the function in jax.nn."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashgen.dtypes import ELEMENTS
from flashgen.errors import ArgumentError
from flashgen.jax.functional import attention
from flashgen.language.captures import Tensor as Captured
from flashgen.language.masks import Mask, causal, padding, sliding_window, trace_mask
from flashgen.language.spec import AttentionSpec

_BIASES = ("float16", "bfloat16", "float32")
_MULTIPLE = 8  # of a spec's head_dim


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    emulate: bool = False,
) -> Any:
    """Computes attention as jax.nn's function of the same name, in float16 or bfloat16.

    It works under jit, grad, vmap and shard_map, as `flashgen.jax.attention`. A query that may attend to no key has an
    output of 0; with jax.nn's default implementation it has the mean of all values.

    Args:
        query: (batch, length, heads, dim), or without the batch.
        key, value: (batch, keys, heads of keys, dim). heads is a multiple of the heads of keys. A dim that is no
            multiple of 8 is padded, which copies all three.
        bias: a float array that is added to the scaled scores, broadcastable to (batch, heads, length, keys). It has a
            gradient where JAX differentiates it.
        mask: a boolean array of such a shape, True where a query may attend to a key.
        scale: the factor of the scores, a Python number; None is 1/sqrt(dim).
        is_causal: let query i attend to keys 0 to i.
        query_seq_lengths: int32 (batch,), the numbers of queries in use. The output of the others is 0.
        key_value_seq_lengths: int32 (batch,), the numbers of keys in use.
        local_window_size: (left, right), the numbers of keys before and after a query's position; or one number for
            both.
        implementation: None or "flashgen". jax.nn's own have other names.
        return_residual: also return the LSE, (batch, length, heads), in the dtype of key and without a gradient.
        emulate: run on the CPU with the emulator.

    Returns:
        The output, in the shape of query, or the pair (output, LSE).

    Raises:
        ArgumentError: jax.nn would refuse the arguments; implementation is one of jax.nn's; scale is an array; or query
            is float32.
    """
    if implementation not in (None, "flashgen"):
        raise ArgumentError(
            f"implementation={implementation!r}: flashgen runs kernels of its own; leave it out, or call "
            "jax.nn.dot_product_attention"
        )
    shape = jnp.shape(query)
    q, k, v = (_four_dimensional(name, each) for name, each in (("query", query), ("key", key), ("value", value)))
    _check_rows(q, k, v)
    captures = {
        "bias": None if bias is None else _four_dimensional("bias", bias),
        "mask": None if mask is None else _four_dimensional("mask", mask),
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
    }
    given: dict[str, Any] = {name: jnp.asarray(array) for name, array in captures.items() if array is not None}
    _check_captures(given, q, k)
    declared = tuple((name, array.dtype.name, isinstance(array, jax.core.Tracer)) for name, array in given.items())
    head_dim, scale = q.shape[-1], _number("scale", scale)
    if head_dim % _MULTIPLE:
        scale = head_dim**-0.5 if scale is None else scale
        q, k, v = (jnp.pad(each, [(0, 0)] * 3 + [(0, -head_dim % _MULTIPLE)]) for each in (q, k, v))
    spec = _build_spec(q.shape[-1], q.dtype.name, scale, bool(is_causal), _window(local_window_size), declared)
    out, lse = attention(spec, q, k, v, return_lse=True, emulate=emulate, **given)
    out = out[..., :head_dim].reshape(shape)
    if not return_residual:
        return out
    residual = jax.lax.stop_gradient(lse).swapaxes(1, 2).astype(k.dtype)
    return out, residual.reshape(shape[:-1])


def _four_dimensional(name: str, array: Any) -> Any:
    """Returns an array with leading dimensions of size 1. Raises ArgumentError for more than four dimensions."""
    array = jnp.asarray(array)
    if array.ndim > 4:
        raise ArgumentError(f"{name} has shape {array.shape}: give at most four dimensions")
    return array[(None,) * (4 - array.ndim)]


def _check_rows(q: Any, k: Any, v: Any) -> None:
    """Raises ArgumentError unless the shapes and dtypes of query, key and value fit."""
    if q.dtype.name not in ELEMENTS:
        raise ArgumentError(
            f"query is {q.dtype.name}; flashgen computes in float16 and bfloat16: convert query, key and value, or "
            "call jax.nn.dot_product_attention"
        )
    for name, array in (("key", k), ("value", v)):
        if array.dtype != q.dtype:
            raise ArgumentError(f"{name} is {array.dtype.name} and query {q.dtype.name}: give both the same dtype")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ArgumentError(
            f"query has shape {q.shape}, key {k.shape} and value {v.shape}: give (batch, length, heads, dim), with the "
            "same batch and dim, and the same shape of key and value"
        )
    if q.shape[2] % k.shape[2]:
        raise ArgumentError(f"query has {q.shape[2]} heads and key {k.shape[2]}: give a multiple of the heads of key")


def _check_captures(given: dict[str, Any], q: Any, k: Any) -> None:
    """Raises ArgumentError unless the arrays beside query, key and value have the shapes and dtypes that they need."""
    batch, length, heads, _ = q.shape
    wanted = (batch, heads, length, k.shape[1])
    for name, array in given.items():
        dtypes = {"bias": _BIASES, "mask": ("bool",)}.get(name, ("int32",))
        if array.dtype.name not in dtypes:
            hint = ", or a mask" if name == "bias" else ", or a bias" if name == "mask" else ""
            raise ArgumentError(f"{name} is {array.dtype.name}: give {', '.join(dtypes)}{hint}")
        if name not in ("bias", "mask"):
            if array.shape != (batch,):
                raise ArgumentError(f"{name} has shape {array.shape}: give one length for each sequence, ({batch},)")
        elif any(size not in (1, full) for size, full in zip(array.shape, wanted, strict=True)):
            raise ArgumentError(f"{name} has shape {array.shape}, which does not broadcast to {wanted}")


def _number(name: str, value: Any) -> float | None:
    if value is None or isinstance(value, (int, float, np.integer, np.floating)):
        return None if value is None else float(value)
    raise ArgumentError(
        f"{name} is an array of type {type(value).__name__}: give a Python number, which is a constant of the program, "
        "or multiply query by it and give 1.0"
    )


def _window(size: Any) -> tuple[int, int] | None:
    """Returns (left, right) of a window. Raises ArgumentError unless both are integers that are not negative."""
    if size is None:
        return None
    sides = (size, size) if isinstance(size, (int, np.integer)) else size
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise ArgumentError(f"local_window_size={size!r}: give one integer, or (left, right)")
    if not all(isinstance(side, (int, np.integer)) and side >= 0 for side in sides):
        raise ArgumentError(f"local_window_size={size!r}: give integers that are not negative")
    return int(sides[0]), int(sides[1])


@lru_cache(maxsize=1024)
def _build_spec(
    head_dim: int,
    dtype: str,
    scale: float | None,
    is_causal: bool,
    window: tuple[int, int] | None,
    declared: tuple[tuple[str, str, bool], ...],
) -> AttentionSpec:
    """Builds the spec of a call. declared: (name, dtype, whether JAX traces it) of the arrays of the call."""
    axes = {"bias": 4, "mask": 4}
    captures = {
        name: Captured(name, kind, axes.get(name, 1), grad=name == "bias" and is_traced)
        for name, kind, is_traced in declared
    }
    masks: list[Mask] = []
    if is_causal:
        masks.append(causal("top_left"))
    if window is not None:
        masks.append(sliding_window(*window, align="top_left"))
    if "key_value_seq_lengths" in captures:
        masks.append(padding(captures["key_value_seq_lengths"]))
    if "query_seq_lengths" in captures:
        lengths = captures["query_seq_lengths"]
        masks.append(trace_mask(lambda b, h, q, k: q < lengths[b], "queries in use"))
    if "mask" in captures:
        kept = captures["mask"]
        masks.append(trace_mask(lambda b, h, q, k: kept[b, h, q, k], "mask"))
    combined = None
    for each in masks:
        combined = each if combined is None else combined & each
    bias = captures.get("bias")
    score = None if bias is None else lambda s, b, h, q, k: s + bias[b, h, q, k]
    return AttentionSpec(head_dim, dtype, None, scale, "bshd", score=score, mask=combined)
