"""Renders the source of the backward kernels on Hopper. The text is deterministic on every machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict

from flashgen.analysis.closed_forms.tile_ranges import key_range, query_range
from flashgen.codegen.arguments import ArgumentLayout, Field, gradient_field
from flashgen.codegen.assembly import check_spec, is_masked, longest_last, suffix_of, visited_tiles
from flashgen.codegen.backward_kernels import (
    DQ_ACCUM,
    DQ_ADDED,
    DQ_NEXT,
    DQ_TILE_STATE,
    EXACT_LIMBS,
    KEYS,
    LSE_AND_D,
    ROWS,
    Block,
    DqAccumulation,
    Rendering,
    Rows,
    backward_kernel,
    numbers,
    postprocess_dkv,
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
from flashgen.codegen.expressions.derivative_text import GatherText, score_gradient
from flashgen.codegen.expressions.row_elements import paired_mask_elements
from flashgen.codegen.expressions.uniform_text import uniform_text
from flashgen.codegen.hopper import backward_scheduler
from flashgen.codegen.hopper.array_tiles import ArrayTile, array_tile
from flashgen.codegen.hopper.backward_plans import (
    HopperBackwardPlan,
    choose_hopper_backward_plan,
    has_slope,
    takes_two_steps,
)
from flashgen.codegen.hopper.backward_scheduler import padded_keys
from flashgen.codegen.hopper.batch_traits import batch_traits
from flashgen.codegen.hopper.plans import panel_columns
from flashgen.codegen.hopper.queries_plans import HopperQueriesPlan, choose_hopper_queries_plan
from flashgen.codegen.hopper.wide_plans import HopperWidePlan, choose_hopper_wide_plan, exchanged
from flashgen.codegen.padding import padded
from flashgen.codegen.rendered_kernel import RenderedKernel, Workspace
from flashgen.codegen.sizes import Sizes
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import layout_of, with_transposed_pairs
from flashgen.codegen.varlen import MAP_ROWS
from flashgen.errors import UnsupportedError
from flashgen.language.operations import QUERY
from flashgen.language.spec import AttentionSpec

HopperPlans = HopperBackwardPlan | HopperWidePlan
_DKDV, _WIDE_DKDV, _DQ = (f"hopper/backward/{part}.cu.jinja" for part in ("dkdv", "wide_dkdv", "dq"))
_WARP_ROWS, _PART_ROWS = 16, 64
_OPTIONAL = ("len_q",)  # TMA clips rows beyond the last one


class MainKernel(NamedTuple):
    """The kernel of dK and dV, how the pass computes dQ, and whether the other kernels depend on the mode."""

    kernel: RenderedKernel
    dq: DqAccumulation
    by_mode: bool


def render_hopper_backward(
    spec: AttentionSpec, target: Target, plan: HopperPlans | None = None, deterministic: bool = False
) -> tuple[RenderedKernel, ...]:
    """Returns the backward kernels of a spec on Hopper, in launch order.

    A separate kernel computes dQ if rows are too wide for one kernel of all gradients. In the deterministic mode it
    does so too, unless the CTAs of the plan accumulate dQ in a fixed order (`in_turns`).

    Args:
        plan: the plan of the kernel that computes dK and dV; None for the default plan.

    Raises:
        UnsupportedError: the target or the plan does not support the spec.
    """
    check_spec(spec, target)
    plan = plan or choose_hopper_backward_plan(spec, target, deterministic)
    plan = plan or choose_hopper_wide_plan(spec, target)
    plan.check(spec, target)
    if plan.heads_apart and deterministic:
        raise UnsupportedError(
            f"{plan}: the deterministic mode cannot accumulate dK and dV of query heads: leave out heads_apart"
        )
    rows = rows_of(spec, plan.tile_q)
    main, dq, by_mode = _MAIN_KERNELS[type(plan)](spec, target, plan, rows, deterministic)
    kernels = [preprocess(spec, target, plan, rows, by_mode, dq), main]
    if dq.apart:
        queries_plan = choose_hopper_queries_plan(spec, target)
        kernels.append(_dq(spec, target, queries_plan, rows, by_mode, plan.tile_q))
    elif not dq.converted:
        kernels.append(postprocess_dq(spec, target, plan, rows, dq.first_stores))
    if plan.heads_apart:
        kernels += [
            postprocess_dkv(spec, target, plan, array, width, padded_keys(plan))
            for array, width in _row_widths(spec, plan)
        ]
    return (*kernels, *sink_kernels(spec, target, rows), *capture_kernels(spec, target, rows, deterministic))


def _main_kernel(
    spec: AttentionSpec, target: Target, plan: HopperBackwardPlan, rows: Rows, deterministic: bool
) -> MainKernel:
    apart = deterministic and not plan.in_turns
    semaphores = backward_scheduler.semaphores(spec, plan, apart)
    first_stores = not (apart or plan.adds_dq(spec))
    dq = DqAccumulation(apart, first_stores, plan.finishes(spec, apart), semaphores)
    return MainKernel(_dkdv(spec, target, plan, rows, deterministic), dq, deterministic)


def _wide_main_kernel(
    spec: AttentionSpec, target: Target, plan: HopperWidePlan, rows: Rows, deterministic: bool
) -> MainKernel:
    return MainKernel(_wide_dkdv(spec, target, plan, rows, deterministic), DqAccumulation(apart=True), by_mode=False)


_MAIN_KERNELS: dict[type[HopperPlans], Callable[..., MainKernel]] = {
    HopperBackwardPlan: _main_kernel,
    HopperWidePlan: _wide_main_kernel,
}


def _dkdv(
    spec: AttentionSpec, target: Target, plan: HopperBackwardPlan, rows: Rows, deterministic: bool
) -> RenderedKernel:
    """Returns the persistent kernel of dK and dV, and of dQ unless another kernel computes dQ."""
    dq_apart = deterministic and not plan.in_turns
    tiles, head = query_range(spec.mask.expression), plan.head_columns(spec)
    layout = layout_of(spec, _dkdv_fields(spec, plan, dq_apart, deterministic), lists=tiles is None)
    context = _keys_context(spec, plan, layout, deterministic)
    context |= backward_scheduler.scheduler_context(spec, plan, dq_apart)
    variant, of_pairs = with_transposed_pairs(spec)
    context |= of_pairs
    context |= _pipeline_context(spec, plan, dq_apart)
    context |= _array_context(spec, plan, dq_apart)
    context |= _epilogue_context(spec, plan, dq_apart)
    context |= {"mask_alone": _mask_alone(spec, deterministic), "deterministic": deterministic}
    launch: dict[str, Any] = {"reads": "queries" if tiles is None else None}
    launch |= backward_scheduler.launch_parameters(spec, plan, rows, dq_apart)
    launch["boxes"] = _boxes(spec, plan, stored=not plan.heads_apart)
    if plan.heads_apart:
        launch["workspaces"] = _head_split_workspaces(spec, plan)
    widths = dict.fromkeys((head, padded(spec.value_dim)))
    dq_forms = [] if dq_apart else [(columns, "true") for _, columns in plan.gradient_chunks(spec)]
    primitives = {
        "shared_forms": list(dict.fromkeys([(plan.tile_q, "false"), *dq_forms])),
        "register_forms": [(width, "true") for width in widths],
    }
    rendering = Rendering(variant, template=_DKDV, primitives=primitives, optional=_OPTIONAL)
    block = Block(plan.threads, plan.shared_memory(spec, dq_apart))
    return backward_kernel("dkdv", spec, target, layout, context, block, launch, rendering)


def _dkdv_fields(spec: AttentionSpec, plan: HopperBackwardPlan, dq_apart: bool, deterministic: bool) -> list[Field]:
    """Returns the struct members of the persistent kernel, with those that the scheduler reads."""
    converts = plan.finishes(spec, dq_apart)
    fields = [Field("TensorMap", f"{name}_map") for name in ("q", "k", "v", "d_o")]
    fields += [] if plan.heads_apart else _stored_gradients(spec, "dk", "dv")
    fields += [LSE_AND_D, *([] if dq_apart else [DQ_ACCUM] if plan.adds_dq(spec) else [DQ_ACCUM, DQ_TILE_STATE])]
    fields += [DQ_ADDED, DQ_NEXT, gradient_field(spec, "dq"), *strides("dq")] if converts else []
    fields += backward_scheduler.scheduler_fields(spec, plan, dq_apart)
    fields += numbers("batch") if converts else []
    fields += [Field("float*", f"d{array}_sums") for array, _ in _row_widths(spec, plan) if plan.heads_apart]
    fields += _gather_fields(_gathers(spec), deterministic)
    fields += [*batch_of(spec).fields("heads_per_kv", "len_q", "len_k", ROWS)]
    return [*fields, *([KEYS] if plan.heads_apart else [])]


class PipelineContext(TypedDict):
    """What the producer and the mainloop of the persistent kernel are rendered from.

    Attributes:
        head_padded: columns of a row of Q, K and dK in shared memory.
        takes_two_steps: P is computed while the wgmma of dP runs, and dS from it in a second step.
        shares_registers: a part of dQ has the registers of the scores.
        dq_chunks: the first column and the columns of each chunk of a warpgroup's part of dQ.
        prefetches_keys: K of the next work tile is loaded during the epilogue.
        recomputes_addresses: shared memory addresses are computed in each iteration, so that no registers hold them.
    """

    head_padded: int
    takes_two_steps: bool
    shares_registers: bool
    dq_chunks: tuple[tuple[int, int], ...]
    prefetches_keys: bool
    recomputes_addresses: bool


def _pipeline_context(spec: AttentionSpec, plan: HopperBackwardPlan, dq_apart: bool) -> PipelineContext:
    has_registers = plan.heads_apart or plan.in_turns or bool(spec.dropout)
    return {
        "head_padded": plan.head_columns(spec),
        "takes_two_steps": takes_two_steps(spec),
        "shares_registers": plan.shares_registers(spec),
        "dq_chunks": plan.gradient_chunks(spec),
        "prefetches_keys": plan.loads_early(dq_apart),
        "recomputes_addresses": not has_registers and (plan.early_scores or not batch_traits(spec).spares_registers),
    }


class ArrayContext(TypedDict):
    """How tiles of a captured array are loaded.

    Attributes:
        array_stages: tiles in shared memory; 0 if scores read their elements from global memory.
        array_tile: the tile; None without one.
        array_warps: warps that load a part of each tile.
        masks_by_elements: the mask reads the elements.
    """

    array_stages: int
    array_tile: ArrayTile | None
    array_warps: int
    masks_by_elements: bool


def _array_context(spec: AttentionSpec, plan: HopperBackwardPlan, dq_apart: bool) -> ArrayContext:
    stages = plan.array_stages(spec, dq_apart)
    return {
        "array_stages": stages,
        "array_tile": array_tile(spec, plan.tile_k) if stages else None,
        "array_warps": plan.array_warps(dq_apart),
        "masks_by_elements": bool(paired_mask_elements(spec)),
    }


class EpilogueContext(TypedDict):
    """Where the gradients of the persistent kernel go.

    Attributes:
        dq_apart: another kernel computes dQ.
        converts_dq: idle warps convert the dQ accumulator.
    """

    dq_apart: bool
    converts_dq: bool


def _epilogue_context(spec: AttentionSpec, plan: HopperBackwardPlan, dq_apart: bool) -> EpilogueContext:
    return {"dq_apart": dq_apart, "converts_dq": plan.finishes(spec, dq_apart)}


def _keys_context(
    spec: AttentionSpec, plan: HopperPlans, layout: ArgumentLayout, deterministic: bool
) -> dict[str, Any]:
    """Returns the template context that the two kernels of dK and dV share."""
    struct = "BackwardDkdvArguments"
    context = {
        "plan": plan,
        "divides_columns": divides_tiles(spec, plan.tile_q, QUERY),
        "uniform": uniform_text(spec),
        "gradient": score_gradient(spec),
        "gathers": _gathers(spec),
        "exact_sums": deterministic,
        "limbs": EXACT_LIMBS,
        "head_panel": plan.head_panel(spec),
        "value_panel": panel_columns(spec.value_dim, spec.element),
        "suffix": suffix_of(spec),
        "query_tiles": visited_tiles(
            spec, query_range(spec.mask.expression), struct, queries=True, semaphores=plan.in_turns
        ),
        "map_rows": MAP_ROWS,
    }
    return context | varlen_context(spec, struct, layout, plan.tile_q, "kTileK", of_keys=True, moves_rows=False)


def _gathers(spec: AttentionSpec) -> tuple[GatherText, ...]:
    """Returns the gradients of captured arrays that a kernel accumulates."""
    gradient = score_gradient(spec)
    return gradient.gathers if gradient else ()


def _mask_alone(spec: AttentionSpec, deterministic: bool) -> bool:
    """Whether boundary tiles of the mask get a separate code path. In deterministic mode it would spill registers."""
    return is_masked(spec) and not deterministic


def _gather_fields(gathers: Iterable[GatherText], exact: bool) -> list[Field]:
    """Returns the accumulators of the gradients of captured arrays. `exact` sums do not depend on their order."""
    members = dict.fromkeys(gather.member for gather in gathers)
    return [Field("long long*" if exact else "float*", f"d_{member}") for member in members]


def _head_split_workspaces(spec: AttentionSpec, plan: HopperBackwardPlan) -> tuple[Workspace, ...]:
    """Returns the dK and dV accumulators of plans with one CTA per query head."""
    keys = padded_keys(plan)

    def shape(width: int) -> Any:
        return lambda sizes: (sizes.batch, sizes.heads_kv, keys(sizes), width)

    return tuple(
        Workspace(f"d{array}_sums", shape(width), "float32", zeroed=True) for array, width in _row_widths(spec, plan)
    )


def _row_widths(spec: AttentionSpec, plan: HopperPlans) -> tuple[tuple[Literal["k", "v"], int], ...]:
    """Returns the padded columns of a row of K and of V in shared memory."""
    return ("k", plan.head_columns(spec)), ("v", padded(spec.value_dim))


def _wide_dkdv(
    spec: AttentionSpec, target: Target, plan: HopperWidePlan, rows: Rows, deterministic: bool
) -> RenderedKernel:
    """Returns the kernel of dK and dV for wide rows.

    The mode `deterministic` makes sums of gradients of captured arrays exact. Nothing else in the kernel depends on it.
    """
    tiles, gathers = query_range(spec.mask.expression), _gathers(spec)
    exact = bool(gathers) and deterministic
    fields = [Field("TensorMap", f"{name}_map") for name in ("q", "k", "v", "d_o")]
    fields += _stored_gradients(spec, "dk", "dv")
    fields += [LSE_AND_D, *_gather_fields(gathers, deterministic)]
    rotates = backward_scheduler.rotates_start(spec, plan, dq_apart=True)
    fields += [backward_scheduler.TILES_OF_HEAD] if rotates else []
    fields += [*batch_of(spec).fields("heads_per_kv", "len_q", "len_k", ROWS)]
    layout = layout_of(spec, fields, lists=tiles is None)
    context = _keys_context(spec, plan, layout, deterministic) | {
        "mask_alone": _mask_alone(spec, exact),
        "deterministic": exact,
        "dq_apart": True,
        "rotates_start": rotates,
        "splits_tiles": False,
        "exchanged": exchanged(spec),
    }
    grid = partial(batch_of(spec).key_grid, plan.tile_k)

    def values(sizes: Sizes) -> dict[str, Any]:
        return row_values(rows, sizes) | ({"tiles_k": grid(sizes)[0]} if rotates else {})

    launch: dict[str, Any] = {"values": values, "reads": "queries" if tiles is None else None, "grid": grid}
    launch["boxes"] = _boxes(spec, plan)
    widths = dict.fromkeys((padded(spec.head_dim), padded(spec.value_dim)))
    primitives = {"shared_forms": [(plan.tile_q, "false")], "register_forms": [(width, "true") for width in widths]}
    rendering = Rendering(template=_WIDE_DKDV, primitives=primitives, optional=_OPTIONAL)
    block = Block(plan.threads, plan.shared_memory(spec))
    return backward_kernel("dkdv", spec, target, layout, context, block, launch, rendering)


def _dq(
    spec: AttentionSpec, target: Target, plan: HopperQueriesPlan, rows: Rows, deterministic: bool, multiple: int
) -> RenderedKernel:
    """Returns the kernel that computes dQ.

    Args:
        deterministic: the kernel is used in the deterministic mode only.
        multiple: the multiple of rows to which LSE and D are padded.
    """
    tiles = key_range(spec.mask.expression)
    fields = [Field("TensorMap", f"{name}_map") for name in ("q", "k", "v", "d_o")] + _stored_gradients(spec, "dq")
    fields += [LSE_AND_D, *batch_of(spec).fields("len_q", "len_k", ROWS)]
    fields.append(Field("unsigned", "kv_reciprocal", comment="2^31 / (query heads per KV head), rounded up"))
    layout = layout_of(spec, fields, lists=tiles is None)
    context = {
        "plan": plan,
        "mask_alone": _mask_alone(spec, deterministic),
        "deterministic": deterministic,
        "dq_apart": True,
        "divides_columns": divides_tiles(spec, plan.tile_k),
        "gradient": score_gradient(spec, with_gathers=False),
        "gathers": (),
        "takes_two_steps": not spec.dropout and not has_slope(spec),
        "head_panel": plan.head_panel(spec),
        "value_panel": panel_columns(spec.value_dim, spec.element),
        "suffix": suffix_of(spec),
        "key_tiles": visited_tiles(spec, tiles, "BackwardDqArguments"),
        "longest_first": longest_last(tiles),
        "map_rows": MAP_ROWS,
    }
    context |= varlen_context(spec, "BackwardDqArguments", layout, multiple, "kTileQ")
    launch: dict[str, Any] = {"values": partial(row_values, rows), "reads": "keys" if tiles is None else None}
    launch["grid"] = partial(batch_of(spec).query_grid, plan.tile_q)
    head, value = plan.head_panel(spec), panel_columns(spec.value_dim, spec.element)
    boxes = {"q": (head, _PART_ROWS), "k": (head, plan.tile_k), "v": (value, plan.tile_k)}
    stored = {} if spec.grad_dtype else {"dq": (head, _WARP_ROWS)}
    launch["boxes"] = boxes | {"d_o": (value, _PART_ROWS)} | stored
    primitives = {"shared_forms": [(plan.tile_k, "false")], "register_forms": [(padded(spec.head_dim), "true")]}
    rendering = Rendering(template=_DQ, primitives=primitives, optional=_OPTIONAL)
    block = Block(plan.threads, plan.shared_memory(spec))
    return backward_kernel("dq", spec, target, layout, context, block, launch, rendering)


def _stored_gradients(spec: AttentionSpec, *names: str) -> list[Field]:
    """Returns the members by which a kernel stores gradients: tensor maps, or pointers to float32.

    wgmma leaves 8 columns of a row to four lanes. In float32 they fill a sector of 32 bytes, so TMA is not needed.
    """
    if spec.grad_dtype:
        return [gradient_field(spec, name) for name in names] + strides(*names)
    return [Field("TensorMap", f"{name}_map") for name in names]


def _boxes(spec: AttentionSpec, plan: HopperPlans, stored: bool = True) -> dict[str, tuple[int, ...]]:
    """Returns the TMA boxes, as (columns, rows).

    A box has the queries of an iteration for q and d_o, the keys of a CTA for k and v, a warp's rows for dk and dv.
    stored: whether this kernel stores dK and dV.
    """
    head, value = plan.head_panel(spec), panel_columns(spec.value_dim, spec.element)
    rows = {"q": plan.tile_q, "k": plan.tile_k, "v": plan.tile_k, "d_o": plan.tile_q}
    if stored and not spec.grad_dtype:
        rows |= {"dk": _WARP_ROWS, "dv": _WARP_ROWS}
    return {name: (value if name in ("v", "d_o", "dv") else head, count) for name, count in rows.items()}
