"""The decode kernel: plans, number of splits, text and assembled code."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

import flashgen.language as fg
from emitted_text import all_called, all_used, functions_fit, members_read, tidy, unconditional
from flashgen.build import nvrtc
from flashgen.codegen.dispatch import render_forward_kernels
from flashgen.codegen.mma_sync.decode_plans import (
    DecodePlan,
    choose_decode_plan,
    decode_plan_for,
    decode_plans,
    other_few_row_plans,
    plan_of_rows,
)
from flashgen.codegen.mma_sync.splits import MAX_SPLITS, choose_splits
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.sizes import Sizes
from flashgen.codegen.stages import kernels_of
from flashgen.codegen.targets import TARGETS, target_named
from flashgen.codegen.workload import Workload
from flashgen.errors import SpecError, UnsupportedError
from flashgen.language import AttentionSpec
from flashgen.verify import variants
from flashgen.verify.variants import spec_of

SM_90A = target_named("sm_90a")
FULL, CAUSAL = AttentionSpec(128, "bfloat16"), AttentionSpec(128, "bfloat16", mask=fg.causal())
WINDOW, LISTED = replace(CAUSAL, mask=fg.sliding_window(1024, 0)), replace(CAUSAL, mask=fg.document("ids"))
COMPILED_FOR = ("sm_75", "sm_80", "sm_86", "sm_90a", "sm_100", "sm_120")
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")


def sizes(batch: int, heads_q: int, heads_kv: int, len_q: int, len_k: int) -> Sizes:
    """Returns a call on a GPU with 132 multiprocessors."""
    return Sizes(batch, heads_q, heads_kv, len_q, len_k, multiprocessors=132)


# ---- plans


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("dim", [8, 40, 64, 96, 128, 192, 256])
def test_every_target_has_a_plan_that_fits(name: str, dim: int) -> None:
    target = TARGETS[name]
    for dropout in (0.0, 0.1):
        spec = AttentionSpec(dim, dropout=dropout)
        for plan in decode_plans(spec, target):
            assert plan.problem(spec, target) is None
            assert plan.blocks * (plan.shared_bytes(spec) + 1024) <= target.shared_per_multiprocessor


def test_wide_heads_with_dropout_on_turing_have_one_stage() -> None:
    """The shared memory holds one tile of 32 keys. Calls without num_splits or pages run the forward kernel."""
    for dims in ((256, 256), (224, 256)):
        spec = AttentionSpec(dims[0], value_dim=dims[1], dropout=0.1)
        (plan,) = decode_plans(spec, TARGETS["sm_75"])
        assert (plan.warps, plan.stages, plan.tile_k) == (1, 1, 32)
        assert decode_plan_for(spec, TARGETS["sm_75"], Workload(1, 4096, 8, 40)) is None
        paged = AttentionSpec(dims[0], value_dim=dims[1], dropout=0.1, page_size=16)
        assert decode_plan_for(paged, TARGETS["sm_75"], Workload(1, 4096, 8, 40)) is not None
    assert all(plan.stages > 1 for plan in decode_plans(AttentionSpec(256), TARGETS["sm_75"]))


def test_enough_bytes_are_in_flight_on_an_h200() -> None:
    """40 KB hide a microsecond at the bandwidth of its memory."""
    for dim in (64, 96, 128, 192, 256):
        spec = AttentionSpec(dim)
        plan = choose_decode_plan(spec, SM_90A)
        assert plan.blocks * plan.warps * (plan.stages - 1) * plan.tile_k * 4 * dim >= 64 * 1024, plan


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_90", "sm_120"])
@pytest.mark.parametrize("dim", [264, 320, 384, 512])
def test_warps_share_tiles_of_more_than_256_columns(name: str, dim: int) -> None:
    """A tile of K and V is loaded while another is read, in as many bytes as hide the latency of each memory."""
    target = TARGETS[name]
    for options in ({}, {"value_dim": 512}, {"kv_dtype": "int8"}, {"dropout": 0.1}):
        if dim % 32 and "kv_dtype" in options:
            continue
        spec = AttentionSpec(dim, **options)
        for plan in decode_plans(spec, target):
            assert plan.problem(spec, target) is None and plan.split == plan.warps == 4
            assert plan.blocks * (plan.shared_bytes(spec) + 1024) <= target.shared_per_multiprocessor
        few = choose_decode_plan(spec, target)
        tile = few.blocks * few.tile_k * spec.kv_element.bytes * (spec.head_dim + spec.value_dim)
        in_flight = tile * few.stages - tile // 2  # K of a stage is loaded again before its V
        assert in_flight >= (80 if name == "sm_90" else 40 if name == "sm_80" else 16) * 1024, few


def test_more_columns_than_shared_memory_holds_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"head_dim=512: .* which hold decode tiles of up to 320 columns"):
        choose_decode_plan(AttentionSpec(512, dropout=0.1), TARGETS["sm_75"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"split": 4}, "split=4 must be 1, or warps=4, .* if head_dim or value_dim is above 256"),
        ({"tile_q": 8}, "multiple of 16"),
        ({"tile_k": 24}, "multiple of 16, of 32 with dropout"),
        ({"stages": 0}, "must be positive"),
        ({"warps": 33}, "at most 32"),
        ({"warps": 16}, "take fewer warps, keys or stages"),
    ],
    ids=str,
)
def test_invalid_plans(change: dict[str, int], said: str) -> None:
    plan = replace(DecodePlan(16, 16, 4, 4), **change)
    with pytest.raises(UnsupportedError, match=said):
        render_forward_kernels(CAUSAL, SM_90A, plan)


def test_rows_of_a_tile() -> None:
    assert [plan.tile_q for plan in decode_plans(CAUSAL, SM_90A)] == [16, 16, 16, 32]
    assert [plan.tile_q for plan in decode_plans(AttentionSpec(256), SM_90A)] == [16], "more would exceed the registers"
    assert [plan.tile_q for plan in decode_plans(LISTED, SM_90A)] == [16], "lists do not depend on KV heads"


def chosen(spec: AttentionSpec, batch: int, heads: int, heads_kv: int, len_q: int, len_k: int) -> DecodePlan | None:
    return decode_plan_for(spec, SM_90A, Workload(len_q, len_k, batch * heads, 132, heads // heads_kv))


def test_plans_for_many_tiles_of_rows_and_for_long_sequences() -> None:
    """More tiles than resident blocks use more warps, few tiles of many keys use larger tiles; both have few rows."""
    few, many, long, rows32 = decode_plans(CAUSAL, SM_90A)
    assert (many.warps, many.stages, many.blocks) == (5, 2, few.blocks) and many.tile_k == few.tile_k
    assert (long.warps, long.stages, long.blocks) == (4, 3, 1) and long.tile_k == 2 * few.tile_k
    names = [plan.part(CAUSAL) for plan in (few, many, long, rows32)]
    assert names == ["decode", "decode_many", "decode_long", "decode_rows32"]
    for batch, kv, keys, plan in (
        (128, 8, 2048, many), (50, 8, 8192, many), (49, 8, 8192, few), (16, 8, 8192, long), (17, 8, 8192, few),
        (16, 8, 2048, few), (1, 8, 131072, long), (1, 8, 65536, few), (1, 8, 1024, few), (1, 1, 1 << 20, long),
    ):  # fmt: skip
        assert chosen(CAUSAL, batch, 4 * kv, kv, 1, keys) == plan, (batch, kv, keys)
    assert chosen(CAUSAL, 128, 64, 8, 4, 2048) == rows32 and chosen(CAUSAL, 16, 64, 8, 4, 8192) == rows32
    for batch, kv in ((1, 8), (132, 1)):
        assert chosen(WINDOW, batch, 4 * kv, kv, 1, 131072) == few, "of visited keys"
    assert plan_of_rows(CAUSAL, SM_90A, 4) == few, "the batch has no effect"
    assert other_few_row_plans(CAUSAL, TARGETS["sm_86"]) == (), "one block per multiprocessor"
    for other in (LISTED, AttentionSpec(256), AttentionSpec(128, page_size=16), AttentionSpec(128, kv_dtype="int8")):
        assert other_few_row_plans(other, SM_90A) == ()
        assert choose_decode_plan(other, SM_90A).part(other) == "decode"


def test_which_calls_decode() -> None:
    for batch in (1, 4, 12):
        assert chosen(CAUSAL, batch, 32, 8, 1, 4096) == choose_decode_plan(CAUSAL, SM_90A)
        assert chosen(CAUSAL, batch, 64, 8, 4, 8192) == choose_decode_plan(CAUSAL, SM_90A, 32)
        assert chosen(CAUSAL, batch, 32, 32, 16, 1024) == choose_decode_plan(CAUSAL, SM_90A)
        assert chosen(CAUSAL, batch, 32, 8, 1, 255) is None, "a step or two"
        assert chosen(CAUSAL, batch, 32, 8, 512, 8192) is None, "many queries"
        assert chosen(LISTED, batch, 32, 8, 16, 8192) and not chosen(LISTED, batch, 32, 8, 17, 8192)
    assert chosen(CAUSAL, 1, 64, 8, 16, 8192), "8 tiles of 128 rows would leave 124 multiprocessors idle"
    assert chosen(CAUSAL, 16, 64, 8, 16, 8192) is None


# ---- splits


def splits(spec: AttentionSpec, *call: int, rows: int = 16) -> int:
    return choose_splits(spec, choose_decode_plan(spec, SM_90A, rows), sizes(*call))


def test_splits_fill_the_card_once() -> None:
    """132 multiprocessors hold 264 blocks."""
    assert splits(FULL, 1, 32, 8, 1, 131072) == 33
    assert splits(FULL, 4, 32, 8, 1, 32768) == 8
    assert splits(FULL, 16, 32, 8, 1, 8192) == 2
    assert splits(FULL, 16, 64, 8, 4, 8192, rows=32) == 2
    assert splits(FULL, 64, 32, 8, 1, 8192) == 1


def test_few_keys_have_fewer_splits_than_fill_the_card() -> None:
    """Each split adds a partial output to merge."""
    assert splits(FULL, 1, 32, 8, 1, 1024) == 8
    assert splits(FULL, 1, 32, 8, 1, 8192) == 16


def test_a_window_is_split_by_its_visited_keys() -> None:
    assert splits(WINDOW, 1, 32, 8, 1, 131072) <= 17 < splits(FULL, 1, 32, 8, 1, 131072)


def test_numbers_of_splits_are_within_bounds_for_every_size() -> None:
    for call in ((1, 1, 1, 1, 10**9), (65535, 8, 1, 1, 1), (1, 1, 1, 0, 5), (1, 1, 1, 5, 0), (0, 8, 8, 1, 5)):
        assert 1 <= splits(FULL, *call) <= MAX_SPLITS


def test_splits_depend_on_multiprocessors_and_not_on_earlier_splits() -> None:
    plan = choose_decode_plan(FULL, SM_90A)
    few = replace(sizes(1, 32, 8, 1, 131072), multiprocessors=4)
    assert choose_splits(FULL, plan, few) == 1 == choose_splits(FULL, plan, replace(few, splits=7))


# ---- text


VARIANTS = variants()


@cache
def emitted(number: int) -> list[RenderedKernel]:
    """Returns the kernels of a variant of `flashgen verify` for a GPU with asynchronous copies and one without."""
    rendered = []
    for target in (TARGETS["sm_80"], TARGETS["sm_75"]):
        spec = spec_of(VARIANTS[number], (64, 128, 40)[number % 3], "float16", ("bhsd", "bshd")[number % 2])
        kernels = kernels_of(spec, target, ("decode",))
        rendered += [kernel for part, kernel in kernels.items() if "lists" not in part]
    return rendered


@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=lambda number: f"{VARIANTS[number].mask}-{number}")
def test_text_follows_the_conventions_of_all_kernels(number: int) -> None:
    for kernel in emitted(number):
        tidy(kernel.source)
        functions_fit(kernel, longest_file=510)
        unconditional(kernel.source)
        all_used(kernel)
        all_called(kernel)
        members_read(kernel)


def test_names_are_unique() -> None:
    names = [kernel.name for number in range(len(VARIANTS)) for kernel in emitted(number)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("spec", [CAUSAL, LISTED], ids=lambda spec: spec.name)
def test_fences_order_partial_outputs_and_counters(spec: AttentionSpec) -> None:
    """No sanitizer checks the order of accesses by blocks that synchronize through counters."""
    source = kernels_of(spec, SM_90A, ("decode",))["decode"].source
    body = re.sub(r"//[^\n]*", "", source)
    order = r"bool arrives_last\([^{]*\{\s+__syncthreads\(\);\s+const bool last = threadIdx\.x == 0 && "
    order += r"atomic_inc_acq_rel\([^;]*;\s+return __syncthreads_or\(last\);"
    assert re.search(order, body, re.DOTALL)
    assert re.search(
        r"store_split_partial\([^;]*;\s+if \(arrives_last\([^;]*store_output<false>",
        body[body.index("void epilogue(") :],
    )
    assert source.count("__ldcg(") == 1 and source.count("load_partial<kFromWarps>(") == 3


def test_parts_of_the_decode_pass_and_their_commands() -> None:
    assert list(kernels_of(CAUSAL, SM_90A, ("decode",))) == ["decode", "decode_many", "decode_long", "decode_rows32"]
    listed = kernels_of(LISTED, SM_90A, ("forward", "decode"), unique_names=True)
    assert list(listed) == ["lists", "forward", "decode_lists", "decode"]
    assert len({kernel.name for kernel in listed.values()}) == 4
    for part, kernel in kernels_of(CAUSAL, SM_90A, ("decode",)).items():
        option = "" if part == "decode" else f" --kernel {part}"
        assert f"//   flashgen show --pass decode{option} --target sm_90a '" in kernel.source
    with pytest.raises(SpecError, match="choose from forward, decode, backward"):
        kernels_of(CAUSAL, SM_90A, ("decoding",))  # type: ignore[arg-type]


# ---- assembled code


def assert_no_spills(spec: AttentionSpec, name: str) -> None:
    for part, kernel in kernels_of(spec, TARGETS[name], ("decode",)).items():
        if "lists" in part:
            continue
        used = nvrtc.compile(kernel.source, kernel.target.architecture, kernel.name).resources
        assert used.spill_stores == used.spill_loads == 0, f"{kernel.name} for {name}: {used}"
        assert used.registers * kernel.threads * kernel.plan.blocks <= 65536, f"{kernel.name} for {name}: {used}"


@needs_nvrtc
@pytest.mark.parametrize("target", COMPILED_FOR)
@pytest.mark.rotated(8)
def test_common_kernels_compile_without_spills_for_every_target(target: str) -> None:
    dtype = "float16" if target == "sm_75" else "bfloat16"
    for dim in (64, 128):
        assert_no_spills(AttentionSpec(dim, dtype, mask=fg.causal()), target)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.rotated(36)
@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=lambda number: f"{VARIANTS[number].mask}-{number}")
def test_every_variant_compiles_without_spills(number: int) -> None:
    for turn, dim in enumerate((64, 96, 128, 40)):
        target = COMPILED_FOR[(number + turn) % len(COMPILED_FOR)]
        dtype = "float16" if target == "sm_75" or number % 2 else "bfloat16"
        assert_no_spills(spec_of(VARIANTS[number], dim, dtype), target)


# ---- pages


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_text_over_pages_follows_the_conventions_of_all_kernels(page_size: int) -> None:
    for spec in (
        AttentionSpec(64, mask=fg.causal(), page_size=page_size),
        AttentionSpec(40, value_dim=96, mask=fg.document("ids"), score=fg.alibi("slopes"), page_size=page_size),
        AttentionSpec(264, value_dim=320, mask=fg.causal(), dropout=0.1, page_size=page_size),
        AttentionSpec(512, mask=fg.sliding_window(100), kv_dtype="int8", page_size=page_size),
    ):
        for part, kernel in kernels_of(spec, TARGETS["sm_80"], ("decode",)).items():
            tidy(kernel.source)
            exchange = 25 if spec.max_dim > 256 else 0  # lines
            functions_fit(kernel, longest_file=exchange + (590 if "scheduled" in part else 510))
            unconditional(kernel.source)
            all_used(kernel)
            all_called(kernel)
            read = kernel.source.replace("launched.", "arguments.")
            members_read(replace(kernel, source=read))


@needs_nvrtc
@pytest.mark.rotated(8)
@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_pages_use_no_local_memory(page_size: int) -> None:
    """The arguments with the length of a sequence are not copied to local memory."""
    for name in ("sm_80", "sm_90a"):
        spec = AttentionSpec(128, "bfloat16", mask=fg.causal(), score=fg.alibi("slopes"), page_size=page_size)
        for kernel in kernels_of(spec, TARGETS[name], ("decode",)).values():
            used = nvrtc.compile(kernel.source, kernel.target.architecture, kernel.name).resources
            assert used.spill_stores == used.spill_loads == used.stack_frame == 0, f"{kernel.name} for {name}: {used}"
