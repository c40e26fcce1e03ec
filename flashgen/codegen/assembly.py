"""Assembles kernels: the context that all templates share, and the primitives that a kernel's text calls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import sympy

from flashgen.analysis.closed_forms.inequalities import K_FIRST, K_LAST, Q_FIRST, Q_LAST
from flashgen.analysis.closed_forms.tile_ranges import TileRange
from flashgen.codegen.arguments import ArgumentLayout
from flashgen.codegen.batches import batch_of
from flashgen.codegen.environment import environment, primitives_for, tidy
from flashgen.codegen.expressions.derivative_text import ScoreGradient
from flashgen.codegen.expressions.printer import statements
from flashgen.codegen.padding import padded_head_dim, padded_value_dim
from flashgen.codegen.shared_memory import SharedMemoryLayout
from flashgen.codegen.targets import Target
from flashgen.codegen.variant import Variant
from flashgen.dtypes import DTYPES
from flashgen.errors import UnsupportedError
from flashgen.language.operations import BATCH
from flashgen.language.spec import AttentionSpec
from flashgen.language.well_formed import FLOAT32_MAX

LOG2_E = math.log2(math.e)
_MAX_OFFSET = 2.0**24  # float32 rounds values up to this by less than 1


def assemble(template: str, context: Mapping[str, Any], target: Target, sizes: Mapping[str, Any] | None = None) -> str:
    """Renders a template, with the primitives and the shared-memory constants that the rendered text uses.

    Args:
        context: Variables of the template. Its "layouts" map a variable name to the shared-memory layout of which the
            template inserts the constants under that name. Its "batch_template" becomes `batch`, the fragments of a
            batch layout.
        sizes: Sizes for which the size-dependent primitives (wgmma) are written out.
    """
    body, primitives = environment().get_template(template), environment().get_template("primitives.cuh.jinja")
    if "batch_template" in context:
        fragments = environment().get_template(context["batch_template"])
        context = {**context, "batch": fragments.make_module(dict(context))}
    layouts: Mapping[str, SharedMemoryLayout] = context.get("layouts", {})
    bare = body.render({**context, "primitives": "", **dict.fromkeys(layouts, "")})
    device, shared = primitives_for(bare, target, sizes)
    text = primitives.render(device_primitives=device, shared_primitives=shared, uses_shared_memory=True)
    constants = {name: layout.constants(bare) for name, layout in layouts.items()}
    return tidy(body.render({**context, "primitives": text.strip(), **constants}))


def check_spec(spec: AttentionSpec, target: Target) -> None:
    """Raises UnsupportedError if the target lacks the spec's dtype, or scale * log2(e) overflows float32."""
    if spec.dtype not in target.dtypes:
        raise UnsupportedError(
            f"dtype={spec.dtype!r} is not supported on {target.name} (family {target.family}); use float16 there"
        )
    if not spec.score and spec.scale * LOG2_E > FLOAT32_MAX:
        raise UnsupportedError(f"scale={spec.scale!r} is not supported: times log2(e) it is beyond float32; scale q")


def suffix_of(spec: AttentionSpec) -> str:
    """Returns the suffix of the primitives for the spec's dtype."""
    return spec.element.suffix


def factor_suffix_of(spec: AttentionSpec) -> str:
    """Returns the suffix of the primitives for the factors of products. float16 holds 8-bit values exactly."""
    return DTYPES["float16"].suffix if spec.scales_kv else suffix_of(spec)


