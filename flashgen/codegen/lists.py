"""The kernel that lists tiles, for masks whose tiles no closed form describes."""

from __future__ import annotations

from typing import Any

from flashgen.codegen.arguments import ArgumentLayout, Field, capture_fields, ordered
from flashgen.codegen.environment import environment, primitives_for, tidy
from flashgen.codegen.kernel import RenderedKernel, entry_name, kernel_name
from flashgen.codegen.plans import ForwardPlan
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import captures_read, variant_of
from flashgen.language.operations import BATCH, HEAD
from flashgen.language.spec import AttentionSpec

THREADS = 256
_STRUCT = "ListArguments"


def depends_on_head(spec: AttentionSpec) -> bool:
    """Whether the mask differs between query heads."""
    return bool(spec.mask.expression.has(HEAD))


def depends_on_batch(spec: AttentionSpec) -> bool:
    """Whether the mask differs between batches."""
    return bool(spec.mask.expression.has(BATCH))


def list_layout(spec: AttentionSpec) -> ArgumentLayout:
    """The argument struct of the list kernel; `heads` is how many heads the lists distinguish."""
    fields = [Field("int*", "counts"), Field("int*", "entries")]
    fields += [Field("int", name) for name in ("heads", "len_q", "len_k")]
    return ordered(fields + capture_fields(captures_read(spec, score=False)))


def render_lists(spec: AttentionSpec, target: Target, plan: ForwardPlan) -> RenderedKernel:
    """The kernel that lists, per tile of queries of `plan`, the tiles of keys that the forward kernel visits."""
    layout, variant = list_layout(spec), variant_of(spec, score=False)
    assert variant.mask is not None, "full() needs no lists"
    templates = environment()
    context: dict[str, Any] = {
        "spec": spec,
        "plan": plan,
        "threads": THREADS,
        "entry": entry_name("list_key_tiles", spec),
        "struct": _STRUCT,
        "types": templates.get_template("types.cuh.jinja").render(struct=_STRUCT, dtype=None, layout=layout).strip(),
        "variant": templates.get_template("variant.cuh.jinja")
        .render(struct=_STRUCT, variant=variant, position=False)
        .strip(),
        "mask_call": variant.mask.call({symbol: str(symbol) for symbol in variant.mask.used}),
        "uses_head": depends_on_head(spec),
        "uses_batch": depends_on_batch(spec),
    }
    template = templates.get_template("tiles/list_key_tiles.cu.jinja")
    device, shared = primitives_for(template.render(context | {"primitives": ""}), target)
    primitives = templates.get_template("primitives.cuh.jinja").render(
        device_primitives=device, shared_primitives=shared, uses_shared_memory=False
    )
    source = tidy(template.render(context | {"primitives": primitives.strip()}))
    return RenderedKernel(kernel_name("lists", target, spec), context["entry"], source, target, layout, THREADS, 0)
