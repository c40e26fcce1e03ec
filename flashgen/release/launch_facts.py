"""How a kernel of a release is launched: its grid and its arguments, for programs that use CUDA's driver API.

Numbers that follow from the sizes of a call are formulas of them, in C++: of integers, `+ * /`, `min`, `max`, and
`ceil_div(a, b)`, which is a / b rounded up. They are what calls launch by, with names in place of numbers.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from typing import Any

from flashgen.codegen.arguments import OF_QUERIES, VALUE_WIDE, ArgumentLayout, member_name
from flashgen.codegen.merge_kernel import MOST_PARTS
from flashgen.codegen.ragged import MAP_ROWS
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.sizes import NAMED_SIZES
from flashgen.codegen.stages import struct_values
from flashgen.codegen.tiling import ELEMENT_BYTES
from flashgen.language.operations import Capture
from flashgen.language.spec import AttentionSpec

FORMULAS = (
    "grid and value in C++'s integers, of a call's batch, heads_q, heads_kv, len_q, len_k, of a ragged batch's total_q "
    "and total_k, its arrays' rows, of the GPU's multiprocessors, of count, the elements of a captured array, and of "
    "splits, into how many parts the caller splits the keys; ceil_div(a, b) is a / b rounded up"
)


def launch_facts(kernels: Mapping[str, RenderedKernel], spec: AttentionSpec) -> dict[str, dict[str, Any]]:
    """What a manifest says about the launches of a pass, by part, as JSON; threads and shared memory stand elsewhere.

    kernels: all of the pass, as `flashgen.codegen.stages.kernels_of` gives them.
    """
    backward = "prepare" in kernels
    return {part: _facts(part, kernel, spec, backward) for part, kernel in kernels.items()}


def step_facts(kernel: RenderedKernel) -> dict[str, Any]:
    """The same of a kernel of no spec, whose members are all the caller's."""
    return {
        "part": kernel.role,
        "grid": dict(zip("xyz", map(str, kernel.grid(NAMED_SIZES)), strict=True)),
        "argument_bytes": struct.calcsize(kernel.layout.format),
        "arguments": _arguments(kernel.layout, {}, _MEANINGS_OF_STEPS[kernel.role] | _MEANINGS_OF_PARTS),
    }


_MEANINGS_OF_STEPS = {
    "append": {
        **{f"{name}_new": f"new {what}, 16-bit" for name, what in (("k", "keys"), ("v", "values"))},
        **{name: f"pages of {what}, written" for name, what in (("k", "keys"), ("v", "values"))},
        **{f"{name}_strides": f"of {name}; batch is a page's in k and v" for name in ("k_new", "v_new", "k", "v")},
        "page_table": "(batch, pages of a sequence), int32",
        "tokens": "new keys of each sequence; count is tokens * heads * max(head_dim, value_dim) / 8",
        "heads": "of k and v",
        "head_dim": "of k, a multiple of 8",
        "value_dim": "of v, a multiple of 8",
        "page_size": "keys of a page",
        "pages": "that k and v have",
    },
    "merge": {
        "o": "the merged output",
        "lse": "the merged LSE, (batch, heads, len_q)",
        "rows": "batch * heads * len_q; count is rows << lane_bits",
        "dim": "of a row, a multiple of 8 up to 256",
        "heads": "query heads",
        "len_q": "queries",
    },
}
_MEANINGS_OF_PARTS = {f"out{i}": f"the output of part {i}, contiguous" for i in range(MOST_PARTS)} | {
    f"lse{i}": "its LSE, (batch, heads, len_q)" for i in range(MOST_PARTS)
}


def _facts(part: str, kernel: RenderedKernel, spec: AttentionSpec, backward: bool) -> dict[str, Any]:
    values = {name: _texts(value) for name, value in struct_values(kernel, spec, NAMED_SIZES).items()}
    facts: dict[str, Any] = {
        "part": "backward_lists" if backward and part == "lists" else part,
        "grid": dict(zip("xyz", map(str, kernel.grid(NAMED_SIZES)), strict=True)),
        "argument_bytes": struct.calcsize(kernel.layout.format),
        "arguments": _arguments(kernel.layout, values, _meanings(spec)),
    }
    if kernel.plan is not None:
        facts["plan"] = dataclasses.asdict(kernel.plan)
    if kernel.boxes:
        facts["maps"] = [_map(name, kernel, spec) for name in kernel.boxes]
    return facts


def _texts(value: Any) -> str | list[str]:
    return [str(each) for each in value] if isinstance(value, tuple) else str(value)


