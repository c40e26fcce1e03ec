"""Calls on a GPU that are like one which was worked out: its launches again, by where arrays stand in a list.

An attention's own calls pass arrays by their names through checks, results and stages. Who knows that a call is like
another one needs none of that: its addresses in order are all that its launches lack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flashgen.attention.stages import COUNTERS, PreparedStages
from flashgen.launch.engines import Gpu, Numbers, Place
from flashgen.launch.memory import Block

_NULL = ""  # stands first: what has no address is there


class Replay:
    """The launches of calls like one, which make their own results and take arrays in one order."""

    def __init__(
        self,
        engine: Gpu,
        stages: PreparedStages,
        device: int,
        names: Sequence[str],
        makers: Mapping[str, Callable[[], Any]],
        pointer: Callable[[Any], int],
    ) -> None:
        """names: of the arrays of a call, as structs have them. makers: of its results. pointer: the address of one."""
        self._engine, self._device, self._pointer = engine, device, pointer
        self._makers, self._counts = tuple(makers.values()), stages.counts
        self._block = stages.workspace if isinstance(stages.workspace, Block) else None
        own = self._block.offsets if self._block else ()
        positions = {name: position for position, name in enumerate((_NULL, *names, *makers, *own))}
        if self._counts:
            positions |= dict.fromkeys(COUNTERS, len(positions))
        self._stages = tuple(
            (stage.runner, stage.launch.by_position(_as_called(positions, stage.pointers))) for stage in stages.stages
        )

    def __call__(self, addresses: Sequence[int], stream: int, numbers: Numbers) -> list[Any] | None:
        """The results, in the order of their makers; None where another device is the current one.

        addresses: of the arrays, in their order, which the caller keeps alive. numbers: by their names in the structs.
        """
        if not self._engine.current(self._device):
            return None
        results = [make() for make in self._makers]
        known = [0, *addresses, *map(self._pointer, results)]
        if self._block:
            _block, own = self._block.lay(stream)  # which lives until everything is launched
            known += own
        place = Place(stream, self._device)
        if self._counts:
            known.append(self._engine.counter(place, self._counts))
        for runner, launch in self._stages:
            runner.launch(launch, known, numbers, place)
        return results


def _as_called(positions: Mapping[str, int], called: Mapping[str, str]) -> Mapping[str, int]:
    """Positions by the names of one stage's struct, where it has names of its own: those alone."""
    return {name: positions.get(here, 0) for name, here in called.items()} if called else positions
