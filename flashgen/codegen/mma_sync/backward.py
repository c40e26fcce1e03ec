"""Spec and plan -> the texts of the kernels of a backward pass. The same bytes on every machine.

P is computed anew from Q, K and the LSE, tile by tile: FlashAttention's algorithm 4 (Dao et al. 2022), with the loops
in the order of FlashAttention-2 (Dao 2023, algorithm 2). With dS = P * (dP - D), D = rowsum(dO * O):

    prepare   a row's LSE to the base 2, and D; zeroes the sums of dQ
    keys      a block walks the queries of a tile of keys: dV = P^T dO, dK = dS^T Q, and shares of dQ = dS K
    finish    dQ from its shares, added up in float32
    queries   in place of shares and finish where gradients must not depend on an order of additions: a block walks the
              keys of a tile of queries, and computes S and dP once more for dQ alone
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import sympy

from flashgen.analysis.closed_forms.tile_ranges import key_range, query_range
from flashgen.codegen.arguments import (
    ELEMENT_TYPES,
    ArgumentLayout,
    Field,
    capture_gradient,
    ordered,
    summed_gradient,
)
from flashgen.codegen.assembly import assemble, check_spec, common_context, longest_last, visited_tiles
from flashgen.codegen.costs import backward_cost
from flashgen.codegen.expressions.derivative_text import score_gradient
from flashgen.codegen.header import backward_header
from flashgen.codegen.mma_sync.backward_plans import (
    BackwardPlan,
    QueriesPlan,
    choose_backward_plan,
    choose_queries_plan,
)
from flashgen.codegen.rendered_kernel import Grid, RenderedKernel, Workspace, entry_name, kernel_name
from flashgen.codegen.sizes import Sizes, ceil_div
from flashgen.codegen.targets import Target
from flashgen.codegen.tiling import padded
from flashgen.codegen.variant import Variant, layout_of, variant_of
from flashgen.language.operations import Capture
from flashgen.language.spec import AttentionSpec
from flashgen.language.well_formed import FLOAT32_MAX

_NO_LSE = FLOAT32_MAX  # that of a row without probabilities, in the statistics
_TEMPLATES = {part: f"backward/{part}.cu.jinja" for part in ("prepare", "capture")}
_TEMPLATES |= {part: f"mma_sync/backward/{part}.cu.jinja" for part in ("keys", "queries", "finish")}
_PREPARE_THREADS, PREPARE_ROWS = 256, 64
_FINISH_THREADS = 256
_CAPTURE_THREADS = 256
EXACT_LIMBS = 10
"""int64 each: the exact sum of a captured element's gradient in the deterministic mode, as `add_exactly` makes it."""


def render_mma_sync_backward(
    spec: AttentionSpec, target: Target, plan: BackwardPlan | None = None, deterministic: bool = False
) -> tuple[RenderedKernel, ...]:
    """The backward kernels of a spec on a target, in the order of their launches; `plan` is that of `keys`.

    Beside those above, "d_" and its name for each captured array whose gradient is not what is summed: float32 sums of
    a float32 array are. UnsupportedError where the target or the plan cannot do it.
    """
    check_spec(spec, target)
    plan = plan or choose_backward_plan(spec, target, deterministic)
    plan.check(spec, target, deterministic)
    rows = partial(_rows, math.lcm(plan.tile_q, PREPARE_ROWS))
    kernels = [_prepare(spec, target, plan, rows, deterministic), _keys(spec, target, plan, rows, deterministic)]
    if deterministic:
        kernels.append(_queries(spec, target, choose_queries_plan(spec, target), rows))
    else:
        kernels.append(_finish(spec, target, plan, rows))
    summed = [capture for capture in spec.captures if capture.grad and (deterministic or capture.dtype != "float32")]
    return (*kernels, *(_capture(spec, target, capture, deterministic) for capture in summed))


_Rows = Callable[[Sizes], Any]
"""Queries, rounded up so that the kernels of rows need not look where they end."""


def _rows(multiple: int, sizes: Sizes) -> Any:
    return ceil_div(sizes.len_q, multiple) * multiple


def _strides(*names: str) -> list[Field]:
    return [Field("Strides", f"{name}_strides") for name in names]


def _numbers(*names: str) -> list[Field]:
    return [Field("int", name) for name in names]


