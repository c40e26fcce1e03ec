"""The kernel of `append_kv`, which writes new keys and values into pages. One kernel serves all sizes and types."""

from __future__ import annotations

from dataclasses import replace

from flashgen.codegen.arguments import Field, ordered
from flashgen.codegen.assembly import assemble
from flashgen.codegen.environment import environment
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.shared_memory import NO_SHARED_MEMORY
from flashgen.codegen.sizes import ceil_div
from flashgen.codegen.targets import Target
from flashgen.dtypes import DTYPES, ELEMENTS

_THREADS = 256
_ELEMENT = replace(DTYPES[ELEMENTS[0]], name="16-bit type")
_STRUCT, _ENTRY = "AppendArguments", "append_kv"


def render_append(target: Target) -> RenderedKernel:
    """Renders the kernel. `Sizes.count`: groups of 8 elements in the new keys or values (the larger) of a sequence."""
    fields = [Field("const Element*", f"{name}_new") for name in "kv"] + [Field("Element*", name) for name in "kv"]
    fields += [Field("const int*", "page_table")]
    fields += [Field("const int*", "seqused_k", comment="(batch): keys before the new ones")]
    fields += [Field("Strides", f"{name}_strides") for name in ("k_new", "v_new", "k", "v")]
    fields += [Field("long long", "table_pitch", comment="elements of a row of page_table")]
    fields += [Field("long long", "most_keys", comment="keys for which a row of page_table has pages")]
    fields += [Field("int", name) for name in ("tokens", "heads", "head_dim", "value_dim", "page_size", "pages")]
    layout = ordered(fields)
    types = environment().get_template("types.cuh.jinja")
    context = {
        "header": "// flashgen: writes new keys and values into pages",
        "types": types.render(struct=_STRUCT, element=_ELEMENT, layout=layout).strip(),
        "struct": _STRUCT,
        "entry": _ENTRY,
        "threads": _THREADS,
    }
    return RenderedKernel(
        f"append-{target.name.replace('_', '')}",
        _ENTRY,
        assemble("append_kv.cu.jinja", context, target),
        target,
        layout,
        _THREADS,
        NO_SHARED_MEMORY,
        plan=None,
        role="append",
        grid=lambda sizes: (ceil_div(sizes.count, _THREADS), 2, sizes.batch),
    )
