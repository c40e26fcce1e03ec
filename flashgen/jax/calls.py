"""The forward and the backward as calls that XLA makes: of the host, with XLA's buffers and on its stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from flashgen.attention.problem import in_layout
from flashgen.errors import ArgumentError
from flashgen.jax.compiled import Compiled
from flashgen.runtime.arrays import numpy_dtype

Numbers = tuple[tuple[str, int | float], ...]
_DLPACK_CPU = 1
ON_THE_CPU = "arrays are on the CPU: put them on a GPU, or say emulate=True to run on the emulator"
_WORDS = {"bfloat16": jnp.uint16}  # what has no name in the interfaces that buffers speak


def forward(entry: Compiled, numbers: Numbers, q: Any, k: Any, v: Any, seed: Any, captures: Sequence[Any]) -> Any:
    """Output and LSE, by name of nobody: (out, lse)."""
    batch, heads, length, _ = in_layout(q.shape, entry.spec.layout)
    out = in_layout((batch, heads, length, entry.spec.value_dim), entry.spec.layout)
    shapes = [(out, q.dtype), ((batch, heads, length), jnp.float32)]
    inputs = [q, k, v, *captures, *_halves(seed)]
    return _call(partial(_forward, entry, numbers), entry, shapes, inputs)


def backward(entry: Compiled, numbers: Numbers, rows: Sequence[Any], d_lse: Any, seed: Any, captures: Any) -> Any:
    """The gradients of q, k, v and of captured arrays that have one; rows: d_out, q, k, v, out, lse."""
    learned = [array for capture, array in zip(entry.arrays, captures, strict=True) if capture.grad]
    shapes = [(array.shape, array.dtype) for array in (*rows[1:4], *learned)]
    inputs = [*rows, *([] if d_lse is None else [d_lse]), *captures, *_halves(seed)]
    return _call(partial(_backward, entry, numbers, d_lse is not None), entry, shapes, inputs)


def _forward(entry: Compiled, numbers: Numbers, results: Sequence[Any], inputs: Sequence[Any]) -> None:
    q, k, v, *rest = inputs
    entry.attention(q, k, v, return_lse=True, out=tuple(results), **_given(entry, numbers, rest))


def _backward(
    entry: Compiled, numbers: Numbers, has_d_lse: bool, results: Sequence[Any], inputs: Sequence[Any]
) -> None:
    d_out, q, k, v, out, lse, *rest = inputs
    given = {"d_lse": rest.pop(0)} if has_d_lse else {}
    given |= _given(entry, numbers, rest)
    entry.attention.backward(d_out, q, k, v, out, lse, into=tuple(results), **given)


def _given(entry: Compiled, numbers: Numbers, rest: Sequence[Any]) -> dict[str, Any]:
    """Captures by name, and the seed, which stands behind them."""
    given: dict[str, Any] = dict(numbers)
    given |= {capture.name: array for capture, array in zip(entry.arrays, rest, strict=False)}
    if len(rest) > len(entry.arrays):
        given["seed"] = rest[-1]
    return given


def _halves(seed: Any) -> list[Any]:
    """A seed of 32 bits as kernels read one from memory, so that no device is waited for; none of none."""
    return [] if seed is None else [jnp.stack([seed, jnp.zeros_like(seed)])]


def _call(run: Callable[..., None], entry: Compiled, shapes: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """`run(results, inputs)` as an operation of XLA; bfloat16 goes through as words."""
    names = [np.dtype(dtype).name for _, dtype in shapes], [np.dtype(array.dtype).name for array in inputs]
    results = [
        jax.ShapeDtypeStruct(shape, _WORDS.get(name, dtype))
        for (shape, dtype), name in zip(shapes, names[0], strict=True)
    ]
    callback = partial(_on_host if entry.emulate else _on_gpu, run, *names)
    words = [_as_words(array) for array in inputs]
    made = buffer_callback(callback, results, vmap_method="sequential")(*words)
    axes = tuple(sorted(frozenset().union(*map(_varying, inputs))))
    made = [_of_devices(array, axes) for array in made]
    return [
        jax.lax.bitcast_convert_type(array, dtype) if name in _WORDS else array
        for array, (_, dtype), name in zip(made, shapes, names[0], strict=True)
    ]


def _varying(array: Any) -> frozenset[str]:
    """The axes of a mesh along which an array differs, inside of shard_map. JAX has renamed what says it."""
    kind = jax.typeof(array)
    known = getattr(kind, "manual_axis_type", None)
    return frozenset(getattr(kind, "vma", ()) if known is None else known.varying)


def _of_devices(array: Any, axes: tuple[str, ...]) -> Any:
    """A result, said to differ along axes, which a callback's does not say by itself."""
    axes = tuple(axis for axis in axes if axis not in _varying(array))
    if not axes:
        return array
    lax: Any = jax.lax
    return lax.pcast(array, axes, to="varying") if hasattr(lax, "pcast") else lax.pvary(array, axes)


def _as_words(array: Any) -> Any:
    words = _WORDS.get(np.dtype(array.dtype).name)
    return array if words is None else jax.lax.bitcast_convert_type(array, words)


def _on_host(run: Any, results: Sequence[str], inputs: Sequence[str], _context: Any, out: Any, *given: Any) -> None:
    if given[0].__dlpack_device__()[0] != _DLPACK_CPU:
        raise ArgumentError("emulate=True runs on the CPU: put arrays there, or run under jax.default_device(cpu)")
    run(_arrays(np.asarray, out, results), _arrays(np.asarray, given, inputs))


def _on_gpu(run: Any, results: Sequence[str], inputs: Sequence[str], context: Any, out: Any, *given: Any) -> None:
    if given[0].__dlpack_device__()[0] == _DLPACK_CPU:
        raise ArgumentError(ON_THE_CPU)
    import cupy

    written, read = _arrays(cupy.asarray, out, results), _arrays(cupy.asarray, given, inputs)
    with read[0].device, cupy.cuda.ExternalStream(context.stream):
        run(written, read)


def _arrays(look: Callable[[Any], Any], buffers: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """XLA's buffers as arrays of NumPy or CuPy, words as what they stand for."""
    seen = [look(buffer) for buffer in buffers]
    return [array.view(numpy_dtype(name)) if name in _WORDS else array for array, name in zip(seen, names, strict=True)]
