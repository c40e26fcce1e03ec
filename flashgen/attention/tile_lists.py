"""Tile lists: created on the device by a kernel of their own, for one call or for many."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import sympy

from flashgen.attention.captures import check_array, number
from flashgen.attention.launches import launch_of
from flashgen.attention.problem import Problem
from flashgen.codegen.arguments import member_name
from flashgen.codegen.rendered_kernel import Direction, RenderedKernel
from flashgen.codegen.tile_list_kernel import ListShape, list_shape
from flashgen.errors import ArgumentError
from flashgen.language.indexed_sizes import position_of
from flashgen.language.layouts import BlockLayout
from flashgen.language.operations import KEY, LONGEST, MAX_HEADS, QUERY, FloorDiv, Load
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Engine, Launch, Operands, Place, ScalarArguments
from flashgen.launch.memory import ArraySpec, Workspace
from flashgen.runtime import gpu
from flashgen.runtime.arrays import Library, View, library_of
from flashgen.runtime.caching import Cache

if TYPE_CHECKING:
    from flashgen.analysis.tile_classes import TileMap

_MAX_CACHED = 8  # lists of masks without captures, by lengths
_FEW_ENTRIES = 2**18  # 1 MiB for all lists together, up to which counting the entries first does not pay off
_MEMBERS = {"counts": "tile_counts", "offsets": "tile_offsets", "entries": "tile_entries"}  # of structs that read lists
_Arrays = dict[str, Any]


@dataclass(frozen=True, eq=False)
class TileLists:
    """The tiles that each tile of queries (or of keys) visits, in arrays on the device.

    Attributes:
        counts: int32 (batch or 1, heads or 1, tiles), the length of each list; 1 where the mask is the same for all.
        offsets: int64, with the shape of `counts`: the index of each list's first entry.
        entries: int32, tile << 1 | full, ascending within a list; full is 1 if the mask keeps the whole tile.
        tile: (queries, keys) of a tile.
        direction: "keys" if lists hold tiles of keys for each tile of queries, "queries" for the transpose.
    """

    mask: sympy.Basic
    tile: tuple[int, int]
    len_q: int
    len_k: int
    counts: Any
    offsets: Any
    entries: Any
    direction: Direction = "keys"

    @property
    def bytes(self) -> int:
        """The memory of the lists in bytes."""
        return sum(int(array.nbytes) for array in (self.counts, self.offsets, self.entries))

    def tile_map(self) -> TileMap:
        """Returns the classes of all tiles, on the CPU, equal to those of `attention.tiles(...)`."""
        from flashgen.analysis.tile_classes import FULL, PARTIAL, TileMap

        counts, offsets, entries = (_on_host(array) for array in (self.counts, self.offsets, self.entries))
        tiles_q, tiles_k = -(-self.len_q // self.tile[0]), -(-self.len_k // self.tile[1])
        listed = tiles_k if self.direction == "keys" else tiles_q
        classes = np.zeros((*counts.shape, listed), np.int8)
        for index in np.ndindex(counts.shape):
            entry = entries[offsets[index] : offsets[index] + counts[index]]
            classes[index][entry >> 1] = np.where(entry & 1, FULL, PARTIAL)
        if self.direction == "queries":
            classes = classes.swapaxes(-1, -2)
        return TileMap(self.tile, classes, self.len_q, self.len_k)

    def arguments(self) -> _Arrays:
        """Returns the arrays by their names in the struct of the attention kernel."""
        return {member: getattr(self, name) for name, member in _MEMBERS.items()}


@dataclass(frozen=True)
class ListsLaunch:
    """The launch that creates the lists of a call, equally spaced, their number, and the workspace that holds them.

    accepted: lists that earlier calls were given and that passed the checks.
    """

    shape: ListShape
    launch: Launch
    library: Library
    workspace: Workspace
    accepted: WeakSet[TileLists] = field(default_factory=WeakSet)


class TileLister:
    """Creates the tile lists of a mask without a closed form, by a kernel that lists the tiles of a plan."""

    def __init__(self, spec: AttentionSpec, kernel: RenderedKernel, engine: Engine, prebuild: str) -> None:
        assert kernel.lists is not None, f"{kernel.name} creates no lists"
        self.spec, self.kernel, self.engine, self.direction = spec, kernel, engine, kernel.lists
        self.tile = (kernel.plan.tile_q, kernel.plan.tile_k)
        self._runner = engine.runner(kernel, prebuild)
        self._captures = spec.mask.captures
        self._keeps_lists = not self._captures and spec.batch_layout.supports("kept tile lists")
        self._blocks = _indexed_blocks(spec)
        self._cache: Cache[Hashable, tuple[TileLists, Operands]] = Cache(_MAX_CACHED)

    def prepare(self, problem: Problem, captured: Mapping[str, View], library: Library, device: int) -> ListsLaunch:
        """Prepares the launch for calls of these sizes and captured arrays on a device. library: that of q."""
        shape, launch = self._shape(problem), launch_of(self.kernel, self.spec, problem, captured)
        workspace = self.engine.workspace(_memory(shape), library, device)
        return ListsLaunch(shape, launch, library, workspace)

    def _shape(self, problem: Problem) -> ListShape:
        return list_shape(self.spec, self.kernel.plan, self.direction, problem)

    def lists_for_call(
        self, prepared: ListsLaunch, problem: Problem, operands: Operands, numbers: ScalarArguments, place: Place
    ) -> Operands:
        """Returns the lists of a call, created on its stream. Lists of a mask without captures are cached by lengths.

        The cache is not used on a stream that is being captured, because lists and memory belong to the graph.
        operands: the arrays of the call; the arrays of lists in its own workspace are added.
        """
        if not self._keeps_lists or self.engine.is_captured(place):
            prepared.workspace.take(operands, place.stream)
            self._launch(prepared.launch, operands, numbers, place)
            return {member: operands[name] for name, member in _MEMBERS.items()}
        make = partial(self._make_persistent, prepared, problem, numbers, place)
        return self._cached(problem, prepared.shape, place, make)[1]

    def make(self, len_q: int, len_k: int, batch: int, heads: int, captures: Mapping[str, Any]) -> TileLists:
        """Creates lists for later calls, and waits until they are complete.

        Small lists are equally spaced and take one launch. Larger lists are packed: a first launch counts the entries,
        and a second one writes them.
        """
        problem = sizes_of(len_q, len_k, batch, heads)
        captures = self._mask_captures(captures)
        self._check_layouts(captures, len_q, len_k)
        arrays = self._own_arrays(captures)
        views = {name: library_of(array, name).view(array, name) for name, array in arrays.items()}
        device = _one_device(views)
        if device is not None and not self.engine.is_current(device):
            with self.engine.device_context(device):
                return self.make(len_q, len_k, batch, heads, captures)
        for capture in self._captures:
            if capture.ndim:
                check_array(self.spec, capture, views[capture.name], problem)
        like = next(iter(arrays.values()), None)
        like = self.engine.empty() if like is None else like
        library = library_of(like, "captures")
        place = Place(library.stream(like), self.engine.current_device())
        numbers = {member_name(c): number(c, captures[c.name]) for c in self._captures if not c.ndim}
        members = {member_name(c): arrays[c.name] for c in self._captures if c.ndim}
        shape = self._shape(problem)

        def fill() -> TileLists:
            if shape.rows * shape.listed <= _FEW_ENTRIES:
                prepared = self.prepare(problem, views, library, place.device)
                lists = self._make_spaced(prepared, problem, members, numbers, place)
            else:
                lists = self._make_compact(problem, views, members, library, numbers, place)
            self.engine.synchronize(place)
            return lists

        return fill() if self._captures else self._cached(problem, shape, place, fill)[0]

    def check(self, lists: Any, prepared: ListsLaunch, problem: Problem, place: Place) -> Operands:
        """Returns the operands of given lists. Raises ArgumentError if they are not for this mask and these sizes."""
        if not isinstance(lists, TileLists):
            raise ArgumentError(f"tile_lists of type {type(lists).__name__}: give what attention.tile_lists(...) made")
        if lists not in prepared.accepted:
            self._check(lists, prepared.shape, problem, place)
            prepared.accepted.add(lists)
        return self.engine.bind(lists.arguments())

    def _check(self, lists: TileLists, shape: ListShape, problem: Problem, place: Place) -> None:
        expected: dict[str, tuple[Any, Any]] = {
            "mask": (lists.mask, self.spec.mask.expression),
            "direction": (lists.direction, self.direction),
            "(len_q, len_k)": ((lists.len_q, lists.len_k), (problem.len_q, problem.len_k)),
            "tile": (lists.tile, self.tile),
            "(batch, heads)": (tuple(lists.counts.shape[:2]), (shape.batch, shape.heads)),
        }
        for what, (given, wanted) in expected.items():
            if given != wanted:
                raise ArgumentError(
                    f"tile_lists were made for {what} {given}, and this call has {wanted}: make them by this "
                    "attention's tile_lists(...) for the sizes of the call"
                )
        for name, array in lists.arguments().items():
            view = self.engine.library(array, "tile_lists").view(array, f"tile_lists ({name})")
            if (view.device or 0) != place.device:
                raise ArgumentError(f"tile_lists are on GPU {view.device} and q on {place.device}: make them there")

    def _cached(
        self, problem: Problem, shape: ListShape, place: Place, make: Callable[[], TileLists]
    ) -> tuple[TileLists, Operands]:
        """Returns the cached lists of these lengths, and their operands. Creates them on a miss.

        Each stream has its own entries. The lists of another stream might not be complete yet. And if an entry is
        evicted while a launch reads it, its memory is reused in the order of its own stream only.
        """
        key = (problem.len_q, problem.len_k, shape.batch, shape.heads, place.device, self.engine.stream_key(place))
        return self._cache.get_or_make(key, lambda: self._bound(make()))

    def _bound(self, lists: TileLists) -> tuple[TileLists, Operands]:
        return lists, self.engine.bind(lists.arguments())

    def _lists(self, problem: Problem, arrays: Mapping[str, Any]) -> TileLists:
        own = (arrays["counts"], arrays["offsets"], arrays["entries"])
        return TileLists(self.spec.mask.expression, self.tile, problem.len_q, problem.len_k, *own, self.direction)

    def _launch(self, launch: Launch, operands: Operands, numbers: ScalarArguments, place: Place) -> None:
        if all(launch.grid):
            self._runner.launch(launch, operands, numbers, place)

    def without_layouts(self, captures: Mapping[str, Any], q: View, k: View) -> dict[str, Any]:
        """Returns the captures of a call with each BlockLayout replaced by its array on the device of q."""
        axis = self.spec.batch_layout.rows_axis
        if len(q.shape) == len(k.shape) == 4:  # other shapes raise later; lengths of varlen batches are not known here
            self._check_layouts(captures, q.shape[axis], k.shape[axis])
        return {name: _plain(value, q.device) for name, value in captures.items()}

    def _mask_captures(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the captures of the mask. Raises ArgumentError if one is missing, or for names not in the spec."""
        for name in sorted(given.keys() - {capture.name for capture in self.spec.captures}):
            raise ArgumentError(f"unknown argument {name!r}; the mask captures {[c.name for c in self._captures]}")
        for capture in self._captures:
            if capture.name not in given:
                raise ArgumentError(f"capture {capture.name!r} is missing: {self.spec.mask.name} reads it")
        return {capture.name: given[capture.name] for capture in self._captures}

    def _check_layouts(self, captures: Mapping[str, Any], len_q: int, len_k: int) -> None:
        """Raises ArgumentError if a BlockLayout has another number of blocks than the lengths need."""
        for name, axis, index, block in self._blocks:
            layout = captures.get(name)
            if not isinstance(layout, BlockLayout) or axis >= len(layout.shape):
                continue
            length, needed = (len_q, -(-len_q // block)) if index == QUERY else (len_k, -(-len_k // block))
            if length and layout.shape[axis] != needed:
                raise ArgumentError(
                    f"capture {name!r} has {layout.shape[axis]} blocks along axis {axis}; "
                    f"len_{index}={length} in blocks of {block} has {needed}"
                )

    def _own_arrays(self, captures: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the captured arrays on the device of the engine."""
        device = self.engine.array_device()  # raises LaunchError if there is no GPU
        arrays = {c.name: _plain(captures[c.name], device) for c in self._captures if c.ndim}
        return {name: self.engine.to_device(array, name) for name, array in arrays.items()}

    def _make_spaced(
        self, prepared: ListsLaunch, problem: Problem, members: _Arrays, numbers: ScalarArguments, place: Place
    ) -> TileLists:
        arrays = _empty(_memory(prepared.shape), prepared.library, place)
        self._launch(prepared.launch, self.engine.bind(arrays | members), numbers, place)
        return self._lists(problem, arrays)

    def _make_persistent(
        self, prepared: ListsLaunch, problem: Problem, numbers: ScalarArguments, place: Place
    ) -> TileLists:
        """Creates lists for later calls, in memory outside of the pools of CUDA graphs."""
        arrays = self.engine.allocate_persistent(_memory(prepared.shape), place)
        self._launch(prepared.launch, self.engine.bind(arrays), numbers, place)
        return self._lists(problem, arrays)

    def _make_compact(
        self,
        problem: Problem,
        views: Mapping[str, View],
        members: _Arrays,
        library: Library,
        numbers: ScalarArguments,
        place: Place,
    ) -> TileLists:
        count, fill = (launch_of(self.kernel, self.spec, problem, views, spacing=spacing) for spacing in (1, 0))
        arrays = _empty(_counts(self._shape(problem)), library, place)
        self._launch(count, self.engine.bind(arrays | members), numbers, place)
        total = _write_offsets(arrays["counts"], arrays["offsets"], place)
        arrays |= _empty({"entries": _entries(total)}, library, place)
        self._launch(fill, self.engine.bind(arrays | members), numbers, place)
        return self._lists(problem, arrays)


def _memory(shape: ListShape) -> dict[str, ArraySpec]:
    """Returns the arrays of equally spaced lists, by their names in the struct of the listing kernel."""
    return {**_counts(shape), "entries": _entries(shape.rows * shape.listed)}


def _counts(shape: ListShape) -> dict[str, ArraySpec]:
    size = (shape.batch, shape.heads, shape.tiles)
    return {"counts": ArraySpec(size, "int32"), "offsets": ArraySpec(size, "int64")}


def _entries(count: int) -> ArraySpec:
    return ArraySpec((max(count, 1),), "int32")


def _empty(memory: Mapping[str, ArraySpec], library: Library, place: Place) -> _Arrays:
    return {name: library.empty(each.shape, each.dtype, place.device) for name, each in memory.items()}


def _plain(value: Any, device: int | None) -> Any:
    """Returns a captured value; for a BlockLayout its array, which is copied to a GPU once."""
    if not isinstance(value, BlockLayout):
        return value
    if device is None:
        return value.to_dense()

    def copy(array: np.ndarray[Any, Any]) -> Any:
        cupy = gpu.cupy()
        with cupy.cuda.Device(device):
            copied = cupy.asarray(array)
            cupy.cuda.get_current_stream().synchronize()  # ready for calls on any stream
        return copied

    return value.moved(device, copy)


def _indexed_blocks(spec: AttentionSpec) -> list[tuple[str, int, sympy.Symbol, int]]:
    """Returns (capture, axis, q or k, block) for each axis that the mask indexes by q // block or k // block."""
    return [
        (load.capture.name, axis, *position)
        for load in spec.mask.expression.atoms(Load)
        for axis, index in enumerate(load.indices)
        if isinstance(index, FloorDiv) and (position := position_of(index)) and position[0] in (QUERY, KEY)
    ]


def sizes_of(len_q: int, len_k: int, batch: int, heads: int, heads_kv: int | None = None) -> Problem:
    """Returns the sizes that lists and plans depend on; heads_kv=None stands for `heads`.

    Raises ArgumentError for a size that is out of range.
    """
    heads_kv = heads if heads_kv is None else heads_kv
    sizes = {
        "len_q": (len_q, 0, LONGEST),
        "len_k": (len_k, 0, LONGEST),
        "batch": (batch, 1, MAX_HEADS),
        "heads": (heads, 1, MAX_HEADS),
        "heads_kv": (heads_kv, 1, MAX_HEADS),
    }
    for name, (size, low, high) in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or not low <= size <= high:
            raise ArgumentError(f"{name}={size!r} must be an integer from {low} to {high}")
    if heads % heads_kv:
        raise ArgumentError(f"heads_kv={heads_kv} must divide heads={heads}")
    return Problem(int(batch), int(heads), int(heads_kv), int(len_q), int(len_k), {})


def _write_offsets(counts: Any, offsets: Any, place: Place) -> int:
    """Writes the offset of each list, packed without gaps, and returns the total number of entries."""
    if isinstance(counts, np.ndarray):
        return _exclusive_sum(counts, offsets)
    cupy = gpu.cupy()
    with gpu.stream_object(place.stream):
        on_host = cupy.asnumpy(cupy.asarray(counts))
        begins = np.empty(on_host.shape, np.int64)
        total = _exclusive_sum(on_host, begins)
        cupy.asarray(offsets).set(begins)
    return total


def _exclusive_sum(counts: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any]) -> int:
    ends = np.cumsum(counts.ravel(), dtype=np.int64)
    offsets[...] = (ends - counts.ravel()).reshape(counts.shape)
    return int(ends[-1]) if ends.size else 0


def _one_device(views: Mapping[str, View]) -> int | None:
    """Returns the GPU of the captured arrays; None for arrays on the CPU, and if there are none."""
    devices = {view.device for view in views.values()}
    if len(devices) > 1:
        raise ArgumentError(f"captures are on different devices, {sorted(map(str, devices))}; move them to one")
    return next(iter(devices), None)


def _on_host(array: Any) -> np.ndarray[Any, Any]:
    if isinstance(array, np.ndarray):
        return array
    cupy = gpu.cupy()
    return np.asarray(cupy.asnumpy(cupy.asarray(array)))
