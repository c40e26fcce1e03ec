"""What the forward and the backward pass do alike: check a call, remember what its shapes decide, launch its stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from flashgen.attention.call import Call, Splits
from flashgen.attention.captures import (
    captured_distances,
    check_captures,
    check_distances,
    check_places,
    check_seed,
    check_seed_in_memory,
    is_in_memory,
    number,
)
from flashgen.attention.problem import NO_BOUNDS, Bounds, Problem
from flashgen.attention.ragged import refuse_ragged
from flashgen.attention.replay import Replay
from flashgen.attention.sharing import Sharing, check_on_host
from flashgen.attention.stages import PreparedStages
from flashgen.codegen.arguments import member_name
from flashgen.errors import ArgumentError
from flashgen.language.layouts import BlockLayout
from flashgen.language.spec import AttentionSpec
from flashgen.launch.argument_writer import Addresses
from flashgen.launch.engines import Engine, Gpu, Numbers, Taken
from flashgen.runtime.arrays import Library, View
from flashgen.runtime.remembered import Remembered

_MOST_PREPARED = 1024  # lengths grow with every call in decoding
_MOST_LIKENESSES = 8  # each of which is asked in turn
_ROW_ALIGNMENT, _LARGEST_ELEMENT = 16, 8  # bytes
_ARGUMENTS = {
    "o": "out",
    "d_o": "d_out",
    "schedule": "decode_schedule",
}  # what the user calls a member of a struct, where it is called differently
_NO_NUMBERS: dict[str, int | float] = {}

Makers = Mapping[str, Callable[[], Any]]
"""What makes the results of a call, by name."""


class Prepared(Protocol):
    """What the shapes, strides, dtypes and device of a call decide."""

    @property
    def device(self) -> int: ...

    @property
    def sharing(self) -> Sharing: ...

    @property
    def problem(self) -> Problem: ...

    @property
    def makers(self) -> Makers: ...

    @property
    def stages(self) -> PreparedStages | None: ...


AnyPrepared = TypeVar("AnyPrepared", bound=Prepared)


class Listers(Protocol):
    """What makes the tile lists of a pass."""

    def without_layouts(self, captures: Mapping[str, Any], q: View, k: View) -> Mapping[str, Any]: ...


class Pass(Generic[AnyPrepared]):
    """One pass of a spec on an engine.

    in_rows: the arrays that are copied 16 bytes at a time; all others are read and written element by element.
    listers: what makes its tile lists, or None where closed forms say what to visit.
    likenesses: what was given to `keep`.
    """

    listers: Listers | None = None

    def __init__(self, spec: AttentionSpec, engine: Engine, in_rows: frozenset[str]) -> None:
        self.spec, self.engine, self._in_rows = spec, engine, in_rows
        self._arrays = [(capture, member_name(capture)) for capture in spec.captures if capture.ndim]
        self._numbers = [(capture, member_name(capture)) for capture in spec.captures if not capture.ndim]
        self._called = _ARGUMENTS | {member: f"capture {capture.name!r}" for capture, member in self._arrays}
        self._distances = captured_distances(spec)
        self._takes_numbers = bool(self._numbers or spec.dropout)
        self._prepared: Remembered[Any, AnyPrepared] = Remembered(_MOST_PREPARED)
        self.likenesses: tuple[Any, ...] = ()

    def __call__(self, call: Call) -> Mapping[str, Any]:
        """The results of a call by name; ArgumentError where an argument does not fit the spec."""
        captures = call.captures
        if captures or self.spec.captures:
            check_captures(self.spec, captures)
        if call.tile_lists is not None and self.listers is None:
            raise ArgumentError(f"tile_lists: the kernels of {self.spec.mask.name} read none; leave them out")
        if call.tile_lists is not None:
            refuse_ragged(self.spec, "tile_lists", "leave them out, each call makes its own")
        q = call.inputs["q"]
        library = self.engine.library(q, "q")
        if library is self.engine.copied:
            return self._through_gpu(call)
        if self.listers and captures and any(isinstance(value, BlockLayout) for value in captures.values()):
            views = (library.view(q, "q"), library.view(call.inputs["k"], "k"))
            captures = self.listers.without_layouts(captures, *views)
        numbers = self._call_numbers(captures, call.seed, call.offset)
        arrays = call.inputs
        if self.spec.dropout and is_in_memory(call.seed):
            arrays["seed"] = call.seed
        for capture, member in self._arrays:
            arrays[member] = captures[capture.name]
        if call.results:
            results = {self._result_argument(name): array for name, array in call.results.items()}
            prepared, addresses = self._prepare(arrays | results, library, call.bounds, call.splits)
            prepared.sharing.check(addresses)
        else:
            prepared, addresses = self._prepare(arrays, library, call.bounds, call.splits)
        if self._distances:
            self._check_distances(captures)
        if self.spec.sharded:
            check_places(self.spec, captures, prepared.problem)
        taken = self.engine.taken(arrays, addresses)
        if self.engine.current(prepared.device):
            return self._run(prepared, call, library.stream(q), taken, numbers)
        with self.engine.on(prepared.device):
            return self._run(prepared, call, library.stream(q), taken, numbers)

    def numbers(self, captures: Mapping[str, Any]) -> Numbers:
        """What `again` takes of captured numbers, of a spec without dropout; ArgumentError where they do not fit it."""
        check_captures(self.spec, captures)
        return self._call_numbers(captures, None, 0)

    def know(self, known: Hashable, arrays: Mapping[str, Any]) -> AnyPrepared:
        """What calls of such arrays of the spec's rows share, for `again`; ArgumentError where they do not fit it.

        arrays: inputs, and results that are given. known: all that their library says of them, but for where they are,
        and how their addresses lie in 16 bytes.
        """
        library = self._library("q", arrays["q"])
        return self._prepared.get_or_make(known, lambda: self._prepare(dict(arrays), library, NO_BOUNDS, None)[0])

    def keep(self, likeness: Any, before: int) -> None:
        """Keeps a caller's own way to what a call like one that it made `know` shares, as the first of the last few.

        before: how often everything was forgotten, `forgotten`, when it asked: what was made by then is not kept.
        """
        self.likenesses = (likeness, *self.likenesses[: _MOST_LIKENESSES - 1])
        if self._prepared.forgotten != before:
            self.likenesses = ()

    @property
    def forgotten(self) -> int:
        """How often what calls share was forgotten."""
        return self._prepared.forgotten

    def forget(self) -> None:
        """Works out anew what calls share."""
        self._prepared.forget()
        self.likenesses = ()

    def known(self, known: Hashable) -> AnyPrepared | None:
        """What calls like one that `know` was told of share; None where there was none."""
        return self._prepared.get(known)

    def again(
        self,
        prepared: AnyPrepared,
        call: Call,
        stream: int,
        addresses: Addresses,
        numbers: Numbers = _NO_NUMBERS,
    ) -> Mapping[str, Any] | None:
        """The results of a call of which `know` or `known` said what it shares with others; None on another device.

        For callers that have looked at the arrays themselves, and have no captured arrays. addresses: of all arrays,
        to be added to. call: what is wanted, and results that are given. numbers: by their names in the structs.
        """
        if not self.engine.current(prepared.device):
            return None
        if call.results:
            prepared.sharing.check(addresses)
        return self._run(prepared, call, stream, addresses, numbers)

    def replay(
        self, prepared: AnyPrepared, names: Sequence[str], wanted: Sequence[str], pointer: Callable[[Any], int]
    ) -> Replay | None:
        """What launches again calls that are given no results; None where they do more than launch.

        names: of their arrays, in the order in which it takes addresses. wanted: the results. pointer: address of one.
        """
        stages = prepared.stages
        if stages is None or not isinstance(self.engine, Gpu) or not self._only_launches(prepared):
            return None
        makers = {name: prepared.makers[name] for name in wanted}
        return Replay(self.engine, stages, prepared.device, names, makers, pointer)

    def _only_launches(self, prepared: AnyPrepared) -> bool:
        """Whether calls make what they are not given, launch their stages, and do nothing else."""
        raise NotImplementedError

    def _run(self, prepared: AnyPrepared, call: Call, stream: int, taken: Taken, numbers: Numbers) -> Mapping[str, Any]:
        """Makes the results that were not given, and launches.

        stream: that of q's library. taken: what launches take of the inputs with the captures among them, by their
        names in the structs, to be added to. numbers: what changes from call to call.
        """
        raise NotImplementedError

    def _make(self, makers: Makers, wanted: Iterable[str]) -> dict[str, Any]:
        """The results of a call that was given none."""
        return {name: makers[name]() for name in wanted}

    def _work_out(
        self, views: dict[str, View], libraries: Mapping[str, Library], bounds: Bounds, splits: Splits
    ) -> AnyPrepared:
        """Checks the arrays of a call, and prepares what calls like it share. libraries: of the arrays.

        bounds: of the lengths of a ragged batch. splits: of a decode kernel's keys, where the call says.
        """
        raise NotImplementedError

    def _result_argument(self, name: str) -> str:
        """What errors and kernels call a result that was given."""
        return name

    def _through_gpu(self, call: Call) -> Mapping[str, Any]:
        """NumPy arrays: copied to the GPU, and the results back; those of captures that are there stay there."""
        self.engine.here()  # says so where there is no GPU
        results = {self._result_argument(name): array for name, array in call.results.items()}
        self._check_sharing_on_host({**call.inputs, **results}, call.captures, results)
        given = (call.inputs, call.captures, call.results)  # results too, so that what is not written is kept
        moved = [{name: self.engine.bring(array) for name, array in arrays.items()} for arrays in given]
        seed = self.engine.bring(call.seed)
        there = call._replace(inputs=moved[0], captures=moved[1], results=moved[2], seed=seed)
        home = {}
        for name, array in self(there).items():
            stays = name in call.captures and there.captures[name] is call.captures[name] and not call.results
            home[name] = array if stays else self.engine.fetch(array, call.results.get(name))
        return home

    def _call_numbers(self, captures: Mapping[str, Any], seed: Any, offset: Any) -> dict[str, int | float]:
        """The numbers that change from call to call, by their names in the structs."""
        if not self._takes_numbers:
            return _NO_NUMBERS
        numbers = {member: number(capture, captures[capture.name]) for capture, member in self._numbers}
        if self.spec.dropout:
            numbers |= check_seed(self.spec, seed, offset)
        return numbers

    def _check_distances(self, captures: Mapping[str, Any]) -> None:
        """ArgumentError where a table has not the entries that a captured number says; the rest is checked."""
        for capture, axis, farthest in self._distances:
            array = captures[capture.name]
            view = self.engine.library(array, capture.name).view(array, capture.name)
            check_distances(capture, view.shape, axis, int(captures[farthest.name]))

    def _prepare(
        self, arrays: dict[str, Any], library: Library, bounds: Bounds, splits: Splits
    ) -> tuple[AnyPrepared, Addresses]:
        """What calls like this one share, worked out, and the arrays checked, the first time; the arrays' addresses.

        library: of q, and so of all arrays of its type.
        """
        kind, look = type(arrays["q"]), library.look
        key: list[Any] = [bounds, splits]
        addresses = Addresses()
        misaligned = 0
        in_rows = self._in_rows
        for name, array in arrays.items():
            seen, address = (look if type(array) is kind else self._library(name, array).look)(array)
            key.append(seen)
            addresses[name] = address
            if name in in_rows:
                misaligned |= address
            else:
                key.append(address % _LARGEST_ELEMENT)
        key.append(misaligned % _ROW_ALIGNMENT)
        known = tuple(key)
        prepared = self._prepared.get(known)
        if prepared is None:
            libraries = {name: self._library(name, array) for name, array in arrays.items()}
            views = {name: libraries[name].view(array, _argument(name)) for name, array in arrays.items()}
            if "seed" in views:
                check_seed_in_memory(views["seed"])
            make = partial(self._work_out, views, libraries, bounds, splits)
            prepared = self._prepared.get_or_make(known, make)
        return prepared, addresses

    def _library(self, name: str, array: Any) -> Library:
        """ArgumentError where the engine takes no such array."""
        return self.engine.library(array, _argument(name))

    def _sharing(self, views: Mapping[str, View], written: Collection[str]) -> Sharing:
        return Sharing(views, written, self._named)

    def _check_sharing_on_host(
        self, arrays: Mapping[str, Any], captures: Mapping[str, Any], written: Collection[str]
    ) -> None:
        """The same for NumPy arrays that are copied to a GPU: no call takes what another refuses."""
        captured = {member: captures[capture.name] for capture, member in self._arrays}
        check_on_host({**arrays, **captured}, written, self._named)

    def _named(self, name: str) -> str:
        return self._called.get(name, name)


def common_device(views: Mapping[str, View]) -> int:
    """The GPU that all arrays are on, 0 for the CPU; ArgumentError where one is not where q is."""
    device = views["q"].device
    for name, view in views.items():
        if view.device != device:
            raise ArgumentError(f"{_argument(name)} is on {_place(view)} and q on {_place(views['q'])}; move it there")
    return device or 0


def _argument(name: str) -> str:
    return _ARGUMENTS.get(name, name)


def _place(view: View) -> str:
    return "the CPU" if view.device is None else f"GPU {view.device}"
