"""The argument struct: Python packs it as C++ lays it out, for all captures and their names."""

from __future__ import annotations

import struct
from typing import Any

import pytest

import flashgen.language as fg
from flashgen.build.host import compile_host
from flashgen.codegen.arguments import ArgumentLayout, Field, ordered
from flashgen.codegen.dispatch import render_forward
from flashgen.codegen.mma_sync.forward import forward_layout
from flashgen.codegen.targets import TARGETS
from flashgen.codegen.tile_list_kernel import list_layout, render_lists
from flashgen.language.captures import Scalar, Tensor
from flashgen.launch.argument_writer import ArgumentWriter

SM_80 = TARGETS["sm_80"]


def captured(*tensors: Tensor, dropout: float = 0.0, scalar: Scalar | None = None) -> fg.AttentionSpec:
    """Returns a spec whose mask, which needs lists, reads each tensor."""

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        result = q >= k
        for tensor in tensors:
            index = (b, h, q, k)[: tensor.ndim]
            result = result & (tensor[index if tensor.ndim > 1 else q] != 0)
        return result & (q > scalar) if scalar is not None else result

    return fg.AttentionSpec(16, dropout=dropout, mask=mask)


SPECS = {
    "plain": fg.AttentionSpec(64),
    "dropout": fg.AttentionSpec(64, dropout=0.1),
    "scalars": fg.AttentionSpec(
        64, mask=fg.sliding_window(Scalar("window")), score=fg.softcap(Scalar("cap", "float32"))
    ),
    "lists": captured(Tensor("ids", "int32", 1)),
    "everything": captured(
        Tensor("a", "int8", 1), Tensor("b1", "bool", 3), Tensor("c", "bfloat16", 2), Tensor("d", "int64", 4),
        Tensor("e", "float32", 1), dropout=0.5, scalar=Scalar("s"),
    ),
}  # fmt: skip


def offsets_checked(source: str, struct_name: str, layout: ArgumentLayout) -> str:
    """Returns the source with a static_assert for the offset of each member and for the size."""
    lines = [
        f'static_assert(__builtin_offsetof({struct_name}, {name}) == {layout.offset(name)}, "{name}");'
        for name in (field.name for field in layout.fields)
    ]
    lines.append(f'static_assert(sizeof({struct_name}) == {struct.calcsize(layout.format)}, "size");')
    return "\n".join([source, *lines, ""])


@pytest.mark.parametrize("name", SPECS)
def test_offsets_equal_those_of_the_struct(name: str) -> None:
    spec = SPECS[name]
    kernel = render_forward(spec, SM_80)
    assert kernel.layout == forward_layout(spec, kernel.reads is not None)
    compile_host(offsets_checked(kernel.source, "ForwardArguments", kernel.layout), kernel.entry)
    if kernel.reads:
        lists = render_lists(spec, SM_80, kernel.plan)
        assert lists.layout == list_layout(spec)
        compile_host(offsets_checked(lists.source, "ListArguments", lists.layout), lists.entry)


def test_a_wrong_offset_does_not_compile() -> None:
    kernel = render_forward(SPECS["plain"], SM_80)
    shuffled = ArgumentLayout(tuple(reversed(kernel.layout.fields)))
    with pytest.raises(Exception, match="static assertion failed"):
        compile_host(offsets_checked(kernel.source, "ForwardArguments", shuffled), kernel.entry)


def test_fields_are_sorted_by_alignment_with_pointers_first() -> None:
    fields = [
        Field("int", "a"),
        Field("float*", "p"),
        Field("long long", "s", 3),
        Field("float", "b"),
        Field("int*", "r"),
    ]
    layout = ordered(fields)
    assert [field.name for field in layout.fields] == ["p", "r", "s", "a", "b"]
    assert [layout.offset(field.name) for field in layout.fields] == [0, 8, 16, 40, 44]
    assert struct.calcsize(layout.format) == 48
    with pytest.raises(KeyError):
        layout.offset("missing")


def test_the_writer_puts_each_value_at_its_offset() -> None:
    layout = ordered(
        [Field("int*", "p"), Field("Strides", "s"), Field("int", "n"), Field("float", "x"), Field("int", "z", 2)]
    )
    writer = ArgumentWriter(layout, {"s": (1, 2, 3), "n": 4, "z": [7, 8]})
    assert writer.pointer_names == ["p"]
    packed = struct.unpack(layout.format, writer.write({"p": 2**63 + 5}, {"x": 0.5}))
    assert packed == (2**63 + 5, 1, 2, 3, 4, 0.5, 7, 8)
    assert struct.unpack(layout.format, writer.write({}, {"x": -1.0}))[0] == 0, "a missing pointer is null"
    with pytest.raises(KeyError):
        writer.write({}, {})


# Members of the structs, suffixes of a capture's own members, types, macros of the emulator, and ordinary words.
NAMES = (
    "counts", "entries", "section", "list_strides", "q_strides", "q_capture", "tile_counts", "heads_per_kv", "seed_low",
    "Element", "Strides", "Position", "shared_memory", "threadIdx", "errno", "NULL", "infinity", "floor_divide", "i0",
    "x0", "arguments", "kTileQ", "matrix_x4", "min", "position", "uint4", "ids_size", "ids_stride",
)  # fmt: skip


def test_any_capture_name_compiles() -> None:
    """All at once: allowed names neither hide the kernel's names nor are hidden by them."""
    for some in (NAMES[::2], NAMES[1::2]):
        spec = captured(
            *(Tensor(name, "int32", 1) for name in some), Tensor("ids", "int32", 2), scalar=Scalar("zs_size")
        )
        forward = render_forward(spec, SM_80)
        for kernel in (forward, render_lists(spec, SM_80, forward.plan)):
            assert len({field.name for field in kernel.layout.fields}) == len(kernel.layout.fields)
            compile_host(kernel.source, kernel.entry)
