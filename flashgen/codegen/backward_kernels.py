"""Kernels of the backward pass that all families share, which run before and after the main kernels.

P is recomputed from Q, K and the LSE, tile by tile: FlashAttention's algorithm 4 (Dao et al. 2022), with the loops in
the order of FlashAttention-2 (Dao 2023, algorithm 2). With dS = P * (dP - D), D = rowsum(dO * O), the roles are:

    prepare   preprocess: the base-2 LSE and D of each row; zeroes the dQ accumulator, or its semaphores
    keys      bwd_dkdv: a block loops over the queries of a tile of keys: dV = P^T dO, dK = dS^T Q, and its addends of
              dQ = dS K, which Hopper's kernel may also convert to dQ itself
    finish    postprocess: converts the float32 dQ accumulator to dQ; finish_dk and finish_dv convert dK and dV if each
              query head has its own CTA
    sink      the gradient of the sinks from the row statistics, if the spec asks for it
    queries   bwd_dq: in place of the accumulator and `finish` if gradients must not depend on the order of additions; a
              block loops over the keys of a tile of queries, and recomputes S and dP for dQ alone
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol

import sympy

from flashgen.codegen.arguments import (
    ELEMENT_TYPES,
    ArgumentLayout,
    Field,
    capture_fields,
    capture_gradient,
    member_name,
    ordered,
    summed_gradient,
)
from flashgen.codegen.assembly import assemble, common_context
from flashgen.codegen.costs import backward_cost
from flashgen.codegen.header import backward_header
from flashgen.codegen.ragged import sequences_text, slots, varlen_fields
from flashgen.codegen.rendered_kernel import Grid, RenderedKernel, Workspace, entry_name, kernel_name
from flashgen.codegen.shared_memory import NO_SHARED_MEMORY, SharedMemoryLayout, slot_per_warp
from flashgen.codegen.sizes import Sizes, ceil_div
from flashgen.codegen.targets import Target
from flashgen.codegen.tiling import WARP
from flashgen.codegen.variant import Variant, variant_of
from flashgen.language.operations import Capture
from flashgen.language.spec import AttentionSpec
from flashgen.language.well_formed import FLOAT32_MAX

_NOTHING_READ = Variant(None, None, ())
_NO_LSE = FLOAT32_MAX  # the LSE in the statistics of a row without allowed scores
_PREPROCESS_THREADS, PREPROCESS_ROWS = 256, 64
_POSTPROCESS_THREADS = 256
_CAPTURE_THREADS = 256
_SINK_THREADS = 1024
_ROUNDS = {"float16": "pack_f16", "bfloat16": "pack_bf16"}
EXACT_LIMBS = 10
"""int64 values of the exact sum of one element's gradient in deterministic mode (device function `add_exactly`)."""


class KeysPlan(Protocol):
    """The members of the main kernel's plan that the kernels before and after it use."""

    @property
    def tile_q(self) -> int: ...

    def summary(self, shared_bytes: int) -> str: ...

    def head_columns(self, spec: AttentionSpec) -> int:
        """Returns the columns of a row of the dQ accumulator: head_dim, rounded up."""

    def gradient_warps(self, spec: AttentionSpec) -> tuple[int, int]:
        """Returns the number of warps along the rows and along the columns of a dQ tile."""


Rows = Callable[[Sizes], Any]
"""Rows of the workspaces: queries, rounded up so that kernels need not check for the end of the rows."""


def _rows(multiple: int, sizes: Sizes) -> Any:
    return ceil_div(sizes.len_q, multiple) * multiple


def rows_of(multiple: int, varlen: bool = False) -> Rows:
    """Returns the function that rounds queries up to a multiple of both `multiple` and the rows of a preprocess block.

    In a varlen batch the rows are those of all sequences together, each of which is rounded up.
    """
    return partial(_varlen_rows if varlen else _rows, row_multiple(multiple))


def row_multiple(multiple: int) -> int:
    """Returns the number to whose multiples `rows_of` rounds."""
    return math.lcm(multiple, PREPROCESS_ROWS)


