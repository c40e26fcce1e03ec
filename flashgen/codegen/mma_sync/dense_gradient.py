"""The kernel of the gradient of a captured array from which each query and key reads an element of its own.

It recomputes the gradients of the scores tile by tile, sums them over the heads and sequences that read an element, and
stores each element once. So there are neither atomic additions nor sums in global memory, and the result does not
depend on the order in which CTAs run. The kernel uses mma.sync on every target: its products are few.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from flashgen.analysis.closed_forms.tile_ranges import key_range
from flashgen.codegen.arguments import Field, capture_gradient
from flashgen.codegen.assembly import is_masked, visited_tiles
from flashgen.codegen.backward_kernels import (
    LSE_AND_D,
    ROWS,
    Block,
    Rendering,
    Rows,
    backward_kernel,
    numbers,
    row_values,
    strides,
)
from flashgen.codegen.demand import divides_tiles
from flashgen.codegen.expressions.derivative_text import dense_gradient
from flashgen.codegen.expressions.row_elements import element_context, paired_elements
from flashgen.codegen.padding import RESERVED_SHARED, WARP, element_sizes, head_extent, value_extent
from flashgen.codegen.plan import Checked, shared_memory_problem, too_wide
from flashgen.codegen.rendered_kernel import RenderedKernel, Workspace
from flashgen.codegen.shared_memory import FLOAT, Buffer, Extent, SharedMemoryLayout
from flashgen.codegen.sizes import Sizes, ceil_div, maximum, minimum
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import layout_of, with_pairs
from flashgen.dtypes import DTYPES
from flashgen.language.operations import BATCH, HEAD, KEY, QUERY, Capture, Load
from flashgen.language.spec import AttentionSpec

_TEMPLATE = "mma_sync/backward/dense_gradient.cu.jinja"
_AXES = {BATCH: "b", HEAD: "h", QUERY: "q", KEY: "k"}


@dataclass(frozen=True)
class DensePlan(Checked):
    """The plan of the kernel: a CTA has tiles of tile_q x tile_k elements of the array, and each warp some queries.

    Attributes:
        part_k: keys of which a warp computes scores at once.
        blocks: CTAs that fit on an SM at once.
    """

    tile_q: int
    tile_k: int
    warps: int
    part_k: int
    blocks: int = 1
    heads_apart: ClassVar[bool] = False
    persistent: ClassVar[bool] = True

    @property
    def loads_apart(self) -> bool:
        """Whether a quarter of the threads loads each of Q, K, dO and V, which takes few registers."""
        return self.part_k < self.tile_k

    @property
    def threads(self) -> int:
        return self.warps * WARP

    def shared_memory(self, spec: AttentionSpec) -> SharedMemoryLayout:
        """Returns the layout: sums of the edges of the array, and Q, dO, K and V of a head, which sums overlay."""
        element, _ = element_sizes(spec)
        queries, keys = Extent("kTileQ", self.tile_q), Extent("kTileK", self.tile_k)
        pitch = Extent("kPitch", self.tile_k + 8)
        return SharedMemoryLayout(
            (
                Buffer("LastRow", "sums of the last row", (keys,), FLOAT),
                Buffer("LastColumn", "sums of the last column", (queries,), FLOAT),
                Buffer("Query", "Q", (queries, head_extent(spec)), element),
                Buffer("Do", "dO", (queries, value_extent(spec)), element),
                Buffer("Key", "K", (keys, head_extent(spec)), element),
                Buffer("Value", "V", (keys, value_extent(spec)), element),
                Buffer("Sum", "sums of a tile", (queries, pitch), FLOAT, overlays="Query"),
            )
        )

    def summary(self, shared_bytes: int) -> str:
        """Returns the line that the kernel's header has about the plan."""
        return (
            f"{self.tile_q} queries x {self.tile_k} keys, {self.warps} warps, {self.part_k} keys at once, "
            f"{self.blocks} CTA(s) per multiprocessor, {shared_bytes} bytes of shared memory"
        )

    def problem(self, spec: AttentionSpec, target: Target) -> str | None:
        """Returns why the plan does not fit the spec or the target; None if it does."""
        return shared_memory_problem(self.shared_bytes(spec), target, "take smaller tiles")


# Several small CTAs on an SM overlap their loads and products. On an H200, one CTA of 128 x 128 elements takes 1.18
# times as long at head dim 64, and two stages take 1.07 times as long. At 128 columns, parts of 32 keys take 1.2 times
# as long, because they read Q and dO twice, and three CTAs of fewer registers take 1.16 times as long as two.
_NARROW, _WIDE = DensePlan(64, 64, 4, 32), DensePlan(64, 64, 4, 64)
_SMALLER = (DensePlan(32, 64, 2, 32), DensePlan(16, 32, 1, 32))  # for wide rows and small GPUs
_NARROW_COLUMNS = 64
_REGISTERS, _NARROW_REGISTERS, _NARROWEST_REGISTERS = 240, 168, 128  # of a thread, at least; up to 64 and 32 columns
_WAVES, _MIN_READERS = 4, 4  # waves of CTAs, and heads and sequences of a part


def choose_dense_plan(spec: AttentionSpec, target: Target) -> DensePlan:
    """Returns the plan of a spec."""
    plan = _plan_that_fits(spec, target)
    if plan is None:
        raise too_wide("backward", spec, target, lambda narrower: _plan_that_fits(narrower, target) is not None)
    return plan


