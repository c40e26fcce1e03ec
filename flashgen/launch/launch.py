"""One launch of a kernel, but for the addresses and numbers that change from call to call."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.launch.argument_writer import ArgumentWriter


@dataclass(frozen=True)
class Launch:
    """A kernel's grid and the writer of its arguments; `counts`: its blocks take tiles by a counter."""

    grid: tuple[int, int, int]
    writer: ArgumentWriter
    counts: bool = False
