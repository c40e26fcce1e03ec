"""The variants that `flashgen bench --variants` times: well-known uses of FlexAttention, on one long sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashgen.bench.cases import Timed
from flashgen.errors import ArgumentError
from flashgen.language import captures, functions, masks, scores
from flashgen.language.modifiers import Mask, trace_mask

LENGTH, HEADS, HEAD_DIM = 16384, 16, 128
CANVAS, RADIUS = 128, 6  # of the neighbourhood mask: each of 128 x 128 positions attends to 13 x 13 positions
DOCUMENTS = 16
DISTANCE = 1024  # maximum distance of the relative table


def neighbourhood(width: int, radius: int) -> Mask:
    """Returns the mask of a square canvas on which a query attends to the keys within `radius` rows and columns.

    At the border, the window is shifted inwards.
    """

    def near(b: Any, h: Any, q: Any, k: Any) -> Any:
        row, column = (functions.clamp(x, radius, width - 1 - radius) for x in (q // width, q % width))
        return (abs(k // width - row) <= radius) & (abs(k % width - column) <= radius)

    return trace_mask(near, f"neighbourhood({width}, {radius})")


@dataclass(frozen=True)
class Variant:
    """A variant: options of its spec, and captures as torch tensors. `learned` ones are timed in the backward only."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    captures: Callable[[], dict[str, Any]] = dict
    learned: bool = False


def variants() -> tuple[Variant, ...]:
    """Returns the variants. The first is full attention, the reference of the time per visited tile."""
    table, learned_table = (captures.Tensor("table", "float32", 2, grad) for grad in (False, True))
    learned_slopes = captures.Tensor("slopes", "float32", 1, grad=True)
    causal = masks.causal()
    return (
        Variant("full"),
        Variant("causal", {"mask": causal}),
        Variant("window 1024", {"mask": masks.sliding_window(1024)}),
        Variant("prefix 4096", {"mask": masks.prefix_lm(4096)}),
        Variant(f"{DOCUMENTS} documents", {"mask": masks.document("ids") & causal}, _documents),
        Variant("neighbourhood 13x13", {"mask": neighbourhood(CANVAS, RADIUS)}),
        Variant("alibi causal", {"mask": causal, "score": scores.alibi(HEADS)}),
        Variant("softcap 20 causal", {"mask": causal, "score": scores.softcap(20)}),
        Variant("softcap 20 accurate", {"mask": causal, "score": scores.softcap(20, precision="accurate")}),
        Variant("relative table", {"score": scores.relative_bias(table, DISTANCE)}, _table),
        Variant("dropout 0.1", {"dropout": 0.1}),
        Variant("learned slopes causal", {"mask": causal, "score": scores.alibi(learned_slopes)}, _slopes, True),
        Variant("learned table", {"score": scores.relative_bias(learned_table, DISTANCE)}, _table, True),
    )


def chosen_variants(timed: Timed = "forward", only: Sequence[str] = ()) -> tuple[Variant, ...]:
    """Returns the variants of a pass, or those named in `only`. Raises ArgumentError for an unknown name."""
    offered = {variant.name: variant for variant in variants() if timed != "forward" or not variant.learned}
    unknown = [name for name in only if name not in offered]
    if unknown:
        raise ArgumentError(f"variant {unknown[0]!r} is not known; choose from {', '.join(offered)}")
    return tuple(variant for name, variant in offered.items() if not only or name in only)


def _documents() -> dict[str, Any]:
    import torch

    return {"ids": torch.arange(LENGTH, device="cuda", dtype=torch.int32) // (LENGTH // DOCUMENTS)}


def _table() -> dict[str, Any]:
    import torch

    return {"table": torch.randn(HEADS, 2 * DISTANCE + 1, device="cuda")}


def _slopes() -> dict[str, Any]:
    import torch

    return {"slopes": 2.0 ** torch.linspace(-0.5, -8, HEADS, device="cuda")}
