"""Into how many columns keys that sequences share are divided, what a schedule holds, and what is refused."""

from __future__ import annotations

import pytest

import flashgen.language as fg
from flashgen.codegen.mma_sync.decode_plans import (
    MOST_SHARED_TILES,
    DecodePlan,
    choose_decode_plan,
    decode_plan_for,
    with_schedule,
)
from flashgen.codegen.mma_sync.runs import RUN_NUMBERS, choose_columns, schedule_size
from flashgen.codegen.sizes import Sizes
from flashgen.codegen.stages import kernels_of
from flashgen.codegen.targets import target_named
from flashgen.codegen.workload import Workload
from flashgen.errors import UnsupportedError
from flashgen.language import AttentionSpec

SM_90A = target_named("sm_90a")
PAGED = AttentionSpec(128, "bfloat16", mask=fg.causal(), page_size=64)
PLAN = with_schedule(choose_decode_plan(PAGED, SM_90A))


def columns(batch: int, heads: int, heads_kv: int, len_k: int, len_q: int = 1) -> int:
    """On a GPU of 132 multiprocessors, which have places for 264 blocks."""
    assert PLAN.blocks == 2
    return choose_columns(PAGED, PLAN, Sizes(batch, heads, heads_kv, len_q, len_k, multiprocessors=132))


def test_columns_fill_the_card_in_even_waves() -> None:
    for batch in (2, 64, 1024):
        assert columns(batch, 32, 8, 32768) == 33
        assert columns(batch, 64, 4, 32768) == 66
        assert columns(batch, 32, 32, 32768) == 8
        assert columns(batch, 40, 40, 32768) == 13, "520 blocks of 528, where a wave has 240 of 264"
        assert columns(batch, 128, 128, 32768) == 2
    assert columns(2, 1024, 1024, 32768) == 1, "4 waves, of which the last is nearly full"


def test_no_more_columns_than_tables_have_tiles_for() -> None:
    assert columns(2, 32, 8, 64) == 4, "16 tiles, of 4 warps"
    assert columns(2, 32, 8, 0) == 2, "what it costs to say that there is nothing"
    assert columns(0, 32, 8, 64) == 1


def test_a_schedule_holds_runs_and_begins_of_units() -> None:
    sizes = Sizes(64, 32, 8, 9, 32768, multiprocessors=132, splits=33)
    assert schedule_size(PAGED, PLAN, sizes) == 33 * RUN_NUMBERS + 64 * 3 + 1, "36 rows are 3 tiles of 16"


def test_more_tiles_than_int32_counts() -> None:
    with pytest.raises(UnsupportedError, match="65535 sequences of up to 1000000000 keys have more tiles than"):
        columns(65535, 8, 8, 10**9)
    many = Workload(1, 10**9, 65535 * 8, 132, 1, 65535)
    plan = decode_plan_for(PAGED, SM_90A, many)
    assert plan is not None and not plan.scheduled, "each sequence has parts of its own then"
    fitting = MOST_SHARED_TILES // 65535 * PLAN.tile_k - 4 * PLAN.tile_k
    plan = decode_plan_for(PAGED, SM_90A, Workload(1, fitting, 65535 * 8, 132, 1, 65535))
    assert plan is not None and plan.scheduled


def test_shared_keys_are_in_pages() -> None:
    with pytest.raises(UnsupportedError, match="scheduled=True is for keys in pages"):
        DecodePlan(16, 16, 4, 3, scheduled=True).check(AttentionSpec(128), SM_90A)


def test_parts_of_calls_over_pages() -> None:
    parts = kernels_of(PAGED, SM_90A, ("decode",))
    shared = ["decode_schedule", "decode_scheduled", "decode_schedule_rows32", "decode_scheduled_rows32"]
    assert list(parts) == ["decode", "decode_rows32", *shared]
    assert len({kernel.name for kernel in parts.values()}) == len(parts)
    for part in shared[1::2]:
        assert f"flashgen show --pass decode --kernel {part} --target sm_90a" in parts[part].source
