"""Describes the launch of a released kernel, its grid and arguments, for programs that use the CUDA driver API.

Numbers that depend on the sizes of a call are C++ integer expressions of `+ - * /`, `min`, `max`, and `ceil_div(a, b)`,
which is a / b rounded up. They are printed from the functions that calls from Python evaluate with numbers.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from typing import Any

from flashgen.codegen.arguments import QUERY_ARRAYS, VALUE_WIDE, ArgumentLayout, member_name
from flashgen.codegen.batches import batch_of, map_axes
from flashgen.codegen.formula_text import MEANINGS, cpp, described
from flashgen.codegen.merge_kernel import MAX_PARTIALS
from flashgen.codegen.rendered_kernel import RenderedKernel, Workspace
from flashgen.codegen.sizes import NAMED_SIZES, SIZE_NAMES, Formula, maximum
from flashgen.codegen.stages import struct_values
from flashgen.codegen.tile_list_kernel import list_shape
from flashgen.language.operations import Capture
from flashgen.language.spec import AttentionSpec

FORMULAS = (
    "grid, value, counters, and shape and wanted of workspaces are C++ integer expressions over "
    f"{described(NAMED_SIZES)}; ceil_div(a, b) is a / b rounded up"
)

_UNSPECIFIED_ORDER = "in an unspecified order of elements"


def launch_facts(kernels: Mapping[str, RenderedKernel], spec: AttentionSpec) -> dict[str, dict[str, Any]]:
    """Returns the launch facts of the kernels of a pass for a manifest, by part, without threads and shared memory.

    kernels: all kernels of the pass, as returned by `flashgen.codegen.stages.kernels_of`.
    """
    backward = "preprocess" in kernels
    return {part: _facts(part, kernel, spec, backward) for part, kernel in kernels.items()}


def step_facts(kernel: RenderedKernel) -> dict[str, Any]:
    """Returns the launch facts of a kernel without a spec. The caller sets all members of its arguments."""
    return {
        "part": kernel.role,
        "grid": dict(zip("xyz", map(cpp, kernel.grid(NAMED_SIZES)), strict=True)),
        "argument_bytes": struct.calcsize(kernel.layout.format),
        "arguments": _arguments(kernel.layout, {}, _STEP_MEANINGS[kernel.role] | _PARTIAL_MEANINGS),
    }


_STEP_MEANINGS = {
    "append": {
        **{f"{name}_new": f"new {what}, 16-bit" for name, what in (("k", "keys"), ("v", "values"))},
        **{name: f"pages of {what}, written" for name, what in (("k", "keys"), ("v", "values"))},
        **{
            f"{name}_strides": f"strides of {name}; batch is the stride of a page in k and v"
            for name in ("k_new", "v_new", "k", "v")
        },
        "page_table": "(batch, pages of a sequence), int32",
        "tokens": "new keys of each sequence; count is tokens * heads * max(head_dim, value_dim) / 8, or "
        "tokens if k holds records",
        "heads": "KV heads",
        "head_dim": "head dim of k, a multiple of 8",
        "value_dim": "head dim of v, a multiple of 8; where V is a part of K, give 0 and launch a grid with y = 1",
        "page_size": "keys of a page",
        "pages": "pages of k and v",
    },
    "merge": {
        "o": "the merged output",
        "lse": "the merged LSE, (batch, heads, len_q)",
        "rows": "batch * heads * len_q; count is rows << lane_bits",
        "dim": "elements of a row, a multiple of 8 up to 512",
        "heads": "query heads",
        "len_q": "queries",
    },
}
_PARTIAL_MEANINGS = {f"out{i}": f"partial output {i}, contiguous" for i in range(MAX_PARTIALS)} | {
    f"lse{i}": f"LSE of partial output {i}, (batch, heads, len_q)" for i in range(MAX_PARTIALS)
}


def _facts(part: str, kernel: RenderedKernel, spec: AttentionSpec, backward: bool) -> dict[str, Any]:
    values = {name: _formula_texts(value) for name, value in struct_values(kernel, spec, NAMED_SIZES).items()}
    facts: dict[str, Any] = {
        "part": "backward_lists" if backward and part == "lists" else part,
        "grid": dict(zip("xyz", map(cpp, kernel.grid(NAMED_SIZES)), strict=True)),
        "argument_bytes": struct.calcsize(kernel.layout.format),
        "arguments": _arguments(kernel.layout, values, _member_meanings(spec)),
    }
    if kernel.plan is not None:
        facts["plan"] = dataclasses.asdict(kernel.plan)
    if kernel.boxes:
        facts["maps"] = [_map(name, kernel, spec) for name in kernel.boxes]
    if kernel.programmatic_launch:
        facts["programmatic_launch"] = True
    if kernel.counts:
        facts["counters"] = cpp(kernel.counts(NAMED_SIZES))
    spaces = [_workspace(space, spec) for space in kernel.workspaces] + _list_workspaces(kernel, spec)
    if spaces:
        facts["workspaces"] = spaces
    pointers = dict(kernel.pointers) | _list_pointers(kernel)
    if pointers:
        facts["pointers"] = pointers
    return facts


_LISTS = {"counts": "int32", "offsets": "int64", "entries": "int32"}


def _list_workspaces(kernel: RenderedKernel, spec: AttentionSpec) -> list[dict[str, Any]]:
    """Returns the facts of the memory of the tile lists that a kernel writes, equally spaced."""
    if kernel.lists is None:
        return []
    shape = list_shape(spec, kernel.plan, kernel.lists, NAMED_SIZES)
    rows = [cpp(size) for size in (shape.batch, shape.heads, shape.tiles)]
    shapes = {"counts": rows, "offsets": rows, "entries": [cpp(maximum(shape.rows * shape.listed, 1))]}
    return [{"name": f"{kernel.lists}.{name}", "dtype": dtype, "shape": shapes[name]} for name, dtype in _LISTS.items()]


def _list_pointers(kernel: RenderedKernel) -> dict[str, str]:
    """Returns the workspaces of the tile lists that a kernel writes or reads, by the members of its struct."""
    if kernel.lists is not None:
        return {name: f"{kernel.lists}.{name}" for name in _LISTS}
    return {f"tile_{name}": f"{kernel.reads}.{name}" for name in _LISTS} if kernel.reads else {}


def _workspace(space: Workspace, spec: AttentionSpec) -> dict[str, Any]:
    """Returns the facts of memory that the caller allocates before this kernel, for it and later kernels of the pass.

    zeroed: it must be 0 before the first kernel of the pass. of_array: the array whose shape precedes `shape`. wanted:
    the pointer is null if this is 0.
    """
    shape, wanted = ([cpp(size) for size in space.shape(NAMED_SIZES)], cpp(space.wanted(NAMED_SIZES)))
    facts: dict[str, Any] = {"name": space.name, "dtype": space.dtype, "shape": shape}
    facts |= {"zeroed": True} if space.zeroed else {}
    for capture in spec.captures:
        facts |= {"of_array": member_name(capture)} if capture.name == space.of_capture else {}
    return facts | ({"wanted": wanted} if wanted != "1" else {})


def _formula_texts(value: Any) -> str | list[str]:
    return [cpp(each) for each in value] if isinstance(value, tuple) else cpp(value)


def _arguments(
    layout: ArgumentLayout, values: Mapping[str, str | list[str]], meanings: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Returns the members of the argument struct in order."""
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