def _plan_that_fits(spec: AttentionSpec, target: Target) -> DensePlan | None:
    preferred = _NARROW if spec.max_dim <= _NARROW_COLUMNS else _WIDE
    plan = next((plan for plan in (preferred, *_SMALLER) if plan.problem(spec, target) is None), None)
    if plan is None:
        return None
    by_memory = target.shared_per_multiprocessor // (plan.shared_bytes(spec) + RESERVED_SHARED)
    registers = _registers(spec.max_dim)
    by_registers = target.registers_per_multiprocessor // (plan.threads * registers)
    return replace(plan, blocks=max(min(by_memory, by_registers), 1))


def _registers(columns: int) -> int:
    if columns <= _NARROW_COLUMNS // 2:
        return _NARROWEST_REGISTERS
    return _NARROW_REGISTERS if columns <= _NARROW_COLUMNS else _REGISTERS


def parts_of_gradient(capture: Capture) -> str:
    """Returns the pass's name for the sums of a gradient by parts."""
    return f"parts of the gradient of {capture.name}"


def gradient_parts(spec: AttentionSpec, plan: DensePlan, load: Load, sizes: Sizes) -> Any:
    """Returns the parts into which the heads and sequences that read an element are divided: 1 if CTAs are many.

    The sums of the parts are stored apart and added by another kernel in a fixed order.
    """
    by_head, by_batch = HEAD in load.indices, BATCH in load.indices
    tiles = ceil_div(sizes.len_q, plan.tile_q) * ceil_div(sizes.len_k, plan.tile_k)
    tiles = tiles * (sizes.heads_q if by_head else 1) * (sizes.batch if by_batch else 1)
    readers = maximum((1 if by_head else sizes.heads_q) * (1 if by_batch else sizes.batch), 1)
    wanted = sizes.multiprocessors * plan.blocks * _WAVES // maximum(tiles, 1)
    return maximum(minimum(wanted, readers // _MIN_READERS), 1)


def dense_gradient_kernel(
    spec: AttentionSpec, target: Target, load: Load, rows: Rows, round_: str | None
) -> RenderedKernel | None:
    """Returns the kernel of the gradient of the array that `load` reads; None if the scores do not depend on it.

    Args:
        load: One of `dense_loads`.
        rows: Rows of LSE and D.
        round_: The primitive that rounds to the type of the array; None for float32.
    """
    elements = paired_elements(spec)
    gradient = dense_gradient(spec, load, elements)
    if not gradient.gathers:
        return None
    plan, capture, tiles = choose_dense_plan(spec, target), load.capture, key_range(spec.mask.expression)
    stored = Field(f"{DTYPES[capture.dtype].c_type}*", "gradient", comment=f"gradient of {capture.name}, dense")
    sums = Field("float*", "sums", comment="(parts, elements): sums of parts; null if there is one")
    fields = [*(Field("const Element*", name) for name in ("q", "k", "v", "d_o")), LSE_AND_D, stored, sums]
    fields += [Field("long long", "count", comment=f"elements of {capture.name}"), *numbers("parts")]
    fields += [*strides("q", "k", "v", "d_o"), *numbers("batch", "heads_q", "len_q", "len_k"), ROWS]
    fields.append(Field("unsigned", "kv_reciprocal", comment="2^31 / (query heads per KV head), rounded up"))
    layout = layout_of(spec, fields, lists=False)
    by_range = is_masked(spec) and tiles is not None
    context: dict[str, Any] = {
        "plan": plan,
        "deterministic": False,
        "divides_columns": divides_tiles(spec, plan.tile_k),
        "gradient": gradient,
        "gathers": (),
        "gather": gradient.gathers[0],
        "axes": [_AXES[index] for index in load.indices],
        "element_type": DTYPES[capture.dtype].c_type,
        "element_bytes": DTYPES[capture.dtype].bytes,
        "round": round_,
        "by_range": by_range,
        "key_tiles": visited_tiles(spec, tiles, "BackwardDenseArguments") if by_range else "",
        "pairs_of_sequence": not any(each.load.has(BATCH) for each in elements),
        **element_context(elements),
    }
    parts = partial(gradient_parts, spec, plan, load)
    sums_of_parts = Workspace(
        parts_of_gradient(capture),
        lambda sizes: (parts(sizes),),
        "float32",
        of_capture=capture.name,
        wanted=lambda sizes: parts(sizes) > 1,
    )
    pointers = {field.name: field.name for field in layout.fields if field.type.endswith("*")}
    launch: dict[str, Any] = {
        "grid": lambda sizes: (sizes.multiprocessors * plan.blocks, 1, 1),
        "values": lambda sizes: row_values(rows, sizes) | {"parts": parts(sizes)},
        "workspaces": (sums_of_parts,),
        "pointers": pointers | {"gradient": capture_gradient(capture), "sums": sums_of_parts.name},
    }
    block = Block(plan.threads, plan.shared_memory(spec))
    rendering = Rendering(with_pairs(spec, gradient, elements), suffix=capture.name, template=_TEMPLATE)
    kernel = backward_kernel("dense", spec, target, layout, context, block, launch, rendering)
    return replace(kernel, plan=plan)
