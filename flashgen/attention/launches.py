"""What a call launches: grids and argument structs of the forward kernel and of the kernel that lists its tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.attention.marshal import ArgumentWriter, Value
from flashgen.attention.problem import Problem, contiguous_strides, in_layout
from flashgen.codegen.arguments import ArgumentLayout, member_name
from flashgen.codegen.forward import ForwardKernel
from flashgen.codegen.lists import depends_on_batch, depends_on_head
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.arrays import View

# Share of the L2 that the keys and values of the heads that run together may take.
_L2_SHARE = 0.6


@dataclass(frozen=True)
class Launch:
    """A kernel's grid and the writer of its arguments."""

    grid: int
    writer: ArgumentWriter


@dataclass(frozen=True)
class ListShape:
    """How many lists there are: 1 where the mask does not depend on batch or head."""

    batch: int
    heads: int
    tiles_q: int
    tiles_k: int

    @property
    def rows(self) -> int:
        return self.batch * self.heads * self.tiles_q


def list_shape(spec: AttentionSpec, problem: Problem, tile: tuple[int, int]) -> ListShape:
    """The lists of a call, for tiles of (queries, keys)."""
    return ListShape(
        problem.batch if depends_on_batch(spec) else 1,
        problem.heads_q if depends_on_head(spec) else 1,
        -(-problem.len_q // tile[0]),
        -(-problem.len_k // tile[1]),
    )


def _capture_values(layout: ArgumentLayout, spec: AttentionSpec, arrays: Mapping[str, View]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    members = {field.name for field in layout.fields}
    for capture in spec.captures:
        name = member_name(capture)
        if capture.ndim and name in members:
            view = arrays[capture.name]
            # A dimension of one element is read at index 0 only; its stride does not matter.
            values[f"{name}_stride"] = view.strides
            values[f"{name}_size"] = view.shape
    return values


def forward_launch(
    spec: AttentionSpec, kernel: ForwardKernel, problem: Problem, arrays: Mapping[str, View], l2_bytes: int
) -> Launch:
    """The forward kernel's launch for calls of these sizes and strides."""
    tile_q, tile_k = kernel.plan.tile_q, kernel.plan.tile_k
    tiles_q = -(-problem.len_q // tile_q)
    output = contiguous_strides(problem.output_shape(spec))
    strides = {"o": in_layout(output, spec.layout)[:3], **problem.strides}
    values: dict[str, Value] = {f"{name}_strides": strides[name] for name in "qkvo"}
    values |= {
        "batch": problem.batch,
        "heads_q": problem.heads_q,
        "heads_per_kv": max(problem.heads_q // max(problem.heads_kv, 1), 1),
        "len_q": problem.len_q,
        "len_k": problem.len_k,
        "section": _section(spec, problem, l2_bytes) if kernel.longest_first else 1,
    }
    if kernel.uses_lists:
        lists = list_shape(spec, problem, (tile_q, tile_k))
        head = lists.tiles_q if lists.heads > 1 else 0
        batch = lists.heads * lists.tiles_q if lists.batch > 1 else 0
        values["list_strides"] = (batch, head, 1)
    values |= _capture_values(kernel.layout, spec, arrays)
    return Launch(tiles_q * problem.batch * problem.heads_q, ArgumentWriter(kernel.layout, values))


def _section(spec: AttentionSpec, problem: Problem, l2_bytes: int) -> int:
    """How many (batch, head) pairs run together: as many as the L2 holds the keys and values of."""
    group = max(problem.heads_q // max(problem.heads_kv, 1), 1)
    bytes_kv = 2 * max(problem.len_k, 1) * (spec.head_dim + spec.value_dim)
    fit = max(int(l2_bytes * _L2_SHARE) // bytes_kv, 1) * group
    return min(fit, problem.batch * problem.heads_q)


def lists_launch(
    spec: AttentionSpec, layout: ArgumentLayout, lists: ListShape, problem: Problem, arrays: Mapping[str, View]
) -> Launch:
    """The list kernel's launch."""
    values: dict[str, Value] = {"heads": lists.heads, "len_q": problem.len_q, "len_k": problem.len_k}
    return Launch(lists.rows, ArgumentWriter(layout, values | _capture_values(layout, spec, arrays)))