def _member_meanings(spec: AttentionSpec) -> dict[str, str]:
    """Returns the meanings of members that have no comment at their declaration."""
    head, value, batch = spec.head_dim, spec.value_dim, batch_of(spec)
    rows = {"q": "queries", "k": "keys", "v": "values", "o": "output"}
    rows |= {f"d{name}": f"gradient of {name}" for name in "qkv"} | {"d_o": "gradient of the output"}
    meanings = {f"{name}_strides": f"strides of {name}" for name in rows}
    for name, what in rows.items():
        rows_of = ("heads_kv", "k") if name[-1] in "kv" else ("heads_q", "q")
        meanings[name] = f"{what}, {_axes(*batch.axes(*rows_of), value if name[-1] in 'vo' else head)}"
        meanings[f"{name}_map"] = f"CUtensorMap of {name}: see maps"
    lse = _axes(*batch.row_axes("heads_q", "q"))
    meanings["lse"] = f"log-sum-exp of each row, {lse}, or null if it is not needed"
    meanings["d_lse"] = "gradient of lse, or null"
    accumulator = _axes(*batch.workspace_shape(NAMED_SIZES, "rows"), "padded head_dim")
    meanings["dq_accum"] = f"dq accumulator, float32, {accumulator}, {_UNSPECIFIED_ORDER}"
    for name, dim in (("dk", "head_dim"), ("dv", "value_dim")):
        shape = f"(batch, heads_kv, keys, padded {dim})"
        meanings[f"{name}_sums"] = f"{name} accumulator over query heads, float32, {shape}, {_UNSPECIFIED_ORDER}"
    meanings["part_sums"] = f"partial dk and dv of split key tiles, float32, {_UNSPECIFIED_ORDER}"
    meanings["lse_and_d"] = f"base-2 LSE and D of each row, {_axes(*batch.workspace_shape(NAMED_SIZES, 'rows', 2))}"
    meanings |= {"tile_counts": "tiles of each list", "tile_offsets": "start of each list in tile_entries"}
    meanings |= {"tile_entries": "tile << 1 | 1 if no element is masked", "list_strides": "strides between lists"}
    meanings |= {"counts": "tiles of each list, written", "offsets": "start of each list in entries"}
    meanings |= {"entries": "tile << 1 | 1 if no element is masked, written"}
    meanings["seed"] = "dropout seed in GPU memory, 8 bytes, or null if seed_low and seed_high hold it"
    meanings |= {"seed_low": "low half of the dropout seed", "seed_high": "high half of the dropout seed"}
    meanings |= {"offset": "offset of the dropout counter"}
    meanings |= {name: MEANINGS[name] for name in (*SIZE_NAMES, "heads_per_kv", "count")}
    meanings |= batch.lengths
    if spec.page_size:
        of_page = f"(pages, {spec.page_size}, heads_kv"
        meanings |= {"k": f"pages of keys, {of_page}, {head})", "v": f"pages of values, {of_page}, {value})"}
    if spec.kv_record:
        record = f"(pages, {spec.page_size}, 1, {spec.kv_record.bytes})"
        meanings["k"] = f"pages of records of keys, {spec.kv_record.name}, uint8 {record}"
        meanings["k_strides"] = "strides of k in units of 2 bytes; batch is the stride of a page"
    if spec.shared_kv:
        meanings["k"] += f"; the first {value} columns are the values"
        meanings["dk"] += ", with that of the values"
    meanings["sums"] = "accumulator of the gradient, written by the dK/dV kernel"
    for capture in spec.captures:
        meanings |= _capture_meanings(capture)
    return meanings


