"""The backward kernels that all families share, preprocess and postprocess, and what the others have in common.

P is recomputed from Q, K and the LSE, tile by tile: FlashAttention's algorithm 4 (Dao et al. 2022), with the loops in
the order of FlashAttention-2 (Dao 2023, algorithm 2). With dS = P * (dP - D), D = rowsum(dO * O), the kernels are:

    preprocess    the base-2 LSE and D of each row; zeroes the dQ accumulator, or the states of its tiles
    dkdv          a block loops over the queries of a tile of keys: dV = P^T dO, dK = dS^T Q, and its addends of
                  dQ = dS K, which Hopper's kernel may also convert to dQ itself
    postprocess   converts the float32 dQ accumulator to dQ; postprocess_dk and postprocess_dv convert dK and dV if each
                  query head has its own CTA
    dq            in place of the accumulator and postprocess if gradients must not depend on the order of additions; a
                  block loops over the keys of a tile of queries, and recomputes S and dP for dQ alone

The families render dkdv and dq by `backward_kernel`. capture_gradient_kernels.py renders the gradients of sinks and of
captured arrays: a kernel dense_<name> computes that of an array by query and key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

from flashgen.codegen.arguments import (
    ArgumentLayout,
    Field,
    gradient_field,
    ordered,
    output_field,
)
from flashgen.codegen.assembly import assemble, common_context, is_masked
from flashgen.codegen.batches import batch_of, describe_maps
from flashgen.codegen.costs import backward_cost
from flashgen.codegen.header import backward_header
from flashgen.codegen.padding import WARP
from flashgen.codegen.rendered_kernel import RenderedKernel, Workspace, entry_name, kernel_name
from flashgen.codegen.shared_memory import NO_SHARED_MEMORY, SharedMemoryLayout
from flashgen.codegen.sizes import Grid, Sizes
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import Variant, variant_of
from flashgen.language.spec import AttentionSpec
from flashgen.language.well_formed import FLOAT32_MAX

NO_VARIANT = Variant(None, None, ())
"""The variant of kernels whose text contains neither the mask, nor the score function, nor captured arrays."""
_NO_LSE = FLOAT32_MAX  # the LSE of a row without allowed scores
_PREPROCESS_THREADS, PREPROCESS_ROWS = 256, 64
_POSTPROCESS_THREADS = 256
EXACT_LIMBS = 10
"""int64 values of the exact sum of one element's gradient in deterministic mode (device function `add_exactly`)."""


class DkdvPlan(Protocol):
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


def rows_of(spec: AttentionSpec, multiple: int) -> Rows:
    """Returns the function that rounds queries up to a multiple of both `multiple` and the rows of a preprocess block.

    In a varlen batch the rows are those of all sequences together, each of which is rounded up.
    """
    return partial(batch_of(spec).padded_rows, row_multiple(multiple))


def row_multiple(multiple: int) -> int:
    """Returns the number to whose multiples `rows_of` rounds."""
    return math.lcm(multiple, PREPROCESS_ROWS)


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
    options = {"of_keys": of_keys, "row_multiple": "kRowMultiple", "moves_rows": moves_rows}
    return batch_of(spec).sequences(struct, layout, slot, **options) | {"row_multiple": row_multiple(multiple)}


def strides(*names: str) -> list[Field]:
    """Returns the stride members of arrays."""
    return [Field("Strides", f"{name}_strides") for name in names]


def numbers(*names: str) -> list[Field]:
    """Returns int members."""
    return [Field("int", name) for name in names]


def rows_shape(spec: AttentionSpec, rows: Rows, *columns: int) -> Callable[[Sizes], tuple[int, ...]]:
    """Returns the shape of a workspace with `rows` rows of `columns` for every query head."""
    batch = batch_of(spec)
    return lambda sizes: batch.workspace_shape(sizes, rows(sizes), *columns)


