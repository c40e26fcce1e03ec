"""`merge_states`: merges the results of attention over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from flashgen.attention.outputs import check_contiguous, check_kind
from flashgen.codegen.families import emulated_target, target_of_gpu
from flashgen.codegen.merge_kernel import MAX_PARTIALS, MERGED_LAYOUTS, render_merge
from flashgen.codegen.sizes import Sizes
from flashgen.dtypes import ELEMENTS
from flashgen.errors import ArgumentError
from flashgen.language.batch_layout import BATCH_LAYOUTS
from flashgen.language.spec import MAX_VALUE_DIM
from flashgen.launch.argument_writer import ArgumentWriter
from flashgen.launch.engines import Emulator, Engine, Gpu, Launch, Place, Runner
from flashgen.runtime import gpu
from flashgen.runtime.arrays import View, give_back
from flashgen.runtime.caching import Cache

_DTYPES = (*ELEMENTS, "float32")
_COLUMNS = 8  # of a thread
_ALIGNMENT = 16
_MOST_BLOCKS = 2**31 - 1
_RUNNERS: Cache[Any, tuple[Any, Runner]] = Cache()


class Merged(NamedTuple):
    """The output and the LSE of attention over all keys."""

    out: Any
    lse: Any


def merge_states(outs: Sequence[Any], lses: Sequence[Any], *, layout: str = "bhsd", emulate: bool = False) -> Merged:
    """Merges attention over several disjoint sets of keys into attention over their union, such as a shared prefix.

    Computes LSE = log(sum_i exp(LSE_i)) and O = sum_i exp(LSE_i - LSE) O_i in float32. A state with an LSE of -inf
    attends to no key and is ignored, whatever its output holds; if all are ignored, O is 0 and the LSE -inf. Merging is
    associative up to rounding. The results must come from specs without a sink. Source: Dao et al. 2023,
    Flash-Decoding.

    Args:
        outs: 2 to 16 outputs of calls with return_lse=True, each (batch, heads, len_q, dim), or (batch, len_q, heads,
            dim) with layout="bshd". All have one shape and dtype: float16, bfloat16 or float32, C-contiguous, dim a
            multiple of 8 up to 512. CuPy, PyTorch, JAX, DLPack or CUDA array interface; NumPy arrays are copied to the
            GPU and back.
        lses: the LSE of each output, float32 (batch, heads, len_q), natural logarithms.
        layout: the layout of the outputs, "bhsd" or "bshd".
        emulate: run the kernel on the CPU, on NumPy arrays.

    Returns:
        (out, lse), with the shapes, dtypes and library of the inputs, computed on the caller's current stream.

    Raises:
        ArgumentError: the arrays do not fit together; the message says what to give.
        LaunchError: there is no GPU, or the kernel could not be launched.
        BuildError: the kernel does not compile, or a compiler is missing.
    """
    if layout not in MERGED_LAYOUTS:
        raise ArgumentError(f"layout={layout!r} must be 'bhsd' or 'bshd'")
    outs, lses = list(outs), list(lses)
    if not 2 <= len(outs) <= MAX_PARTIALS or len(outs) != len(lses):
        raise ArgumentError(f"{len(outs)} outputs and {len(lses)} LSEs: give as many of each, 2 to {MAX_PARTIALS}")
    engine: Engine = Emulator() if emulate else Gpu()
    library = engine.library(outs[0], "outs[0]")
    if library is engine.host_library:
        merged = merge_states(
            [engine.to_device(out) for out in outs], [engine.to_device(lse) for lse in lses], layout=layout
        )
        return Merged(*(engine.fetch(array) for array in merged))
    names = [f"out{i}" for i in range(len(outs))] + [f"lse{i}" for i in range(len(lses))]
    arrays = dict(zip(names, [*outs, *lses], strict=True))
    views = {
        name: engine.library(array, _argument(name)).view(array, _argument(name)) for name, array in arrays.items()
    }
    _check(views, len(outs), layout)
    first, device = views["out0"], views["out0"].device or 0
    results = {
        "o": library.maker(first.shape, first.dtype, device)(),
        "lse": library.maker(BATCH_LAYOUTS[layout].lse_shape(first.shape), "float32", device)(),
    }
    with engine.device_context(device):
        place = Place(library.stream(outs[0]), device)
        _launch(engine, views["out0"], len(outs), layout, {**arrays, **results}, place)
    return Merged(**{"out" if name == "o" else name: array for name, array in give_back(library, results).items()})


def _launch(engine: Engine, view: View, count: int, layout: str, arrays: dict[str, Any], place: Place) -> None:
    rows = view.shape[0] * view.shape[1] * view.shape[2]
    dim = view.shape[3]
    if not rows or not dim:
        return
    target = target_of_gpu(*gpu.compute_capability()) if isinstance(engine, Gpu) else emulated_target()
    key = (engine, target.name, view.dtype, count, layout)
    kernel, runner = _RUNNERS.get_or_make(key, partial(_build, engine, target, view.dtype, count, layout))
    lane_bits = (dim // _COLUMNS - 1).bit_length()
    _, heads, len_q = BATCH_LAYOUTS[layout].lse_shape(view.shape)
    grid = kernel.grid(Sizes(0, 0, 0, 0, 0, count=rows << lane_bits))
    if grid[0] > _MOST_BLOCKS:
        raise ArgumentError(f"outs of shape {view.shape} are too large for one launch; merge parts of the batch")
    values = {"rows": rows, "dim": dim, "lane_bits": lane_bits, "heads": heads, "len_q": len_q}
    runner.launch(Launch(grid, ArgumentWriter(kernel.layout, values)), engine.bind(arrays), {}, place)


def _build(engine: Engine, target: Any, dtype: str, count: int, layout: str) -> tuple[Any, Runner]:
    kernel = render_merge(dtype, count, layout, target)
    return kernel, engine.runner(kernel, "flashgen.merge_states(...) where FLASHGEN_JIT is not 0")


def _check(views: dict[str, View], count: int, layout: str) -> None:
    first = views["out0"]
    if len(first.shape) != 4 or first.dtype not in _DTYPES:
        raise ArgumentError(f"outs[0] is {first.dtype} {first.shape}; give 4 dimensions of {', '.join(_DTYPES)}")
    if first.shape[3] % _COLUMNS or first.shape[3] > MAX_VALUE_DIM:
        raise ArgumentError(f"outs[0] has rows of {first.shape[3]}; give a multiple of 8 up to {MAX_VALUE_DIM}")
    for i in range(count):
        out, lse = views[f"out{i}"], views[f"lse{i}"]
        check_kind(f"outs[{i}]", out, first.shape, first.dtype)
        check_contiguous(f"outs[{i}]", out)
        if out.pointer % _ALIGNMENT:
            raise ArgumentError(f"outs[{i}] at address {out.pointer:#x}: give one at a multiple of {_ALIGNMENT} bytes")
        check_kind(f"lses[{i}]", lse, BATCH_LAYOUTS[layout].lse_shape(first.shape), "float32")
        check_contiguous(f"lses[{i}]", lse)
        for name, view in ((f"outs[{i}]", out), (f"lses[{i}]", lse)):
            if view.device != first.device:
                raise ArgumentError(f"{name} is on GPU {view.device} and outs[0] on {first.device}; move it there")


def _argument(name: str) -> str:
    return f"{name[:3]}s[{name[3:]}]"
