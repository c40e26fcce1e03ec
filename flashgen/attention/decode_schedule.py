"""Decode schedules: which CTA reads which keys, computed on the device once per step for the calls of all layers."""

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
    """The plan and the sizes that a schedule and a call must agree on.

    num_ctas: the number of CTAs that divide the keys of all sequences, for each group of heads.
    """

    plan: DecodePlan
    batch: int
    heads: int
    heads_kv: int
    len_q: int
    num_ctas: int

    def check(self, plan: DecodePlan, problem: Problem) -> None:
        """Raises ArgumentError if the plan or the sizes of a call differ."""
        sizes = {"batch": self.batch, "heads": self.heads, "heads_kv": self.heads_kv, "len_q": self.len_q}
        for name, size in sizes.items():
            wanted = getattr(problem, {"heads": "heads_q"}.get(name, name))
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
    """The division of the keys of a batch among the CTAs of decode calls; see `attention.decode_schedule(...)`.

    Calls of every paged attention with the same plan accept it: all layers of a model, including those with another
    mask. It does not decide which keys are attended to. With other lengths than those of the schedule, the result of a
    call is still right, but the work is divided less evenly. `update` recomputes the schedule in the same memory, also
    at each replay of a captured graph. A graph that has captured such calls reads that memory, so keep the schedule
    alive as long as the graph.

    Attributes:
        scheduler: what computes it.
        captures: the captured numbers that the bounds of the mask read.
        sizes: the plan and the sizes that calls must agree with.
        problem: the sizes of the kernel that computes the schedule.
        memory: int32, on the device of the lengths: (start, stop, length, unit) for each CTA's range of tiles of keys;
            then the first tile of keys of each unit, which is a tile of rows of one sequence, and the end of the last.
    """

    def __init__(
        self, scheduler: Scheduler, problem: Problem, sizes: ScheduledSizes, memory: Any, captures: Mapping[str, Any]
    ) -> None:
        self._scheduler, self._captures, self.problem = scheduler, captures, problem
        self.sizes, self.memory = sizes, memory

    def __repr__(self) -> str:
        return f"<flashgen.DecodeSchedule of {self.sizes}>"

    def update(self, *, seqused_k: Any, **captures: Any) -> None:
        """Recomputes the schedule from the lengths in `seqused_k`, in place, on the caller's current stream.

        The lengths are read when the kernel runs. This is one launch without allocations, and may be captured into a
        graph. Calls that use the earlier schedule must be on the same stream, or must have finished.

        Args:
            seqused_k: int32 (batch,), the number of keys of each sequence, on the device of the schedule.
            captures: the captures that the mask's bounds read, if they differ from those given before.

        Raises:
            ArgumentError: the arrays do not fit the batch.
            LaunchError: the kernel could not be launched.
        """
        self._scheduler.fill(self, seqused_k, {**self._captures, **captures})


