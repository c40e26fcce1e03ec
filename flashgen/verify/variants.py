"""The variants that `flashgen verify` and the test suites go through: every named mask and score, and mixtures."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import cycle
from typing import Any

import numpy as np

import flashgen.language as fg
from flashgen.language import AttentionSpec, Mask, Score, Tensor, masks, scores
from flashgen.language.operations import Capture
from flashgen.verify.problems import ENOUGH, CaptureMaker, Shape

HEAD_DIMS = (64, 128, 40, 96, 32, 256, 80, 192, 8, 160)
VALUE_DIMS = {40: 64, 96: 32, 192: 128, 8: 24}  # beside these head dims; else the value dim is the head dim
DTYPES = ("float16", "bfloat16")
HEADS = ((2, 2), (4, 2), (3, 1))  # (heads_q, heads_kv): MHA, GQA, MQA

SMALL_LENGTHS = ((113, 203), (64, 128), (1, 1), (128, 217), (3, 3), (239, 1), (65, 65), (64, 32), (1, 339), (129, 256))
LARGE_LENGTHS = ((799, 3), (255, 256), (1023, 1024), (512, 512), (1024, 1024), (2048, 2048))
SHORT_LENGTHS = ((64, 32), (65, 65), (3, 3))  # in the small sweep, of gradients of few numbers: many calls each
EQUAL_LENGTHS = ((65, 65), (203, 203), (1, 1), (128, 128))
# Several tiles of queries and steps of keys, the last of them cut off; less of what takes many calls.
STEPPING_LENGTHS = ((113, 203), (150, 139), (97, 230))
STEPPING_SHORT_LENGTHS, STEPPING_EQUAL_LENGTHS = ((65, 97), (97, 65)), ((150, 150), (203, 203))
LARGE_EQUAL_LENGTHS = ((1000, 1000), (2048, 2048))


@dataclass(frozen=True)
class Variant:
    """A mask, a score function, a dropout and a scale, before head dim and dtype are chosen.

    `equal` needs len_q == len_k. `captures` makes what the variant captures, for a shape; None is random captures that
    fit how they are indexed. `scale` None is AttentionSpec's default. `lengths` are the (len_q, len_k) at which to
    verify a variant that does not fit every pair; () is those of the sweeps. `sink` is AttentionSpec's.
    """

    mask: Mask
    score: Score | None = None
    dropout: float = 0.0
    equal: bool = False
    captures: CaptureMaker | None = None
    scale: float | None = None
    lengths: tuple[tuple[int, int], ...] = ()
    sink: Tensor | None = None

    @property
    def name(self) -> str:
        """What tells it from others of a sweep: its mask, score function and dropout."""
        return f"{self.mask}-{self.score}-{self.dropout}"

    def lengths_of(self, large: bool) -> tuple[tuple[int, int], ...]:
        """Its own lengths, or those of the sweeps."""
        if self.lengths:
            return self.lengths
        if self.equal:
            return EQUAL_LENGTHS + (LARGE_EQUAL_LENGTHS if large else ())
        return SMALL_LENGTHS + (LARGE_LENGTHS if large else ())


@dataclass(frozen=True)
class Case:
    """One spec at one shape; `captures` as a variant's. `lse_gradient`: the backward gets a gradient of the LSE too."""

    spec: AttentionSpec
    shape: Shape
    captures: CaptureMaker | None = None
    lse_gradient: bool = False

    def __str__(self) -> str:
        return f"{self.spec.name} {self.shape}"