def _varlen_rows(multiple: int, sizes: Sizes) -> Any:
    return slots(sizes.total_q, sizes, multiple) * multiple


def varlen_context(
    spec: AttentionSpec,
    struct: str,
    layout: ArgumentLayout,
    multiple: int,
    slot: str,
    of_keys: bool = False,
    moves_rows: bool = True,
) -> dict[str, Any]:
    """Returns the template context for varlen batches; empty if the layout is not varlen.

    Args:
        multiple: As for `rows_of`.
        slot: Name of the constant with the rows of a tile slot.
        of_keys, moves_rows: As for `sequences_text`.
    """
    if not spec.is_ragged:
        return {}
    text = sequences_text(struct, layout, slot, of_keys, "kRowMultiple", moves_rows)
    return {"row_multiple": row_multiple(multiple), "sequences": text}


def strides(*names: str) -> list[Field]:
    """Returns the stride members of arrays."""
    return [Field("Strides", f"{name}_strides") for name in names]


def numbers(*names: str) -> list[Field]:
    """Returns int members."""
    return [Field("int", name) for name in names]


def rows_shape(spec: AttentionSpec, rows: Rows, *columns: int) -> Callable[[Sizes], tuple[int, ...]]:
    """Returns the shape of a workspace with `rows` rows of `columns` for every query head."""
    if spec.is_ragged:
        return lambda sizes: (sizes.heads_q, rows(sizes), *columns)
    return lambda sizes: (sizes.batch, sizes.heads_q, rows(sizes), *columns)


def _with_varlen_comments(layout: ArgumentLayout) -> ArgumentLayout:
    """Returns the layout with comments that give the shapes in a varlen batch."""
    comments = {
        "statistics": "(heads_q, rows, 2): LSE to the base 2, and D",
        "dq_accum": "(heads_q, rows, padded head_dim), in the order of the fragments",
        "rows": "rows of all sequences, each rounded up",
    }
    return ArgumentLayout(
        tuple(replace(field, comment=comments.get(field.name, field.comment)) for field in layout.fields)
    )


STATISTICS = Field("const float*", "statistics", comment="(batch, heads_q, rows, 2): LSE to the base 2, and D")
DQ_ACCUM = Field("float*", "dq_accum", comment="(batch, heads_q, rows, padded head_dim), in the order of the fragments")
DQ_SEMAPHORE = Field("unsigned*", "dq_semaphore", comment="(batch, heads_q, rows / tile): the next CTA to add")
DQ_NEXT = Field("unsigned*", "dq_next", comment="(1): the next rows of dq to convert")
DQ_ADDED = Field("unsigned*", "dq_added", comment="(batch, heads_q): CTAs that have added all of their dQ")
PART_TURNS = Field("unsigned*", "part_turns", comment="(split key tile, warp): the split that adds next")
ROWS = Field("int", "rows", comment="len_q, rounded up")
KEYS = Field("int", "keys", comment="len_k, rounded up")


