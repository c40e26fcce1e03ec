"""Small kernels of Hopper's instructions, those of tests/emulator, with their text changed."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashgen.build.host import compile_host
from flashgen.runtime.emulator import launch
from flashgen.runtime.schedule import Schedule
from hopper_kernels import Pipeline, WrittenOperands
from kernel_arguments import pack_arguments
from planting import Result

_ROWS_IN_MAP = 36  # the offset of the size of dimension 1 in a map of templates/emulator/tensor_map.h


@dataclass(frozen=True)
class InstructionSubject:
    """A kernel and its launch.

    Attributes:
        rows_of_a: the number of rows that the first tensor map declares; None for that of its array.
    """

    kernel: Any
    rows_of_a: int | None = None

    def texts(self) -> dict[str, str]:
        return {self.kernel.name: self.kernel.source}

    def run(
        self, texts: Mapping[str, str] | None, *, sanitize: Any, schedule: Schedule, shared_bytes: int = 0
    ) -> Result:
        values, got, want = self.kernel.arguments()
        arguments, pointers = pack_arguments(values)
        if self.rows_of_a is not None:
            rows = struct.pack("<I", self.rows_of_a)
            arguments = arguments[:_ROWS_IN_MAP] + rows + arguments[_ROWS_IN_MAP + len(rows) :]
        compiled = compile_host((texts or self.texts())[self.kernel.name], self.kernel.name, sanitize)
        memory = self.kernel.shared_bytes + shared_bytes
        launch(compiled, (1, 1, 1), self.kernel.block, memory, arguments, pointers, schedule)
        return Result(bool(np.allclose(got.astype(np.float64), want, rtol=1e-3, atol=1e-3)))


def instruction_subjects() -> dict[str, InstructionSubject]:
    pipeline = Pipeline()
    return {
        "pipeline": InstructionSubject(pipeline),
        "pipeline, a row more in the map": InstructionSubject(pipeline, pipeline.tiles * 128 + 1),
        "written": InstructionSubject(WrittenOperands()),
    }
