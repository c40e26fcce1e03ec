"""Rows of the table of variants: each beside FlexAttention, at one long sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashgen.attention import Attention, compile
from flashgen.bench.cases import Case, Timed, inputs
from flashgen.bench.ours import ours
from flashgen.bench.peers import flex
from flashgen.bench.timing import median_ms
from flashgen.bench.variants import HEAD_DIM, HEADS, LENGTH, Variant
from flashgen.codegen.kernels import PASSES
from flashgen.language.spec import AttentionSpec


@dataclass(frozen=True)
class VariantRow:
    """A measured variant: milliseconds of flashgen and of FlexAttention, and of making tile lists and block masks.

    deterministic_ms: of the deterministic backward. share: of all tiles, those visited. per_tile: time per visited tile
    over full attention's beside it. None stands for what was not asked for or cannot be done.
    """

    name: str
    spec: str
    timed: Timed
    milliseconds: float
    deterministic_ms: float | None
    lists_ms: float | None
    flex_ms: float | None
    flex_mask_ms: float | None
    share: float
    per_tile: float

    @property
    def ratio(self) -> float | None:
        """How many times as fast as FlexAttention."""
        return self.flex_ms / self.milliseconds if self.flex_ms else None

    @property
    def deterministic_ratio(self) -> float | None:
        """How fast the deterministic backward is, of the default one."""
        return self.milliseconds / self.deterministic_ms if self.deterministic_ms else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "deterministic_ratio": self.deterministic_ratio}


def variant_rows(
    chosen: Sequence[Variant], timed: Timed = "forward", dtype: str = "bfloat16", beside_flex: bool = True
) -> Iterator[VariantRow]:
    """Measures the variants one after the other; lists and block masks are made outside the timing, and timed apart.

    Full attention is measured anew beside each variant, since a GPU's clock drifts over minutes. Block masks are timed
    with the forward only: torch takes minutes to compile what makes them.
    """
    for variant in chosen:
        yield _measure(variant, AttentionSpec(HEAD_DIM, dtype, **variant.options), timed, beside_flex)


def _measure(variant: Variant, spec: AttentionSpec, timed: Timed, beside_flex: bool) -> VariantRow:
    arrays, captures = inputs(Case(spec, LENGTH, 1, HEADS)), variant.captures()
    attention = compile(spec)
    lists_ms, options = _lists(attention, timed, captures)
    time = median_ms(ours(attention, timed, arrays, captures, **options))
    full_time = median_ms(ours(compile(AttentionSpec(HEAD_DIM, spec.dtype)), timed, arrays, {}))
    deterministic_ms = None
    if timed != "forward":
        other = compile(spec, deterministic=True)
        _, options = _lists(other, timed, captures)
        deterministic_ms = median_ms(ours(other, timed, arrays, captures, **options))
    peer = flex(spec, timed, arrays, captures, time_mask=timed == "forward") if beside_flex else None
    flex_ms = median_ms(peer.run) if peer else None
    flex_mask_ms = median_ms(peer.make_block_mask) if peer and peer.make_block_mask else None
    host = {name: value.cpu().numpy() for name, value in captures.items()}
    share = attention.tiles(LENGTH, LENGTH, 1, HEADS, **host).share
    per_tile = time / share / full_time  # shares are of scores, so that tile sizes do not matter
    return VariantRow(
        variant.name, spec.name, timed, time, deterministic_ms, lists_ms, flex_ms, flex_mask_ms, share, per_tile
    )


def _lists(
    attention: Attention, timed: Timed, captures: Mapping[str, Any]
) -> tuple[float | None, dict[str, dict[str, Any]]]:
    """Milliseconds of making the tile lists of what is timed, None where there are none; and the lists, by pass."""
    of_mask = {capture.name for capture in attention.spec.mask.captures}
    read = {name: value for name, value in captures.items() if name in of_mask}
    makers: dict[str, Callable[[], Any]] = {}
    if len(attention.kernels) > 1:  # one that lists tiles goes before
        makers["forward"] = lambda: attention.tile_lists(LENGTH, LENGTH, 1, HEADS, **read)
    if timed != "forward" and (attention.backward_kernels.uses_lists or attention.backward_kernels.uses_key_lists):
        makers["backward"] = lambda: attention.backward_tile_lists(LENGTH, LENGTH, 1, HEADS, **read)
    timed_passes = PASSES if timed == "both" else (timed,)
    times = [median_ms(make) for name, make in makers.items() if name in timed_passes]
    return sum(times) if times else None, {name: {"tile_lists": make()} for name, make in makers.items()}
