"""Renders the source of the backward kernels that use mma.sync. The text is deterministic on every machine."""

from __future__ import annotations

from functools import partial
from typing import Any

from flashgen.analysis.closed_forms.tile_ranges import key_range, query_range
from flashgen.codegen.arguments import Field, gradient_field
from flashgen.codegen.assembly import check_spec, longest_last, visited_tiles
from flashgen.codegen.backward_kernels import (
    DQ_ACCUM,
    EXACT_LIMBS,
    LSE_AND_D,
    ROWS,
    Block,
    DqAccumulation,
    Rendering,
    Rows,
    backward_kernel,
    postprocess_dq,
    preprocess,
    row_values,
    rows_of,
    strides,
    varlen_context,
)
from flashgen.codegen.batches import batch_of
from flashgen.codegen.capture_gradient_kernels import capture_kernels, sink_kernels
from flashgen.codegen.demand import divides_tiles
from flashgen.codegen.expressions.derivative_text import score_gradient
from flashgen.codegen.expressions.uniform_text import uniform_text
from flashgen.codegen.mma_sync.backward_plans import (
    BackwardPlan,
    QueriesPlan,
    choose_backward_plan,
    choose_queries_plan,
)
from flashgen.codegen.padding import padded_output_gradient
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import layout_of, with_transposed_pairs
from flashgen.errors import UnsupportedError
from flashgen.language.operations import QUERY
from flashgen.language.spec import AttentionSpec

_MIN_SHARED_SCALE = 2.0**-15  # the largest float16 is 65504
_DKDV, _DQ = (f"mma_sync/backward/{part}.cu.jinja" for part in ("dkdv", "dq"))


def render_mma_sync_backward(
    spec: AttentionSpec, target: Target, plan: BackwardPlan | None = None, deterministic: bool = False
) -> tuple[RenderedKernel, ...]:
    """Returns the backward kernels of a spec on a target, in launch order.

    They are the kernels that codegen/backward_kernels.py lists, and those of the gradients of captured arrays.

    Args:
        plan: the plan of the kernel `dkdv`, which computes dK and dV; None for the default plan.

    Raises:
        UnsupportedError: the target or the plan does not support the spec.
    """
    check_spec(spec, target)
    _check_shared_scale(spec)
    plan = plan or choose_backward_plan(spec, target, deterministic)
    plan.check(spec, target, deterministic)
    rows = rows_of(spec, plan.tile_q)
    kernels = [
        preprocess(spec, target, plan, rows, deterministic, DqAccumulation(apart=deterministic)),
        _render_dkdv(spec, target, plan, rows, deterministic),
    ]
    if deterministic:
        kernels.append(_render_dq(spec, target, choose_queries_plan(spec, target), rows, plan.tile_q))
    else:
        kernels.append(postprocess_dq(spec, target, plan, rows))
    return (*kernels, *sink_kernels(spec, target, rows), *capture_kernels(spec, target, rows, deterministic))


def _check_shared_scale(spec: AttentionSpec) -> None:
    """Raises UnsupportedError if P / scale, which adds to the gradient of K where V is a part of K, overflows."""
    if spec.shared_kv and abs(spec.scale) < 256 / spec.keep_threshold * _MIN_SHARED_SCALE:
        raise UnsupportedError(
            f"scale={spec.scale!r}: with shared_kv=True the backward divides probabilities by it: multiply q by a part "
            "of it, and give a larger scale"
        )


def _render_dkdv(
    spec: AttentionSpec, target: Target, plan: BackwardPlan, rows: Rows, deterministic: bool
) -> RenderedKernel:
    tiles, shared = query_range(spec.mask.expression), plan.shared_memory(spec, deterministic)
    fields = [*(Field("const Element*", name) for name in (*spec.inputs, "d_o")), LSE_AND_D]
    fields += [] if deterministic else [DQ_ACCUM]
    gradients = [f"d{name}" for name in spec.inputs if name != "q"]
    fields += [gradient_field(spec, name) for name in gradients]
    fields += strides(*spec.inputs, "d_o", *gradients)
    variant, of_pairs = with_transposed_pairs(spec)
    gradient = of_pairs["gradient"]
    gathers = gradient.gathers if gradient else ()
    sums = "long long*" if deterministic else "float*"
    fields += [Field(sums, f"d_{member}") for member in dict.fromkeys(gather.member for gather in gathers)]
    fields += [*batch_of(spec).fields("heads_per_kv", "len_q", "len_k", ROWS)]
    layout = layout_of(spec, fields, lists=tiles is None)
    context = {
        "plan": plan,
        "deterministic": deterministic,
        "dq_apart": deterministic,
        "dq_tiles_at_once": plan.dq_tiles_at_once(spec),
        "value_padded": padded_output_gradient(spec),
        "vector_reductions": target.vector_reductions,
        "divides_columns": divides_tiles(spec, plan.tile_q, QUERY),
        "uniform": uniform_text(spec),
        "gathers": gathers,
        "exact_sums": deterministic,
        "limbs": EXACT_LIMBS,
        "query_tiles": visited_tiles(spec, tiles, "BackwardDkdvArguments", queries=True),
        **of_pairs,
    }
    context |= varlen_context(spec, "BackwardDkdvArguments", layout, plan.tile_q, "kTileK", of_keys=True)
    launch: dict[str, Any] = {"values": partial(row_values, rows), "reads": "queries" if tiles is None else None}
    launch["grid"] = partial(batch_of(spec).key_grid, plan.tile_k)
    block, rendering = Block(plan.threads, shared), Rendering(variant, template=_DKDV)
    return backward_kernel("dkdv", spec, target, layout, context, block, launch, rendering)


def _render_dq(spec: AttentionSpec, target: Target, plan: QueriesPlan, rows: Rows, multiple: int) -> RenderedKernel:
    """Returns the kernel that computes dQ. LSE and D are padded to a multiple of `multiple` rows."""
    tiles, shared = key_range(spec.mask.expression), plan.shared_memory(spec)
    fields = [*(Field("const Element*", name) for name in (*spec.inputs, "d_o")), LSE_AND_D]
    fields += [
        gradient_field(spec, "dq"),
        *strides(*spec.inputs, "d_o", "dq"),
        *batch_of(spec).fields("len_q", "len_k"),
        ROWS,
    ]
    fields.append(Field("unsigned", "kv_reciprocal", comment="2^31 / (query heads per KV head), rounded up"))
    context = {
        "plan": plan,
        "deterministic": True,
        "dq_apart": True,
        "divides_columns": divides_tiles(spec, plan.tile_k),
        "gradient": score_gradient(spec, with_gathers=False),
        "gathers": (),
        "key_tiles": visited_tiles(spec, tiles, "BackwardDqArguments"),
        "value_padded": padded_output_gradient(spec),
        "longest_first": longest_last(tiles),
    }
    launch: dict[str, Any] = {"values": partial(row_values, rows), "reads": "keys" if tiles is None else None}
    launch["grid"] = partial(batch_of(spec).query_grid, plan.tile_q)
    layout = layout_of(spec, fields, tiles is None)
    context |= varlen_context(spec, "BackwardDqArguments", layout, multiple, "kTileQ")
    block, rendering = Block(plan.threads, shared), Rendering(template=_DQ)
    return backward_kernel("dq", spec, target, layout, context, block, launch, rendering)