def common_context(
    spec: AttentionSpec,
    target: Target,
    variant: Variant,
    struct: str,
    layout: ArgumentLayout,
    gradient: ScoreGradient | None = None,
    position: bool = True,
) -> dict[str, Any]:
    """Returns the template context that all kernels of a spec share: types, sizes, constants and primitive names.

    Args:
        gradient: The score function with its derivatives, for kernels that use them.
        position: Whether the struct `Position`, the indices of a score, is declared.
    """
    types = environment().get_template("types.cuh.jinja").render(struct=struct, element=spec.element, layout=layout)
    options = {"struct": struct, "variant": variant, "position": position, "gradient": gradient}
    declared = environment().get_template("variant.cuh.jinja").render(options)
    suffix, factors = suffix_of(spec), factor_suffix_of(spec)
    return {
        "spec": spec,
        "target": target,
        **batch_of(spec).template_context,
        "mixed": False,
        "convert": None,
        "scaled_exponent": False,
        "struct": struct,
        "types": types.strip(),
        "variant": declared.strip(),
        "head_padded": padded_head_dim(spec),
        "value_padded": padded_value_dim(spec),
        "scale_log2": spec.scale * LOG2_E,
        "most_reference": min(_MAX_OFFSET / (LOG2_E if spec.score else spec.scale * LOG2_E), FLOAT32_MAX),
        "keep_threshold": spec.keep_threshold,
        "keep_scale": 256 / spec.keep_threshold,
        "masked": variant.mask is not None,
        "mask_call": variant.mask.call() if variant.mask else "",
        "copy": "copy_async_16" if target.asynchronous_copies else "copy_sync_16",
        "mma": f"mma_m16n8k16_{factors}" if target.deep_mma else f"mma_m16n8k8x2_{factors}",
        "pack": f"pack_{suffix}",
        "pack_factors": f"pack_{factors}",
        "unpack": f"unpack_{suffix}",
    }


ENDS_OF_TILES = {
    Q_FIRST: "const int q_first = work.first_query;",
    Q_LAST: "const int q_last = min(work.first_query + kTileQ, arguments.len_q) - 1;",
    K_FIRST: "const int k_first = work.first_key;",
    K_LAST: "const int k_last = min(work.first_key + kTileK, arguments.len_k) - 1;",
}
"""Symbols of a tile's first and last query and key in the bounds of ranges -> their declarations in a kernel."""
_SEQUENCE = "const int b = work.batch;"


def range_texts(tiles: TileRange, ends: Mapping[sympy.Symbol, str] = ENDS_OF_TILES) -> dict[str, Any]:
    """Returns the texts of a range for templates/key_tiles.cuh.jinja."""
    parts = ("begin", "end", "full_begin", "full_end")
    nodes = [getattr(tiles, part) for part in parts]
    declarations, texts = statements(*nodes)
    used = [line for symbol, line in ends.items() if any(node.has(symbol) for node in nodes)]
    return dict(zip(parts, texts, strict=True)) | {"declarations": [*used, *declarations]}


def is_masked(spec: AttentionSpec) -> bool:
    """Whether a spec has a mask."""
    return bool(spec.mask.expression != sympy.true)


def visited_tiles(
    spec: AttentionSpec,
    tiles: TileRange | None,
    struct: str,
    queries: bool = False,
    ends: Mapping[sympy.Symbol, str] = ENDS_OF_TILES,
    any_size: bool = False,
    semaphores: bool = False,
    counts_only: bool = False,
) -> str:
    """Returns the text that enumerates the tiles a block visits: by a range, or from lists if `tiles` is None.

    Args:
        queries: Whether a block visits tiles of queries instead of keys.
        any_size: Whether the size of key tiles is a template parameter, for kernels with tiles of several sizes.
        semaphores: Whether blocks add to a visited tile in a fixed order, and therefore also ask which tiles other
            blocks visit.
        counts_only: Whether the kernel only counts the tiles, so that it need not know which ones are FULL.
    """
    module: Any = environment().get_template("key_tiles.cuh.jinja").module
    batch: Any = environment().get_template(batch_of(spec).template).module
    side = module.QUERIES if queries else module.KEYS
    if tiles is None:
        return str(module.lists(struct, batch, side))
    texts = range_texts(tiles, {BATCH: _SEQUENCE, **ends})
    return str(module.ranges(texts, struct, is_masked(spec) and not counts_only, batch, side, any_size, semaphores))


def longest_last(tiles: TileRange | None) -> bool:
    """Whether later queries see more keys: their range ends later, but does not begin later."""
    return tiles is not None and tiles.end.has(Q_LAST, Q_FIRST) and not tiles.begin.has(Q_LAST, Q_FIRST)
