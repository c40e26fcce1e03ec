"""The kernel of `merge_states`, which merges the partial outputs of disjoint sets of keys by their LSE."""

from __future__ import annotations

from flashgen.codegen.arguments import Field, ordered
from flashgen.codegen.assembly import assemble
from flashgen.codegen.environment import environment
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.shared_memory import NO_SHARED_MEMORY
from flashgen.codegen.sizes import ceil_div
from flashgen.codegen.targets import Target
from flashgen.dtypes import DTYPES
from flashgen.errors import UnsupportedError

MAX_PARTIALS = 16
MERGED_LAYOUTS = ("bhsd", "bshd")
_THREADS = 256
_STRUCT = "MergeArguments"


def render_merge(dtype: str, parts: int, layout: str, target: Target) -> RenderedKernel:
    """Renders the kernel for a number of partial outputs, which are contiguous arrays of `dtype` and `layout`.

    A block processes 256 groups of 8 columns. In its `Sizes`, `count` is the number of groups, with the groups per row
    rounded up to a power of 2.

    Raises:
        UnsupportedError: The target does not support the dtype.
    """
    if dtype != "float32" and dtype not in target.dtypes:
        raise UnsupportedError(f"dtype={dtype!r} is not supported on {target.name} (family {target.family})")
    bshd, element = layout == "bshd", DTYPES[dtype]
    fields = [Field("const Element*", f"out{i}") for i in range(parts)]
    fields += [Field("const float*", f"lse{i}") for i in range(parts)]
    fields += [Field("Element*", "o"), Field("float*", "lse"), Field("long long", "rows")]
    fields += [Field("int", "dim"), Field("int", "lane_bits", comment="log2 of the threads per row")]
    fields += [Field("int", name) for name in ("heads", "len_q")] if bshd else []
    struct, entry = ordered(fields), f"merge_states_{parts}_{dtype}_{layout}"
    types = environment().get_template("types.cuh.jinja")
    context = {
        "header": f"// flashgen: merges {parts} partial outputs by their LSE; {dtype}, {layout}",
        "types": types.render(struct=_STRUCT, element=element, layout=struct).strip(),
        "element": element,
        "struct": _STRUCT,
        "entry": entry,
        "threads": _THREADS,
        "parts": parts,
        "bshd": bshd,
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
