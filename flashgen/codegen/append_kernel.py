"""The kernels of `append_kv`, which write new keys and values into pages.

One serves all sizes and 16-bit types, and another one each kind of records of keys.
"""

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
from flashgen.language.kv_records import KvRecord

_THREADS = 256
_ELEMENT = replace(DTYPES[ELEMENTS[0]], name="16-bit type")
_STRUCT, _ENTRY = "AppendArguments", "append_kv"


def render_append(target: Target) -> RenderedKernel:
    """Renders the kernel. `Sizes.count`: groups of 8 elements in the new keys or values (the larger) of a sequence."""
    fields = [Field("const Element*", f"{name}_new") for name in "kv"] + [Field("Element*", name) for name in "kv"]
    fields += [Field("Strides", f"{name}_strides") for name in ("k_new", "v_new", "k", "v")]
    fields += [Field("int", name) for name in ("heads", "head_dim", "value_dim")]
    layout = ordered([*fields, *_page_fields()])
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


def render_append_records(target: Target, record: KvRecord) -> RenderedKernel:
    """Renders the kernel that encodes new keys as records. `Sizes.count`: new keys of a sequence."""
    fields = [Field("const Element*", "k_new"), Field("unsigned char*", "k")]
    fields += [Field("Strides", f"{name}_strides") for name in ("k_new", "k")]
    layout = ordered([*fields, *_page_fields()])
    types = environment().get_template("types.cuh.jinja")
    entry = f"append_{record.name}"
    context = {
        "header": f"// flashgen: writes new keys into pages as records, {record.name}",
        "types": types.render(struct=_STRUCT, element=DTYPES["bfloat16"], layout=layout).strip(),
        "struct": _STRUCT,
        "entry": entry,
        "threads": _THREADS,
        "record": record,
    }
    return RenderedKernel(
        f"append-{target.name.replace('_', '')}-{record.short_name}",
        entry,
        assemble("append_records.cu.jinja", context, target),
        target,
        layout,
        _THREADS,
        NO_SHARED_MEMORY,
        plan=None,
        role="append",
        grid=lambda sizes: (ceil_div(sizes.count, _THREADS // target.threads_per_warp), 1, sizes.batch),
    )


def _page_fields() -> list[Field]:
    """Returns the members that locate the rows of new keys in pages."""
    return [
        Field("const int*", "page_table"),
        Field("const int*", "seqused_k", comment="(batch): keys before the new ones"),
        Field("long long", "table_pitch", comment="elements of a row of page_table"),
        Field("long long", "most_keys", comment="keys for which a row of page_table has pages"),
        *(Field("int", name) for name in ("tokens", "page_size", "pages")),
    ]
