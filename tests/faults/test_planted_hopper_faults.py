"""Mistakes planted in kernels of Hopper's instructions: each is caught, by line, by the check that the table names.

A check that finds a fault proves something only if it finds nothing in the kernel as it is: that is tested beside it.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from planting import replaced_once

from flashgen.errors import LaunchError
from flashgen.runtime.schedule import Schedule

sys.path.insert(0, str(Path(__file__).parent))
from hopper_subjects import SUBJECTS, runs_right

LATE, EARLY, RANDOM = Schedule("in_order", "late"), Schedule("greedy_warp", "early"), Schedule("random", "random", 5)
FULL_WAIT, EMPTY_WAIT = r"mbarrier_wait\(full\(use\), parity\(use\)\);", r"mbarrier_wait\(empty\(use\), [^;]*;"
RELEASE = r"if \(lane == 0\) mbarrier_arrive\(empty\(use\)\);"
NOWHERE = r"nothing has been written to|may still write|over-arrival"


@dataclass(frozen=True)
class Fault:
    """`pattern`, a regular expression that stands once in the subject's text, becomes `replacement`.

    `finding` is what is said of it.
    """

    name: str
    pattern: str
    replacement: str
    finding: str
    subject: str = "pipeline"

    def planted(self) -> str:
        return replaced_once(self.name, self.pattern, self.replacement, SUBJECTS[self.subject].source)


def named(faults: list[Fault]) -> Any:
    return pytest.mark.parametrize("fault", faults, ids=lambda fault: fault.name)


def is_caught(fault: Fault, sanitize: Any, schedule: Schedule) -> None:
    finding = f"data race|{fault.finding}" if sanitize == "thread" else fault.finding
    assert runs_right(fault.subject, sanitize=sanitize, schedule=schedule)
    with pytest.raises(LaunchError) as error:
        runs_right(fault.subject, fault.planted(), sanitize=sanitize, schedule=schedule)
    assert re.search(rf"kernel\.cu:\d+: .*({finding})", str(error.value), re.DOTALL), str(error.value)


UNGUARDED = [
    Fault("missing wait for a full stage", FULL_WAIT, "", NOWHERE),
    Fault("missing wait for an empty stage", EMPTY_WAIT, "", "TMA load writes .* may still|over-arrival"),
    Fault(
        "early release",
        rf"(wgmma_wait<0>\(\);\s+order_registers\(d\);\s+)({RELEASE})",
        r"\2 \1",
        "TMA load writes .*, which the wgmma of kernel.cu:.* may still read",
    ),
    Fault("missing wgmma wait", r"wgmma_wait<0>\(\);", "", "TMA load writes .*, which the wgmma .* may still read"),
    Fault("wait for the group before", r"wgmma_wait<0>", "wgmma_wait<1>", "which the wgmma .* may still read"),
    Fault("missing commit", r"wgmma_commit\(\);", "", "which the wgmma .* may still read|no wgmma_commit"),
    Fault(
        "result rewritten while it is stored",
        r"if \(elected\) bulk_wait_read<0>\(\);(   // of)",
        r"\1",
        "stmatrix writes .*, which the TMA store of kernel.cu:.* may still read",
    ),
    Fault("no wait for the last store", r"if \(elected\) bulk_wait_read<0>\(\);\n\}", "}", "bulk_wait_read is missing"),
    Fault("store not committed", r"bulk_commit\(\);\n  \}\n\}", "}\n}", "which the TMA store .* may still read"),
]


@named(UNGUARDED)
def test_what_is_not_waited_for_is_caught_by_engines_that_are_late(fault: Fault) -> None:
    is_caught(fault, None, LATE)


@named(UNGUARDED)
def test_what_is_not_waited_for_is_caught_by_engines_at_random(fault: Fault) -> None:
    is_caught(fault, None, RANDOM)


PROTOCOL = [
    Fault("too many bytes announced", "kStageBytes\\);", "kStageBytes + 16);", r"deadlock.* 16 bytes are missing"),
    Fault("too few bytes announced", "kStageBytes\\);", "kStageBytes - 16);", r"wrong byte count: 16 bytes more"),
    Fault(
        "one load announced of two", "kStageBytes\\);", "kOffsetB);", "wrong byte count|TMA load of .* may still write"
    ),
    Fault(
        "consumer's parity slips",
        r"(full\(use\), )parity\(use\)",
        r"\g<1>0",
        r"parity slip: .* waits again for a phase",
    ),
    Fault("producer's parity slips", r"parity\(use\) \^ 1", "1", r"parity slip|deadlock"),
    Fault("parity of the next phase", r"parity\(use\) \^ 1", "parity(use)", r"deadlock.*for phase 0 \(parity 0\)"),
    Fault("every lane releases", RELEASE, "mbarrier_arrive(empty(use));", "over-arrival|may still"),
    Fault("too few arrivals expected", r"empty\(use\), 8\)", "empty(use), 4)", "over-arrival|may still"),
    Fault("too many arrivals expected", r"empty\(use\), 8\)", "empty(use), 9)", "deadlock.*1 of 9 arrivals"),
    Fault(
        "load into the next stage's barrier",
        r"full\(use\), step \* kDepth, 0,",
        "full(use + 1), step * kDepth, 0,",
        "byte",
    ),
    Fault(
        "barriers not shown to TMA", r"mbarrier_fence_init\(\);", "", r"initialised at .* without a mbarrier_fence_init"
    ),
    Fault(
        "a barrier initialised twice", r"mbarrier_init\(empty\(use\)", "mbarrier_init(full(use)", "initialised before"
    ),
    Fault(
        "a barrier overwritten",
        r"(elected = elect_one\(\);)",
        r"\1 *reinterpret_cast<unsigned*>(shared_memory + kOffsetBarriers) = 1;",
        "the mbarrier at offset .* was overwritten",
    ),
    Fault(
        "a load nobody waits for",
        r"use < arguments.tiles \* arguments.steps;",
        "use <= arguments.tiles * arguments.steps;",
        "nobody has waited",
    ),
    Fault("unfenced result", r"fence_async_shared\(\);", "", r"TMA store reads .*fence_async_shared\(\) is missing"),
    Fault(
        "unfenced operands",
        r"fence_async_shared\(\);",
        "",
        r"wgmma reads .*fence_async_shared\(\) is missing",
        "written",
    ),
    Fault(
        "fence before the writes",
        r"(store_matrix_x4\(row.*?)fence_async_shared\(\);",
        r"fence_async_shared(); \1",
        r"wgmma reads .*fence_async_shared\(\) is missing",
        "written",
    ),
    Fault(
        "one warp does not fence",
        r"fence_async_shared\(\);",
        "if (warp != 2) fence_async_shared();",
        r"wgmma reads .* wrote \(stmatrix\): fence_async_shared\(\) is missing",
        "written",
    ),
    Fault("missing wgmma fence", r"wgmma_fence\(\);", "", r"wgmma without a wgmma_fence\(\)"),
    Fault(
        "half a warpgroup multiplies",
        r"(wgmma_shared_f16<32, false>\(d,)",
        r"if (warp < 2) \1",
        "deadlock.* for the wgmma of .*, which 64 of 128 threads have issued",
        "written",
    ),
    Fault(
        "threads disagree in a descriptor",
        r"a \+ depth \* 2, 16,",
        "a + depth * 2 + threadIdx.x / 32 % 2 * 16, 16,",
        "disagree in the descriptors",
    ),
    Fault(
        "fewer threads at a barrier",
        r"named_barrier_sync\(1 \+ group, 256\)",
        "named_barrier_sync(1 + group, 128)",
        "barrier 1: 128 threads here, but 256 at",
    ),
    Fault(
        "more threads at a barrier",
        r"named_barrier_sync\(1 \+ group, 256\)",
        "named_barrier_sync(1 + group, 384)",
        "barrier 1: 384 threads here, but 256 at",
    ),
    Fault(
        "no number of warps at a barrier",
        r"named_barrier_sync\(1 \+ group, 256\)",
        "named_barrier_sync(1 + group, 200)",
        "200 threads are not a number of warps",
    ),
    Fault(
        "the other's barrier",
        r"named_barrier_arrive\(2 - group, 256\)",
        "named_barrier_arrive(1 + group, 256)",
        "has come to it before|deadlock",
    ),
    Fault(
        "the first turn is nobody's",
        r"if \(group == 1\) named_barrier_arrive[^;]*;",
        "",
        r"deadlock.*barrier 1, .*\(128 of 256 have arrived\)",
    ),
    Fault(
        "a barrier that is not there",
        r"named_barrier_sync\(1 \+ group, 256\)",
        "named_barrier_sync(15 + group, 256)",
        "named barriers are 1 to 15, not 16|deadlock",
    ),
    Fault(
        "registers for half a warpgroup",
        r"(registers_increase<232>\(\);)",
        r"if (threadIdx.x % 128 < 64) \1",
        "deadlock.*64 of the warpgroup's 128 threads have come",
    ),
    Fault(
        "given up by half a warpgroup",
        r"(registers_decrease<40>\(\);)",
        r"if (threadIdx.x % 128 < 64) \1",
        "deadlock.*wait for 232 registers",
    ),
    Fault(
        "more registers than there are",
        r"registers_increase<232>",
        "registers_increase<240>",
        "deadlock.*wait for 240 registers a thread .*are free",
    ),
    Fault(
        "an increase that is none",
        r"registers_increase<232>",
        "registers_increase<96>",
        "setmaxnreg cannot increase to 96 registers: the warpgroup has 168",
    ),
    Fault(
        "an odd number of registers",
        r"registers_increase<232>",
        "registers_increase<230>",
        "multiples of 8 from 24 to 256",
    ),
    Fault(
        "tile in the middle of a swizzle",
        r"const unsigned a = stage\(use\) \+",
        "const unsigned a = stage(use) + 128 +",
        "within the pattern of its 64-byte swizzle",
    ),
    Fault(
        "rows too far apart",
        r"(b \+ depth \* 2, 16, )8 \*",
        r"\g<1>1000 *",
        "out of bounds|nothing has been written to|may still write",
    ),
    Fault(
        "no tensor map",
        r"arguments\.c_map, rows",
        "*reinterpret_cast<const TensorMap*>(shared_memory), rows",
        "no tensor map",
    ),
    Fault(
        "a misaligned tile", r"tma_load_4d\(stage\(use\),", "tma_load_4d(stage(use) + 64,", "misaligned shared address"
    ),
    Fault(
        "a load beyond shared memory",
        r"tma_load_4d\(stage\(use\),",
        "tma_load_4d(stage(use) + 40960,",
        "shared memory out of bounds",
    ),
]


@named(PROTOCOL)
def test_a_broken_protocol_is_caught_by_line(fault: Fault) -> None:
    is_caught(fault, None, LATE)


WRONG = [
    Fault("wrong stride of a descriptor", r"(a \+ depth \* 2, 16, )8 \*", r"\g<1>4 *", ""),
    Fault("wrong swizzle of a descriptor", r"(matrix_descriptor<)kSwizzle(>\(b \+ depth)", r"\g<1>32\2", ""),
    Fault("wrong step along the depth", r"\(b \+ depth \* 2", "(b + depth", ""),
    Fault(
        "wrong leading stride",
        r"matrix_descriptor<0>\(b, 512, 128\)",
        "matrix_descriptor<0>(b, 256, 128)",
        "",
        "written",
    ),
    Fault("accumulated upon what was there", r"use % arguments.steps > 0 \|\| depth > 0", "true", ""),
    Fault("wrong coordinate", r"(arguments\.b_map, full\(use\), step \* kDepth, )0", r"\g<1>1", ""),
    Fault("stored at another's rows", r"tile \* kRows \+ group \* 64 \+ warp \* 16", "tile * kRows + group * 64", ""),
    Fault("wrong swizzle of the result", r"row % 8", "row % 4", ""),
]


@named(WRONG)
def test_a_wrong_place_is_caught_by_the_numbers(fault: Fault) -> None:
    assert runs_right(fault.subject, schedule=LATE)
    assert not runs_right(fault.subject, fault.planted(), schedule=LATE)


RACES = [
    *UNGUARDED[:5],
    Fault("no barrier after initialising", r"__syncthreads\(\);(\s+const int group)", r"\1", "no mbarrier"),
    Fault(
        "no barrier before the product",
        r"__syncthreads\(\);",
        "",
        "nothing has been written to|is missing",
        "written",
    ),
    Fault("no syncwarp before the store", r"__syncwarp\(\);(\s+if \(elected\) \{)", r"\1", "is missing"),
    Fault(
        "registers read before the wait",
        r"wgmma_commit\(\);",
        "wgmma_commit(); if (d[3] > 4.0f) d[2] = 0.0f;",
        "data race",
    ),
    Fault("registers written after the fence", r"wgmma_fence\(\);", "wgmma_fence(); d[5] = 0.0f;", "data race"),
]


@named(RACES)
def test_a_race_is_caught_by_thread_sanitizer(fault: Fault) -> None:
    is_caught(fault, "thread", EARLY)


@named([RACES[-2]])
def test_registers_in_use_are_caught_by_address_sanitizer(fault: Fault) -> None:
    assert runs_right(fault.subject, sanitize="address", schedule=EARLY)
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*use-after-poison"):
        runs_right(fault.subject, fault.planted(), sanitize="address", schedule=EARLY)


def test_a_load_outside_of_an_array_is_caught_by_address_sanitizer() -> None:
    rows = SUBJECTS["pipeline"].tiles * 128
    assert runs_right("pipeline", sanitize="address", schedule=LATE, rows_of_a=rows)
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*heap-buffer-overflow"):
        runs_right(
            "pipeline",
            Fault("", r"tile \* kRows, 0, 0", "tile * kRows + 1, 0, 0", "").planted(),
            sanitize="address",
            schedule=LATE,
            rows_of_a=rows + 1,
        )