def preprocess(
    spec: AttentionSpec,
    target: Target,
    plan: KeysPlan,
    rows: Rows,
    deterministic: bool,
    dq_apart: bool,
    first_stores: bool = False,
    finishes: bool = False,
    turns: Rows | None = None,
) -> RenderedKernel:
    """Renders the preprocess kernel: computes the row statistics and zeroes the dQ accumulator or its semaphores.

    Args:
        deterministic: Whether the kernel is used in deterministic mode only.
        dq_apart: Whether a kernel of its own computes dQ, so that there is no accumulator.
        first_stores: Whether the first CTA to reach a dQ tile stores instead of accumulating, so that only the
            semaphores need zeroing.
        finishes: Whether the main kernel converts the dQ of a head once all CTAs have added to it.
        turns: Returns the number of semaphores for key tiles that are split over CTAs; None without split tiles.
    """
    fields = [Field("const Element*", "o"), Field("const Element*", "d_o"), Field("const float*", "lse")]
    fields += [Field("const float*", "d_lse", comment="or null"), Field("float*", "statistics")]
    counts = (DQ_SEMAPHORE, DQ_ADDED, DQ_NEXT) if finishes else (DQ_SEMAPHORE,)
    fields += () if dq_apart else counts if first_stores else (DQ_ACCUM,)
    fields += [PART_TURNS, Field("int", "turns", comment="elements of part_turns")] if turns else []
    fields += [*strides("o", "d_o"), *(() if spec.is_ragged else numbers("heads_q")), *numbers("len_q"), ROWS]
    layout = ordered([*fields, *(varlen_fields(keys=False) if spec.is_ragged else ())])
    lanes = max(1 << (spec.value_dim // 8 - 1).bit_length(), _PREPROCESS_THREADS // PREPROCESS_ROWS)
    context: dict[str, Any] = {
        "threads": _PREPROCESS_THREADS,
        "rows": PREPROCESS_ROWS,
        "lanes": lanes,
        "deterministic": deterministic,
        "dq_apart": dq_apart or first_stores,
        "first_stores": first_stores,
        "finishes": finishes,
        "turns": turns is not None,
        "tile": plan.tile_q,
    }
    context |= varlen_context(spec, "BackwardPreprocessArguments", layout, plan.tile_q, "kRowMultiple")
    memory = [Workspace("statistics", rows_shape(spec, rows, 2), "float32")]
    if not dq_apart:
        columns = context["head_padded"] = plan.head_columns(spec)
        memory.append(Workspace("dq_accum", rows_shape(spec, rows, columns), "float32"))
    if first_stores:
        memory.append(Workspace("dq_semaphore", rows_shape(spec, lambda sizes: rows(sizes) // plan.tile_q), "int32"))
    if finishes:
        memory.append(Workspace("dq_added", lambda sizes: (sizes.batch, sizes.heads_q), "int32"))
        memory.append(Workspace("dq_next", lambda sizes: (1,), "int32"))
    values: Callable[[Sizes], dict[str, Any]] = partial(row_values, rows)
    if turns:
        memory.append(Workspace("part_turns", lambda sizes: (turns(sizes),), "int32", wanted=lambda it: turns(it) > 0))
        values = lambda sizes: row_values(rows, sizes) | {"turns": turns(sizes)}
    launch = {"grid": partial(_blocks_of_rows, spec, rows, PREPROCESS_ROWS), "values": values}
    threads, shared = _PREPROCESS_THREADS, NO_SHARED_MEMORY
    kernel = backward_kernel("preprocess", spec, target, layout, context, threads, shared, launch, plain=True)
    return replace(kernel, plan=plan, workspaces=tuple(memory))


def _blocks_of_rows(spec: AttentionSpec, rows: Rows, rows_per_block: int, sizes: Sizes) -> Grid:
    return rows(sizes) // rows_per_block, sizes.heads_q, 1 if spec.is_ragged else sizes.batch


def row_values(rows: Rows, sizes: Sizes) -> dict[str, Any]:
    """Returns the struct member that holds the rows of the workspaces."""
    return {"rows": rows(sizes)}


def postprocess_dq(
    spec: AttentionSpec, target: Target, plan: KeysPlan, rows: Rows, first_stores: bool = False
) -> RenderedKernel:
    """Renders the postprocess kernel of dQ, which converts its accumulator. first_stores: As for `preprocess`."""
    fields = [
        Field("const float*", "dq_accum"),
        *([DQ_SEMAPHORE] if first_stores else []),
        STATISTICS,
        Field("Element*", "dq"),
        *strides("dq"),
        *numbers("len_q"),
    ]
    layout = ordered([*fields, ROWS, *(varlen_fields(keys=False) if spec.is_ragged else ())])
    context: dict[str, Any] = {
        "plan": plan,
        "gradient_of": "q",
        "accumulator": "dq_accum",
        "dim": spec.head_dim,
        "padded_dim": plan.head_columns(spec),
        "tile": plan.tile_q,
        "warps": plan.gradient_warps(spec),
        "factor": spec.scale,
        "first_stores": first_stores,
    }
    context |= varlen_context(spec, "BackwardPostprocessArguments", layout, plan.tile_q, "kRowMultiple")
    launch = {"grid": partial(_blocks_of_rows, spec, rows, plan.tile_q), "values": partial(row_values, rows)}
    return _postprocess("", spec, target, layout, context, launch)


def postprocess_dkv(
    spec: AttentionSpec, target: Target, plan: Any, of: Literal["k", "v"], columns: int, keys: Rows
) -> RenderedKernel:
    """Renders the postprocess kernel of dK or dV, which converts the sums over the query heads of a KV head.

    A warp converts 16 keys. The sums have `keys` rows of `columns`.
    """
    fields = [Field("const float*", f"d{of}_sums"), Field("Element*", f"d{of}"), *strides(f"d{of}"), *numbers("len_k")]
    context: dict[str, Any] = {
        "plan": plan,
        "gradient_of": of,
        "accumulator": f"d{of}_sums",
        "dim": spec.head_dim if of == "k" else spec.value_dim,
        "padded_dim": columns,
        "tile": plan.tile_k,
        "warps": (plan.tile_k // 16, 1),
        "factor": spec.scale if of == "k" else 256 / spec.keep_threshold,
        "first_stores": False,
    }
    launch = {
        "grid": lambda sizes: (keys(sizes) // plan.tile_k, sizes.heads_kv, sizes.batch),
        "values": lambda sizes: {"keys": keys(sizes)},
    }
    return _postprocess(f"d{of}", spec, target, ordered([*fields, KEYS]), context, launch)


def _postprocess(
    of: str,
    spec: AttentionSpec,
    target: Target,
    layout: ArgumentLayout,
    context: dict[str, Any],
    launch: dict[str, Any],
) -> RenderedKernel:
    context |= {
        "threads": _POSTPROCESS_THREADS,
        "deterministic": False,
        "dq_apart": False,
        "head_padded": context["padded_dim"],
        "vector_reductions": target.vector_reductions,
    }
    threads, shared = _POSTPROCESS_THREADS, NO_SHARED_MEMORY
    return backward_kernel("postprocess", spec, target, layout, context, threads, shared, launch, plain=True, of=of)


def capture_sums(spec: AttentionSpec, target: Target, deterministic: bool) -> tuple[RenderedKernel, ...]:
    """Renders a kernel per captured array that converts sums to its gradient; float32 sums of float32 need none."""
    learned = [capture for capture in spec.captures if capture.grad and capture != spec.sink]
    summed = [capture for capture in learned if deterministic or capture.dtype != "float32"]
    return tuple(_capture(spec, target, capture, deterministic) for capture in summed)


def sink_sums(spec: AttentionSpec, target: Target, rows: Rows) -> tuple[RenderedKernel, ...]:
    """Renders the kernel of the sinks' gradient; none if the spec does not ask for it. It is always deterministic."""
    capture = spec.sink
    if capture is None or not capture.grad:
        return ()
    gradient = Field(f"{ELEMENT_TYPES[capture.dtype]}*", "gradient", comment=f"of {capture.name}, {capture.dtype}")
    sizes = [] if spec.is_ragged else numbers("batch", "heads_q")
    layout = ordered([STATISTICS, gradient, *sizes, ROWS, *capture_fields((capture,))])
    context: dict[str, Any] = {"deterministic": False, "threads": _SINK_THREADS}
    context |= {"sink": f"load_{capture.name}", "round": _ROUNDS.get(capture.dtype)}
    launch: dict[str, Any] = {
        "grid": lambda sizes: (sizes.heads_q, 1, 1),
        "values": partial(row_values, rows),
        "pointers": {
            "statistics": "statistics",
            "gradient": capture_gradient(capture),
            member_name(capture): member_name(capture),
        },
    }
    shared = slot_per_warp("sums of warps", _SINK_THREADS // WARP)
    arrays = replace(variant_of(spec, score=False, sink=True), mask=None)
    arrays = replace(arrays, arrays=tuple(each for each in arrays.arrays if each.name == capture.name))
    return (
        backward_kernel("sink", spec, target, layout, context, _SINK_THREADS, shared, launch, plain=True, reads=arrays),
    )


def _capture(spec: AttentionSpec, target: Target, capture: Capture, deterministic: bool) -> RenderedKernel:
    summed = Field("const long long*" if deterministic else "const float*", "sums")
    gradient = Field(f"{ELEMENT_TYPES[capture.dtype]}*", "gradient", comment=f"of {capture.name}, {capture.dtype}")
    context = {
        "deterministic": deterministic,
        "exact_sums": deterministic,
        "threads": _CAPTURE_THREADS,
        "round": _ROUNDS.get(capture.dtype),
    }
    context["limbs"] = EXACT_LIMBS
    layout = ordered([summed, gradient, Field("long long", "count")])
    sums = summed_gradient(capture)
    dtype, limbs = ("int64", (EXACT_LIMBS,)) if deterministic else ("float32", ())
    launch: dict[str, Any] = {
        "grid": lambda sizes: (ceil_div(sizes.count, _CAPTURE_THREADS), 1, 1),
        "workspaces": (Workspace(sums, lambda sizes: limbs, dtype, zeroed=True, of_capture=capture.name),),
        "pointers": {"sums": sums, "gradient": capture_gradient(capture)},
    }
    return backward_kernel(
        "capture",
        spec,
        target,
        layout,
        context,
        _CAPTURE_THREADS,
        NO_SHARED_MEMORY,
        launch,
        plain=True,
        of=capture.name,
    )


def is_masked(spec: AttentionSpec) -> bool:
    """Whether a spec has a mask."""
    return bool(spec.mask.expression != sympy.true)


def backward_kernel(
    part: str,
    spec: AttentionSpec,
    target: Target,
    layout: ArgumentLayout,
    context: dict[str, Any],
    threads: int,
    shared: SharedMemoryLayout,
    launch: Mapping[str, Any],
    plain: bool = False,
    of: str = "",
    template: str = "",
    primitives: Mapping[str, Any] | None = None,
    optional: tuple[str, ...] = (),
    reads: Variant = _NOTHING_READ,
) -> RenderedKernel:
    """Renders a backward kernel.

    Args:
        part: Role of the kernel, and name of its template in templates/backward/.
        launch: The fields of `RenderedKernel` about its launch.
        plain: Whether its text is without the mask and the score function.
        of: The capture, or the gradient, that it is for.
        template: Path of its template, if that belongs to a family.
        primitives: Sizes for which the size-dependent primitives (wgmma) are written out.
        optional: Members that are left out of the struct if the text does not read them.
        reads: The texts of the variant that a plain kernel contains nevertheless.
    """
    layout = _with_varlen_comments(layout) if spec.is_ragged else layout
    struct, entry = f"Backward{part.title()}Arguments", entry_name(f"attention_backward_{part}{of and f'_{of}'}", spec)
    shown = (f"postprocess_{of}" if part == "postprocess" else f"d_{of}") if of else part
    plan, dq_apart = context.get("plan"), context.get("dq_apart", False)
    finishes = part == "dkdv" and context.get("converts_dq", False)
    exact_sums, columns = context.get("exact_sums", False), context.get("head_padded", 0)
    cost = backward_cost(shown, spec, dq_apart, exact_sums, columns, finishes)
    facts = (shared.total_bytes, cost, context["deterministic"], dq_apart, finishes)
    header = backward_header(shown, spec, target, plan, *facts)
    variant = reads if plain else variant_of(spec)

    def render_source(layout: ArgumentLayout) -> str:
        full = common_context(spec, target, variant, struct, layout, context.get("gradient")) | {"no_lse": _NO_LSE}
        full |= {
            "memory": shared,
            "layouts": {"shared_constants": shared},
            "mask_alone": is_masked(spec),
            "alike": None,
        }
        full |= context | {"entry": entry, "header": header}
        return assemble(template or f"backward/{part}.cu.jinja", full, target, primitives)

    source = render_source(layout)
    unread = [name for name in optional if f"arguments.{name}" not in source]
    if unread:
        layout = ArgumentLayout(tuple(field for field in layout.fields if field.name not in unread))
        source = render_source(layout)
    name = kernel_name(f"bwd-{part}{of and f'-{of}'}", target, spec)
    return RenderedKernel(
        name, entry, source, target, layout, threads, shared, plan=plan, role=shown, cost=cost, **launch
    )
