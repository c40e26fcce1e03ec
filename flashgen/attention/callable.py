"""`Attention`: a compiled spec. Checks a call, makes the outputs, lists tiles where the mask wants lists, launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.attention.engines import Engine, Gpu, build
from flashgen.attention.launches import Launch, ListShape, forward_launch, list_shape, lists_launch
from flashgen.attention.problem import Problem, check_array, check_captures, check_seed, number, problem_of
from flashgen.build.resources import Resources
from flashgen.codegen.arguments import member_name
from flashgen.codegen.forward import ForwardKernel, render_forward
from flashgen.codegen.kernel import RenderedKernel
from flashgen.codegen.lists import render_lists
from flashgen.codegen.plans import ForwardPlan
from flashgen.codegen.targets import Target
from flashgen.errors import ArgumentError
from flashgen.language.spec import AttentionSpec
from flashgen.runtime import gpu
from flashgen.runtime.arrays import CUPY, NUMPY, Library, View, give_back

if TYPE_CHECKING:
    from flashgen.analysis.tiles import TileMap


@dataclass(frozen=True)
class _Prepared:
    """Everything of a call that its shapes, strides and dtypes decide."""

    problem: Problem
    output_shape: tuple[int, ...]
    forward: Launch
    lists: Launch | None
    list_shape: ListShape | None


class Attention:
    """A spec compiled for a target: call it with q, k and v.

    Attributes: `spec`, `target`, `engine` (where it runs), `source` (the CUDA), `plan`, `resources`.
    """

    def __init__(self, spec: AttentionSpec, target: Target, engine: Engine, plan: ForwardPlan | None = None) -> None:
        self.spec, self.target, self.engine = spec, target, engine
        self._kernel: ForwardKernel = render_forward(spec, target, plan)
        self._list_kernel: RenderedKernel | None = (
            render_lists(spec, target, self._kernel.plan) if self._kernel.uses_lists else None
        )
        prebuild = f"flashgen show --what resources --target {target.name} '{spec.to_json()}'"
        self._forward = engine.runner(self._kernel, prebuild)
        self._lists = engine.runner(self._list_kernel, prebuild) if self._list_kernel else None
        self._arrays = [capture for capture in spec.captures if capture.ndim]
        self._numbers = [capture for capture in spec.captures if not capture.ndim]
        self._prepared: dict[Any, _Prepared] = {}

    def __repr__(self) -> str:
        return f"<flashgen.Attention {self._kernel.name} on {self.engine.name}>"

    @property
    def name(self) -> str:
        """The kernel's readable name."""
        return self._kernel.name

    @property
    def source(self) -> str:
        """The emitted CUDA of the kernel."""
        return self._kernel.source

    @property
    def sources(self) -> dict[str, str]:
        """The emitted CUDA of every kernel a call launches, by readable name, in the order of the launches."""
        return {kernel.name: kernel.source for kernel in self.kernels}

    @property
    def kernels(self) -> tuple[RenderedKernel, ...]:
        """The kernels a call launches, in order."""
        return (self._list_kernel, self._kernel) if self._list_kernel else (self._kernel,)

    @property
    def plan(self) -> ForwardPlan:
        """Tile sizes, warps and stages."""
        return self._kernel.plan

    @cached_property
    def resources(self) -> Resources:
        """Registers, spills and shared memory of the kernel, by the GPU's assembler; needs NVRTC, but no GPU."""
        return build(self._kernel, f"flashgen show --what resources --target {self.target.name}").resources

    def tiles(self, len_q: int, len_k: int | None = None, batch: int = 1, heads: int = 1, **captures: Any) -> TileMap:
        """Which tiles a call of these lengths visits, and which of them need their mask; computed on the CPU.

        Captures are NumPy arrays and numbers, needed only if the mask reads them.
        """
        from flashgen.analysis.tiles import tile_map

        length_k = len_q if len_k is None else len_k
        needed = {capture.name for capture in self.spec.mask.captures}
        given = {name: value for name, value in captures.items() if name in needed}
        tile = (self.plan.tile_q, self.plan.tile_k)
        return tile_map(self.spec.mask.expression, tile, len_q, length_k, batch, heads, given)

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        seed: int | None = None,
        offset: int = 0,
        return_lse: bool = False,
        **captures: Any,
    ) -> Any:
        """Attention of q over k and v.

        Args:
            q: (batch, heads_q, len_q, head_dim), or as the spec's layout says; any strides with a contiguous last
                dimension and rows at multiples of 16 bytes. NumPy, CuPy, PyTorch, JAX, DLPack or CUDA array interface.
            k: (batch, heads_kv, len_k, head_dim); heads_q is a multiple of heads_kv.
            v: (batch, heads_kv, len_k, value_dim).
            seed: of the dropout, 0 <= seed < 2**64; required if the spec has dropout.
            offset: of the dropout's counter, 0 <= offset < 2**32.
            return_lse: give the log-sum-exp of the scores too.
            captures: the arrays and numbers that the spec declares, by name.

        Returns:
            The output, (batch, heads_q, len_q, value_dim) in the spec's layout, of q's kind; with return_lse a pair
            with the LSE, float32 (batch, heads_q, len_q). Rows with nothing to attend to are 0, their LSE -inf.

        Raises:
            ArgumentError: an argument does not fit the spec; the message says what to give.
            LaunchError: the kernel could not be launched, or the emulator found a fault.
        """
        check_captures(self.spec, captures)
        library = self.engine.library(q, "q")
        if library is NUMPY and isinstance(self.engine, Gpu):
            return self._through_gpu(q, k, v, captures, seed=seed, offset=offset, return_lse=return_lse)
        numbers = self._call_numbers(captures, seed, offset)
        arrays = self._views({"q": q, "k": k, "v": v}, captures)
        prepared = self._prepare(arrays)
        out = library.empty(prepared.output_shape, self.spec.dtype, q)
        lse = library.empty(prepared.problem.lse_shape, "float32", q) if return_lse else None
        if not prepared.problem.is_empty:
            self._launch(prepared, library, q, out, lse, arrays, numbers)
        result = give_back(library, out)
        return (result, give_back(library, lse)) if return_lse else result

    def _launch(
        self,
        prepared: _Prepared,
        library: Library,
        like: Any,
        out: Any,
        lse: Any,
        arrays: dict[str, View],
        numbers: dict[str, int | float],
    ) -> None:
        own = CUPY if library.empty is CUPY.empty else library
        stream = library.stream(like)
        arrays["o"] = own.view(out, "out")
        if lse is not None:
            arrays["lse"] = own.view(lse, "lse")
        if prepared.lists and prepared.list_shape and self._lists:
            shape = prepared.list_shape
            counts = library.empty((shape.rows,), "int32", like)
            entries = library.empty((shape.rows, max(shape.tiles_k, 1)), "int32", like)
            arrays["tile_counts"] = arrays["counts"] = own.view(counts, "counts")
            arrays["tile_entries"] = arrays["entries"] = own.view(entries, "entries")
            self._lists.launch(prepared.lists, arrays, numbers, stream)
        self._forward.launch(prepared.forward, arrays, numbers, stream)

    def _call_numbers(self, captures: Mapping[str, Any], seed: Any, offset: Any) -> dict[str, int | float]:
        numbers: dict[str, int | float] = {
            member_name(capture): number(capture, captures[capture.name]) for capture in self._numbers
        }
        if self.spec.dropout:
            seed, offset = check_seed(self.spec, seed, offset)
            numbers |= {"seed_low": seed & 0xFFFFFFFF, "seed_high": seed >> 32, "offset": offset}
        return numbers

    def _views(self, inputs: Mapping[str, Any], captures: Mapping[str, Any]) -> dict[str, View]:
        arrays = {name: self.engine.library(array, name).view(array, name) for name, array in inputs.items()}
        for capture in self._arrays:
            array = captures[capture.name]
            arrays[member_name(capture)] = self.engine.library(array, capture.name).view(array, capture.name)
        device = arrays["q"].device
        for name, view in arrays.items():
            if view.device != device:
                raise ArgumentError(
                    f"{name} is on {_place(view)} and q on {_place(arrays['q'])}; move them to one device"
                )
        return arrays

    def _prepare(self, arrays: dict[str, View]) -> _Prepared:
        aligned = all(arrays[name].pointer % 16 == 0 for name in "qkv")
        key = (aligned, arrays["q"].device, *((view.shape, view.strides, view.dtype) for view in arrays.values()))
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepared[key] = self._prepare_anew(arrays)
        return prepared

    def _prepare_anew(self, arrays: dict[str, View]) -> _Prepared:
        problem = problem_of(self.spec, arrays)
        captured = {capture.name: arrays[member_name(capture)] for capture in self._arrays}
        for capture in self._arrays:
            check_array(self.spec, capture, captured[capture.name], problem)
        l2 = self.engine.l2_bytes(arrays["q"].device)
        forward = forward_launch(self.spec, self._kernel, problem, captured, l2)
        lists = launch = None
        if self._list_kernel:
            lists = list_shape(self.spec, problem, (self.plan.tile_q, self.plan.tile_k))
            launch = lists_launch(self.spec, self._list_kernel.layout, lists, problem, captured)
        return _Prepared(problem, problem.output_shape(self.spec), forward, launch, lists)

    def _through_gpu(self, q: Any, k: Any, v: Any, captures: Mapping[str, Any], **options: Any) -> Any:
        """NumPy arrays: copied to the GPU, and the results back."""
        cupy = gpu.cupy()
        moved = {
            name: cupy.asarray(value) if isinstance(value, np.ndarray) else value for name, value in captures.items()
        }
        result = self(cupy.asarray(q), cupy.asarray(k), cupy.asarray(v), **options, **moved)
        return tuple(cupy.asnumpy(x) for x in result) if isinstance(result, tuple) else cupy.asnumpy(result)


def _place(view: View) -> str:
    return "the CPU" if view.device is None else f"GPU {view.device}"
