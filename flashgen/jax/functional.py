"""`attention`, as JAX's transformations see it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from flashgen.attention.problem import checked_sizes
from flashgen.errors import ArgumentError
from flashgen.jax.calls import ON_THE_CPU, Numbers
from flashgen.jax.compiled import Compiled, compiled
from flashgen.jax.mapping import mapped_backward, mapped_forward
from flashgen.language.bound import BoundArray


def attention(
    spec: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    seed: Any = None,
    return_lse: bool = False,
    emulate: bool = False,
    deterministic: bool = False,
    **captures: Any,
) -> Any:
    """Attention of q over k and v, to be used under jit, grad, vmap and shard_map.

    Args:
        spec: an AttentionSpec, compiled when a call of it first runs and remembered; or what `flashgen.compile` gave.
        q, k, v: arrays as the spec says, (batch, heads, length, dim) or "bshd".
        seed: of the dropout: an integer, or an integer array without dimensions, which kernels read.
        return_lse: give the LSE, float32 (batch, heads, queries), too; it is differentiable.
        emulate: run on the CPU, by the emulator.
        deterministic: gradients that are bitwise equal from run to run.
        captures: the arrays that the spec declares, and its numbers, which are Python's and constants of a program.
            Arrays that its functions closed over need not be given.

    Inside of shard_map each device calls kernels for its own part: a mask's b, h, q and k count within that.

    Returns the output, of q's dtype, or a pair with the LSE. Raises ArgumentError where something does not fit.
    """
    entry, bound = compiled(spec, emulate, deterministic)
    numbers = _numbers(entry, captures)
    arrays = _arrays(entry, captures, bound)
    q, k, v = (jnp.asarray(array) for array in (q, k, v))
    checked_sizes(entry.spec, {name: _Shaped(array) for name, array in (("q", q), ("k", k), ("v", v))})
    stands_somewhere = not isinstance(q, jax.core.Tracer)
    if not entry.emulate and stands_somewhere and all(device.platform == "cpu" for device in q.devices()):
        raise ArgumentError(ON_THE_CPU)
    out, lse = _attend(entry, numbers, q, k, v, _seed(entry, seed), arrays)
    return (out, lse) if return_lse else out


class _Shaped:
    """Shape and dtype of an array of JAX, by the names that checks know."""

    def __init__(self, array: Any) -> None:
        self.shape, self.dtype = tuple(array.shape), np.dtype(array.dtype).name


def _numbers(entry: Compiled, given: dict[str, Any]) -> Numbers:
    for name in given:
        if name not in {capture.name for capture in entry.spec.captures}:
            known = ", ".join(capture.name for capture in entry.spec.captures) or "none"
            raise ArgumentError(f"unknown argument {name!r}; the spec declares these captures: {known}")
    numbers = []
    for capture in entry.numbers:
        value = given.get(capture.name)
        if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
            raise ArgumentError(
                f"capture {capture.name!r} is {value!r}: give a Python number, which is a constant of the program"
            )
        numbers.append((capture.name, value.item() if isinstance(value, np.generic) else value))
    return tuple(numbers)


def _arrays(entry: Compiled, given: dict[str, Any], bound: Any) -> list[Any]:
    arrays = []
    for capture in entry.arrays:
        value = given.get(capture.name, bound.get(capture.name))
        if value is None:
            raise ArgumentError(f"capture {capture.name!r} is missing: give {capture.name}=<{capture.dtype} array>")
        array = jnp.asarray(_of_bound(value) if isinstance(value, BoundArray) else value)
        if capture.dtype == "int64" and array.dtype == jnp.int32:
            raise ArgumentError(
                f"capture {capture.name!r} was declared int64, which JAX has if jax_enable_x64 is set: declare it int32"
            )
        if np.dtype(array.dtype).name != capture.dtype or array.ndim != capture.ndim:
            raise ArgumentError(
                f"capture {capture.name!r} is {array.dtype} of shape {array.shape}; it was declared {capture.dtype} of "
                f"{capture.ndim} dimension(s)"
            )
        arrays.append(array)
    return arrays


def _of_bound(value: BoundArray) -> Any:
    array = value.current()
    return array if isinstance(array, jax.Array) else value.on_host()


def _seed(entry: Compiled, seed: Any) -> Any:
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
def _attend(entry: Compiled, numbers: Numbers, q: Any, k: Any, v: Any, seed: Any, captures: Any) -> Any:
    return tuple(mapped_forward(entry, numbers)(q, k, v, seed, captures))


def _forward(entry: Compiled, numbers: Numbers, q: Any, k: Any, v: Any, seed: Any, captures: Any) -> Any:
    for capture, array in zip(entry.arrays, captures, strict=True):
        if array.perturbed and not capture.grad and capture.kind == "float":
            raise ArgumentError(
                f"capture {capture.name!r} is differentiated and was declared without a gradient: declare it with "
                "grad=True, or give it through jax.lax.stop_gradient"
            )
    q, k, v = q.value, k.value, v.value
    seed = None if seed is None else seed.value
    captures = [array.value for array in captures]
    out, lse = _attend(entry, numbers, q, k, v, seed, captures)
    return (out, lse), (q, k, v, seed, captures, out, lse)


def _backward(entry: Compiled, numbers: Numbers, saved: Any, gradients: Any) -> Any:
    q, k, v, seed, captures, out, lse = saved
    d_out, d_lse = (None if isinstance(gradient, SymbolicZero) else gradient for gradient in gradients)
    d_out = jnp.zeros_like(out) if d_out is None else d_out
    made = mapped_backward(entry, numbers)([d_out, q, k, v, out, lse], d_lse, seed, captures)
    learned = iter(made[3:])
    of_captures = [
        next(learned) if capture.grad else _no_gradient(array)
        for capture, array in zip(entry.arrays, captures, strict=True)
    ]
    return (*made[:3], None if seed is None else _no_gradient(seed), of_captures)


def _no_gradient(array: Any) -> Any:
    if jnp.issubdtype(array.dtype, jnp.floating):
        return jnp.zeros_like(array)
    return np.zeros(array.shape, jax.dtypes.float0)


_attend.defvjp(_forward, _backward, symbolic_zeros=True)
