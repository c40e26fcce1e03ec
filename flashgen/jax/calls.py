"""The forward and the backward as host callbacks of XLA, which run on XLA's buffers and stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from flashgen.dtypes import numpy_dtype
from flashgen.errors import ArgumentError
from flashgen.jax.compiled import CompiledSpec

Numbers = tuple[tuple[str, int | float], ...]
_DLPACK_CPU = 1
CPU_ARRAYS_MESSAGE = "arrays are on the CPU: put them on a GPU, or give emulate=True to run on the emulator"
_BIT_DTYPES = {"bfloat16": jnp.uint16}  # dtypes that the buffer interfaces lack are passed as integers of equal width


def forward(entry: CompiledSpec, numbers: Numbers, q: Any, k: Any, v: Any, seed: Any, captures: Sequence[Any]) -> Any:
    """Returns the output and the LSE, (out, lse). v is None where it is a part of k."""
    shapes = [
        ((*q.shape[:-1], entry.spec.value_dim), entry.spec.out_element.numpy),
        (entry.spec.batch_layout.lse_shape(q.shape), jnp.float32),
    ]
    inputs = [q, k, *([] if v is None else [v]), *captures, *_seed_words(seed)]
    return _call(partial(_forward, entry, numbers), entry, shapes, inputs)


def backward(entry: CompiledSpec, numbers: Numbers, rows: Sequence[Any], d_lse: Any, seed: Any, captures: Any) -> Any:
    """Returns the gradients of q, k, v and of captured arrays declared with grad=True.

    rows: d_out, q, k, v, out, lse, without v where it is a part of k.
    """
    differentiated = [array for capture, array in zip(entry.arrays, captures, strict=True) if capture.grad]
    shapes = [(array.shape, array.dtype) for array in (*rows[1:-2], *differentiated)]
    inputs = [*rows, *([] if d_lse is None else [d_lse]), *captures, *_seed_words(seed)]
    return _call(partial(_backward, entry, numbers, d_lse is not None), entry, shapes, inputs)


def _forward(entry: CompiledSpec, numbers: Numbers, results: Sequence[Any], inputs: Sequence[Any]) -> None:
    count = len(entry.spec.inputs)
    given = _call_arguments(entry, numbers, inputs[count:])
    entry.attention(*inputs[:count], return_lse=True, out=tuple(results), **given)


def _backward(
    entry: CompiledSpec, numbers: Numbers, has_d_lse: bool, results: Sequence[Any], inputs: Sequence[Any]
) -> None:
    count = len(entry.spec.inputs) + 3
    rest = list(inputs[count:])
    given = {"d_lse": rest.pop(0)} if has_d_lse else {}
    given |= _call_arguments(entry, numbers, rest)
    entry.attention.backward(*inputs[:count], into=tuple(results), **given)


def _call_arguments(entry: CompiledSpec, numbers: Numbers, rest: Sequence[Any]) -> dict[str, Any]:
    """Returns captures by name, and the seed. rest: the captured arrays, followed by the seed if there is one."""
    given: dict[str, Any] = dict(numbers)
    given |= {capture.name: array for capture, array in zip(entry.arrays, rest, strict=False)}
    if len(rest) > len(entry.arrays):
        given["seed"] = rest[-1]
    return given


def _seed_words(seed: Any) -> list[Any]:
    """Returns a 32-bit seed as the two words that kernels read from memory, so that the host need not wait for it.

    Returns an empty list without a seed.
    """
    return [] if seed is None else [jnp.stack([seed, jnp.zeros_like(seed)])]


def _call(run: Callable[..., None], entry: CompiledSpec, shapes: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Returns the results of `run(results, inputs)` as an operation of XLA. bfloat16 is passed as 16-bit integers."""
    names = [np.dtype(dtype).name for _, dtype in shapes], [np.dtype(array.dtype).name for array in inputs]
    results = [
        jax.ShapeDtypeStruct(shape, _BIT_DTYPES.get(name, dtype))
        for (shape, dtype), name in zip(shapes, names[0], strict=True)
    ]
    callback = partial(_on_host if entry.emulate else _on_gpu, run, *names)
    bits = [_as_bits(array) for array in inputs]
    outputs = buffer_callback(callback, results, vmap_method="sequential")(*bits)
    axes = tuple(sorted(frozenset().union(*map(_varying_axes, inputs))))
    outputs = [_mark_varying(array, axes) for array in outputs]
    return [
        jax.lax.bitcast_convert_type(array, dtype) if name in _BIT_DTYPES else array
        for array, (_, dtype), name in zip(outputs, shapes, names[0], strict=True)
    ]


def _varying_axes(array: Any) -> frozenset[str]:
    """Returns the mesh axes along which an array varies inside shard_map. Versions of JAX name this differently."""
    kind = jax.typeof(array)
    axis_type = getattr(kind, "manual_axis_type", None)
    return frozenset(getattr(kind, "vma", ()) if axis_type is None else axis_type.varying)


def _mark_varying(array: Any, axes: tuple[str, ...]) -> Any:
    """Marks a result as varying along mesh axes, which JAX does not infer for the results of a callback."""
    axes = tuple(axis for axis in axes if axis not in _varying_axes(array))
    if not axes:
        return array
    lax: Any = jax.lax
    return lax.pcast(array, axes, to="varying") if hasattr(lax, "pcast") else lax.pvary(array, axes)


def _as_bits(array: Any) -> Any:
    bits = _BIT_DTYPES.get(np.dtype(array.dtype).name)
    return array if bits is None else jax.lax.bitcast_convert_type(array, bits)


def _on_host(run: Any, results: Sequence[str], inputs: Sequence[str], _context: Any, out: Any, *given: Any) -> None:
    if given[0].__dlpack_device__()[0] != _DLPACK_CPU:
        raise ArgumentError("emulate=True runs on the CPU: put arrays there, or run under jax.default_device(cpu)")
    run(_arrays(np.asarray, out, results), _arrays(np.asarray, given, inputs))


def _on_gpu(run: Any, results: Sequence[str], inputs: Sequence[str], context: Any, out: Any, *given: Any) -> None:
    if given[0].__dlpack_device__()[0] == _DLPACK_CPU:
        raise ArgumentError(CPU_ARRAYS_MESSAGE)
    import cupy

    written, read = _arrays(cupy.asarray, out, results), _arrays(cupy.asarray, given, inputs)
    with read[0].device, cupy.cuda.ExternalStream(context.stream):
        run(written, read)


def _arrays(as_array: Callable[[Any], Any], buffers: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Returns XLA's buffers as NumPy or CuPy arrays of the dtypes `names`. as_array converts one buffer."""
    arrays = [as_array(buffer) for buffer in buffers]
    return [
        array.view(numpy_dtype(name)) if name in _BIT_DTYPES else array
        for array, name in zip(arrays, names, strict=True)
    ]
