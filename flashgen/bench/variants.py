"""The variants that FlexAttention is known by, timed beside it at one long sequence: `flashgen bench --variants`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from flashgen.attention import compile
from flashgen.bench.cases import Case, inputs
from flashgen.bench.peers import flex
from flashgen.bench.timing import median_ms
from flashgen.language import captures, functions, masks, scores
from flashgen.language.spec import AttentionSpec
from flashgen.language.variants import Mask, trace_mask

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
    """A variant: its mask and score, and its captures as torch tensors."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    captures: Callable[[], dict[str, Any]] = dict


def variants() -> tuple[Variant, ...]:
    """The variants, full attention first: what the others' time per visited tile is compared with."""
    table = captures.Tensor("table", "float32", 2)
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
    )


def _documents() -> dict[str, Any]:
    import torch

    return {"ids": torch.arange(LENGTH, device="cuda", dtype=torch.int32) // (LENGTH // DOCUMENTS)}


def _table() -> dict[str, Any]:
    import torch

    return {"table": torch.randn(HEADS, 2 * DISTANCE + 1, device="cuda")}


@dataclass(frozen=True)
class VariantRow:
    """A measured variant: milliseconds of flashgen and of FlexAttention, and of making tile lists and block masks.

    share: of all tiles, those visited. per_tile: time per visited tile over full attention's.
    """

    name: str
    spec: str
    milliseconds: float
    lists_ms: float | None
    flex_ms: float | None
    flex_mask_ms: float | None
    share: float
    per_tile: float

    @property
    def ratio(self) -> float | None:
        """How many times as fast as FlexAttention."""
        return self.flex_ms / self.milliseconds if self.flex_ms else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}


def variant_count() -> int:
    """How many rows `variant_rows` gives."""
    return len(variants())


def variant_rows(dtype: str = "bfloat16") -> Iterator[VariantRow]:
    """Measures the variants one after the other; lists and block masks are made outside the timing, and timed apart."""
    full_time: float | None = None
    for variant in variants():
        spec = AttentionSpec(HEAD_DIM, dtype, **variant.options)
        row = _measure(variant, spec, full_time)
        full_time = full_time or row.milliseconds / row.share
        yield row


def _measure(variant: Variant, spec: AttentionSpec, full: float | None) -> VariantRow:
    q, k, v = inputs(Case(spec, LENGTH, 1, HEADS))
    given = variant.captures()
    options: dict[str, Any] = {"seed": 1} if spec.dropout else {}
    attention = compile(spec)
    lists_ms = None
    if len(attention.kernels) > 1:  # one that lists tiles goes before
        mask_only = {name: value for name, value in given.items() if name in _names(spec)}

        def make() -> Any:
            return attention.tile_lists(LENGTH, LENGTH, 1, HEADS, **mask_only)

        lists_ms, options["tile_lists"] = median_ms(make), make()
    time = median_ms(lambda: attention(q, k, v, **options, **given))
    peer = flex(spec, q, k, v, given)
    flex_ms = median_ms(peer.run) if peer else None
    flex_mask_ms = median_ms(peer.make_block_mask) if peer and peer.make_block_mask else None
    host = {name: value.cpu().numpy() for name, value in given.items()}
    share = attention.tiles(LENGTH, LENGTH, 1, HEADS, **host).share
    per_tile = time / share / full if full else 1.0  # shares are of scores, so that tile sizes do not matter
    return VariantRow(variant.name, spec.name, time, lists_ms, flex_ms, flex_mask_ms, share, per_tile)


def _names(spec: AttentionSpec) -> set[str]:
    return {capture.name for capture in spec.mask.captures}
