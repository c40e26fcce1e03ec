"""Mistakes in how blocks of a mixed batch find their work, planted in emitted text; each must be noticed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

import flashgen as fg
from flashgen.codegen.mma_sync.decode_plans import DecodePlan
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.mma_sync.mixed_plans import MixedPlan
from flashgen.errors import LaunchError
from flashgen.launch.engines import Emulator
from flashgen.runtime.schedule import Schedule
from flashgen.verify import judged
from flashgen.verify.problems import Shape, poisoned_outputs, random_inputs

SPEC = fg.AttentionSpec(16, mask=fg.causal(), page_size=4, layout="thd")
PLAN = MixedPlan(DecodePlan(16, 32, 2, 2, scheduled=True), ForwardPlan(32, 32, 2))
# (queries, keys): prompts of several tiles, few queries of several tiles of rows, sequences without any between them.
LENGTHS = ((1, 150), (70, 90), (0, 40), (15, 190), (0, 0), (1, 3), (33, 20), (1, 120))
OUTSIDE = 2
PLACES = 8  # for blocks: columns that cut sequences
BARRIER = "__syncthreads();"


def call(source: dict[str, str] | None = None, sanitize: Any = None, schedule: Schedule | None = None) -> bool:
    """Whether a call is right, of kernels with these texts."""
    compiled = fg.compile(
        SPEC, "sm_80", emulate=True, plan=PLAN, source=source, sanitize=sanitize, schedule=schedule or Schedule()
    )
    paged = fg.AttentionSpec(16, mask=fg.causal(), page_size=4, layout="bshd")
    inputs = random_inputs(paged, Shape(1, 190, len(LENGTHS), 6, 2), seed=1)
    for array in (inputs.k, inputs.v):
        np.nan_to_num(array, copy=False)
    begins = OUTSIDE + np.cumsum([0, *(queries for queries, _ in LENGTHS)])
    random = np.random.default_rng(2)
    q = random.standard_normal((begins[-1] + OUTSIDE, 6, 16), np.float32).astype(np.float16)
    given = {
        "cu_seqlens_q": begins.astype(np.int32),
        "page_table": np.maximum(inputs.captures["page_table"], 0),
        "seqused_k": np.array([keys for _, keys in LENGTHS], np.int32),
    }
    out, lse = poisoned_outputs(SPEC, q, inputs.v)
    with mock.patch.object(Emulator, "multiprocessors", lambda self, device: PLACES):
        compiled(q, inputs.k, inputs.v, return_lse=True, out=(out, lse), **given)
    return judged(SPEC, q, inputs.k, inputs.v, out, lse, given).ok


def planted(right: str, wrong: str, times: int = 1) -> dict[str, str]:
    """The kernel's text with the mistake."""
    ((name, text),) = fg.compile(SPEC, "sm_80", emulate=True, plan=PLAN).sources.items()
    assert text.count(right) == times, f"{right!r} stands {text.count(right)} times in the text"
    return {name: text.replace(right, wrong)}


def test_the_call_without_a_mistake() -> None:
    for sanitize in (None, "address", "thread"):
        assert call(sanitize=sanitize, schedule=Schedule("greedy_warp", "late"))


