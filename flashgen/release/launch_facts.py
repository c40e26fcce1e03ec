"""How a kernel of a release is launched: its grid and its arguments, for programs that do it by CUDA's driver API.

Numbers that follow from the sizes of a call are formulas of them, in C++: of integers, `* /`, `min`, `max`, and
`ceil_div(a, b)`, which is a / b rounded up. What calls compute is the same (flashgen/attention/: launches.py,
hopper_launch.py, backward_launches.py), which a test sees to.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping
from typing import Any

from flashgen.codegen.arguments import ArgumentLayout, member_name
from flashgen.codegen.hopper.forward import HopperKernel
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.mma_sync.backward import PREPARE_ROWS
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.tile_list_kernel import depends_on_batch, depends_on_head
from flashgen.language.operations import Capture
from flashgen.language.spec import AttentionSpec

SIZES = ("batch", "heads_q", "heads_kv", "len_q", "len_k")
FORMULAS = (
    "grid and value in C++'s integers, of a call's batch, heads_q, heads_kv, len_q, len_k, of the GPU's "
    "multiprocessors, and of count, the elements of a captured array; ceil_div(a, b) is a / b rounded up"
)
_SECTION_BYTES = 32 * 2**20  # of K and V, which blocks that run side by side should find in the L2
_ELEMENT_BYTES = 2  # of what maps are of
_RECIPROCAL = "ceil_div(2147483648, {})"  # by which kernels divide a head's number


def launch_facts(kernels: Mapping[str, RenderedKernel], spec: AttentionSpec) -> dict[str, dict[str, Any]]:
    """What a manifest says of the launches of a pass, beside threads and shared memory, by part; as JSON has it.

    kernels: all of the pass, as `flashgen.codegen.kernels.kernels_of` gives them.
    """
    rows = _rows(kernels["prepare"].plan) if "prepare" in kernels else ""
    return {part: _facts(part, kernel, spec, rows) for part, kernel in kernels.items()}


def _facts(part: str, kernel: RenderedKernel, spec: AttentionSpec, rows: str) -> dict[str, Any]:
    """rows: the formula of the rows that all kernels of a backward agree on."""
    facts: dict[str, Any] = {
        "part": "backward_lists" if rows and part == "lists" else part,
        "grid": dict(zip("xyz", _grid(part, kernel, spec, rows), strict=True)),
        "argument_bytes": struct.calcsize(kernel.layout.format),
        "arguments": _arguments(kernel.layout, _values(part, kernel, spec, rows), spec),
    }
    if kernel.plan is not None:
        facts["plan"] = dataclasses.asdict(kernel.plan)
    if isinstance(kernel, HopperKernel):
        facts["maps"] = [_map(name, kernel, spec) for name in "qkvo"]
    return facts


# ---- grids


def _grid(part: str, kernel: RenderedKernel, spec: AttentionSpec, rows: str) -> tuple[str, str, str]:
    """Blocks along x, y and z."""
    plan = kernel.plan
    if part.startswith("d_"):
        return f"ceil_div(count, {kernel.threads})", "1", "1"
    if isinstance(kernel, HopperKernel):
        return f"max(min({_hopper_tiles(kernel.plan)}, multiprocessors), 1)", "1", "1"
    if part == "prepare":
        return f"{rows} / {PREPARE_ROWS}", "heads_q", "batch"
    if part == "keys":
        return _tiles("len_k", plan.tile_k), "heads_kv", "batch"
    if part.endswith("lists"):
        heads, batch = "heads_q" if depends_on_head(spec) else "1", "batch" if depends_on_batch(spec) else "1"
        return _listed_rows(part, plan), heads, batch
    if part == "finish":
        return f"{rows} / {plan.tile_q}", "heads_q", "batch"
    return _tiles("len_q", plan.tile_q), "heads_q", "batch"


def _tiles(length: str, tile: int) -> str:
    return f"ceil_div({length}, {tile})"


def _rows(plan: Any) -> str:
    """Queries of a backward, rounded up so that kernels need not look where they end; plan: of the kernel of keys."""
    multiple = math.lcm(plan.tile_q, PREPARE_ROWS)
    return f"ceil_div(len_q, {multiple}) * {multiple}"


def _listed_rows(part: str, plan: Any) -> str:
    """Lists of a batch and head: one for each tile of queries, or of keys."""
    return _tiles("len_k", plan.tile_k) if part == "query_lists" else _tiles("len_q", plan.tile_q)


def _listed_columns(part: str, plan: Any) -> str:
    """Tiles of the longest list."""
    return _tiles("len_q", plan.tile_q) if part == "query_lists" else _tiles("len_k", plan.tile_k)


def _packs(plan: HopperPlan) -> str:
    """Query heads, or packs of them, of all batches."""
    return "batch * heads_q" + (f" / {plan.packed_heads}" if plan.packed_heads > 1 else "")


def _hopper_tiles(plan: HopperPlan) -> str:
    return f"{_packs(plan)} * {_tiles('len_q', plan.tile_q)}"


# ---- arguments


def _values(part: str, kernel: RenderedKernel, spec: AttentionSpec, rows: str) -> dict[str, str | list[str]]:
    """Formulas of the members that follow from sizes; of `Strides` one for batch, head and row each."""
    plan = kernel.plan
    values: dict[str, str | list[str]] = {name: name for name in (*SIZES, "count")}
    values |= {"kv_reciprocal": _RECIPROCAL.format("heads_q / heads_kv"), "heads_per_kv": "heads_q / heads_kv"}
    if isinstance(kernel, HopperKernel):
        values |= _hopper_values(kernel, spec)
    elif part.endswith("lists"):
        values["spacing"] = f"max({_listed_columns(part, plan)}, 1)"
    elif part in ("prepare", "keys", "finish", "queries"):
        values["rows"] = rows
    if not part.endswith("lists") and plan is not None:
        values["list_strides"] = _list_strides("query_lists" if part == "keys" else "lists", plan, spec)
    return values


def _list_strides(part: str, plan: Any, spec: AttentionSpec) -> list[str]:
    """From list to list along batch, head and tile; 0 where lists are the same for all."""
    rows = _listed_rows(part, plan)
    heads = f"heads_q * {rows}" if depends_on_head(spec) else rows
    return [heads if depends_on_batch(spec) else "0", rows if depends_on_head(spec) else "0", "1"]


def _hopper_values(kernel: HopperKernel, spec: AttentionSpec) -> dict[str, str]:
    plan, packed = kernel.plan, kernel.plan.packed_heads
    per_kv = "heads_q / heads_kv" + (f" / {packed}" if packed > 1 else "")
    head_bytes = 2 * (spec.head_dim + spec.value_dim)
    fitting = f"max({_SECTION_BYTES} / ({head_bytes} * max(len_k, 1)), 1) * ({per_kv})"
    return {
        "tiles": _hopper_tiles(plan),
        "tiles_q": _tiles("len_q", plan.tile_q),
        "heads": _packs(plan),
        "section": f"max(min({fitting}, {_packs(plan)}), 1)" if kernel.longest_first else "1",
        "kv_reciprocal": _RECIPROCAL.format(f"max({per_kv}, 1)"),
    }


def _arguments(
    layout: ArgumentLayout, values: Mapping[str, str | list[str]], spec: AttentionSpec
) -> list[dict[str, Any]]:
    """The members of the struct in their order."""
    meanings = _meanings(spec)
    members = []
    for field in layout.fields:
        member: dict[str, Any] = {"name": field.name, "type": field.type, "offset": layout.offset(field.name)}
        if field.count:
            member["count"] = field.count
        member["meaning"] = meanings.get(field.name, field.comment)
        if field.name in values:
            member["value"] = values[field.name]
        members.append(member)
    return members


def _meanings(spec: AttentionSpec) -> dict[str, str]:
    """What members are, but for those whose declaration has a comment that says it."""
    head, value = spec.head_dim, spec.value_dim
    rows = {"q": "queries", "k": "keys", "v": "values", "o": "output"}
    rows |= {f"d{name}": f"gradient of {name}" for name in "qkv"} | {"d_o": "gradient of the output"}
    meanings = {f"{name}_strides": f"of {name}" for name in rows}
    for name, what in rows.items():
        heads, length = ("heads_kv", "len_k") if name[-1] in "kv" else ("heads_q", "len_q")
        meanings[name] = f"{what}, (batch, {heads}, {length}, {value if name[-1] in 'vo' else head})"
        meanings[f"{name}_map"] = f"CUtensorMap of {name}: see maps"
    meanings["lse"] = "log-sum-exp of each row, (batch, heads_q, len_q), or null where it is not wanted"
    meanings["d_lse"] = "gradient of lse, or null"
    meanings["dq_sums"] = "sums of dq, float32, (batch, heads_q, rows, padded head_dim), in an order of their own"
    meanings["statistics"] = "LSE to the base 2, and D, of each row, (batch, heads_q, rows, 2)"
    meanings |= {"tile_counts": "tiles of each list", "tile_offsets": "where each list begins in tile_entries"}
    meanings |= {"tile_entries": "tile << 1 | 1 where no element is masked", "list_strides": "from list to list"}
    meanings |= {"counts": "tiles of each list, written", "offsets": "where each list begins in entries"}
    meanings |= {"entries": "tile << 1 | 1 where no element is masked, written"}
    meanings |= {"seed_low": "of the dropout's seed the low half", "seed_high": "the high half"}
    meanings |= {"offset": "of the dropout's counter"}
    meanings |= {"heads_q": "query heads", "heads_kv": "heads of k and v", "heads_per_kv": "query heads of each of k"}
    meanings |= {"len_q": "queries", "len_k": "keys", "count": "elements of the captured array"}
    meanings["sums"] = "of the gradient, which the kernel of keys added up"
    for capture in spec.captures:
        meanings |= _capture_meanings(capture)
    return meanings


def _capture_meanings(capture: Capture) -> dict[str, str]:
    name = member_name(capture)
    if not capture.ndim:
        return {name: f"the number {capture.name}"}
    return {
        name: f"the array {capture.name}, {capture.dtype}",
        f"{name}_stride": "of its axes, in bytes",
        f"{name}_size": "of its axes",
        f"d_{name}": f"sums of the gradient of {capture.name}, zeros at first; 8 to an element where deterministic",
    }


# ---- tensor maps


def _map(name: str, kernel: HopperKernel, spec: AttentionSpec) -> dict[str, Any]:
    """What cuTensorMapEncodeTiled is told of an array; in every map steps of 1, no interleaving, zeros outside."""
    columns = spec.value_dim if name in "vo" else spec.head_dim
    rows, heads = ("len_q", "heads_q") if name in "qo" else ("len_k", "heads_kv")
    box = (*kernel.boxes[name], 1, 1, 1)[:4]
    packed = kernel.plan.packed_heads > 1 and name in "qo"
    return {
        "member": f"{name}_map",
        "array": name,
        "dtype": spec.dtype,
        "sizes": [str(columns), heads, rows, "batch"] if packed else [str(columns), rows, heads, "batch"],
        "strides": ["head", "row", "batch"] if packed else ["row", "head", "batch"],
        "box": list(box),
        "swizzle_bytes": box[0] * _ELEMENT_BYTES,
        "l2_promotion_bytes": 256,
    }
