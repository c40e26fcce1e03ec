"""What a backward call launches, and the memory that its launches need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.attention.gradients import ROWS, differentiated, gradient_shape
from flashgen.attention.launches import Launch, capture_values, list_shape, list_strides
from flashgen.attention.marshal import ArgumentWriter, Value
from flashgen.attention.problem import Problem, contiguous_strides, in_layout
from flashgen.codegen.arguments import member_name
from flashgen.codegen.mma_sync.backward import EXACT_LIMBS
from flashgen.codegen.plans import padded
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.arrays import View

if TYPE_CHECKING:
    from flashgen.codegen.mma_sync.backward import BackwardKernels


@dataclass(frozen=True)
class Memory:
    """An array that a call makes: shape, dtype, and whether it begins as zeros."""

    shape: tuple[int, ...]
    dtype: str
    zeroed: bool = False


@dataclass(frozen=True)
class BackwardLaunches:
    """The launches of a backward call; `captures` by the names of the captures."""

    prepare: Launch
    keys: Launch
    queries: Launch | None
    finish: Launch | None
    captures: Mapping[str, Launch]


def gradient_memory(
    spec: AttentionSpec, kernels: BackwardKernels, problem: Problem, captured: Mapping[str, View]
) -> dict[str, Memory]:
    """The gradients, by the names of `Gradients`. Zeroed where they are added to, or where nothing is written."""
    launched = problem.has_scores
    memory = {
        name: Memory(gradient_shape(spec, problem, name), spec.dtype, zeroed=not launched)
        for name in ("dq", "dk", "dv")
    }
    for capture in differentiated(spec):
        written = launched and capture.name in kernels.captures
        memory[capture.name] = Memory(captured[capture.name].shape, capture.dtype, zeroed=not written)
    return memory


def workspaces(
    spec: AttentionSpec, kernels: BackwardKernels, problem: Problem, captured: Mapping[str, View]
) -> dict[str, Memory]:
    """Memory for a call's own use, by the names in the structs: linear in the lengths, and in the captures' sizes."""
    rows = (problem.batch, problem.heads_q, _rows(kernels, problem))
    memory = {"statistics": Memory((*rows, 2), "float32")}
    if kernels.finish:
        memory["dq_sums"] = Memory((*rows, padded(spec.head_dim)), "float32")  # `prepare` zeroes it
    for capture in differentiated(spec):
        if capture.name in kernels.captures:
            shape = captured[capture.name].shape
            sums = ((*shape, EXACT_LIMBS), "int64") if kernels.deterministic else (shape, "float32")
            memory[sums_name(member_name(capture))] = Memory(*sums, zeroed=True)
    return memory


def sums_name(member: str) -> str:
    """The pointer that the gradient of a captured array is summed at."""
    return f"d_{member}"


def _rows(kernels: BackwardKernels, problem: Problem) -> int:
    """Queries, rounded up so that the kernels of rows need not look where they end."""
    return -(-problem.len_q // kernels.row_multiple) * kernels.row_multiple


def backward_launches(
    spec: AttentionSpec, kernels: BackwardKernels, problem: Problem, captured: Mapping[str, View]
) -> BackwardLaunches:
    """The launches for calls of these sizes and strides. Each kernel's struct takes those values that it has."""
    rows = _rows(kernels, problem)
    values = _values(spec, problem, rows)

    def launch(kernel: RenderedKernel, grid: tuple[int, int, int], **own: Value) -> Launch:
        known = values | own | capture_values(kernel.layout, spec, captured)
        return Launch(grid, ArgumentWriter(kernel.layout, known))

    def row_launch(kernel: RenderedKernel, rows_of_a_block: int) -> Launch:
        return launch(kernel, (rows // rows_of_a_block, problem.heads_q, problem.batch))

    plan, queries_plan = kernels.plan, kernels.queries_plan
    transposed = list_shape(spec, problem, (plan.tile_q, plan.tile_k), "queries")
    keys = launch(
        kernels.keys,
        (-(-problem.len_k // plan.tile_k), problem.heads_kv, problem.batch),
        list_strides=list_strides(transposed),
    )
    queries = None
    if kernels.queries and queries_plan:
        lists = list_shape(spec, problem, (queries_plan.tile_q, queries_plan.tile_k))
        grid = (lists.tiles, problem.heads_q, problem.batch)
        queries = launch(kernels.queries, grid, list_strides=list_strides(lists))
    return BackwardLaunches(
        row_launch(kernels.prepare, kernels.prepare_rows),
        keys,
        queries,
        row_launch(kernels.finish, kernels.finish_rows) if kernels.finish else None,
        {name: _capture_launch(kernel, captured[name]) for name, kernel in kernels.captures.items()},
    )


def _values(spec: AttentionSpec, problem: Problem, rows: int) -> dict[str, Value]:
    """What the kernels' structs hold of the sizes and strides of a call."""
    strides = {
        name: in_layout(contiguous_strides(gradient_shape(spec, problem, name)), spec.layout)[:3] for name in ROWS
    } | problem.strides
    values: dict[str, Value] = {f"{name}_strides": each for name, each in strides.items()}
    return values | {
        "heads_q": problem.heads_q,
        "heads_kv": problem.heads_kv,
        "heads_per_kv": problem.heads_per_kv,
        "kv_reciprocal": problem.kv_reciprocal,
        "len_q": problem.len_q,
        "len_k": problem.len_k,
        "rows": rows,
    }


def _capture_launch(kernel: RenderedKernel, view: View) -> Launch:
    """One thread for each element of a captured array."""
    count = math.prod(view.shape)
    return Launch((-(-count // kernel.threads), 1, 1), ArgumentWriter(kernel.layout, {"count": count}))
