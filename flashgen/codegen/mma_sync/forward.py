"""Renders the source of the forward kernel that uses mma.sync. The text is deterministic on every machine."""

from __future__ import annotations

from functools import partial

from flashgen.codegen.arguments import ArgumentLayout, Field
from flashgen.codegen.assembly import assemble, check_spec
from flashgen.codegen.demand import demand_of
from flashgen.codegen.expressions.uniform_text import uniform_text
from flashgen.codegen.forward_kernel import forward_context, forward_kernel, page_fields
from flashgen.codegen.header import header
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan, choose_forward_plan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import layout_of
from flashgen.codegen.varlen import sequences_text, tiles_of_queries, varlen_fields
from flashgen.language.spec import AttentionSpec


def forward_layout(spec: AttentionSpec, lists: bool) -> ArgumentLayout:
    """Returns the argument struct of the forward kernel."""
    fields = [Field("const Element*", name) for name in "qkv"] + [Field("Element*", "o"), Field("float*", "lse")]
    fields[-1] = Field("float*", "lse", comment="(batch, heads_q, len_q), or null")
    fields += page_fields(spec)
    fields += [Field("Strides", f"{name}_strides") for name in "qkvo"]
    fields += [Field("int", name) for name in (*(() if spec.is_varlen else ("heads_q",)), "len_q", "len_k")]
    if spec.is_varlen:
        fields[4] = Field("float*", "lse", comment="(heads_q, total_q), or null")
        fields += varlen_fields()
    fields.append(Field("unsigned", "kv_reciprocal", comment="2^31 / (query heads per KV head), rounded up"))
    return layout_of(spec, fields, lists, sink=True)


def render_mma_sync(spec: AttentionSpec, target: Target, plan: ForwardPlan | None = None) -> tuple[RenderedKernel, ...]:
    """Returns the forward kernel of a spec on a target.

    Raises:
        UnsupportedError: the target or the plan does not support the spec.
    """
    check_spec(spec, target)
    plan = plan or choose_forward_plan(spec, target)
    plan.check(spec, target)
    layout = forward_layout(spec, demand_of(spec).listed)
    context = forward_context(spec, target, plan, layout, "scores[i][j][e]")
    context |= {"header": header(spec, target, plan), "page_size": spec.page_size, "uniform": uniform_text(spec)}
    if spec.is_varlen:
        context["sequences"] = sequences_text(context["struct"], layout, "kTileQ")
    source = assemble("mma_sync/forward.cu.jinja", context, target)
    kernel = forward_kernel(
        spec,
        target,
        plan,
        layout,
        source,
        grid=partial(tiles_of_queries, spec, plan.tile_q),
    )
    return (kernel,)
