"""Spec and plan -> the text of a kernel. The same bytes on every machine."""

from __future__ import annotations

from flashgen.analysis.closed_forms.tile_ranges import key_range
from flashgen.codegen.arguments import DROPOUT_FIELDS, LIST_FIELDS, ArgumentLayout, Field, capture_fields, ordered
from flashgen.codegen.assembly import assemble, check_spec, common_context, longest_last, visited_tiles
from flashgen.codegen.costs import forward_cost
from flashgen.codegen.demand import divides_tiles
from flashgen.codegen.header import header
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan, choose_forward_plan
from flashgen.codegen.rendered_kernel import Direction, RenderedKernel, entry_name, kernel_name
from flashgen.codegen.sizes import ceil_div
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import captures_read, variant_of
from flashgen.language.spec import AttentionSpec


def forward_layout(spec: AttentionSpec, lists: bool) -> ArgumentLayout:
    """The argument struct of the forward kernel."""
    fields = [Field("const Element*", name) for name in "qkv"] + [Field("Element*", "o"), Field("float*", "lse")]
    fields[-1] = Field("float*", "lse", comment="(batch, heads_q, len_q), or null")
    fields += [Field("Strides", f"{name}_strides") for name in "qkvo"]
    fields += [Field("int", name) for name in ("heads_q", "len_q", "len_k")]
    fields.append(Field("unsigned", "kv_reciprocal", comment="2^31 / heads per head of K and V, rounded up"))
    fields += [*(LIST_FIELDS if lists else ()), *(DROPOUT_FIELDS if spec.dropout else ())]
    return ordered(fields + capture_fields(captures_read(spec)))


def render_mma_sync(spec: AttentionSpec, target: Target, plan: ForwardPlan | None = None) -> RenderedKernel:
    """The forward kernel of a spec on a target; UnsupportedError where the target or the plan cannot do it."""
    check_spec(spec, target)
    plan = plan or choose_forward_plan(spec, target)
    plan.check(spec, target)
    tiles, variant, struct = key_range(spec.mask.expression), variant_of(spec), "ForwardArguments"
    layout, entry = forward_layout(spec, lists=tiles is None), entry_name("attention_forward", spec)
    context = common_context(spec, target, variant, struct, layout) | {
        "plan": plan,
        "entry": entry,
        "header": header(spec, target, plan),
        "key_tiles": visited_tiles(tiles, struct, variant.mask is not None),
        "shared_bytes": plan.shared_bytes(spec),
        "longest_first": longest_last(tiles),
        "score_operand": variant.score.of("scores[i][j][e]") if variant.score else "",
        "score_call": variant.score.call() if variant.score else "",
        "divides_tiles": divides_tiles(spec, plan.tile_k),
        "may_be_empty": variant.mask is not None or variant.score is not None,
    }
    source = assemble("mma_sync/forward.cu.jinja", context, target)
    lists: Direction | None = "keys" if tiles is None else None
    return RenderedKernel(
        kernel_name("fwd", target, spec),
        entry,
        source,
        target,
        layout,
        plan.threads,
        plan.shared_bytes(spec),
        plan=plan,
        role="forward",
        cost=forward_cost(spec),
        reads=lists,
        grid=lambda sizes: (ceil_div(sizes.len_q, plan.tile_q), sizes.heads_q, sizes.batch),
    )
