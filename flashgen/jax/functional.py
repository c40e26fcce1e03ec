"""The function `attention` with its custom derivative for JAX."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from flashgen.attention.problem import checked_sizes
from flashgen.attention.row_arrays import arrays_of_rows
from flashgen.errors import ArgumentError
from flashgen.jax.calls import CPU_ARRAYS_MESSAGE, Numbers
from flashgen.jax.compiled import CompiledSpec, get_compiled
from flashgen.jax.mapping import mapped_backward, mapped_forward
from flashgen.language.bound import BoundArray


def attention(
    spec: Any,
    q: Any,
    k: Any,
    v: Any = None,
    *,
    seed: Any = None,
    return_lse: bool = False,
    emulate: bool = False,
    deterministic: bool = False,
    **captures: Any,
) -> Any:
    """Computes attention of q over k and v, under jit, grad, vmap and shard_map too.

    Inside shard_map each device runs kernels on its own shard, and the indices b, h, q and k of a mask are local to it.

    Args:
        spec: an AttentionSpec, which is compiled when the first call runs and cached; or a result of
            `flashgen.compile`.
        q, k, v: arrays in the layout of the spec, (batch, heads, length, dim) or "bshd". For a spec with `shared_kv`
            there is no v: `attention(spec, q, kv)`.
        seed: the seed of the dropout: an integer, or an integer array without dimensions, which kernels read.
        return_lse: also return the LSE, float32 (batch, heads, queries), which is differentiable.
        emulate: run on the CPU with the emulator.
        deterministic: compute gradients that are bitwise equal from run to run.
        captures: the arrays and numbers that the spec declares. Numbers are Python numbers and become constants of the
            program. Arrays that the functions of the spec closed over need not be given.

    Returns the output in the dtype that the spec says, or (output, LSE). Raises ArgumentError for arguments that do not
    fit the spec or each other.
    """
    entry, bound = get_compiled(spec, emulate, deterministic)
    numbers = _numbers(entry, captures)
    arrays = _arrays(entry, captures, bound)
    rows = {name: jnp.asarray(array) for name, array in arrays_of_rows(entry.spec, q, k, v).items()}
    checked_sizes(entry.spec, {name: _Shaped(array) for name, array in rows.items()})
    q, k, v = rows["q"], rows["k"], rows.get("v")
    is_concrete = not isinstance(q, jax.core.Tracer)
    if not entry.emulate and is_concrete and all(device.platform == "cpu" for device in q.devices()):
        raise ArgumentError(CPU_ARRAYS_MESSAGE)
    out, lse = _attend(entry, numbers, q, k, v, _seed(entry, seed), arrays)
    return (out, lse) if return_lse else out


class _Shaped:
    """The shape and dtype of a JAX array, as plain values that `checked_sizes` accepts."""

    def __init__(self, array: Any) -> None:
        self.shape, self.dtype = tuple(array.shape), np.dtype(array.dtype).name


def _numbers(entry: CompiledSpec, given: dict[str, Any]) -> Numbers:
    for name in given:
        if name not in {capture.name for capture in entry.spec.captures}:
            declared = ", ".join(capture.name for capture in entry.spec.captures) or "none"
            raise ArgumentError(f"unknown argument {name!r}; the spec declares these captures: {declared}")
    numbers = []
    for capture in entry.numbers:
        value = given.get(capture.name)
        if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
            raise ArgumentError(
                f"capture {capture.name!r} is {value!r}: give a Python number, which is a constant of the program"
            )
        numbers.append((capture.name, value.item() if isinstance(value, np.generic) else value))
    return tuple(numbers)


def _arrays(entry: CompiledSpec, given: dict[str, Any], bound: Any) -> list[Any]:
    arrays = []
    for capture in entry.arrays:
        value = given.get(capture.name, bound.get(capture.name))
        if value is None:
            raise ArgumentError(f"capture {capture.name!r} is missing: give {capture.name}=<{capture.dtype} array>")
        array = jnp.asarray(_bound_array(value) if isinstance(value, BoundArray) else value)
        if capture.dtype == "int64" and array.dtype == jnp.int32:
            raise ArgumentError(
                f"capture {capture.name!r} was declared int64, which JAX supports only with jax_enable_x64: "
                "declare it int32"
            )
        if np.dtype(array.dtype).name != capture.dtype or array.ndim != capture.ndim:
            raise ArgumentError(
                f"capture {capture.name!r} is {array.dtype} of shape {array.shape}; it was declared {capture.dtype} of "
                f"{capture.ndim} dimension(s)"
            )
        arrays.append(array)
    return arrays


def _bound_array(value: BoundArray) -> Any:
    array = value.current()
    return array if isinstance(array, jax.Array) else value.on_host()


def _seed(entry: CompiledSpec, seed: Any) -> Any:
    if not entry.spec.dropout:
        if seed is not None:
            raise ArgumentError(f"seed={seed!r} is given, and the spec has no dropout: leave it out")
        return None
    if seed is None:
        raise ArgumentError(f"seed is missing: the spec has dropout={entry.spec.dropout:g}; give seed=<int or array>")
    if isinstance(seed, int) and not 0 <= seed < 2**32:
        raise ArgumentError(f"seed={seed} must be from 0 to 2**32 - 1")
    return jnp.asarray(seed, jnp.uint32)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(entry: CompiledSpec, numbers: Numbers, q: Any, k: Any, v: Any, seed: Any, captures: Any) -> Any:
    return tuple(mapped_forward(entry, numbers)(q, k, v, seed, captures))


def _forward(entry: CompiledSpec, numbers: Numbers, q: Any, k: Any, v: Any, seed: Any, captures: Any) -> Any:
    for capture, array in zip(entry.arrays, captures, strict=True):
        if array.perturbed and not capture.grad and capture.kind == "float":
            raise ArgumentError(
                f"capture {capture.name!r} is differentiated and was declared without a gradient: declare it with "
                "grad=True, or give it through jax.lax.stop_gradient"
            )
    perturbed = {c.name: None for c, array in zip(entry.arrays, captures, strict=True) if c.grad and array.perturbed}
    q, k, v = q.value, k.value, None if v is None else v.value
    seed = None if seed is None else seed.value
    captures = [array.value for array in captures]
    out, lse = _attend(entry, numbers, q, k, v, seed, captures)
    return (out, lse), (q, k, v, seed, captures, out, lse, perturbed)


def _backward(entry: CompiledSpec, numbers: Numbers, saved: Any, gradients: Any) -> Any:
    q, k, v, seed, captures, out, lse, perturbed = saved  # the keys of the last are part of the structure
    entry = entry.with_gradients_of(frozenset(perturbed))
    d_out, d_lse = (None if isinstance(gradient, SymbolicZero) else gradient for gradient in gradients)
    d_out = jnp.zeros_like(out) if d_out is None else d_out
    d_out = d_out.astype(q.dtype)
    rows = [d_out, q, k, *([] if v is None else [v]), out, lse]
    dq, dk, *results = mapped_backward(entry, numbers)(rows, d_lse, seed, captures)
    dv = None if v is None else results.pop(0)
    differentiated = iter(results)
    capture_gradients = [
        next(differentiated) if capture.grad else _no_gradient(array)
        for capture, array in zip(entry.arrays, captures, strict=True)
    ]
    return (dq, dk, dv, None if seed is None else _no_gradient(seed), capture_gradients)


def _no_gradient(array: Any) -> Any:
    if jnp.issubdtype(array.dtype, jnp.floating):
        return jnp.zeros_like(array)
    return np.zeros(array.shape, jax.dtypes.float0)


_attend.defvjp(_forward, _backward, symbolic_zeros=True)
