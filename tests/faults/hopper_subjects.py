"""The kernels that Hopper's faults are planted in: those of tests/emulator, launched as they are or changed."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

from flashgen.build.host import compile_host
from flashgen.runtime.emulator import launch
from flashgen.runtime.schedule import Schedule

sys.path.insert(0, str(Path(__file__).parents[1] / "emulator"))
from hopper_kernels import Pipeline, WrittenOperands
from kernel_arguments import pack_arguments

SUBJECTS: dict[str, Any] = {"pipeline": Pipeline(), "written": WrittenOperands()}
_ROWS_IN_MAP = 36  # where a map of templates/emulator/tensor_map.h has the size of dimension 1


def runs_right(
    name: str,
    source: str | None = None,
    *,
    sanitize: Any = None,
    schedule: Schedule,
    rows_of_a: int | None = None,
) -> bool:
    """Whether a subject with `source` for its text computes what it should; its first map may say wrong rows."""
    subject = SUBJECTS[name]
    values, got, want = subject.arguments()
    arguments, pointers = pack_arguments(values)
    if rows_of_a is not None:
        rows = struct.pack("<I", rows_of_a)
        arguments = arguments[:_ROWS_IN_MAP] + rows + arguments[_ROWS_IN_MAP + len(rows) :]
    kernel = compile_host(source or subject.source, subject.name, sanitize)
    launch(kernel, (1, 1, 1), subject.block, subject.shared_bytes, arguments, pointers, schedule)
    return bool(np.allclose(got.astype(np.float64), want, rtol=1e-3, atol=1e-3))