def near_or_global(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A window around each query and four keys that everybody sees: the README's first spec."""
    return (abs(q - k) <= 128) | (k < 4)


def cliff(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """The first half of the keys stands 30000 below the rest: a row's maximum leaps up on the way."""
    return fg.where(k < fg.len_k // 2, score - 30000, score)


def learned(score: Score) -> Score:
    """The same score function with a gradient for each array of floats that it reads."""
    floats = [capture for capture in score.expression.atoms(Capture) if capture.kind == "float" and capture.ndim]
    with_gradients = {capture: Capture(capture.name, capture.dtype, capture.ndim, True) for capture in floats}
    return replace(score, expression=score.expression.xreplace(with_gradients))


def biased(name: str, bias: Callable[[Any, Any, Any, Any], Any]) -> Score:
    """The score plus a bias, a function of the indices."""
    return fg.trace_score(lambda score, b, h, q, k: score + bias(b, h, q, k), name)


def learned_variants() -> tuple[Variant, ...]:
    """Score functions whose captured arrays have gradients, gathered in every way that models do."""
    near = fg.trace_mask(near_or_global)
    whole = fg.Tensor("bias", "float32", 4)
    left, right = fg.Tensor("left", "float32", 3), fg.Tensor("right", "bfloat16", 3)
    of_queries, of_keys = fg.Tensor("of_queries", "float32", 2), fg.Tensor("of_keys", "float32", 1)
    gain, table = fg.Tensor("gain", "float16", 1), fg.Tensor("table", "float16", 2)
    product = biased("low_rank_bias", lambda b, h, q, k: sum(left[h, q, r] * right[h, k, r] for r in range(2)))
    gained = fg.trace_score(lambda score, b, h, q, k: score * (1 + gain[h]), "gain")
    scores = (
        Variant(fg.causal(), fg.alibi("slopes")),
        Variant(fg.full(), fg.relative_bias("table", 24)),
        Variant(fg.causal(), biased("bias", lambda b, h, q, k: whole[b, h, q, k])),
        Variant(fg.full(), product),
        Variant(fg.causal() & near, biased("of_queries_and_keys", lambda b, h, q, k: of_queries[b, q] + of_keys[k])),
        Variant(fg.sliding_window(40), gained),
        Variant(fg.document("ids"), fg.softcap(20)(fg.relative_bias(table, 12)), dropout=0.17, equal=True),
    )
    return tuple(replace(variant, score=learned(variant.score)) for variant in scores if variant.score)


def variants() -> tuple[Variant, ...]:
    """Every named mask, every named score, dropout, and mixtures of them."""
    chosen = _chosen_variants()
    called = set(re.findall(r"\w+(?=\()", " ".join(f"{variant.mask} {variant.score}" for variant in chosen)))
    examples = [example for example in (*masks.EXAMPLES, *scores.EXAMPLES) if example.partition("(")[0] not in called]
    return (*chosen, *map(_variant_of, examples))


def _variant_of(example: str) -> Variant:
    """A named mask, or a causal mask with a named score, as one of their modules' EXAMPLES calls it."""
    if example in masks.EXAMPLES:
        return Variant(fg.parse_mask(example))
    return Variant(fg.causal(), fg.parse_score(example))


def _chosen_variants() -> tuple[Variant, ...]:
    near = fg.trace_mask(near_or_global)
    return (
        Variant(fg.full()),
        Variant(fg.causal()),
        Variant(fg.causal(align="top_left")),
        Variant(fg.sliding_window(40)),
        Variant(fg.sliding_window(30, 20)),
        Variant(fg.sliding_window(fg.Scalar("window", "int32"))),
        Variant(fg.dilated_window(60, 3)),
        Variant(fg.causal() & fg.dilated_window(64, 4)),
        Variant(fg.prefix_lm(50)),
        Variant(fg.prefix_lm(fg.Tensor("prefix", "int32", 1))),
        Variant(fg.document("ids"), equal=True),
        Variant(fg.document(fg.Tensor("ids", "int32", 2)) & fg.causal(), equal=True),
        Variant(fg.block_sparse("layout", 32, 32)),
        Variant(fg.block_sparse(fg.Tensor("layout", "bool", 4), 64, 16)),
        Variant(fg.causal() & near),
        Variant(~fg.sliding_window(16, 16)),
        Variant(fg.full(), fg.alibi(4)),
        Variant(fg.causal(), fg.alibi("slopes")),
        Variant(fg.full(), fg.softcap(30)),
        Variant(fg.causal(), fg.softcap(fg.Scalar("cap", "float32"))),
        Variant(fg.causal(), fg.softcap(20)(fg.alibi(8))),
        Variant(fg.full(), fg.relative_bias("table", 24)),
        Variant(fg.full(), dropout=0.17),
        Variant(fg.causal() & near, fg.alibi("slopes"), dropout=0.1),
        # With the default scale no score of random inputs outgrows a row's first tile by enough to rescale the output.
        Variant(fg.causal(), scale=1.5),
        Variant(fg.full(), fg.trace_score(cliff)),
        *learned_variants(),
        Variant(fg.tree("bits"), captures=drafted),
    )


def drafted(shape: Shape, random: np.random.Generator) -> dict[str, Any]:
    """Trees of all the queries of each sequence, whose tokens have any parents before them."""
    parents = random.integers(-1, np.arange(shape.len_q), (shape.batch, shape.len_q))
    return {"bits": fg.tree_bits(parents)}


def named_cases(shapes_each: int = 3) -> tuple[Case, ...]:
    """The small sweep, for the emulator and CI: every variant once, head dims, dtypes, heads and lengths in turn."""
    return _small_sweep(shapes_each, SMALL_LENGTHS, SHORT_LENGTHS, EQUAL_LENGTHS)


def stepping_cases() -> tuple[Case, ...]:
    """The specs of `named_cases`, for orders of threads and for sanitizers that look for races: one batch each, at
    lengths where loops go round several times, and memory that was read is written again.
    """
    cases = _small_sweep(1, STEPPING_LENGTHS, STEPPING_SHORT_LENGTHS, STEPPING_EQUAL_LENGTHS)
    return tuple(replace(case, shape=replace(case.shape, batch=1)) for case in cases)


def ragged_cases() -> tuple[Case, ...]:
    """Every variant once as a ragged batch, whose longest sequence has the case's lengths."""
    cases = _small_sweep(1, STEPPING_LENGTHS, STEPPING_SHORT_LENGTHS, STEPPING_EQUAL_LENGTHS)
    return tuple(replace(case, spec=in_layout(case.spec, "thd")) for case in cases)


def sink_cases() -> tuple[Case, ...]:
    """Sinks beside masks, scores, lists and dropout, in batches of one length and in ragged ones."""
    sinks = fg.Tensor("sinks", "float32", 1, grad=True)
    chosen = (
        Variant(fg.full()),
        Variant(fg.causal()),
        Variant(fg.sliding_window(40), fg.softcap(30)),
        Variant(fg.causal() & fg.trace_mask(near_or_global), dropout=0.1),
        Variant(fg.causal(), learned(fg.alibi("slopes"))),
    )
    cases = []
    for number, variant in enumerate(chosen):
        dtype, layout = DTYPES[number % 2], ("bhsd", "thd", "bshd", "thd")[number % 4]
        spec = spec_of(replace(variant, sink=sinks), HEAD_DIMS[number], dtype, layout)
        cases += [_case(variant, spec, pair, number + turn) for turn, pair in enumerate(STEPPING_LENGTHS)]
    return tuple(cases)


def shard_cases() -> tuple[Case, ...]:
    """Parts of q and k, anywhere in the whole, beside masks, scores, lists and dropout."""
    chosen = (
        Variant(fg.causal()),
        Variant(fg.sliding_window(40), fg.alibi(4)),
        Variant(fg.causal() & fg.trace_mask(near_or_global), fg.softcap(30), dropout=0.1),
        Variant(fg.prefix_lm(200), learned(fg.alibi("slopes"))),
    )
    cases = []
    for number, variant in enumerate(chosen):
        spec = spec_of(variant, HEAD_DIMS[number], DTYPES[number % 2], ("bhsd", "bshd")[number % 2]).shard()
        cases += [_case(variant, spec, pair, number + turn) for turn, pair in enumerate(STEPPING_LENGTHS)]
    return tuple(cases)


def in_layout(spec: AttentionSpec, layout: str) -> AttentionSpec:
    """The spec in another layout."""
    values = {each.name: getattr(spec, each.name) for each in fields(spec)}
    return AttentionSpec(**{**values, "layout": layout})


def _small_sweep(shapes_each: int, *lengths: tuple[tuple[int, int], ...]) -> tuple[Case, ...]:
    """`lengths`: of most variants, of those with gradients of few numbers, of those that need equal ones."""
    most, short, equal = map(cycle, lengths)
    dims = cycle(HEAD_DIMS)
    cases = []
    for number, variant in enumerate(variants()):
        dtype, layout = DTYPES[number % 2], ("bhsd", "bshd")[number // 2 % 2]
        spec = spec_of(variant, next(dims), dtype, layout)
        kind = equal if variant.equal else short if _has_few_gradients(spec) else most
        pairs = [next(kind) for _ in range(shapes_each)]
        cases += [_case(variant, spec, pair, number + i) for i, pair in enumerate(pairs)]
    return tuple(cases)


def all_cases() -> tuple[Case, ...]:
    """The whole sweep, for a GPU: every variant, head dim and dtype, at lengths small and large in turn."""
    cases = []
    for number, variant in enumerate(variants()):
        lengths = cycle(variant.lengths_of(large=True))
        for head_dim in HEAD_DIMS:
            for dtype in DTYPES:
                spec = spec_of(variant, head_dim, dtype)
                cases += [_case(variant, spec, next(lengths), number + i) for i in range(3)]
    return tuple(cases)


def cases_of(spec: AttentionSpec, large: bool = False, variant: Variant | None = None) -> tuple[Case, ...]:
    """A user's spec at every length, with the heads in turn; of a variant, at its lengths and with its captures."""
    variant = variant or Variant(spec.mask)
    lengths = variant.lengths_of(large)
    return tuple(_case(variant, spec, pair, number) for number, pair in enumerate(lengths))


def spec_of(variant: Variant, head_dim: int, dtype: str, layout: str = "bhsd") -> AttentionSpec:
    """The variant at a head dim, with the value dim that goes with it here."""
    return AttentionSpec(
        head_dim=head_dim,
        value_dim=VALUE_DIMS.get(head_dim),
        dtype=dtype,
        scale=variant.scale,
        layout=layout,
        dropout=variant.dropout,
        score=variant.score,
        mask=variant.mask,
        sink=variant.sink,
    )


def _has_few_gradients(spec: AttentionSpec) -> bool:
    """Whether a capture with a gradient may have as few numbers as there are heads."""
    return any(capture.grad and capture.ndim == 1 for capture in spec.captures)


def _case(variant: Variant, spec: AttentionSpec, lengths: tuple[int, int], number: int) -> Case:
    """Heads in turn, and every other case with a gradient of the LSE.

    Where a length is tiny, the batch is large enough for ENOUGH rows of q and of k, so that one call can be judged.
    """
    heads_q, heads_kv = HEADS[number % len(HEADS)]
    batch = max(2, -(-ENOUGH // (min(lengths) * heads_kv)))
    shape = Shape(*lengths, batch=batch, heads_q=heads_q, heads_kv=heads_kv)
    return Case(spec, shape, variant.captures, lse_gradient=number % 2 == 1)