WRONG = {
    "keys of the sequence before": ("arguments.seqused_k + number", "arguments.seqused_k + max(number - 1, 0)"),
    "queries that begin with the first": ("arguments.q += sequence.first_q *", "arguments.q += 0 * sequence.first_q *"),
    "an output that begins with the first": ("arguments.o += sequence.first_q *", "arguments.o += 0 *"),
    "an LSE that begins with the first": ("arguments.lse += sequence.first_q;", "arguments.lse += 0;"),
    "a sequence less": ("const int all = arguments.batch + 2", "const int all = arguments.batch"),
    "a tile of rows less": ("(sequence.len_q * arguments.packed + kTileQ - 1)", "(sequence.len_q * arguments.packed)"),
    "tiles of no length": ("return max(count, 1) + kBeginning;", "return count;"),
    "the first column's run": ("begin = column * length;", "begin = 0;"),
    "runs that begin behind their tiles": ("start - kBeginning <= begin &&", "start <= begin &&"),
    "the sequence without rows": (" && row_tiles_of(sequence_of(own, arguments), arguments) > 0", ""),
    "a sequence twice": ("next_sequence(run.sequence + 1, arguments)", "next_sequence(run.sequence, arguments)"),
    "a tile twice": ("if (++run.tile == row_tiles_of", "if (run.tile + 1 == row_tiles_of"),
    "another tile of the next sequence": ("run.tile = 0;", "run.tile = 1;"),
    "a part too many": ("last - first + 1;", "last - first + 2;"),
    "parts from the run's begin on": ("work.split == 0 ? 0 : run.column", "run.column"),
    "a part without its last tile": ("(run.column + 1) * run.length - run.start,",
                                     "(run.column + 1) * run.length - run.start - 1,"),
    "a tile of the first prompt": ("*found = {number, wanted - start, head};", "*found = {number, 0, head};"),
    "prompts of the first head": ("head = index / tiles, place", "head = 0 * index, place"),
    "as many tiles in a row of heads": ("place = index % tiles;", "place = index;"),
    "prompts that are left out": ("Turn{true, block - runs}", "Turn{true, block}"),
    "runs that are left out": ("Turn{false, block - first}", "Turn{false, block}"),
    "heads of another group": ("find_run(index / given.groups, index % given.groups, given)",
                               "find_run(index / given.groups, 0, given)"),
    "an LSE by the sequence's length": ("arguments.lse[head * arguments.total_q + place.query]",
                                        "arguments.lse[head * arguments.len_q + place.query]"),
}  # fmt: skip


@pytest.mark.rotated(6)
@pytest.mark.parametrize("fault", WRONG.values(), ids=list(WRONG))
def test_a_wrong_number_is_caught_by_the_verdict(fault: tuple[str, str]) -> None:
    try:
        right = call(planted(*fault))
    except LaunchError:
        right = False  # the emulator saw it first
    assert not right


RACES = {
    "sums of other warps": (f"of_warps[warp] = sum;\n  {BARRIER}", "of_warps[warp] = sum;"),
    "none over a run": (f"// a column that has none\n  {BARRIER}", ""),
    "a run not found yet": (f"{BARRIER}\n  const Run run = *found;", "const Run run = *found;"),
    "tiles over a run": (
        f"const Run run = *found;\n  {BARRIER}   // every thread has read it, and tiles take its place",
        "const Run run = *found;",
    ),
    "none over a tile": (f"= {{arguments.batch + 1, 0, head}};\n  {BARRIER}", "= {arguments.batch + 1, 0, head};"),
    "a tile not found yet": (f"{BARRIER}\n  const Tile tile = *found;", "const Tile tile = *found;"),
    "queries over a tile": (
        f"const Tile tile = *found;\n  {BARRIER}   // every thread has read it, and tiles take its place",
        "const Tile tile = *found;",
    ),
    "tiles over shares": (f"{BARRIER}   // every thread is done with the run and", "// every thread is done with"),
}


@pytest.mark.parametrize("fault", RACES.values(), ids=list(RACES))
def test_a_race_is_caught_by_thread_sanitizer(fault: tuple[str, str]) -> None:
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*data race|in flight"):
        call(planted(*fault), sanitize="thread", schedule=Schedule("greedy_warp", "late"))


OUTSIDE_OF_ARRAYS = {
    "offsets as they are": ("return min(max(__ldg(arguments.cu_seqlens_q + number), 0), arguments.total_q);",
                            "return __ldg(arguments.cu_seqlens_q + number) + (number == arguments.batch ? 40 : 0);"),
    "a sequence behind the last": ("number >= arguments.batch)", "number > arguments.batch)"),
    "parts behind all columns": ("work.unit = run.group * arguments.splits + first;",
                                       "work.unit = arguments.groups * arguments.splits + first;"),
    "rows of the next tile": ("min(kTileQ, sequence.len_q * arguments.packed - first_row);", "kTileQ;"),
}  # fmt: skip


@pytest.mark.parametrize("fault", OUTSIDE_OF_ARRAYS.values(), ids=list(OUTSIDE_OF_ARRAYS))
def test_an_access_outside_an_array_is_caught_by_address_sanitizer(fault: tuple[str, str]) -> None:
    with pytest.raises(LaunchError, match=r"kernel\.cu:\d+: .*heap-buffer-overflow"):
        call(planted(*fault), sanitize="address")
