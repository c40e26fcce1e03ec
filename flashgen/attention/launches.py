"""What a call launches: grids and argument structs of the forward kernel and of the kernel that lists its tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.attention.captures import byte_strides
from flashgen.attention.marshal import ArgumentWriter, Value
from flashgen.attention.problem import Problem, contiguous_strides, in_layout
from flashgen.codegen.arguments import ArgumentLayout, member_name
from flashgen.codegen.mma_sync.forward import ForwardKernel
from flashgen.codegen.tile_list_kernel import Direction, depends_on_batch, depends_on_head
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.arrays import View


@dataclass(frozen=True)
class Launch:
    """A kernel's grid and the writer of its arguments."""

    grid: tuple[int, int, int]
    writer: ArgumentWriter


@dataclass(frozen=True)
class ListShape:
    """How many lists there are, `tiles` for each batch and head, and of how many tiles each may be at most.

    batch, heads: 1 where the mask does not depend on them.
    """

    batch: int
    heads: int
    tiles: int
    listed: int

    @property
    def rows(self) -> int:
        return self.batch * self.heads * self.tiles


def list_shape(
    spec: AttentionSpec, problem: Problem, tile: tuple[int, int], direction: Direction = "keys"
) -> ListShape:
    """The lists of a call, for tiles of (queries, keys)."""
    tiles_q, tiles_k = -(-problem.len_q // tile[0]), -(-problem.len_k // tile[1])
    return ListShape(
        problem.batch if depends_on_batch(spec) else 1,
        problem.heads_q if depends_on_head(spec) else 1,
        *((tiles_q, tiles_k) if direction == "keys" else (tiles_k, tiles_q)),
    )


def list_strides(lists: ListShape) -> tuple[int, int, int]:
    """From list to list along (batch, head, tile); 0 where the lists are the same for all."""
    head = lists.tiles if lists.heads > 1 else 0
    return (lists.heads * lists.tiles if lists.batch > 1 else 0, head, 1)


def capture_values(layout: ArgumentLayout, spec: AttentionSpec, arrays: Mapping[str, View]) -> dict[str, Value]:
    """Strides in bytes and sizes of the captured arrays that a struct has."""
    values: dict[str, Value] = {}
    members = {field.name for field in layout.fields}
    for capture in spec.captures:
        name = member_name(capture)
        if capture.ndim and name in members:
            view = arrays[capture.name]
            values[f"{name}_stride"] = byte_strides(view)
            values[f"{name}_size"] = view.shape
    return values


def forward_launch(spec: AttentionSpec, kernel: ForwardKernel, problem: Problem, arrays: Mapping[str, View]) -> Launch:
    """The forward kernel's launch for calls of these sizes and strides."""
    tile_q, tile_k = kernel.plan.tile_q, kernel.plan.tile_k
    tiles_q = -(-problem.len_q // tile_q)
    output = contiguous_strides(problem.output_shape(spec))
    strides = {"o": in_layout(output, spec.layout)[:3], **problem.strides}
    values: dict[str, Value] = {f"{name}_strides": strides[name] for name in "qkvo"}
    values |= {
        "heads_q": problem.heads_q,
        "kv_reciprocal": problem.kv_reciprocal,
        "len_q": problem.len_q,
        "len_k": problem.len_k,
    }
    if kernel.uses_lists:
        lists = list_shape(spec, problem, (tile_q, tile_k))
        values["list_strides"] = list_strides(lists)
    values |= capture_values(kernel.layout, spec, arrays)
    return Launch((tiles_q, problem.heads_q, problem.batch), ArgumentWriter(kernel.layout, values))


def lists_launch(
    spec: AttentionSpec,
    layout: ArgumentLayout,
    lists: ListShape,
    problem: Problem,
    arrays: Mapping[str, View],
    spacing: int,
) -> Launch:
    """The list kernel's launch; `spacing` entries from list to list, 0 where the offsets are given."""
    values: dict[str, Value] = {
        "len_q": problem.len_q,
        "len_k": problem.len_k,
        "spacing": spacing,
    }
    grid = (lists.tiles, lists.heads, lists.batch)
    return Launch(grid, ArgumentWriter(layout, values | capture_values(layout, spec, arrays)))
