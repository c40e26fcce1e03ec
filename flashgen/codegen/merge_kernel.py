"""The kernel that merges what attention gave for parts of the keys, by the LSE of each: the text of `merge_states`."""

from __future__ import annotations

from flashgen.codegen.arguments import Field, ordered
from flashgen.codegen.assembly import assemble
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.shared_memory import NO_SHARED_MEMORY
from flashgen.codegen.sizes import ceil_div
from flashgen.codegen.targets import Target
from flashgen.errors import UnsupportedError

MOST_PARTS = 16
_THREADS = 256
_STRUCT = "MergeArguments"
_SUFFIXES = {"float16": "f16", "bfloat16": "bf16"}


def render_merge(dtype: str, parts: int, layout: str, target: Target) -> RenderedKernel:
    """The kernel for so many parts, contiguous arrays of a dtype and a layout; a block has 256 groups of 8 columns.

    Sizes: `count` is that of the groups, with those that fill rows up to a power of 2. UnsupportedError where the
    target has not the type.
    """
    if dtype != "float32" and dtype not in target.dtypes:
        raise UnsupportedError(f"dtype={dtype!r} is not supported on {target.name} (family {target.family})")
    bshd, suffix = layout == "bshd", _SUFFIXES.get(dtype, "")
    fields = [Field("const Element*", f"out{i}") for i in range(parts)]
    fields += [Field("const float*", f"lse{i}") for i in range(parts)]
    fields += [Field("Element*", "o"), Field("float*", "lse"), Field("long long", "rows")]
    fields += [Field("int", "dim"), Field("int", "lane_bits", comment="log2 of the threads that a row has")]
    fields += [Field("int", name) for name in ("heads", "len_q")] if bshd else []
    struct, entry = ordered(fields), f"merge_states_{parts}_{dtype}_{layout}"
    context = {
        "header": f"// flashgen: outputs of {parts} parts of the keys, merged by their LSE; {dtype}, {layout}",
        "element": "float" if dtype == "float32" else "unsigned short",
        "dtype": dtype,
        "layout": struct,
        "struct": _STRUCT,
        "entry": entry,
        "threads": _THREADS,
        "parts": parts,
        "bshd": bshd,
        "pack": f"pack_{suffix}",
        "unpack": f"unpack_{suffix}",
    }
    return RenderedKernel(
        f"merge-{target.name.replace('_', '')}-{parts}-{dtype}-{layout}",
        entry,
        assemble("merge_states.cu.jinja", context, target),
        target,
        struct,
        _THREADS,
        NO_SHARED_MEMORY,
        plan=None,
        role="merge",
        grid=lambda sizes: (ceil_div(sizes.count, _THREADS), 1, 1),
    )
