"""Stream-K: number of work units, contents of a schedule, and refusals."""

from __future__ import annotations

import pytest

import flashgen.language as fg
from flashgen.build import nvrtc
from flashgen.codegen.mma_sync.decode_plans import (
    MAX_STREAM_K_TILES,
    DecodePlan,
    choose_decode_plan,
    decode_plan_for,
    decode_plans,
)
from flashgen.codegen.mma_sync.stream_k import INTS_PER_WORK_UNIT, choose_work_units, schedule_size
from flashgen.codegen.sizes import Sizes
from flashgen.codegen.stages import kernels_of
from flashgen.codegen.targets import TARGETS, target_named
from flashgen.codegen.workload import Workload
from flashgen.errors import UnsupportedError
from flashgen.language import AttentionSpec

SM_90A = target_named("sm_90a")
PAGED = AttentionSpec(128, "bfloat16", mask=fg.causal(), page_size=64)
PLAN = choose_decode_plan(PAGED, SM_90A, scheduled=True)


def columns(batch: int, heads: int, heads_kv: int, len_k: int, len_q: int = 1) -> int:
    """On a GPU with 132 multiprocessors, which hold 264 blocks."""
    assert PLAN.blocks == 2
    return choose_work_units(PAGED, PLAN, Sizes(batch, heads, heads_kv, len_q, len_k, multiprocessors=132))


def test_work_units_fill_the_card_in_even_waves() -> None:
    assert columns(1, 32, 8, 131072) == 33
    for batch in (3, 67, 1025):
        assert columns(batch, 32, 8, 65536) == 33
        assert columns(batch, 64, 4, 65536) == 66
        assert columns(batch, 32, 32, 65536) == 8
        assert columns(batch, 40, 40, 32768) == 13, "520 blocks of 528; a wave would have 240 of 264"
        assert columns(batch, 128, 128, 32768) == 2
    assert columns(2, 1024, 1024, 32768) == 1, "4 waves, of which the last is nearly full"


def test_work_units_end_at_the_ends_of_equal_sequences() -> None:
    assert columns(16, 32, 8, 8192) == 32, "2 per sequence instead of 33 in total"
    assert columns(64, 32, 8, 8192) == 32 and columns(1024, 32, 8, 8192) == 32, "2 sequences per unit, or 32"
    assert columns(32, 64, 4, 8192) == 64


def test_short_sequences_have_as_few_work_units_as_splits() -> None:
    assert columns(1, 32, 8, 8192) == 16 and columns(1, 32, 8, 1024) == 8
    assert columns(4, 32, 8, 1024) == 32 and columns(3, 40, 40, 32768) == 13, "these fill the card"


def test_no_more_work_units_than_the_tables_have_tiles() -> None:
    assert columns(2, 32, 8, 64) == 4, "16 tiles, of 4 warps"
    assert columns(2, 32, 8, 0) == 2, "the cost of an empty unit"
    assert columns(0, 32, 8, 64) == 1


def test_contents_of_a_schedule() -> None:
    sizes = Sizes(64, 32, 8, 9, 32768, multiprocessors=132, splits=33)
    assert schedule_size(PAGED, PLAN, sizes) == 33 * INTS_PER_WORK_UNIT + 64 * 3 + 1, "36 rows are 3 tiles of 16"


def test_numbers_of_tiles_beyond_int32() -> None:
    with pytest.raises(UnsupportedError, match="65535 sequences of up to 1000000000 keys have more tiles than"):
        columns(65535, 8, 8, 10**9)
    many = Workload(1, 10**9, 65535 * 8, 132, 1, 65535)
    plan = decode_plan_for(PAGED, SM_90A, many)
    assert plan is not None and not plan.scheduled, "each sequence then has splits of its own"
    fitting = MAX_STREAM_K_TILES // 65535 * PLAN.tile_k - 4 * PLAN.tile_k
    plan = decode_plan_for(PAGED, SM_90A, Workload(1, fitting, 65535 * 8, 132, 1, 65535))
    assert plan is not None and plan.scheduled


def test_stream_k_needs_pages() -> None:
    with pytest.raises(UnsupportedError, match="scheduled=True needs a paged KV cache"):
        DecodePlan(16, 16, 4, 3, scheduled=True).check(AttentionSpec(128), SM_90A)


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_has_plans_that_fit_where_it_has_others(name: str) -> None:
    """Work units need shared memory, too."""
    target = TARGETS[name]
    for dim in range(8, 257, 8):
        for how in ({"page_size": 16}, {"page_size": 1, "kv_dtype": "int8"}):
            spec = AttentionSpec(dim - dim % 32 or 32 if "kv_dtype" in how else dim, **how)
            plans = decode_plans(spec, target)
            assert [plan.scheduled for plan in plans] == sorted(plan.scheduled for plan in plans)
            for plan in plans:
                assert plan.problem(spec, target) is None
                reserved = target.reserved_shared_per_block
                assert plan.blocks * (plan.shared_bytes(spec) + reserved) <= target.shared_per_multiprocessor


def test_parts_of_calls_over_pages() -> None:
    parts = kernels_of(PAGED, SM_90A, ("decode",))
    shared = ["decode_schedule", "decode_scheduled", "decode_schedule_rows32", "decode_scheduled_rows32"]
    assert list(parts) == ["decode", "decode_rows32", *shared]
    assert len({kernel.name for kernel in parts.values()}) == len(parts)
    for part in shared[1::2]:
        assert f"flashgen show --pass decode --kernel {part} --target sm_90a" in parts[part].source


# ---- assembled code


@pytest.mark.rotated(36)
@pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")
@pytest.mark.parametrize("name", ["sm_75", "sm_80", "sm_86", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_stream_k_kernels_do_not_spill(name: str, dim: int) -> None:
    """Also with 8-bit keys, whose products need more registers."""
    target = target_named(name)
    dtype = "float16" if name == "sm_75" else "bfloat16"
    specs = [AttentionSpec(dim, dtype, mask=fg.sliding_window(500), score=fg.softcap(30.0), page_size=16)]
    if dim < 256:
        specs.append(AttentionSpec(dim, dtype, mask=fg.causal(), page_size=1, kv_dtype="int8"))
    if name != "sm_75":
        specs.append(AttentionSpec(dim, dtype, mask=fg.causal(), page_size=64, kv_dtype="float8_e4m3fn"))
    for spec in specs:
        for part, kernel in kernels_of(spec, target, ("decode",)).items():
            if "schedule" not in part:
                continue
            used = nvrtc.compile(kernel.source, target.architecture, kernel.name).resources
            assert used.spill_stores == used.stack_frame == 0, f"{kernel.name} for {name}: {used}"
            assert used.registers * kernel.threads * kernel.plan.blocks <= 65536, f"{kernel.name} for {name}: {used}"
