"""Schedules of decoding: who reads which keys, worked out on the device once a step, for the calls of all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from flashgen.attention.captures import check_array, number
from flashgen.attention.launches import launch_of
from flashgen.attention.problem import Problem, check_aligned
from flashgen.attention.tile_lists import sizes_of
from flashgen.attention.varlen import refuse_varlen
from flashgen.codegen.arguments import member_name
from flashgen.codegen.dispatch import is_decode_plan, num_splits
from flashgen.codegen.families import forward_family
from flashgen.codegen.family import DecodeFamily, DecodePlan
from flashgen.codegen.plan import Plan
from flashgen.codegen.targets import Target
from flashgen.errors import ArgumentError
from flashgen.language.operations import Capture
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Engine, Launch, Place, Runner
from flashgen.runtime.arrays import View
from flashgen.runtime.caching import Cache


@dataclass(frozen=True)
class ScheduledSizes:
    """What a schedule and a call must agree on: the plan, the sizes, and the columns that the keys are shared by."""

    plan: DecodePlan
    batch: int
    heads: int
    heads_kv: int
    len_q: int
    columns: int

    def check(self, plan: DecodePlan, problem: Problem) -> None:
        """ArgumentError where a call with this plan and of these sizes is another."""
        own = {"batch": self.batch, "heads": self.heads, "heads_kv": self.heads_kv, "len_q": self.len_q}
        called = {"heads": "heads_q"}
        for name, size in own.items():
            wanted = getattr(problem, called.get(name, name))
            if size != wanted:
                raise ArgumentError(
                    f"decode_schedule was made for {name}={size} and this call has {wanted}; make one of this "
                    "attention's decode_schedule(...) for the sizes of the call"
                )
        if self.plan != plan:
            raise ArgumentError(
                f"decode_schedule was made for {self.plan} and this call takes {plan}; make it by an attention of the "
                "same head dims and dtypes"
            )


class DecodeSchedule:
    """How the blocks of decode calls share the keys of a batch; `attention.decode_schedule(...)` makes it.

    Calls of every attention over pages take it whose plan is the same: the layers of a model, also those of another
    mask. It says who does what, not what is attended to: with other lengths than it was made of a call is right, and
    less evenly divided. `update` makes it anew in the same memory, which a captured graph may do at each replay. A
    graph that has captured such calls reads its memory: keep the schedule as long.

    Attributes:
        sizes: what calls must agree with it on. problem: the sizes of the kernel that makes it.
        memory: int32, on the device of the lengths: (start, stop, length, unit) of each column's run, then where each
            unit, a tile of rows of a sequence, begins, and where the last one ends, in tiles of keys.
    """

    def __init__(
        self, scheduler: Scheduler, problem: Problem, sizes: ScheduledSizes, memory: Any, captures: Mapping[str, Any]
    ) -> None:
        self._scheduler, self._captures, self.problem = scheduler, captures, problem
        self.sizes, self.memory = sizes, memory

    def __repr__(self) -> str:
        return f"<flashgen.DecodeSchedule of {self.sizes}>"

    def update(self, *, seqused_k: Any, **captures: Any) -> None:
        """Makes it anew by the lengths that `seqused_k` has when the kernel runs, on the caller's current stream.

        One launch, captured like any other; no memory is made. Calls that still use the earlier one must be on that
        stream, or be over.

        Args:
            seqused_k: int32 (batch), on the device of the memory.
            captures: what the mask's bounds read, where it is another than before.

        Raises ArgumentError where they are not those of the batch, LaunchError where the kernel cannot be launched.
        """
        self._scheduler.fill(self, seqused_k, {**self._captures, **captures})


class Scheduler:
    """Makes the schedules of a spec's calls."""

    def __init__(self, spec: AttentionSpec, target: Target, engine: Engine, given: Plan) -> None:
        """given: the plan of the attention, which calls have if it is a scheduled one."""
        self.spec, self.target, self.engine, self._given = spec, target, engine, given
        self._runners: Cache[DecodePlan, tuple[Any, Runner]] = Cache()
        self._launches: Cache[Any, Launch] = Cache()

    @property
    def _decode(self) -> DecodeFamily:
        """Returns the decode kernels. Raises ArgumentError if the spec takes no schedules."""
        if not self.spec.page_size:
            raise ArgumentError(
                "decode_schedule is for keys in pages, whose lengths the device knows: declare page_size=..., or leave "
                "it out, as splits follow from the sizes"
            )
        refuse_varlen(self.spec, "decode_schedule", "leave it out, blocks share keys by their lengths")
        return forward_family(self.target).decode

    def make(
        self, len_q: int, page_table: Any, seqused_k: Any, heads: int, heads_kv: int, captures: Mapping[str, Any]
    ) -> DecodeSchedule:
        """A schedule of these lengths; ArgumentError where they are none."""
        decode, page_size = self._decode, self.spec.page_size or 1
        seqused_k = self.engine.bring(seqused_k, "seqused_k")
        library = self.engine.library(seqused_k, "seqused_k")
        lengths = library.view(seqused_k, "seqused_k")
        shape = tuple(page_table.shape)
        if len(shape) != 2 or len(lengths.shape) != 1 or shape[0] != lengths.shape[0]:
            raise ArgumentError(
                f"page_table of shape {shape} and seqused_k of shape {lengths.shape}; give (batch, pages of a "
                "sequence) and (batch,)"
            )
        problem = sizes_of(len_q, shape[1] * page_size, shape[0], heads, heads_kv)
        device = lengths.device or 0
        problem = replace(problem, multiprocessors=self.engine.multiprocessors(device), pages=1)
        plan = self._plan(decode, problem.heads_per_kv * len_q)
        problem = replace(problem, splits=num_splits(plan, self.spec, problem))
        sizes = ScheduledSizes(plan, problem.batch, heads, heads_kv, len_q, problem.splits)
        with self.engine.on(device):
            memory = library.empty((decode.schedule_size(self.spec, plan, problem),), "int32", device)
        schedule = DecodeSchedule(self, problem, sizes, memory, captures)
        self.fill(schedule, seqused_k, captures)
        return schedule

    def _plan(self, decode: DecodeFamily, rows: int) -> DecodePlan:
        if is_decode_plan(self._given, self.target):
            given = cast(DecodePlan, self._given)
            if given.scheduled:
                return given
        return decode.plan_of_rows(self.spec, self.target, rows, True)

    def fill(self, schedule: DecodeSchedule, seqused_k: Any, captures: Mapping[str, Any]) -> None:
        """Launches the kernel that writes the schedule."""
        kernel, runner = self._built(schedule.sizes.plan)
        seqused_k = self.engine.bring(seqused_k, "seqused_k")
        library = self.engine.library(seqused_k, "seqused_k")
        arrays = {"seqused_k": seqused_k}
        read = self._captures(kernel)
        for capture in read:
            if capture.name not in captures:
                raise ArgumentError(f"capture {capture.name!r} is missing: which keys {self.spec.mask.name} needs")
            if capture.ndim:
                arrays[member_name(capture)] = self.engine.bring(captures[capture.name], capture.name)
        views = {name: self.engine.library(array, name).view(array, name) for name, array in arrays.items()}
        device = self._check(views, library.view(schedule.memory, "decode_schedule"), schedule)
        numbers = {member_name(c): number(c, captures[c.name]) for c in read if not c.ndim}
        launch = self._launch(schedule, read, views)
        with self.engine.on(device):
            operands = self.engine.bind(arrays | {"schedule": schedule.memory})
            runner.launch(launch, operands, numbers, Place(library.stream(seqused_k), device))

    def _captures(self, kernel: Any) -> tuple[Capture, ...]:
        members = {field.name for field in kernel.layout.fields}
        return tuple(capture for capture in self.spec.captures if member_name(capture) in members)

    def _check(self, views: Mapping[str, View], memory: View, schedule: DecodeSchedule) -> int:
        """The device; ArgumentError where the lengths are not of the batch, or something is elsewhere."""
        lengths = views["seqused_k"]
        if lengths.dtype != "int32" or lengths.shape != (schedule.sizes.batch,):
            raise ArgumentError(
                f"seqused_k is {lengths.dtype} {lengths.shape}; give int32 ({schedule.sizes.batch},), as the schedule's"
            )
        if lengths.shape[0] > 1 and lengths.strides[0] != 1:
            raise ArgumentError(f"seqused_k has strides {lengths.strides} (elements); give a contiguous array")
        check_aligned("seqused_k", lengths)
        for name, view in views.items():
            if view.device != memory.device:
                raise ArgumentError(f"{name} is on GPU {view.device}, the schedule on {memory.device}; move it there")
        return memory.device or 0

    def _launch(self, schedule: DecodeSchedule, read: tuple[Capture, ...], views: Mapping[str, View]) -> Launch:
        """The launch of a schedule: worked out once for sizes and captured arrays of the same shapes."""
        captured = {c.name: views[member_name(c)] for c in read if c.ndim}
        shapes = tuple((view.shape, view.strides, view.dtype) for view in captured.values())
        kernel, problem = self._built(schedule.sizes.plan)[0], schedule.problem

        def make() -> Launch:
            for capture in read:
                if capture.ndim:
                    check_array(self.spec, capture, captured[capture.name], problem)
            return launch_of(kernel, self.spec, problem, captured)

        return self._launches.get_or_make((schedule.sizes, problem.len_k, shapes), make)

    def _built(self, plan: DecodePlan) -> tuple[Any, Runner]:
        return self._runners.get_or_make(plan, partial(self._build, plan))

    def _build(self, plan: DecodePlan) -> tuple[Any, Runner]:
        kernel = self._decode.render_schedule(self.spec, self.target, plan)
        return kernel, self.engine.runner(kernel, "attention.decode_schedule(...) where FLASHGEN_JIT is not 0")


def given_schedule(schedule: Any, num_splits: Any, spec: AttentionSpec) -> DecodeSchedule:
    """The schedule that a call was given; ArgumentError where it is none, or the call cannot have one."""
    if not isinstance(schedule, DecodeSchedule):
        raise ArgumentError(
            f"decode_schedule of type {type(schedule).__name__}: give what attention.decode_schedule(...) made"
        )
    if num_splits is not None:
        raise ArgumentError(f"decode_schedule and num_splits={num_splits!r} both share keys out: leave one out")
    if not spec.page_size:
        raise ArgumentError("decode_schedule is for keys in pages: leave it out, or declare page_size=...")
    return schedule
