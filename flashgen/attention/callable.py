"""`Attention`: a compiled spec. Checks a call, makes the outputs, lists tiles where the mask wants lists, launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.attention.engines import Engine, Gpu, Place, build
from flashgen.attention.launches import Launch, forward_launch
from flashgen.attention.lists import ListsLaunch, TileLister, TileLists
from flashgen.attention.problem import (
    Problem,
    check_array,
    check_captures,
    check_outputs,
    check_seed,
    given_outputs,
    number,
    problem_of,
)
from flashgen.build.resources import Resources
from flashgen.codegen.arguments import member_name
from flashgen.codegen.forward import ForwardKernel, render_forward
from flashgen.codegen.kernel import RenderedKernel
from flashgen.codegen.plans import ForwardPlan
from flashgen.codegen.targets import Target
from flashgen.errors import ArgumentError
from flashgen.language.layouts import BlockLayout
from flashgen.language.spec import AttentionSpec
from flashgen.runtime import gpu
from flashgen.runtime.arrays import NUMPY, View, give_back

if TYPE_CHECKING:
    from flashgen.analysis.tiles import TileMap


_IN_ROWS = frozenset(("q", "k", "v", "o"))  # copied 16 bytes at a time; all others element by element
_MOST_PREPARED = 1024
_ROW_ALIGNMENT, _LARGEST_ELEMENT = 16, 8  # bytes
_ARGUMENTS = {"o": "out"}  # what the user calls a member of the struct, where it is called differently
_NO_NUMBERS: dict[str, int | float] = {}


@dataclass(frozen=True)
class _Prepared:
    """Everything of a call that its shapes, strides, dtypes and device decide."""

    problem: Problem
    output_shape: tuple[int, ...]
    device: int
    forward: Launch
    lists: ListsLaunch | None


class Attention:
    """A spec compiled for a target: call it with q, k and v.

    Attributes: `spec`, `target`, `engine` (where it runs), `source` (the CUDA), `plan`, `resources`.
    """

    def __init__(self, spec: AttentionSpec, target: Target, engine: Engine, plan: ForwardPlan | None = None) -> None:
        self.spec, self.target, self.engine = spec, target, engine
        self._kernel: ForwardKernel = render_forward(spec, target, plan)
        prebuild = f"flashgen show --what resources --target {target.name} '{spec.to_json()}'"
        self._forward = engine.runner(self._kernel, prebuild)
        self._lister = TileLister(spec, target, self.plan, engine, prebuild) if self._kernel.uses_lists else None
        self._arrays = [(capture, member_name(capture)) for capture in spec.captures if capture.ndim]
        self._numbers = [(capture, member_name(capture)) for capture in spec.captures if not capture.ndim]
        self._takes_numbers = bool(self._numbers or spec.dropout)
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
        return (self._lister.kernel, self._kernel) if self._lister else (self._kernel,)

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

    def tile_lists(
        self, len_q: int, len_k: int | None = None, batch: int = 1, heads: int = 1, **captures: Any
    ) -> TileLists:
        """The tiles that calls of these lengths visit, listed once: `attention(q, k, v, tile_lists=lists, ...)`.

        Of use where several calls, or the layers of a model, share a mask: by itself a call makes its lists anew, or,
        if the mask reads no capture, remembers them by lengths. Not for a stream that is being captured.

        Args:
            len_q: queries. len_k: keys; None for as many.
            batch: of q. heads: query heads. Lists differ between them only where the mask does.
            captures: what the mask captures, on the device where the calls will be; NumPy arrays are copied there.

        Raises ArgumentError where the mask has a closed form and needs no lists, or a capture does not fit.
        """
        if self._lister is None:
            raise ArgumentError(f"{self.spec.mask.name} needs no lists: its tiles are known in closed form")
        return self._lister.make(len_q, len_q if len_k is None else len_k, batch, heads, captures)

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        seed: int | None = None,
        offset: int = 0,
        return_lse: bool = False,
        out: Any = None,
        tile_lists: TileLists | None = None,
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
            out: an array to write the output to, and with return_lse a pair of arrays; None makes new ones.
            tile_lists: what `tile_lists(...)` made for the sizes and captures of this call; None makes them.
            captures: the arrays and numbers that the spec declares, by name; a layout may be a BlockLayout.

        Returns:
            The output, (batch, heads_q, len_q, value_dim) in the spec's layout, of q's kind; with return_lse a pair
            with the LSE, float32 (batch, heads_q, len_q). Rows with nothing to attend to are 0, their LSE -inf.

        Raises:
            ArgumentError: an argument does not fit the spec; the message says what to give.
            LaunchError: the kernel could not be launched, or the emulator found a fault.
        """
        if captures or self.spec.captures:
            check_captures(self.spec, captures)
        if tile_lists is not None and self._lister is None:
            raise ArgumentError(f"tile_lists: the kernel of {self.spec.mask.name} reads none; leave them out")
        library = self.engine.library(q, "q")
        if library is NUMPY and isinstance(self.engine, Gpu):
            options = {"seed": seed, "offset": offset, "return_lse": return_lse, "tile_lists": tile_lists}
            return self._through_gpu(q, k, v, out, captures, **options)
        if self._lister and any(isinstance(value, BlockLayout) for value in captures.values()):
            captures = self._lister.without_layouts(captures, library.view(q, "q"), library.view(k, "k"))
        numbers = self._call_numbers(captures, seed, offset) if self._takes_numbers else _NO_NUMBERS
        arrays = {"q": q, "k": k, "v": v}
        for capture, member in self._arrays:
            arrays[member] = captures[capture.name]
        if out is not None:
            arrays |= given_outputs(out, return_lse)
        prepared = self._prepare(arrays)
        if not self.engine.current(prepared.device):
            with gpu.cupy().cuda.Device(prepared.device):
                return self(
                    q, k, v, seed=seed, offset=offset, return_lse=return_lse, out=out, tile_lists=tile_lists, **captures
                )
        if out is None:
            arrays["o"] = library.empty(prepared.output_shape, self.spec.dtype, q)
            if return_lse:
                arrays["lse"] = library.empty(prepared.problem.lse_shape, "float32", q)
        if not prepared.problem.is_empty:
            place = Place(library.stream(q), prepared.device)
            if self._lister and prepared.lists:
                arrays |= (
                    self._lister.of_call(prepared.lists, prepared.problem, library, arrays, numbers, place)
                    if tile_lists is None
                    else self._lister.check(tile_lists, prepared.problem, place)
                )
            self._forward.launch(prepared.forward, arrays, numbers, place)
        if out is not None:
            return out
        result = give_back(library, arrays["o"])
        return (result, give_back(library, arrays["lse"])) if return_lse else result

    def _call_numbers(self, captures: Mapping[str, Any], seed: Any, offset: Any) -> dict[str, int | float]:
        """The numbers that change from call to call, by their names in the struct."""
        numbers = {member: number(capture, captures[capture.name]) for capture, member in self._numbers}
        if self.spec.dropout:
            seed, offset = check_seed(self.spec, seed, offset)
            numbers |= {"seed_low": seed & 0xFFFFFFFF, "seed_high": seed >> 32, "offset": offset}
        return numbers

    def _prepare(self, arrays: dict[str, Any]) -> _Prepared:
        """What calls like this one share; worked out, and the arrays checked, the first time."""
        library = self.engine.library
        key: list[Any] = []
        misaligned = 0
        for name, array in arrays.items():
            own = library(array, _ARGUMENTS.get(name, name))
            key.append(own.signature(array))
            if name in _IN_ROWS:
                misaligned |= own.pointer(array)
            else:
                key.append(own.pointer(array) % _LARGEST_ELEMENT)
        prepared = self._prepared.get((misaligned % _ROW_ALIGNMENT, *key))
        if prepared is None:
            views = {
                name: library(array, name).view(array, _ARGUMENTS.get(name, name)) for name, array in arrays.items()
            }
            if len(self._prepared) >= _MOST_PREPARED:  # lengths that grow with every call, as in decoding
                self._prepared.pop(next(iter(self._prepared)))
            prepared = self._prepared[misaligned % _ROW_ALIGNMENT, *key] = self._prepare_anew(views)
        return prepared

    def _prepare_anew(self, views: dict[str, View]) -> _Prepared:
        device = views["q"].device
        for name, view in views.items():
            if view.device != device:
                argument = _ARGUMENTS.get(name, name)
                raise ArgumentError(f"{argument} is on {_place(view)} and q on {_place(views['q'])}; move it there")
        problem = problem_of(self.spec, views)
        check_outputs(self.spec, views, problem)
        captured = {capture.name: views[member] for capture, member in self._arrays}
        for capture, _ in self._arrays:
            check_array(self.spec, capture, captured[capture.name], problem)
        forward = forward_launch(self.spec, self._kernel, problem, captured)
        lists = None
        if self._lister:
            lists = self._lister.prepare(problem, captured)
        return _Prepared(problem, problem.output_shape(self.spec), device or 0, forward, lists)

    def _through_gpu(self, q: Any, k: Any, v: Any, out: Any, captures: Mapping[str, Any], **options: Any) -> Any:
        """NumPy arrays: copied to the GPU, and the results back."""
        gpu.compute_capability()  # says so where there is no GPU
        cupy = gpu.cupy()
        moved = {
            name: cupy.asarray(value) if isinstance(value, np.ndarray) else value for name, value in captures.items()
        }
        given = given_outputs(out, options["return_lse"]) if out is not None else {}
        there = tuple(cupy.asarray(array) for array in given.values())  # copies, so that what is not written is kept
        into = (there if options["return_lse"] else there[0]) if there else None
        result = self(cupy.asarray(q), cupy.asarray(k), cupy.asarray(v), out=into, **options, **moved)
        home = tuple(cupy.asnumpy(array) for array in (result if isinstance(result, tuple) else (result,)))
        for array, target in zip(home, given.values(), strict=False):
            target[...] = array
        return out if out is not None else home if options["return_lse"] else home[0]


def _place(view: View) -> str:
    return "the CPU" if view.device is None else f"GPU {view.device}"
