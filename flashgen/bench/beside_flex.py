"""Measures variants and FlexAttention on one long sequence: `flashgen bench --variants`."""

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
    """A measured variant. Values that were not requested or are not available are None.

    Attributes:
        target: the architecture of the kernels of flashgen.
        milliseconds, deterministic_ms: times of flashgen, and of its deterministic backward.
        full_ms: the time of full attention, measured in interleaved runs.
        lists_ms: the time to create tile lists.
        flex_ms, flex_mask_ms: times of FlexAttention, and of the creation of its block mask.
        share: the fraction of tiles that are visited.
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
        """The speed of flashgen relative to FlexAttention."""
        return self.flex_ms / self.milliseconds if self.flex_ms else None

    @property
    def deterministic_ratio(self) -> float | None:
        """The speed of the deterministic backward relative to the default one."""
        return self.milliseconds / self.deterministic_ms if self.deterministic_ms else None

    @property
    def of_full(self) -> float:
        """The time relative to that of full attention."""
        return self.milliseconds / self.full_ms

    @property
    def per_tile(self) -> float:
        """The time per visited tile relative to that of full attention."""
        return self.of_full / self.share  # shares count scores, so tile sizes do not matter

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
    """Measures the variants one after another. The creation of tile lists and block masks is timed separately.

    The runs of each variant are interleaved with full attention, since the clock of a GPU drifts over minutes. Block
    masks are timed in the forward and with `mask_times` only, since torch compiles their creation for minutes.
    `target` is that of `flashgen.compile`.
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
    """Returns milliseconds to create the tile lists of the timed passes, or None, and the lists by pass."""
    mask_captures = {capture.name for capture in attention.spec.mask.captures}
    read = {name: value for name, value in captures.items() if name in mask_captures}
    makers: dict[str, Callable[[], Any]] = {}
    if len(attention.kernels) > 1:  # one of them lists tiles
        makers["forward"] = lambda: attention.tile_lists(LENGTH, LENGTH, 1, HEADS, **read)
    if timed != "forward" and any(kernel.lists for kernel in attention.backward_kernels.values()):
        makers["backward"] = lambda: attention.backward_tile_lists(LENGTH, LENGTH, 1, HEADS, **read)
    timed_passes = PASSES if timed == "both" else (timed,)
    times = [median_ms(make) for name, make in makers.items() if name in timed_passes]
    return sum(times) if times else None, {name: {"tile_lists": make()} for name, make in makers.items()}