class Scheduler:
    """Creates the schedules of a spec's calls."""

    def __init__(self, spec: AttentionSpec, target: Target, engine: Engine, given: Plan) -> None:
        """given: the plan of the attention; schedules are for this plan if it supports schedules."""
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
        refuse_varlen(
            self.spec, "decode_schedule", "leave it out, the kernel splits keys by the lengths of the sequences"
        )
        return forward_family(self.target).decode

    def make(
        self, len_q: int, page_table: Any, seqused_k: Any, heads: int, heads_kv: int, captures: Mapping[str, Any]
    ) -> DecodeSchedule:
        """Creates a schedule for these lengths. Raises ArgumentError if an argument does not fit."""
        decode, page_size = self._decode, self.spec.page_size or 1
        seqused_k = self.engine.to_device(seqused_k, "seqused_k")
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
        plan = self._choose_plan(decode, problem.heads_per_kv * len_q)
        problem = replace(problem, splits=num_splits(plan, self.spec, problem))
        sizes = ScheduledSizes(plan, problem.batch, heads, heads_kv, len_q, problem.splits)
        with self.engine.device_context(device):
            memory = library.empty((decode.schedule_size(self.spec, plan, problem),), "int32", device)
        schedule = DecodeSchedule(self, problem, sizes, memory, captures)
        self.fill(schedule, seqused_k, captures)
        return schedule

    def _choose_plan(self, decode: DecodeFamily, rows: int) -> DecodePlan:
        if is_decode_plan(self._given, self.target):
            given = cast(DecodePlan, self._given)
            if given.scheduled:
                return given
        return decode.plan_of_rows(self.spec, self.target, rows, True)

    def fill(self, schedule: DecodeSchedule, seqused_k: Any, captures: Mapping[str, Any]) -> None:
        """Launches the kernel that writes the schedule."""
        kernel, runner = self._get_runner(schedule.sizes.plan)
        seqused_k = self.engine.to_device(seqused_k, "seqused_k")
        library = self.engine.library(seqused_k, "seqused_k")
        arrays = {"seqused_k": seqused_k}
        read = self._captures(kernel)
        for capture in read:
            if capture.name not in captures:
                raise ArgumentError(f"capture {capture.name!r} is missing: which keys {self.spec.mask.name} needs")
            if capture.ndim:
                arrays[member_name(capture)] = self.engine.to_device(captures[capture.name], capture.name)
        views = {name: self.engine.library(array, name).view(array, name) for name, array in arrays.items()}
        device = self._check(views, library.view(schedule.memory, "decode_schedule"), schedule)
        numbers = {member_name(c): number(c, captures[c.name]) for c in read if not c.ndim}
        launch = self._launch(schedule, read, views)
        with self.engine.device_context(device):
            operands = self.engine.bind(arrays | {"schedule": schedule.memory})
            runner.launch(launch, operands, numbers, Place(library.stream(seqused_k), device))

    def _captures(self, kernel: Any) -> tuple[Capture, ...]:
        members = {field.name for field in kernel.layout.fields}
        return tuple(capture for capture in self.spec.captures if member_name(capture) in members)

    def _check(self, views: Mapping[str, View], memory: View, schedule: DecodeSchedule) -> int:
        """Returns the device. Raises ArgumentError if lengths do not fit, or an array is on another device."""
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
        """Returns the launch of a schedule, which is cached by sizes and by the shapes of captured arrays."""
        captured = {c.name: views[member_name(c)] for c in read if c.ndim}
        shapes = tuple((view.shape, view.strides, view.dtype) for view in captured.values())
        kernel, problem = self._get_runner(schedule.sizes.plan)[0], schedule.problem

        def make() -> Launch:
            for capture in read:
                if capture.ndim:
                    check_array(self.spec, capture, captured[capture.name], problem)
            return launch_of(kernel, self.spec, problem, captured)

        return self._launches.get_or_make((schedule.sizes, problem.len_k, shapes), make)

    def _get_runner(self, plan: DecodePlan) -> tuple[Any, Runner]:
        return self._runners.get_or_make(plan, partial(self._build, plan))

    def _build(self, plan: DecodePlan) -> tuple[Any, Runner]:
        kernel = self._decode.render_schedule(self.spec, self.target, plan)
        return kernel, self.engine.runner(kernel, "attention.decode_schedule(...) where FLASHGEN_JIT is not 0")


def given_schedule(schedule: Any, num_splits: Any, spec: AttentionSpec) -> DecodeSchedule:
    """Returns the given schedule. Raises ArgumentError if it is none, or if the call cannot use a schedule."""
    if not isinstance(schedule, DecodeSchedule):
        raise ArgumentError(
            f"decode_schedule of type {type(schedule).__name__}: give what attention.decode_schedule(...) made"
        )
    if num_splits is not None:
        raise ArgumentError(f"decode_schedule and num_splits={num_splits!r} both share keys out: leave one out")
    if not spec.page_size:
        raise ArgumentError("decode_schedule is for keys in pages: leave it out, or declare page_size=...")
    return schedule