_STATISTICS = Field("const float*", "statistics", comment="(batch, heads_q, rows, 2): LSE to the base 2, and D")
_DQ_SUMS = Field("float*", "dq_sums", comment="(batch, heads_q, rows, padded head_dim), in an order of its own")
_ROWS = Field("int", "rows", comment="len_q, rounded up")


def _prepare(
    spec: AttentionSpec, target: Target, plan: BackwardPlan, rows: _Rows, deterministic: bool
) -> RenderedKernel:
    fields = [Field("const Element*", "o"), Field("const Element*", "d_o"), Field("const float*", "lse")]
    fields += [Field("const float*", "d_lse", comment="or null"), Field("float*", "statistics")]
    fields += [] if deterministic else [_DQ_SUMS]
    layout = ordered([*fields, *_strides("o", "d_o"), *_numbers("heads_q", "len_q"), _ROWS])
    lanes = max(1 << (spec.value_dim // 8 - 1).bit_length(), _PREPARE_THREADS // PREPARE_ROWS)
    context = {"threads": _PREPARE_THREADS, "rows": PREPARE_ROWS, "lanes": lanes, "deterministic": deterministic}
    memory = [Workspace("statistics", lambda sizes: (sizes.batch, sizes.heads_q, rows(sizes), 2), "float32")]
    if not deterministic:  # the kernel zeroes them
        head = padded(spec.head_dim)
        memory.append(Workspace("dq_sums", lambda sizes: (sizes.batch, sizes.heads_q, rows(sizes), head), "float32"))
    launch = {"grid": partial(_blocks_of_rows, rows, PREPARE_ROWS), "values": partial(_values, rows)}
    kernel = _kernel("prepare", spec, target, layout, context, _PREPARE_THREADS, 0, launch, plain=True)
    return replace(kernel, plan=plan, workspaces=tuple(memory))


def _blocks_of_rows(rows: _Rows, of_a_block: int, sizes: Sizes) -> Grid:
    return rows(sizes) // of_a_block, sizes.heads_q, sizes.batch


def _values(rows: _Rows, sizes: Sizes) -> dict[str, Any]:
    return {"rows": rows(sizes)}


def _finish(spec: AttentionSpec, target: Target, plan: BackwardPlan, rows: _Rows) -> RenderedKernel:
    fields = [Field("const float*", "dq_sums"), _STATISTICS, Field("Element*", "dq"), *_strides("dq")]
    fields += _numbers("heads_q", "len_q")
    context = {"plan": plan, "threads": _FINISH_THREADS, "deterministic": False}
    context["vector_reductions"] = target.vector_reductions
    launch = {"grid": partial(_blocks_of_rows, rows, plan.tile_q), "values": partial(_values, rows)}
    return _kernel("finish", spec, target, ordered([*fields, _ROWS]), context, _FINISH_THREADS, 0, launch, plain=True)


def _keys(spec: AttentionSpec, target: Target, plan: BackwardPlan, rows: _Rows, deterministic: bool) -> RenderedKernel:
    tiles, shared = query_range(spec.mask.expression), plan.shared_bytes(spec, deterministic)
    fields = [*(Field("const Element*", name) for name in ("q", "k", "v", "d_o")), _STATISTICS]
    fields += [] if deterministic else [_DQ_SUMS]
    fields += [Field("Element*", "dk"), Field("Element*", "dv"), *_strides("q", "k", "v", "d_o", "dk", "dv")]
    gradient = score_gradient(spec)
    gathers = gradient.gathers if gradient else ()
    sums = "long long*" if deterministic else "float*"
    fields += [Field(sums, f"d_{member}") for member in dict.fromkeys(gather.member for gather in gathers)]
    fields += [*_numbers("heads_q", "heads_per_kv", "len_q", "len_k"), _ROWS]
    layout = layout_of(spec, fields, lists=tiles is None)
    context = {
        "plan": plan,
        "deterministic": deterministic,
        "vector_reductions": target.vector_reductions,
        "shared_bytes": shared,
        "gradient": gradient,
        "gathers": gathers,
        "limbs": EXACT_LIMBS,
        "query_tiles": visited_tiles(tiles, "BackwardKeysArguments", _is_masked(spec), queries=True),
    }
    launch: dict[str, Any] = {"values": partial(_values, rows), "reads": "queries" if tiles is None else None}
    launch["grid"] = lambda sizes: (ceil_div(sizes.len_k, plan.tile_k), sizes.heads_kv, sizes.batch)
    return _kernel("keys", spec, target, layout, context, plan.threads, shared, launch)


def _queries(spec: AttentionSpec, target: Target, plan: QueriesPlan, rows: _Rows) -> RenderedKernel:
    tiles, shared = key_range(spec.mask.expression), plan.shared_bytes(spec)
    fields = [*(Field("const Element*", name) for name in ("q", "k", "v", "d_o")), _STATISTICS]
    fields += [
        Field("Element*", "dq"),
        *_strides("q", "k", "v", "d_o", "dq"),
        *_numbers("heads_q", "len_q", "len_k"),
        _ROWS,
    ]
    fields.append(Field("unsigned", "kv_reciprocal", comment="2^31 / heads per head of K and V, rounded up"))
    context = {
        "plan": plan,
        "shared_bytes": shared,
        "deterministic": True,
        "gradient": score_gradient(spec, with_gathers=False),
        "gathers": (),
        "key_tiles": visited_tiles(tiles, "BackwardQueriesArguments", _is_masked(spec)),
        "longest_first": longest_last(tiles),
    }
    launch: dict[str, Any] = {"values": partial(_values, rows), "reads": "keys" if tiles is None else None}
    launch["grid"] = lambda sizes: (ceil_div(sizes.len_q, plan.tile_q), sizes.heads_q, sizes.batch)
    layout = layout_of(spec, fields, tiles is None)
    return _kernel("queries", spec, target, layout, context, plan.threads, shared, launch)


def _capture(spec: AttentionSpec, target: Target, capture: Capture, deterministic: bool) -> RenderedKernel:
    summed = Field("const long long*" if deterministic else "const float*", "sums")
    gradient = Field(f"{ELEMENT_TYPES[capture.dtype]}*", "gradient", comment=f"of {capture.name}, {capture.dtype}")
    rounds = {"float16": "pack_f16", "bfloat16": "pack_bf16"}
    context = {"deterministic": deterministic, "threads": _CAPTURE_THREADS, "round": rounds.get(capture.dtype)}
    context["limbs"] = EXACT_LIMBS
    layout = ordered([summed, gradient, Field("long long", "count")])
    sums = summed_gradient(capture)
    dtype, limbs = ("int64", (EXACT_LIMBS,)) if deterministic else ("float32", ())
    launch: dict[str, Any] = {
        "grid": lambda sizes: (ceil_div(sizes.count, _CAPTURE_THREADS), 1, 1),
        "workspaces": (Workspace(sums, lambda sizes: limbs, dtype, zeroed=True, of_capture=capture.name),),
        "pointers": {"sums": sums, "gradient": capture_gradient(capture)},
    }
    return _kernel("capture", spec, target, layout, context, _CAPTURE_THREADS, 0, launch, plain=True, of=capture.name)


def _is_masked(spec: AttentionSpec) -> bool:
    return bool(spec.mask.expression != sympy.true)


def _kernel(
    part: str,
    spec: AttentionSpec,
    target: Target,
    layout: ArgumentLayout,
    context: dict[str, Any],
    threads: int,
    shared_bytes: int,
    launch: Mapping[str, Any],
    plain: bool = False,
    of: str = "",
) -> RenderedKernel:
    """One of the kernels; a `plain` one has nothing of the mask and the score in it.

    launch: what its record says of that. of: the capture that it is for.
    """
    struct, entry = f"Backward{part.title()}Arguments", entry_name(f"attention_backward_{part}{of and f'_{of}'}", spec)
    variant = Variant(None, None, ()) if plain else variant_of(spec)
    told = common_context(spec, target, variant, struct, layout, context.get("gradient")) | {"no_lse": _NO_LSE}
    shown = f"d_{of}" if of else part
    cost, plan = backward_cost(shown, spec, context["deterministic"]), context.get("plan")
    header = backward_header(shown, spec, target, plan, shared_bytes, cost, context["deterministic"])
    source = assemble(_TEMPLATES[part], told | context | {"entry": entry, "header": header}, target)
    name = kernel_name(f"bwd-{part}{of and f'-{of}'}", target, spec)
    return RenderedKernel(
        name, entry, source, target, layout, threads, shared_bytes, plan=plan, role=shown, cost=cost, **launch
    )
