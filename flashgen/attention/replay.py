"""Replays of the launches of an earlier call on a GPU, with other arrays of the same shapes.

A normal call passes its arrays by name through checks and stages. A caller that knows that a call hits the launch cache
needs none of these: a replay takes a list of addresses, and each launch reads them by position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flashgen.attention.stages import COUNTERS, PreparedStages
from flashgen.launch.engines import Gpu, Place, ScalarArguments
from flashgen.launch.memory import GpuWorkspace

_NULL = ""  # the first position, which holds a null pointer for arrays that the call does not have


class Replay:
    """The launches of all calls that share one cached state. It allocates the results, and takes addresses in order."""

    def __init__(
        self,
        engine: Gpu,
        stages: PreparedStages,
        device: int,
        names: Sequence[str],
        makers: Mapping[str, Callable[[], Any]],
        pointer: Callable[[Any], int],
    ) -> None:
        """names: the arrays of a call in order, by their names in the structs. makers: functions that allocate the
        results, by name. pointer: returns the address of a result.
        """
        self._engine, self._pointer, self._place = engine, pointer, Place(0, device)
        self._makers, self._counts = tuple(makers.values()), stages.counts
        self._workspace = stages.workspace if isinstance(stages.workspace, GpuWorkspace) else None
        workspaces = self._workspace.offsets if self._workspace else ()
        positions = {name: position for position, name in enumerate((_NULL, *names, *makers, *workspaces))}
        if self._counts:
            positions |= dict.fromkeys(COUNTERS, len(positions))
        self._stages = tuple(
            (stage.runner, stage.launch.by_position(_stage_positions(positions, stage.pointers)))
            for stage in stages.stages
        )

    def __call__(self, addresses: Sequence[int], stream: int, numbers: ScalarArguments) -> list[Any] | None:
        """Launches like `launch`; returns None if another device is the current one."""
        return self.launch(addresses, stream, numbers) if self._engine.is_current(self._place.device) else None

    def launch(self, addresses: Sequence[int], stream: int, numbers: ScalarArguments) -> list[Any]:
        """Launches, and returns the results in the order of their makers. The arrays' device must be the current one.

        addresses: of the arrays, which the caller keeps alive. numbers: by their names in the structs.
        """
        place = self._place  # of the last call, in any thread
        if place.stream != stream:
            place = self._place = Place(stream, place.device)
        results = [make() for make in self._makers]
        operands = [0, *addresses, *map(self._pointer, results)]
        if self._workspace:
            # `_block` keeps the allocation alive until all is launched.
            _block, workspaces = self._workspace.allocate(stream)
            operands += workspaces
        if self._counts:
            operands.append(self._engine.counter(place, self._counts))
        for runner, launch in self._stages:
            runner.launch(launch, operands, numbers, place)
        return results


def _stage_positions(positions: Mapping[str, int], pointers: Mapping[str, str]) -> Mapping[str, int]:
    """Returns the positions by the names of one stage's struct, where a stage has names of its own."""
    return {member: positions.get(name, 0) for member, name in pointers.items()} if pointers else positions
