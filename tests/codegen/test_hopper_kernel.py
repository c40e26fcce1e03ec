"""Hopper's forward kernel without a GPU: text and assembled code."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

import pytest

import flashgen.language as fg
from emitted_text import lines_of_element_loads, without_types
from flashgen.build import nvrtc
from flashgen.build.inspect import sass
from flashgen.codegen.dispatch import render_forward
from flashgen.codegen.hopper.measured_plans import choose_hopper_plan
from flashgen.codegen.hopper.plans import HopperPlan, panel_columns, swizzled_columns
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.targets import target_named
from flashgen.dtypes import DTYPES
from flashgen.errors import BuildError, UnsupportedError
from flashgen.language import AttentionSpec
from flashgen.verify import variants
from flashgen.verify.variants import Variant, spec_of

SM_90A = target_named("sm_90a")
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")

DIMS = (128, 64, 256, 40, 96, 192, 8, 160, 72, 80, 224)
MOST_LINES = 400  # including comments, header and code of the variant; without primitives
MOST_CODE = 465  # lines of code, including code of the variant and of the tiles
# Lines of code of the exchange between warpgroups with the same rows, of the second mainloop, and of parts of tiles.
MORE_OF_SPLIT = 110
LONGEST_FUNCTION = 75


def compiled(kernel: RenderedKernel) -> nvrtc.Compiled:
    result = nvrtc.compile(kernel.source, "sm_90a", kernel.name)
    used = result.resources
    assert used.spill_stores == used.spill_loads == 0, f"{kernel.name}, {kernel.plan}: {used}"
    # C7510 and similar: products that wait for each other; C7508: setmaxnreg without effect.
    assert not re.search(r"\(C75\d\d\)", result.log), f"{kernel.name}: {result.log}"
    assert used.registers * kernel.threads <= 65536
    return result


# Each variant once, cycling through head dims.
CASES = list(zip(variants(), cycle(DIMS), cycle(("float16", "bfloat16"))))


@needs_nvrtc
@pytest.mark.parametrize(("variant", "dim", "dtype"), CASES)
@pytest.mark.rotated(36)
def test_every_variant_compiles_without_spills_or_serialized_products(variant: Variant, dim: int, dtype: str) -> None:
    compiled(render_forward(spec_of(variant, dim, dtype), SM_90A))


WIDE_CASES = list(zip(variants(), cycle((512, 264, 448, 384)), cycle(("float16", "bfloat16"))))


@needs_nvrtc
@pytest.mark.parametrize(("variant", "dim", "dtype"), WIDE_CASES)
@pytest.mark.rotated(36)
def test_every_variant_of_wide_heads_compiles(variant: Variant, dim: int, dtype: str) -> None:
    compiled(render_forward(spec_of(variant, dim, dtype), SM_90A))


@needs_nvrtc
@pytest.mark.parametrize(
    "plan", [HopperPlan(2, 64, 1, split=2), HopperPlan(2, 48, 1, split=2), HopperPlan(2, 32, 2, split=2)]
)
@pytest.mark.rotated(8)
def test_wide_plans_compile_with_packed_heads(plan: HopperPlan) -> None:
    for heads in (1, 8, 64):
        for options in ({"mask": fg.causal()}, {"score": fg.alibi("slopes")}):
            spec = AttentionSpec(512, "bfloat16", **options)
            compiled(render_forward(spec, SM_90A, plan.packing(heads, spec)))


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("dim", range(16, 257, 16))
@pytest.mark.rotated(36)
def test_every_dim_compiles_without_spills_with_some_variant(dim: int) -> None:
    every = variants()
    compiled(render_forward(spec_of(every[dim // 16 * 7 % len(every)], dim, "bfloat16"), SM_90A))


@needs_nvrtc
@pytest.mark.parametrize("dims", [(8, 128), (128, 8), (64, 128), (192, 128), (96, 40), (40, 256)], ids=str)
@pytest.mark.rotated(36)
def test_unequal_value_dims_compile(dims: tuple[int, int]) -> None:
    for mask in (fg.full(), fg.causal()):
        compiled(render_forward(AttentionSpec(dims[0], "bfloat16", value_dim=dims[1], mask=mask), SM_90A))


@needs_nvrtc
def test_machine_code_uses_hoppers_instructions() -> None:
    cubin = compiled(render_forward(AttentionSpec(128, mask=fg.causal()), SM_90A)).cubin
    try:
        text = sass(cubin)
    except BuildError:
        pytest.skip("no disassembler here")
    for instruction in (
        r"HGMMA\.64x128x16",
        r"HGMMA.*tnspB",
        "UTMALDG.4D",
        "UTMASTG.4D",
        "USETMAXREG",
        "STSM",
        "MUFU.EX2",
    ):
        assert re.search(instruction, text), instruction
    assert " HMMA" not in text and "LDL" not in text and "STL" not in text


@pytest.mark.rotated(3)
@pytest.mark.parametrize("variant", variants(), ids=lambda v: f"{v.mask}-{v.score}-{v.dropout}")
def test_text_is_short_and_tidy(variant: Variant) -> None:
    assert_short_and_tidy(render_forward(spec_of(variant, 64, "float16"), SM_90A).source, 0)
    assert_short_and_tidy(render_forward(spec_of(variant, 512, "float16"), SM_90A).source, MORE_OF_SPLIT)


def assert_short_and_tidy(source: str, more: int) -> None:
    assert not re.search(r"[ \t]\n|\n\n\n|\{\n\n|\t", source) and source.endswith("}\n")
    head, primitives, rest = re.fullmatch(
        r"(.*?)(// ---- Primitives -.*?)(// ---- The variant -.*)", source, re.DOTALL
    ).groups()
    assert (head + rest).count("\n") < MOST_LINES + more + lines_of_element_loads(source) and "#endif" in primitives
    body = without_types(re.sub(r"//[^\n]*", "", source)).split("#endif\n", 1)[1]
    assert sum(bool(line.strip()) for line in body.splitlines()) <= MOST_CODE + more + lines_of_element_loads(source)
    for text in re.findall(r"^(?:__device__|template)[^;\n]*\n(?:.*\n)*?\}\n", body, re.MULTILINE):
        assert text.count("\n") <= LONGEST_FUNCTION, text
    assert re.findall(r"^ *#(\w+)", source, re.MULTILINE).count("ifndef") == 1


def test_maps_come_first_and_are_aligned() -> None:
    kernel = render_forward(AttentionSpec(64, mask=fg.document("ids")), SM_90A)
    layout = kernel.layout
    assert [layout.offset(f"{name}_map") for name in "qkvo"] == [0, 128, 256, 384]
    assert layout.offset("lse") == 512 and layout.has_maps
    import struct

    assert struct.calcsize(layout.format) % 64 == 0


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32"])
def test_rows_of_panels_have_the_bytes_that_tma_swizzles(dtype: str) -> None:
    element = DTYPES[dtype]
    assert [columns * element.bytes for columns in swizzled_columns(element)] == [128, 64, 32]
    assert panel_columns(256, element) * element.bytes == 128


def test_boxes_are_as_wide_as_a_swizzle() -> None:
    assert [panel_columns(dim, DTYPES["float16"]) for dim in (8, 16, 32, 40, 64, 80, 96, 128, 160, 192, 256)] == [
        16, 16, 32, 16, 64, 16, 32, 64, 32, 64, 64,
    ]  # fmt: skip
    kernel = render_forward(AttentionSpec(96, value_dim=128), SM_90A, HopperPlan(2, 112))
    assert kernel.boxes == {"q": (32, 64), "k": (32, 112), "v": (64, 112), "o": (64, 16)}
    assert (kernel.threads, kernel.plan.tile_q) == (384, 128)


def test_default_plans_fit_every_variant() -> None:
    for variant in variants():
        for dim in range(8, 257, 8):
            spec = spec_of(variant, dim, "float16")
            choose_hopper_plan(spec, SM_90A).check(spec, SM_90A)


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_a_clipped_bias_treats_some_tiles_as_uniform(dim: int) -> None:
    """At 256 columns these would spill registers."""

    def plan(score: fg.Score | Callable[..., object]) -> HopperPlan:
        return choose_hopper_plan(AttentionSpec(dim, score=score), SM_90A)

    table = fg.Tensor("table", "float32", 1)
    clipped, whole = plan(fg.relative_bias(table, 50)), plan(lambda s, b, h, q, k: s + table[k - q + 500])
    assert (clipped == plan(fg.alibi(8))) is (dim < 256) and (clipped == whole) is (dim != 128)


PLAN = HopperPlan(2, 128)


@pytest.mark.parametrize(
    ("plan", "spec", "says"),
    [
        (replace(PLAN, consumers=4), AttentionSpec(64), "consumers=4"),
        (replace(PLAN, consumers=1, takes_turns=True), AttentionSpec(64), "not 1 for taking turns"),
        (replace(PLAN, tile_k=272), AttentionSpec(64), "tile_k=272"),
        (replace(PLAN, tile_k=40), AttentionSpec(64), "tile_k=40"),
        (replace(PLAN, tile_k=48), AttentionSpec(64, dropout=0.1), "of 32 with dropout"),
        (replace(PLAN, stages=0), AttentionSpec(64), "stages=0"),
        (PLAN, AttentionSpec(256), "take fewer keys or stages"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_invalid_plans_are_refused_by_name(plan: HopperPlan, spec: AttentionSpec, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        render_forward(spec, SM_90A, plan)


def test_dropout_draws_fill_the_remaining_shared_memory() -> None:
    dropped, kept = AttentionSpec(128, dropout=0.1), AttentionSpec(128)
    # Blocks of 32 keys are drawn 32 at a time, once or twice.
    drawn = {plan: plan.drawn_steps(dropped) for plan in (PLAN, HopperPlan(3, 64), HopperPlan(2, 96))}
    assert drawn == {PLAN: 8, HopperPlan(3, 64): 32, HopperPlan(2, 96): 20}
    for plan, steps in drawn.items():
        words = -(-plan.tile_k // 64)
        more = 16 + plan.warps * 32 * 16 + steps * plan.consumers * 128 * words * 4
        assert plan.shared_bytes(dropped) - plan.shared_bytes(kept) == more and plan.drawn_steps(kept) == 0
        assert plan.shared_bytes(dropped) <= SM_90A.shared_per_block
    HopperPlan(2, 16).check(kept, SM_90A)  # fewer keys than a block of dropout has


def test_a_plan_belongs_to_one_family() -> None:
    spec = AttentionSpec(64)
    with pytest.raises(UnsupportedError, match="takes a HopperPlan"):
        render_forward(spec, SM_90A, ForwardPlan(64, 64, 4))
    with pytest.raises(UnsupportedError, match="takes a ForwardPlan"):
        render_forward(spec, target_named("sm_90"), PLAN)
    with pytest.raises(UnsupportedError, match="family hopper"):
        PLAN.check(spec, target_named("sm_90"))


def test_rendering_is_deterministic() -> None:
    spec = AttentionSpec(128, mask=fg.sliding_window(100), score=fg.softcap(20))
    assert render_forward(spec, SM_90A).source == render_forward(AttentionSpec.from_json(spec.to_json()), SM_90A).source


def test_second_warpgroup_multiplies_p_by_the_last_columns() -> None:
    source = render_forward(AttentionSpec(512, mask=fg.causal()), SM_90A).source
    second = source.split("value_consumer(const SharedStorage& storage", 1)[1].split("\n}\n", 1)[0]
    assert "wgmma_shared_f16<kOutputColumns, true>" in source and "constexpr int kRowGroups = kConsumers / 2;" in source
    assert "issue_qk_wgmma" not in second and "softmax" not in second and second.count("issue_passed_pv_wgmma(") == 1
    for pair in ("values", "passed"):
        assert f"mbarrier_wait(storage.{pair}_full" in second and f"release(storage.{pair}_empty" in second


@pytest.mark.parametrize("dims", [(576, 512), (128, 64)], ids=str)
def test_v_in_k_is_neither_loaded_nor_stored_apart(dims: tuple[int, int]) -> None:
    kernel = render_forward(AttentionSpec(dims[0], value_dim=dims[1], shared_kv=True), SM_90A)
    assert not re.search(r"\b(values_full|values_empty|v_map|kValueBytes)\b", kernel.source)
    assert "v" not in kernel.boxes and "Value" not in kernel.shared.offsets
    assert kernel.plan.head_panel(AttentionSpec(dims[0], value_dim=dims[1], shared_kv=True)) == 64


def test_wide_plans_fit_and_have_half_of_the_columns() -> None:
    for head_dim, value_dim in ((512, 512), (264, 264), (576, 512), (320, 448), (16, 288)):
        spec = AttentionSpec(head_dim, value_dim=value_dim)
        plan = choose_hopper_plan(spec, SM_90A)
        assert plan.split == 2 and plan.rows == plan.tile_q == 64 and not plan.problem(spec, SM_90A)
        assert plan.output_columns(spec) % plan.value_panel(spec) == 0 and plan.output_columns(spec) <= 256
    assert choose_hopper_plan(AttentionSpec(512, value_dim=256), SM_90A).split == 1
