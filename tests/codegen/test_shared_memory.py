"""Layouts of shared memory: offsets, totals, emitted constants, and the regions that reports draw."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

import flashgen.language as fg
from flashgen.codegen.mma_sync.decode_plans import choose_decode_plan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.shared_memory import (
    BYTE,
    FLOAT,
    Barrier,
    BarrierGroup,
    Buffer,
    Extent,
    SharedMemoryLayout,
    literal,
    mbarriers,
)
from flashgen.codegen.stages import backward_kernels, decode_kernels, forward_kernels
from flashgen.codegen.targets import TARGETS
from flashgen.dtypes import DTYPES
from flashgen.errors import UnsupportedError
from flashgen.verify import variants
from flashgen.verify.variants import spec_of
from formulas import evaluate

ROWS, COLUMNS, STAGES = Extent("kRows", 64), Extent("kColumns", 16), Extent("kStages", 3)
ELEMENT = Extent("kElementBytes", 2)
TILES = (
    Buffer("Query", "Q", (ROWS, COLUMNS), ELEMENT),
    Buffer("Key", "K", (ROWS, COLUMNS), ELEMENT, copies=STAGES),
)


def names(layout: SharedMemoryLayout) -> list[tuple[str, int, int]]:
    return [tuple(region) for region in layout.regions()]


def test_buffers_are_consecutive() -> None:
    layout = SharedMemoryLayout((*TILES, Buffer("Sums", "sums", (ROWS,), FLOAT)))
    assert layout.offsets == {"Query": 0, "Key": 2048, "Sums": 8192} and layout.total_bytes == 8192 + 256
    assert names(layout) == [
        ("Q", 0, 2048),
        ("K 0", 2048, 2048),
        ("K 1", 4096, 2048),
        ("K 2", 6144, 2048),
        ("sums", 8192, 256),
    ]


def test_an_aligned_buffer_leaves_padding() -> None:
    small = Buffer("Index", "index", (literal(8),), BYTE)
    aligned = Buffer("Value", "V", (ROWS, COLUMNS), ELEMENT, alignment=1024)
    layout = SharedMemoryLayout((small, aligned))
    assert layout.offsets["Value"] == 1024 and layout.total_bytes == 1024 + 2048
    assert names(layout) == [("index", 0, 8), ("padding", 8, 1016), ("V", 1024, 2048)]
    assert "kValueOffset = (kIndexBytes + 1023) / 1024 * 1024;" in layout.constants("kValueOffset")


@pytest.mark.parametrize("before", [8, 16])
def test_a_reserved_alignment_is_counted_in_full(before: int) -> None:
    words = Buffer("Words", "words", (ROWS,), FLOAT, alignment=16, reserves_alignment=True)
    layout = SharedMemoryLayout((Buffer("Index", "index", (literal(before),), BYTE), words))
    assert layout.offsets["Words"] == 16 and layout.total_bytes == before + 16 + 256
    assert sum(region.bytes for region in layout.regions()) == layout.total_bytes


@pytest.mark.parametrize(("rows", "total"), [(64, 8192), (512, 16384)])
def test_an_overlay_only_adds_memory_beyond_its_target(rows: int, total: int) -> None:
    output = Buffer("Output", "O", (Extent("kOutputRows", rows), COLUMNS), ELEMENT, overlays="Query")
    layout = SharedMemoryLayout((*TILES, output))
    assert layout.offsets["Output"] == 0 and layout.total_bytes == total
    assert [region.name for region in layout.overlays()] == ["O"]
    assert sum(region.bytes for region in layout.regions()) == total
    checked = f"static_assert(kOutputBytes <= {total}," in layout.constants("")
    assert checked == (rows > 64), "the part larger than Q must fit"


def test_buffers_after_an_overlay() -> None:
    over = (Buffer("Share", "shares", (ROWS,), FLOAT, overlays="Key"), Buffer("States", "states", (ROWS,), FLOAT))
    layout = SharedMemoryLayout((*TILES, *over, Buffer("Run", "run", (literal(16),), BYTE, at_end=True)))
    assert layout.offsets == {"Query": 0, "Key": 2048, "Share": 2048, "States": 2304, "Run": 8192}
    assert [region.name for region in layout.overlays()] == ["shares", "states"]
    assert names(layout)[-1] == ("run", 8192, 16) and layout.total_bytes == 8208
    assert "static_assert(kKeyOffset + kStages * kKeyBytes <= kRunOffset," in layout.constants("")
    larger = SharedMemoryLayout(layout.buffers, min_bytes=10000)
    assert larger.total_bytes == 10000 and larger.offsets["Run"] == 9984


@pytest.mark.parametrize(("union", "total"), [(False, 2 * 3072), (True, 2 * 2048)])
def test_regions_of_a_copy(union: bool, total: int) -> None:
    parts = (TILES[0], Buffer("Output", "O", (ROWS, literal(8)), ELEMENT))
    rows = Buffer("Rows", "rows", copies=Extent("kGroups", 2), parts=parts, union=union)
    layout = SharedMemoryLayout((rows,))
    assert layout.total_bytes == total
    labels = [region.name for region in layout.regions()]
    assert labels == (["Q, then O 0", "Q, then O 1"] if union else ["Q 0", "O 0", "Q 1", "O 1"])
    found = values(layout.constants("kRowsBytes"), {"kRows": 64, "kColumns": 16, "kElementBytes": 2})
    assert 2 * found["kRowsBytes"] == total


def test_only_needed_constants_are_emitted() -> None:
    text = SharedMemoryLayout((*TILES, Buffer("Sums", "sums", (ROWS,), FLOAT))).constants("use(kKeyOffset)")
    assert set(re.findall(r"constexpr int (\w+)", text)) == {
        "kQueryBytes",  # its offset is emitted
        "kKeyOffset",
        "kKeyBytes",  # its assertion is emitted
        "kSumsBytes",
        "kSumsOffset",
    }
    assert "//        0  Q, 2048 bytes\n//     2048  K, 3 x 2048 bytes\n" in text


def test_barriers_have_addresses_names_and_bytes() -> None:
    groups = (
        BarrierGroup("Once.", (Barrier("queries_full", "1"),)),
        BarrierGroup("Last.", (Barrier("tail_full", "1"),), at_end=True),
        BarrierGroup("Each.", (Barrier("keys_full", "1"), Barrier("keys_empty", "4")), STAGES),
    )
    layout = SharedMemoryLayout((TILES[0], mbarriers(groups)), groups)
    assert layout.total_bytes == 2048 + 8 * 8
    assert layout.barrier_address("keys_empty") == "barriers + 16 + stage * 16"
    assert layout.barrier_address("tail_full") == "barriers + kStages * 16 + 8"
    known = {"barriers": 2048, "kStages": 3}
    for at, name in layout.barrier_offsets().items():
        stem, _, stage = name.rstrip(")").partition("(")
        assert evaluate(layout.barrier_address(stem), known | {"stage": int(stage or 0)}) == at
    assert list(layout.barrier_offsets()) == list(range(2048, layout.total_bytes, 8))


@pytest.mark.parametrize("union", [False, True])
def test_members_return_the_addresses_of_copies(union: bool) -> None:
    queries = Buffer("Query", "Q", (ROWS, COLUMNS), ELEMENT, member="queries")
    parts = (queries, Buffer("Output", "O", (ROWS, COLUMNS), ELEMENT, member="output"))
    rows = Buffer("Rows", "rows", copies=Extent("kGroups", 2), parts=parts, union=union, index="group")
    keys = Buffer("Key", "K", (ROWS, COLUMNS), ELEMENT, copies=STAGES, member="keys")
    gradient = Buffer("Dk", "dK", (ROWS, COLUMNS), ELEMENT, overlays="Key", member="dk")
    layout = SharedMemoryLayout((rows, keys, Buffer("Sums", "sums", (ROWS,), FLOAT), gradient))
    named = {member.name: member for member in layout.members()}
    assert [(name, member.parameter) for name, member in named.items()] == [
        ("queries", "group"),
        ("output", "group"),
        ("keys", "stage"),
        ("dk", ""),
    ], "sums have no member"
    text = layout.constants(" ".join(member.address for member in named.values()))
    known = values(text, {"kRows": 64, "kColumns": 16, "kElementBytes": 2, "kGroups": 2, "kStages": 3, "base": 512})
    found = {name: evaluate(member.address, known | {"group": 1, "stage": 2}) - 512 for name, member in named.items()}
    at = {region.name: region.offset for region in layout.regions()}
    first = at["Q, then O 1" if union else "Q 1"]
    assert found == {"queries": first, "output": first if union else at["O 1"], "keys": at["K 2"], "dk": at["K 0"]}


# ---- the layouts of kernels


def values(source: str, known: dict[str, int] | None = None) -> dict[str, int]:
    """Evaluates the integer constants of an emitted text, as a compiler does."""
    found = dict(known or {})
    declared = re.search(r"^using Element = ([\w ]+);", source, re.MULTILINE)
    sizes = {dtype.c_type: dtype.bytes for dtype in DTYPES.values()} | {"float2": 8, "uint4": 16}
    sizes |= {"Element": sizes[declared[1]]} if declared else {}
    for name, formula in re.findall(r"^constexpr (?:int|unsigned) (k\w+) = ([^;]+);", source, re.MULTILINE):
        formula = re.sub(r"sizeof\((\w+)\)", lambda match: str(sizes.get(match[1], match[0])), formula)
        larger = re.fullmatch(r"(k\w+) > (k\w+) \? \1 : \2", formula)
        try:
            found[name] = max(found[larger[1]], found[larger[2]]) if larger else int(evaluate(formula, found))
        except Exception:
            continue
    return found


def kernels_of_variant(number: int) -> Iterator[RenderedKernel]:
    """Kernels of every family and layout, over variants, head dims and targets."""
    variant = variants()[number]
    dim, layout = (64, 256, 40, 128, 192)[number % 5], ("bhsd", "thd")[number % 2]
    spec = spec_of(variant, dim, "float16", layout)
    for target in (TARGETS["sm_90a"], TARGETS[("sm_75", "sm_80", "sm_86")[number % 3]]):
        yield from forward_kernels(spec, target).values()
        for deterministic in (False, True):
            yield from backward_kernels(spec, target, deterministic).values()
        if layout == "bhsd":
            yield from decode_kernels(spec, target).values()


def paged_kernels(layout: str, kv_dtype: str | None) -> Iterator[RenderedKernel]:
    spec = fg.AttentionSpec(128, mask=fg.causal(), layout=layout, page_size=64, kv_dtype=kv_dtype)
    for target in (TARGETS["sm_90a"], TARGETS["sm_80"]):
        for kernels in (forward_kernels, decode_kernels):
            try:
                yield from kernels(spec, target).values()
            except UnsupportedError:  # varlen batches have one kernel for both
                assert layout == "thd"


def assert_consistent(kernel: RenderedKernel) -> None:
    """Asserts that emitted constants equal the layout's numbers, and that its regions fill the memory."""
    layout: Any = kernel.shared
    at = 0
    for region in layout.regions():
        assert region.offset == at and region.bytes > 0, (kernel.name, region)
        at += region.bytes
    assert at == kernel.shared_bytes
    source = kernel.source.split("namespace prefill {")[0].replace("namespace decode {\n", "")
    found = values(source)
    named = 0
    for buffer in layout.buffers:
        for name, value in (("Offset", layout.offsets[buffer.name]), ("Bytes", buffer.copy_bytes)):
            if (constant := f"k{buffer.name}{name}") in found:
                named += 1
                assert found[constant] == value, (kernel.name, constant)
    assert named >= 2 or len(layout.buffers) < 2, f"{kernel.name} does not use its layout"