def _axes(*axes: Any) -> str:
    """Returns the axes of an array in words, such as "(batch, heads_q, rows, 2)"."""
    return f"({', '.join(map(cpp, axes))})"


def _capture_meanings(capture: Capture) -> dict[str, str]:
    name = member_name(capture)
    if not capture.ndim:
        return {name: f"the number {capture.name}"}
    return {
        name: f"the array {capture.name}, {capture.dtype}",
        f"{name}_stride": f"strides of the axes of {capture.name}, in bytes",
        f"{name}_size": f"sizes of the axes of {capture.name}",
        f"d_{name}": f"gradient accumulator of {capture.name}, initially 0; 8 per element if deterministic",
    }


# ---- tensor maps


_PANEL_STRIDES = ("row", "panel", "group", "page")  # for copies of several panels of a page; a group has 8 rows


def _map(name: str, kernel: RenderedKernel, spec: AttentionSpec) -> dict[str, Any]:
    """Returns the arguments of cuTensorMapEncodeTiled for an array.

    All maps have element strides of 1, no interleaving, and zeros outside of the array.
    """
    columns = spec.value_dim if name in VALUE_WIDE else spec.head_dim
    box, pages = kernel.boxes[name], Formula("pages")
    if spec.page_size and len(box) == len(_PANEL_STRIDES):
        panel, group, joined, _ = box
        panels = (NAMED_SIZES.heads_kv - 1) * Formula(f"{name}_head_panels") + joined
        extents: tuple[Any, ...] = (panel, group, panels, spec.page_size // group, pages)
        return _map_facts(name, kernel, spec, (*box, 1), extents, _PANEL_STRIDES)
    box = (*box, 1, 1, 1)[:4]
    axes = map_axes(spec, name, NAMED_SIZES, pages)
    packed = kernel.plan.packed_heads > 1 and name in QUERY_ARRAYS
    order = (1, 0, 2) if packed else (0, 1, 2)
    sizes, strides = (tuple(each[axis] for axis in order) for each in (axes.sizes, axes.strides))
    facts = _map_facts(name, kernel, spec, box, (columns, *sizes), strides)
    return facts | ({"rows_before": axes.rows_before} if axes.rows_before else {})


def _map_facts(
    name: str,
    kernel: RenderedKernel,
    spec: AttentionSpec,
    box: tuple[int, ...],
    extents: tuple[Any, ...],
    strides: tuple[str, ...],
) -> dict[str, Any]:
    """Returns the facts of a map. A map of a varlen batch starts `rows_before` rows before the array's address."""
    return {
        "member": f"{name}_map",
        "array": name,
        "dtype": spec.element_of(name).name,
        "box": list(box),
        "swizzle_bytes": box[0] * spec.element_of(name).bytes,
        "l2_promotion_bytes": kernel.l2_promotion,
        "sizes": [cpp(extent) for extent in extents],
        "strides": list(strides),
    }
