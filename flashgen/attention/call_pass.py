"""The steps that both passes have in common: check a call, look up its launch parameters in a cache, and launch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from flashgen.attention.aliasing import AliasCheck, check_on_host
from flashgen.attention.call import Call, Splits
from flashgen.attention.captures import (
    captured_distances,
    check_captures,
    check_distances,
    check_seed,
    check_seed_in_memory,
    check_shard,
    is_in_memory,
    number,
)
from flashgen.attention.problem import NO_BOUNDS, Bounds, Problem
from flashgen.attention.replay import Replay
from flashgen.attention.stages import PreparedStages
from flashgen.attention.varlen import refuse_varlen
from flashgen.codegen.arguments import member_name
from flashgen.errors import ArgumentError
from flashgen.language.layouts import BlockLayout
from flashgen.language.spec import AttentionSpec
from flashgen.launch.argument_writer import Addresses
from flashgen.launch.engines import Engine, Gpu, Operands, ScalarArguments
from flashgen.runtime.arrays import Library, View
from flashgen.runtime.caching import Cache

_MAX_PREPARED = 1024  # in decoding, every call has a new length
_MAX_RECENT_LAUNCHES = 8  # a lookup compares a call with each of them
_ALIGNMENT = 16  # bytes: of a copy of a row, and more than that of any element
_ARGUMENTS = {
    "o": "out",
    "d_o": "d_out",
    "schedule": "decode_schedule",
}  # the user's name of a struct member, where the two names differ
_NO_NUMBERS: dict[str, int | float] = {}

Makers = Mapping[str, Callable[[], Any]]
"""Functions that allocate the results of a call, by name."""


class Prepared(Protocol):
    """The state that all calls of the same shapes, strides, dtypes and device share: an entry of the launch cache."""

    @property
    def device(self) -> int: ...

    @property
    def alias_check(self) -> AliasCheck: ...

    @property
    def problem(self) -> Problem: ...

    @property
    def makers(self) -> Makers: ...

    @property
    def stages(self) -> PreparedStages | None: ...


AnyPrepared = TypeVar("AnyPrepared", bound=Prepared)


class Listers(Protocol):
    """The tile listers of a pass."""

    def without_layouts(self, captures: Mapping[str, Any], q: View, k: View) -> Mapping[str, Any]: ...


class Pass(Generic[AnyPrepared]):
    """One pass of a spec on an engine.

    listers: create the tile lists; None if closed forms give the tiles to visit.
    recent_launches: the entries that callers added with `remember_launch`, the newest first.
    """

    listers: Listers | None = None

    def __init__(self, spec: AttentionSpec, engine: Engine) -> None:
        self.spec, self.engine = spec, engine
        self._arrays = [(capture, member_name(capture)) for capture in spec.captures if capture.ndim]
        self._numbers = [(capture, member_name(capture)) for capture in spec.captures if not capture.ndim]
        self._argument_names = _ARGUMENTS | {member: f"capture {capture.name!r}" for capture, member in self._arrays}
        self._capture_names = {capture.name for capture in spec.captures}
        self._distances = captured_distances(spec)
        self._takes_numbers = bool(self._numbers or spec.dropout)
        self._prepared: Cache[Any, AnyPrepared] = Cache(_MAX_PREPARED)
        self.recent_launches: tuple[Any, ...] = ()

    def __call__(self, call: Call) -> Mapping[str, Any]:
        """Returns the results of a call by name. Raises ArgumentError if an argument does not fit the spec."""
        captures = call.captures
        if captures.keys() != self._capture_names:
            check_captures(self.spec, captures)  # raises ArgumentError
        if call.tile_lists is not None and self.listers is None:
            raise ArgumentError(f"tile_lists: the kernels of {self.spec.mask.name} read none; leave them out")
        if call.tile_lists is not None:
            refuse_varlen(self.spec, "tile_lists", "leave them out, each call makes its own")
        q = call.inputs["q"]
        library = self.engine.library(q, "q")
        if library is self.engine.host_library:
            return self._through_gpu(call)
        if self.listers and BlockLayout in map(type, captures.values()):
            views = (library.view(q, "q"), library.view(call.inputs["k"], "k"))
            captures = self.listers.without_layouts(captures, *views)
        numbers = self._call_numbers(captures, call.seed, call.offset) if self._takes_numbers else _NO_NUMBERS
        arrays = call.inputs
        if self.spec.dropout and is_in_memory(call.seed):
            arrays["seed"] = call.seed
        for capture, member in self._arrays:
            arrays[member] = captures[capture.name]
        given = arrays
        if call.results:
            given = arrays | {self._result_argument(name): array for name, array in call.results.items()}
        prepared, addresses, key = self._find(given, library, call.bounds, call.splits)
        if prepared is None:
            prepared = self._check_and_prepare(key, given, call.bounds, call.splits)
        if call.results:
            prepared.alias_check.check(addresses)
        if self._distances:
            self._check_distances(captures)
        if self.spec.sharded:
            check_shard(self.spec, captures, prepared.problem)
        operands = self.engine.operands(arrays, addresses)
        if self.engine.is_current(prepared.device):
            return self._run(prepared, call, library.stream(q), operands, numbers)
        with self.engine.device_context(prepared.device):
            return self._run(prepared, call, library.stream(q), operands, numbers)

    def numbers(self, captures: Mapping[str, Any]) -> ScalarArguments:
        """Returns the captured numbers as `launch_prepared` takes them; for specs without dropout.

        Raises ArgumentError if the captures do not fit the spec.
        """
        check_captures(self.spec, captures)
        return self._call_numbers(captures, None, 0)

    def lookup(self, arrays: Mapping[str, Any], numbers: ScalarArguments = _NO_NUMBERS) -> AnyPrepared | None:
        """Returns the shared state of calls with arrays like these, for `launch_prepared`; None on a miss.

        Args:
            arrays: the inputs, then the results if the caller gives them, in the order of calls of the attention, on
                which the key depends. The spec must have no captured arrays, and the call neither maximum lengths nor a
                number of splits.
            numbers: the captured numbers, by their names in the structs.

        Raises:
            ArgumentError: a shard is not within the full range that the numbers give.
        """
        prepared, _, _ = self._find(arrays, self._library("q", arrays["q"]), NO_BOUNDS, None)
        if prepared is not None and self.spec.sharded:
            check_shard(self.spec, {c.name: numbers[member] for c, member in self._numbers}, prepared.problem)
        return prepared

    @property
    def repeats_launches(self) -> bool:
        """Whether calls with arrays of the same shapes and strides launch the same kernels on a GPU, and do no more.

        Calls with dropout do so if their seed is a number.
        """
        return isinstance(self.engine, Gpu) and self.listers is None and not self._numbers

    def seed_numbers(self, seed: Any, offset: Any) -> ScalarArguments:
        """Returns the seed and offset of the dropout by their names in the structs; none if the spec has no dropout.

        Raises ArgumentError if the seed is missing, or either is out of range.
        """
        return check_seed(self.spec, seed, offset) if self.spec.dropout else _NO_NUMBERS

    def prepared_of(self, call: Call) -> tuple[AnyPrepared | None, Mapping[str, Any]]:
        """Returns the shared state of a call that has been run, None if it is not cached, and its arrays by name."""
        results = {self._result_argument(name): array for name, array in call.results.items()}
        arrays = call.inputs | results
        return self._find(arrays, self._library("q", arrays["q"]), call.bounds, call.splits)[0], arrays

    def remember_launch(self, entry: Any, generation: int) -> None:
        """Puts a caller's own entry in front of `recent_launches`, which holds the last few.

        generation: the value of `generation` when the caller looked up the shared state. If the cache was cleared
            since, the entry is stale and is not kept.
        """
        self.recent_launches = (entry, *self.recent_launches[: _MAX_RECENT_LAUNCHES - 1])
        if self._prepared.generation != generation:
            self.recent_launches = ()

    @property
    def generation(self) -> int:
        """How often the cache was cleared."""
        return self._prepared.generation

    def clear_cache(self) -> None:
        """Removes the shared state of all calls: the next call of any shape prepares its launches again."""
        self._prepared.clear()
        self.recent_launches = ()

    def launch_prepared(
        self,
        prepared: AnyPrepared,
        call: Call,
        stream: int,
        addresses: Addresses,
        numbers: ScalarArguments = _NO_NUMBERS,
    ) -> Mapping[str, Any] | None:
        """Launches a call from cached state, and returns its results; None if another device is the current one.

        For callers that have compared the arrays with the cache key themselves and have no captured arrays.

        call: only its wanted names and its given results are read. addresses: of all arrays of the call; those of
        results and workspaces are added. numbers: the captured numbers, by their names in the structs.
        """
        if not self.engine.is_current(prepared.device):
            return None
        if call.results:
            prepared.alias_check.check(addresses)
        return self._run(prepared, call, stream, addresses, numbers)

    def create_replay(
        self, prepared: AnyPrepared, names: Sequence[str], wanted: Sequence[str], pointer: Callable[[Any], int]
    ) -> Replay | None:
        """Returns a replay of the launches of calls without `out=`; None if such calls do more than launch kernels.

        names: the arrays of a call, in the order in which the replay takes their addresses. wanted: the names of the
        results. pointer: returns the address of an array.
        """
        stages = prepared.stages
        if stages is None or not isinstance(self.engine, Gpu) or not self._only_launches(prepared):
            return None
        makers = {name: prepared.makers[name] for name in wanted}
        return Replay(self.engine, stages, prepared.device, names, makers, pointer)

    def _only_launches(self, prepared: AnyPrepared) -> bool:
        """Whether calls allocate their results and launch their stages, and do nothing else."""
        raise NotImplementedError

    def _run(
        self, prepared: AnyPrepared, call: Call, stream: int, operands: Operands, numbers: ScalarArguments
    ) -> Mapping[str, Any]:
        """Allocates the results that were not given, and launches.

        stream: the current stream of q's library. operands: the inputs and captured arrays, by their names in the
        structs; results and workspaces are added. numbers: those that change from call to call.
        """
        raise NotImplementedError

    def _make_results(self, makers: Makers, wanted: Iterable[str]) -> dict[str, Any]:
        """Allocates the results of a call that was given none."""
        return {name: makers[name]() for name in wanted}

    def _prepare(
        self, views: dict[str, View], libraries: Mapping[str, Library], bounds: Bounds, splits: Splits
    ) -> AnyPrepared:
        """Checks the arrays of a call, and prepares the state that all calls with its cache key share.

        views, libraries: of the arrays, by their names in the structs. bounds: the maximum lengths of a varlen batch.
        """
        raise NotImplementedError

    def _result_argument(self, name: str) -> str:
        """The name of a given result in error messages and kernels."""
        return name

    def _through_gpu(self, call: Call) -> Mapping[str, Any]:
        """Runs a call of NumPy arrays: copies them to the GPU, and the results back.

        A gradient of a captured array that is on the GPU already stays there.
        """
        self.engine.current_device()  # raises LaunchError if there is no GPU
        results = {self._result_argument(name): array for name, array in call.results.items()}
        self._check_sharing_on_host({**call.inputs, **results}, call.captures, results)
        given = (call.inputs, call.captures, call.results)  # results too, so that elements not written keep their value
        moved = [{name: self.engine.to_device(array) for name, array in arrays.items()} for arrays in given]
        seed = self.engine.to_device(call.seed)
        on_gpu = call._replace(inputs=moved[0], captures=moved[1], results=moved[2], seed=seed)
        fetched = {}
        for name, array in self(on_gpu).items():
            stays = name in call.captures and on_gpu.captures[name] is call.captures[name] and not call.results
            fetched[name] = array if stays else self.engine.fetch(array, call.results.get(name))
        return fetched

    def _call_numbers(self, captures: Mapping[str, Any], seed: Any, offset: Any) -> ScalarArguments:
        """Returns the numbers that change from call to call, by their names in the structs."""
        numbers = {member: number(capture, captures[capture.name]) for capture, member in self._numbers}
        return {**numbers, **self.seed_numbers(seed, offset)}

    def _check_distances(self, captures: Mapping[str, Any]) -> None:
        """Raises ArgumentError if an array of relative positions has another size than a captured number implies.

        The value of that number is no part of the cache key, so every call checks it.
        """
        for capture, axis, farthest in self._distances:
            array = captures[capture.name]
            view = self.engine.library(array, capture.name).view(array, capture.name)
            check_distances(capture, view.shape, axis, int(captures[farthest.name]))

    def _check_and_prepare(
        self, key: tuple[Any, ...], arrays: Mapping[str, Any], bounds: Bounds, splits: Splits
    ) -> AnyPrepared:
        """Checks the arrays of a call, and caches the state that all calls with its key share."""
        libraries = {name: self._library(name, array) for name, array in arrays.items()}
        views = {name: libraries[name].view(array, _argument(name)) for name, array in arrays.items()}
        if "seed" in views:
            check_seed_in_memory(views["seed"])
        return self._prepared.get_or_make(key, partial(self._prepare, views, libraries, bounds, splits))

    def _find(
        self, arrays: Mapping[str, Any], library: Library, bounds: Bounds, splits: Splits
    ) -> tuple[AnyPrepared | None, Addresses, tuple[Any, ...]]:
        """Returns the shared state of a call, None on a miss of the launch cache; the addresses of its arrays; its key.

        The key holds the arguments, what the libraries say of each array, and how the addresses are aligned. library:
        the library of q, and of all arrays of the same type.
        """
        q_type, look = type(arrays["q"]), library.look
        key: list[Any] = [bounds, splits]
        addresses = Addresses()
        misaligned = 0
        for name, array in arrays.items():
            described, address = (look if type(array) is q_type else self._library(name, array).look)(array)
            key.append(described)
            addresses[name] = address
            misaligned |= address
        if misaligned % _ALIGNMENT:
            key += [address % _ALIGNMENT for address in addresses.values()]
        cache_key = tuple(key)
        return self._prepared.get(cache_key), addresses, cache_key

    def _library(self, name: str, array: Any) -> Library:
        """Returns the library of an array. Raises ArgumentError if the engine does not take arrays of its type."""
        return self.engine.library(array, _argument(name))

    def _alias_check(self, views: Mapping[str, View], written: Collection[str]) -> AliasCheck:
        return AliasCheck(views, written, self._argument_name)

    def _check_sharing_on_host(
        self, arrays: Mapping[str, Any], captures: Mapping[str, Any], written: Collection[str]
    ) -> None:
        """Checks NumPy arrays that will be copied to a GPU: they too must not overlap where they are written to."""
        captured = {member: captures[capture.name] for capture, member in self._arrays}
        check_on_host({**arrays, **captured}, written, self._argument_name)

    def _argument_name(self, name: str) -> str:
        return self._argument_names.get(name, name)


def common_device(views: Mapping[str, View]) -> int:
    """Returns the index of the GPU that holds all arrays, 0 for the CPU.

    Raises ArgumentError if an array is on another device than q.
    """
    device = views["q"].device
    for name, view in views.items():
        if view.device != device:
            where = f"is on {_device(view)} and q on {_device(views['q'])}"
            raise ArgumentError(f"{_argument(name)} {where}; move it to the device of q")
    return device or 0


def _argument(name: str) -> str:
    return _ARGUMENTS.get(name, name)


def _device(view: View) -> str:
    return "the CPU" if view.device is None else f"GPU {view.device}"