LSE_AND_D = Field("const float*", "lse_and_d", comment="(batch, heads_q, rows, 2): base-2 LSE, and D = rowsum(dO * O)")
DQ_ACCUM = Field("float*", "dq_accum", comment="(batch, heads_q, rows, padded head_dim), in fragment order")
_STATES = "(batch, heads_q, rows / tile): 0 until a CTA adds to the dQ tile; accumulate_dq explains the states"
DQ_TILE_STATE = Field("unsigned*", "dq_tile_state", comment=_STATES)
DQ_NEXT = Field("unsigned*", "dq_next", comment="(1): the next group of dQ rows to convert; 0 before a launch")
DQ_ADDED = Field(
    "unsigned*", "dq_added", comment="(batch, heads): work tiles whose dQ has been added; 0 before a launch"
)
PART_SEMAPHORE = Field("unsigned*", "part_semaphore", comment="(split key tile, warp): the split that adds next")
ROWS = Field("int", "rows", comment="len_q, rounded up to whole tiles (seqlen_q_rounded of FlashAttention)")
KEYS = Field("int", "keys", comment="len_k, rounded up to whole tiles")


@dataclass(frozen=True)
class DqAccumulation:
    """How a backward pass computes dQ.

    Attributes:
        apart: Whether a kernel of its own computes dQ, so that there is no accumulator.
        first_stores: Whether the first CTA to reach a dQ tile stores instead of accumulating, so that only the
            tile states need zeroing.
        converted: Whether the main kernel converts the dQ of a head once all CTAs have added to it.
        part_semaphores: Returns the number of semaphores for key tiles that are split over CTAs; None without split
            tiles.
    """

    apart: bool
    first_stores: bool = False
    converted: bool = False
    part_semaphores: Rows | None = None

    def fields(self) -> list[Field]:
        """Returns the members by which the preprocess kernel initialises the accumulator and its tile states."""
        fields = [DQ_ACCUM]
        if self.apart or self.first_stores:
            fields = [] if self.apart else [DQ_TILE_STATE, *((DQ_ADDED, DQ_NEXT) if self.converted else ())]
        if self.part_semaphores:
            fields += [PART_SEMAPHORE, Field("int", "part_semaphores", comment="elements of part_semaphore")]
        return fields

    def workspaces(self, spec: AttentionSpec, plan: DkdvPlan, rows: Rows) -> list[Workspace]:
        """Returns the accumulator, the states of its tiles and the semaphores of split key tiles."""
        memory = []
        if not self.apart:
            memory.append(Workspace("dq_accum", rows_shape(spec, rows, plan.head_columns(spec)), "float32"))
        if self.first_stores:
            shape = rows_shape(spec, lambda sizes: rows(sizes) // plan.tile_q)
            memory.append(Workspace("dq_tile_state", shape, "int32"))
        if self.converted:
            memory.append(Workspace("dq_added", lambda sizes: (sizes.batch, sizes.heads_q), "int32"))
            memory.append(Workspace("dq_next", lambda sizes: (1,), "int32"))
        if number := self.part_semaphores:
            shape = lambda sizes: (number(sizes),)
            memory.append(Workspace("part_semaphore", shape, "int32", wanted=number))
        return memory

    def values(self, sizes: Sizes) -> dict[str, Any]:
        """Returns the member that holds the number of semaphores of split key tiles, if there are any."""
        return {"part_semaphores": self.part_semaphores(sizes)} if self.part_semaphores else {}


def preprocess(
    spec: AttentionSpec, target: Target, plan: DkdvPlan, rows: Rows, deterministic: bool, dq: DqAccumulation
) -> RenderedKernel:
    """Renders the preprocess kernel: computes LSE and D, and zeroes the dQ accumulator or its tile states.

    deterministic: Whether the kernel is used in deterministic mode only.
    """
    o = output_field(spec)
    fields = [replace(o, type=f"const {o.type}"), Field("const Element*", "d_o"), Field("const float*", "lse")]
    fields += [Field("const float*", "d_lse", comment="gradient of the LSE, or null")]
    fields += [Field("float*", "lse_and_d"), *dq.fields()]
    layout = ordered([*fields, *strides("o", "d_o"), *batch_of(spec).fields("len_q", ROWS, keys=False)])
    chunks = -(-spec.value_dim // 8)
    lanes = min(max(1 << (chunks - 1).bit_length(), _PREPROCESS_THREADS // PREPROCESS_ROWS), WARP)
    context: dict[str, Any] = {
        "threads": _PREPROCESS_THREADS,
        "rows": PREPROCESS_ROWS,
        "lanes": lanes,
        "chunks": -(-chunks // lanes),
        "deterministic": deterministic,
        "dq_apart": dq.apart or dq.first_stores,
        "zeroes_accum": not (dq.apart or dq.first_stores),
        "tile_states": dq.first_stores,
        "converts_dq": dq.converted,
        "splits": dq.part_semaphores is not None,
        "tile": plan.tile_q,
    }
    if not dq.apart:
        context["head_padded"] = plan.head_columns(spec)
    context |= varlen_context(spec, "BackwardPreprocessArguments", layout, plan.tile_q, "kRowMultiple")
    launch = {
        "grid": partial(_blocks_of_rows, spec, rows, PREPROCESS_ROWS),
        "values": lambda sizes: row_values(rows, sizes) | dq.values(sizes),
    }
    block = Block(_PREPROCESS_THREADS)
    kernel = backward_kernel("preprocess", spec, target, layout, context, block, launch, Rendering(NO_VARIANT))
    lse_and_d = Workspace("lse_and_d", rows_shape(spec, rows, 2), "float32")
    return replace(kernel, plan=plan, workspaces=(lse_and_d, *dq.workspaces(spec, plan, rows)))


def _blocks_of_rows(spec: AttentionSpec, rows: Rows, rows_per_block: int, sizes: Sizes) -> Grid:
    return rows(sizes) // rows_per_block, sizes.heads_q, batch_of(spec).outer(sizes)


def row_values(rows: Rows, sizes: Sizes) -> dict[str, Any]:
    """Returns the struct member that holds the rows of the workspaces."""
    return {"rows": rows(sizes)}


def postprocess_dq(
    spec: AttentionSpec, target: Target, plan: DkdvPlan, rows: Rows, first_stores: bool = False
) -> RenderedKernel:
    """Renders the postprocess kernel of dQ, which converts its accumulator. first_stores: As in `DqAccumulation`."""
    fields = [
        Field("const float*", "dq_accum"),
        *([DQ_TILE_STATE] if first_stores else []),
        LSE_AND_D,
        gradient_field(spec, "dq"),
        *strides("dq"),
        *numbers("len_q"),
    ]
    layout = ordered([*fields, ROWS, *batch_of(spec).search_fields(keys=False)])
    context: dict[str, Any] = {
        "plan": plan,
        "gradient_of": "q",
        "accumulator": "dq_accum",
        "dim": spec.head_dim,
        "padded_dim": plan.head_columns(spec),
        "tile": plan.tile_q,
        "warps": plan.gradient_warps(spec),
        "factor": spec.scale,
        "tile_states": first_stores,
    }
    context |= varlen_context(spec, "BackwardPostprocessArguments", layout, plan.tile_q, "kRowMultiple")
    launch = {"grid": partial(_blocks_of_rows, spec, rows, plan.tile_q), "values": partial(row_values, rows)}
    return _postprocess("", spec, target, layout, context, launch)


def postprocess_dkv(
    spec: AttentionSpec, target: Target, plan: Any, array: Literal["k", "v"], columns: int, keys: Rows
) -> RenderedKernel:
    """Renders the postprocess kernel of dK or dV, which converts the sums over the query heads of a KV head.

    A warp converts 16 keys. The sums have `keys` rows of `columns`.
    """
    name = f"d{array}"
    fields = [Field("const float*", f"{name}_sums"), gradient_field(spec, name), *strides(name)]
    fields += [*numbers("len_k"), KEYS]
    context: dict[str, Any] = {
        "plan": plan,
        "gradient_of": array,
        "accumulator": f"{name}_sums",
        "dim": spec.head_dim if array == "k" else spec.value_dim,
        "padded_dim": columns,
        "tile": plan.tile_k,
        "warps": (plan.tile_k // 16, 1),
        "factor": spec.scale if array == "k" else 256 / spec.keep_threshold,
        "tile_states": False,
    }
    launch = {
        "grid": lambda sizes: (keys(sizes) // plan.tile_k, sizes.heads_kv, sizes.batch),
        "values": lambda sizes: {"keys": keys(sizes)},
    }
    return _postprocess(name, spec, target, ordered(fields), context, launch)


def _postprocess(
    suffix: str,
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
    block, rendering = Block(_POSTPROCESS_THREADS), Rendering(NO_VARIANT, suffix=suffix)
    return backward_kernel("postprocess", spec, target, layout, context, block, launch, rendering)


@dataclass(frozen=True)
class Block:
    """The threads and the shared memory of a thread block."""

    threads: int
    shared: SharedMemoryLayout = NO_SHARED_MEMORY


@dataclass(frozen=True)
class Rendering:
    """How the text of a backward kernel is rendered.

    Attributes:
        variant: The mask, the score function and the arrays that the text contains; None for all of the spec's.
        suffix: The gradient or the captured array that a kernel of several per role is for.
        template: Path of the template; "" for the one of the role in templates/backward/.
        primitives: Sizes for which the size-dependent primitives (wgmma) are written out.
        optional: Members that are left out of the struct if the text does not read them.
    """

    variant: Variant | None = None
    suffix: str = ""
    template: str = ""
    primitives: Mapping[str, Any] = field(default_factory=dict)
    optional: tuple[str, ...] = ()


def backward_kernel(
    part: str,
    spec: AttentionSpec,
    target: Target,
    layout: ArgumentLayout,
    context: dict[str, Any],
    block: Block,
    launch: Mapping[str, Any],
    rendering: Rendering,
) -> RenderedKernel:
    """Renders a backward kernel. part: Its role. launch: The fields of `RenderedKernel` about its launch."""
    layout = describe_maps(spec, batch_of(spec).describe(layout), launch.get("boxes", {}))
    suffix, shared, variant = rendering.suffix, block.shared, rendering.variant or variant_of(spec)
    struct = f"Backward{part.title()}Arguments"
    entry = entry_name(f"attention_backward_{part}{suffix and f'_{suffix}'}", spec)
    role = f"{'d' if part == 'capture' else part}_{suffix}" if suffix else part
    plan, dq_apart = context.get("plan"), context.get("dq_apart", False)
    finishes = part == "dkdv" and context.get("converts_dq", False)
    exact_sums, columns = context.get("exact_sums", False), context.get("head_padded", 0)
    cost = backward_cost(role, spec, dq_apart, exact_sums, columns, finishes, dense=part == "dense")
    facts = (shared.total_bytes, cost, context["deterministic"], dq_apart, finishes)
    header = backward_header(role, spec, target, plan, *facts)

    def render_source(layout: ArgumentLayout) -> str:
        full = common_context(spec, target, variant, struct, layout, context.get("gradient")) | {"no_lse": _NO_LSE}
        full |= {
            "memory": shared,
            "layouts": {"shared_constants": shared},
            "mask_alone": is_masked(spec),
            "uniform": None,
            "pair_elements": (),
        }
        full |= context | {"entry": entry, "header": header}
        return assemble(rendering.template or f"backward/{part}.cu.jinja", full, target, rendering.primitives)

    source = render_source(layout)
    unread = [name for name in rendering.optional if f"arguments.{name}" not in source]
    if unread:
        layout = ArgumentLayout(tuple(field for field in layout.fields if field.name not in unread))
        source = render_source(layout)
    name = kernel_name(f"bwd-{part}{suffix and f'-{suffix}'}", target, spec)
    return RenderedKernel(
        name, entry, source, target, layout, block.threads, shared, plan=plan, role=role, cost=cost, **launch
    )
