"""The variants that FlexAttention is known by, at one long sequence: what `flashgen bench --variants` times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashgen.bench.cases import Timed
from flashgen.errors import ArgumentError
from flashgen.language import captures, functions, masks, scores
from flashgen.language.modifiers import Mask, trace_mask

LENGTH, HEADS, HEAD_DIM = 16384, 16, 128
CANVAS, RADIUS = 128, 6  # of the neighbourhood: 128 x 128 positions, 13 x 13 around each
DOCUMENTS = 16
DISTANCE = 1024  # of the relative table


def neighbourhood(width: int, radius: int) -> Mask:
    """A query sees the keys within `radius` rows and columns of it on a square canvas; at its border, of the window
    moved inside.
    """

    def near(b: Any, h: Any, q: Any, k: Any) -> Any:
        row, column = (functions.clamp(x, radius, width - 1 - radius) for x in (q // width, q % width))
        return (abs(k // width - row) <= radius) & (abs(k % width - column) <= radius)

    return trace_mask(near, f"neighbourhood({width}, {radius})")


@dataclass(frozen=True)
class Variant:
    """A variant: its mask and score, and its captures as torch tensors. `learned`: it differs only in the backward."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    captures: Callable[[], dict[str, Any]] = dict
    learned: bool = False


def variants() -> tuple[Variant, ...]:
    """The variants, full attention first: what the others' time per visited tile is compared with."""
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
    """Those of a pass, or the ones named in `only`; ArgumentError for a name that there is not."""
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