@pytest.mark.rotated(9)
@pytest.mark.parametrize("number", range(len(variants())))
def test_emitted_constants_equal_the_layout(number: int) -> None:
    for kernel in kernels_of_variant(number):
        assert_consistent(kernel)


@pytest.mark.parametrize("layout", ["bhsd", "thd"])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_emitted_constants_over_pages_equal_the_layout(layout: str, kv_dtype: str | None) -> None:
    for kernel in paged_kernels(layout, kv_dtype):
        assert_consistent(kernel)


@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3fn"])
def test_buffers_have_the_element_types_of_their_arrays(kv_dtype: str | None) -> None:
    spec = fg.AttentionSpec(128, kv_dtype=kv_dtype)
    plan = choose_decode_plan(spec, TARGETS["sm_80"])
    query, stage = plan.shared_memory(spec).buffers[:2]
    assert query.bytes == plan.tile_q * 128 * spec.element.bytes
    assert [part.bytes for part in stage.parts] == [plan.tile_k * 128 * spec.kv_element.bytes] * 2


def test_a_buffer_without_an_element_type_is_refused() -> None:
    with pytest.raises(TypeError, match="Key must have the size of its elements"):
        SharedMemoryLayout((Buffer("Key", "K", (ROWS, COLUMNS)),)).total_bytes


def test_a_named_layout() -> None:
    spec = fg.AttentionSpec(128, "bfloat16", mask=fg.causal())
    kernel = forward_kernels(spec, TARGETS["sm_80"])["forward"]
    assert [region.name for region in kernel.shared.regions()] == ["Q", "K 0", "K 1", "V 0", "V 1"]
    found = values(kernel.source)
    assert found["kKeyOffset"] == 128 * 128 * 2 and found["kValueOffset"] == 128 * 128 * 2 + 2 * 32 * 128 * 2
