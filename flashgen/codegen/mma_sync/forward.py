"""Renders the source of the forward kernel that uses mma.sync. The text is deterministic on every machine."""

from __future__ import annotations

from functools import partial

from flashgen.codegen.arguments import ArgumentLayout, Field, output_field
from flashgen.codegen.assembly import assemble, check_spec
from flashgen.codegen.batches import batch_of
from flashgen.codegen.demand import demand_of
from flashgen.codegen.expressions.uniform_text import uniform_text
from flashgen.codegen.forward_kernel import forward_context, forward_kernel, page_fields
from flashgen.codegen.header import header
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan, choose_forward_plan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import layout_of
from flashgen.language.spec import AttentionSpec


def forward_layout(spec: AttentionSpec, lists: bool) -> ArgumentLayout:
    """Returns the argument struct of the forward kernel."""
    fields = [Field("const Element*", name) for name in spec.inputs] + [output_field(spec), batch_of(spec).lse]
    fields += page_fields(spec)
    fields += [Field("Strides", f"{name}_strides") for name in (*spec.inputs, "o")]
    fields += batch_of(spec).fields("len_q", "len_k")
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
    context = forward_context(spec, target, plan, layout, "scores[n]", by_rows=True)
    context |= {"header": header(spec, target, plan), "page_size": spec.page_size, "uniform": uniform_text(spec)}
    context |= {"split": plan.split > 1}
    context |= batch_of(spec).sequences(context["struct"], layout, "kTileQ")
    source = assemble("mma_sync/forward.cu.jinja", context, target)
    kernel = forward_kernel(
        spec,
        target,
        plan,
        layout,
        source,
        grid=partial(batch_of(spec).query_grid, plan.tile_q),
    )
    return (kernel,)