def _arguments(
    layout: ArgumentLayout, values: Mapping[str, str | list[str]], meanings: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The members of the struct in their order."""
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
    """What members are, unless a comment at their declaration says it."""
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
    for name, dim in (("dk", "head_dim"), ("dv", "value_dim")):
        shape = f"(batch, heads_kv, keys, padded {dim})"
        meanings[f"{name}_sums"] = f"sums of {name} over query heads, float32, {shape}, in an order of their own"
    meanings["part_sums"] = "sums of dk and dv of the tiles in parts, float32, in an order of their own"
    meanings["statistics"] = "LSE to the base 2, and D, of each row, (batch, heads_q, rows, 2)"
    meanings |= {"tile_counts": "tiles of each list", "tile_offsets": "where each list begins in tile_entries"}
    meanings |= {"tile_entries": "tile << 1 | 1 where no element is masked", "list_strides": "from list to list"}
    meanings |= {"counts": "tiles of each list, written", "offsets": "where each list begins in entries"}
    meanings |= {"entries": "tile << 1 | 1 where no element is masked, written"}
    meanings["seed"] = "the dropout's seed in the GPU's memory, 8 bytes, or null where the next two hold it"
    meanings |= {"seed_low": "of the dropout's seed the low half", "seed_high": "the high half"}
    meanings |= {"offset": "of the dropout's counter"}
    meanings |= {"heads_q": "query heads", "heads_kv": "heads of k and v", "heads_per_kv": "query heads of each of k"}
    meanings |= {"batch": "sequences", "len_q": "queries", "len_k": "keys", "count": "elements of the captured array"}
    meanings |= _ragged_meanings(rows, head, value) if spec.is_ragged else {}
    if spec.page_size:
        of_page = f"(pages, {spec.page_size}, heads_kv"
        meanings |= {"k": f"pages of keys, {of_page}, {head})", "v": f"pages of values, {of_page}, {value})"}
    meanings["sums"] = "of the gradient, which the kernel of keys added up"
    for capture in spec.captures:
        meanings |= _capture_meanings(capture)
    return meanings


def _ragged_meanings(rows: Mapping[str, str], head: int, value: int) -> dict[str, str]:
    """What members of ragged batches' kernels are, where that is another thing; `rows`: the arrays of rows."""
    meanings = {"len_q": "queries of a sequence, at most", "len_k": "keys of it, at most"}
    for name, what in rows.items():
        heads, total = ("heads_kv", "total_k") if name[-1] in "kv" else ("heads_q", "total_q")
        meanings[name] = f"{what}, ({total}, {heads}, {value if name[-1] in 'vo' else head})"
    meanings["lse"] = "log-sum-exp of each row, (heads_q, total_q), or null where it is not wanted"
    meanings["dq_sums"] = "sums of dq, float32, (heads_q, rows, padded head_dim), in an order of their own"
    meanings["statistics"] = "LSE to the base 2, and D, of each row, (heads_q, rows, 2)"
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


_OF_PANELS = ("row", "panel", "group", "page")  # of 8 rows a group: of pages of which a copy has several panels


def _map(name: str, kernel: RenderedKernel, spec: AttentionSpec) -> dict[str, Any]:
    """What cuTensorMapEncodeTiled is told of an array; in every map steps of 1, no interleaving, zeros outside."""
    columns = spec.value_dim if name in VALUE_WIDE else spec.head_dim
    rows, heads = ("len_q", "heads_q") if name in OF_QUERIES else ("len_k", "heads_kv")
    box = kernel.boxes[name]
    if spec.page_size and len(box) == len(_OF_PANELS):
        panel, group, joined, _ = box
        return {
            **_map_of(name, spec, (*box, 1)),
            "sizes": [
                *(str(panel), str(group), f"(heads_kv - 1) * {name}_head_panels + {joined}"),
                *(str(spec.page_size // group), "pages"),
            ],
            "strides": list(_OF_PANELS),
        }
    box = (*box, 1, 1, 1)[:4]
    if spec.page_size and name not in OF_QUERIES:
        return {
            **_map_of(name, spec, box),
            "sizes": [str(columns), str(spec.page_size), heads, "pages"],
            "strides": ["row", "head", "page"],
        }
    if spec.is_ragged:
        total = "total_q" if name in OF_QUERIES else "total_k"
        return {
            **_map_of(name, spec, box),
            "sizes": [str(columns), str(MAP_ROWS), heads, f"{total} + 1"],
            "strides": ["row", "head", "row"],
            "rows_before": MAP_ROWS,
        }
    packed = kernel.plan.packed_heads > 1 and name in OF_QUERIES
    return {
        **_map_of(name, spec, box),
        "sizes": [str(columns), heads, rows, "batch"] if packed else [str(columns), rows, heads, "batch"],
        "strides": ["head", "row", "batch"] if packed else ["row", "head", "batch"],
    }


def _map_of(name: str, spec: AttentionSpec, box: tuple[int, ...]) -> dict[str, Any]:
    """What every map says. One of a ragged batch also that it begins `rows_before` rows before the array's address."""
    return {
        "member": f"{name}_map",
        "array": name,
        "dtype": spec.dtype,
        "box": list(box),
        "swizzle_bytes": box[0] * ELEMENT_BYTES,
        "l2_promotion_bytes": 256,
    }
