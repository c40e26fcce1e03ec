"""Spec and plan -> the text of a kernel. The same bytes on every machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flashgen.analysis.order import Q_FIRST, Q_LAST
from flashgen.analysis.ranges import TileRange, key_range
from flashgen.codegen.arguments import ArgumentLayout, Field, capture_fields, ordered
from flashgen.codegen.environment import environment, primitives_for, tidy
from flashgen.codegen.header import header
from flashgen.codegen.kernel import RenderedKernel, entry_name, kernel_name
from flashgen.codegen.plans import ForwardPlan, choose_forward_plan, padded
from flashgen.codegen.printer import statements
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import captures_read, variant_of
from flashgen.errors import UnsupportedError
from flashgen.language.rules import FLOAT32_MAX
from flashgen.language.spec import AttentionSpec

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class ForwardKernel(RenderedKernel):
    """The forward kernel: its plan, and what its launches depend on.

    uses_lists: tiles of keys come from lists, not from closed forms. longest_first: later queries see more keys, so
    that blocks run in reverse.
    """

    plan: ForwardPlan
    uses_lists: bool
    longest_first: bool


def _range_texts(tiles: TileRange) -> dict[str, Any]:
    parts = ("begin", "end", "full_begin", "full_end")
    nodes = [getattr(tiles, part) for part in parts]
    declarations, texts = statements(*nodes)
    first = "const int q_first = work.first_query;"
    last = "const int q_last = min(work.first_query + kTileQ, arguments.len_q) - 1;"
    used = [line for symbol, line in ((Q_FIRST, first), (Q_LAST, last)) if any(node.has(symbol) for node in nodes)]
    return dict(zip(parts, texts, strict=True)) | {"declarations": [*used, *declarations]}


def _longest_last(tiles: TileRange | None) -> bool:
    """Whether later queries see more keys: the run ends later and does not begin later."""
    return tiles is not None and tiles.end.has(Q_LAST, Q_FIRST) and not tiles.begin.has(Q_LAST, Q_FIRST)


def forward_layout(spec: AttentionSpec, lists: bool) -> ArgumentLayout:
    """The argument struct of the forward kernel."""
    fields = [Field("const Element*", name) for name in "qkv"] + [Field("Element*", "o"), Field("float*", "lse")]
    fields[-1] = Field("float*", "lse", comment="(batch, heads_q, len_q), or null")
    fields += [Field("Strides", f"{name}_strides") for name in "qkvo"]
    fields += [Field("int", name) for name in ("heads_q", "len_q", "len_k")]
    fields.append(Field("unsigned", "kv_reciprocal", comment="2^31 / heads per head of K and V, rounded up"))
    if lists:
        fields += [Field("const int*", "tile_counts"), Field("const long long*", "tile_offsets")]
        fields.append(Field("const int*", "tile_entries"))
        fields.append(Field("Strides", "list_strides"))
    if spec.dropout:
        fields += [Field("unsigned", name) for name in ("seed_low", "seed_high", "offset")]
    return ordered(fields + capture_fields(captures_read(spec)))


def _suffix(spec: AttentionSpec) -> str:
    return {"float16": "f16", "bfloat16": "bf16"}[spec.dtype]


def render_forward(spec: AttentionSpec, target: Target, plan: ForwardPlan | None = None) -> ForwardKernel:
    """The forward kernel of a spec on a target; UnsupportedError where the target or the plan cannot do it."""
    if spec.dtype not in target.dtypes:
        raise UnsupportedError(
            f"dtype={spec.dtype!r} is not supported on {target.name} (family {target.family}); use float16 there"
        )
    if not spec.score and spec.scale * LOG2_E > FLOAT32_MAX:
        raise UnsupportedError(f"scale={spec.scale!r} is not supported: times log2(e) it is beyond float32; scale q")
    plan = plan or choose_forward_plan(spec, target)
    plan.check(spec, target)
    tiles = key_range(spec.mask.expression)
    layout = forward_layout(spec, lists=tiles is None)
    variant = variant_of(spec)
    suffix, entry = _suffix(spec), entry_name("attention_forward", spec)
    key_tiles: Any = environment().get_template("key_tiles.cuh.jinja").module
    struct = "ForwardArguments"
    context: dict[str, Any] = {
        "spec": spec,
        "target": target,
        "plan": plan,
        "entry": entry,
        "struct": struct,
        "header": header(spec, target, plan),
        "types": environment()
        .get_template("types.cuh.jinja")
        .render(struct=struct, dtype=spec.dtype, layout=layout)
        .strip(),
        "variant": environment()
        .get_template("variant.cuh.jinja")
        .render(struct=struct, variant=variant, position=True)
        .strip(),
        "key_tiles": key_tiles.ranges(_range_texts(tiles), struct, variant.mask is not None) if tiles else key_tiles.lists(struct),
        "head_padded": padded(spec.head_dim),
        "value_padded": padded(spec.value_dim),
        "scale_log2": spec.scale * LOG2_E,
        "shared_bytes": plan.shared_bytes(spec),
        "keep_threshold": spec.keep_threshold,
        "keep_scale": 256 / spec.keep_threshold,
        "longest_first": _longest_last(tiles),
        "masked": variant.mask is not None,
        "score_operand": variant.score.of("scores[i][j][e]") if variant.score else "",
        "score_call": variant.score.call() if variant.score else "",
        "mask_call": variant.mask.call() if variant.mask else "",
        "may_be_empty": variant.mask is not None or variant.score is not None,
        "copy": "copy_async_16" if target.asynchronous_copies else "copy_sync_16",
        "mma": f"mma_m16n8k16_{suffix}" if target.asynchronous_copies else f"mma_m16n8k8x2_{suffix}",
        "pack": f"pack_{suffix}",
    }
    template = environment().get_template("forward/mma_sync.cu.jinja")
    body = template.render(context | {"primitives": ""})
    device, shared = primitives_for(body, target)
    primitives = (
        environment()
        .get_template("primitives.cuh.jinja")
        .render(device_primitives=device, shared_primitives=shared, uses_shared_memory=True)
    )
    source = tidy(template.render(context | {"primitives": primitives.strip()}))
    name, lists, longest_first = kernel_name("fwd", target, spec), tiles is None, _longest_last(tiles)
    shared_bytes = plan.shared_bytes(spec)
    return ForwardKernel(name, entry, source, target, layout, plan.threads, shared_bytes, plan, lists, longest_first)
