"""Rows of the table of variants: each beside FlexAttention, at one long sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashgen.attention import Attention, compile
from flashgen.bench.cases import Case, Timed, inputs
from flashgen.bench.ours import ours
from flashgen.bench.peers import flex
from flashgen.bench.variants import HEAD_DIM, HEADS, LENGTH, Variant
from flashgen.codegen.stages import PASSES
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.timing import median_ms, medians_ms


@dataclass(frozen=True)
class VariantRow:
    """A measured variant: milliseconds of flashgen, of FlexAttention, of its tile lists and of Flex's block masks.

    target: the architecture that flashgen's kernels were emitted for. full_ms: full attention's time, measured in turn.
    deterministic_ms: the deterministic backward's time. share: the share of tiles that are visited. None stands where
    nothing was asked for or nothing can be done.
    """

    name: str
    spec: str
    target: str
    timed: Timed
    milliseconds: float
    full_ms: float
    deterministic_ms: float | None
    lists_ms: float | None
    flex_ms: float | None
    flex_mask_ms: float | None
    share: float

    @property
    def ratio(self) -> float | None:
        """How many times as fast as FlexAttention flashgen is."""
        return self.flex_ms / self.milliseconds if self.flex_ms else None

    @property
    def deterministic_ratio(self) -> float | None:
        """The deterministic backward's speed over the default one's."""
        return self.milliseconds / self.deterministic_ms if self.deterministic_ms else None

    @property
    def of_full(self) -> float:
        """Its time over full attention's."""
        return self.milliseconds / self.full_ms

    @property
    def per_tile(self) -> float:
        """Time per visited tile over full attention's."""
        return self.of_full / self.share  # a share counts scores, so that tile sizes do not matter

    def to_dict(self) -> dict[str, Any]:
        derived = ("ratio", "deterministic_ratio", "of_full", "per_tile")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def variant_rows(
    chosen: Sequence[Variant],
    timed: Timed = "forward",
    dtype: str = "bfloat16",
    beside_flex: bool = True,
    mask_times: bool = True,
    target: str | None = None,
) -> Iterator[VariantRow]:
    """Measures the variants one after the other. Lists and block masks are made outside the timing, and timed apart.

    Full attention is measured in turn with each variant, since a GPU's clock drifts over minutes. Block masks are timed
    with the forward only, and if mask_times, as torch takes minutes to compile their making. target is that of
    `flashgen.compile`.
    """
    for variant in chosen:
        spec = AttentionSpec(HEAD_DIM, dtype, **variant.options)
        yield _measure(variant, spec, timed, beside_flex, mask_times and timed == "forward", target)


def _measure(
    variant: Variant, spec: AttentionSpec, timed: Timed, beside_flex: bool, time_mask: bool, target: str | None
) -> VariantRow:
    arrays, captures = inputs(Case(spec, LENGTH, 1, HEADS)), variant.captures()
    attention = compile(spec, target)
    lists_ms, options = _lists(attention, timed, captures)
    runs = {
        "flashgen": ours(attention, timed, arrays, captures, **options),
        "full": ours(compile(AttentionSpec(HEAD_DIM, spec.dtype), target), timed, arrays, {}),
    }
    if timed != "forward":
        other = compile(spec, target, deterministic=True)
        _, options = _lists(other, timed, captures)
        runs["deterministic"] = ours(other, timed, arrays, captures, **options)
    peer = flex(spec, timed, arrays, captures, time_mask) if beside_flex else None
    if peer:
        runs["Flex"] = peer.run
    times = medians_ms(runs)
    host = {name: value.cpu().numpy() for name, value in captures.items()}
    return VariantRow(
        name=variant.name,
        spec=spec.name,
        target=attention.target.name,
        timed=timed,
        milliseconds=times["flashgen"],
        full_ms=times["full"],
        deterministic_ms=times.get("deterministic"),
        lists_ms=lists_ms,
        flex_ms=times.get("Flex"),
        flex_mask_ms=median_ms(peer.make_block_mask) if peer and peer.make_block_mask else None,
        share=attention.tiles(LENGTH, LENGTH, 1, HEADS, **host).share,
    )


def _lists(
    attention: Attention, timed: Timed, captures: Mapping[str, Any]
) -> tuple[float | None, dict[str, dict[str, Any]]]:
    """Milliseconds to make the tile lists of the timed passes (None without lists), and the lists, by pass."""
    of_mask = {capture.name for capture in attention.spec.mask.captures}
    read = {name: value for name, value in captures.items() if name in of_mask}
    makers: dict[str, Callable[[], Any]] = {}
    if len(attention.kernels) > 1:  # a kernel that lists tiles goes before
        makers["forward"] = lambda: attention.tile_lists(LENGTH, LENGTH, 1, HEADS, **read)
    if timed != "forward" and any(kernel.lists for kernel in attention.backward_kernels.values()):
        makers["backward"] = lambda: attention.backward_tile_lists(LENGTH, LENGTH, 1, HEADS, **read)
    timed_passes = PASSES if timed == "both" else (timed,)
    times = [median_ms(make) for name, make in makers.items() if name in timed_passes]
    return sum(times) if times else None, {name: {"tile_lists": make()} for name, make in makers.items()}
