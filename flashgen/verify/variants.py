"""The variants that `flashgen verify` and the tests run: every named mask and score function, and combinations."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import cycle
from typing import Any

import numpy as np

import flashgen.language as fg
from flashgen.dtypes import ELEMENTS
from flashgen.language import AttentionSpec, Mask, Score, Tensor, masks, scores
from flashgen.language.operations import Capture
from flashgen.verify.problems import ENOUGH, CaptureMaker, Shape

HEAD_DIMS = (64, 128, 40, 96, 32, 256, 80, 192, 8, 160)
VALUE_DIMS = {40: 64, 96: 32, 192: 128, 8: 24}  # by head dim; for other head dims the value dim is the head dim
DTYPES = ELEMENTS
HEADS = ((2, 2), (4, 2), (3, 1))  # (heads_q, heads_kv): MHA, GQA, MQA
RECORD_HEADS = ((3, 1), (16, 1), (20, 1))  # of caches of records, which have one KV head

SMALL_LENGTHS = ((113, 203), (64, 128), (1, 1), (128, 217), (3, 3), (239, 1), (65, 65), (64, 32), (1, 339), (129, 256))
LARGE_LENGTHS = ((799, 3), (255, 256), (1023, 1024), (512, 512), (1024, 1024), (2048, 2048))
SHORT_LENGTHS = ((64, 32), (65, 65), (3, 3))  # for gradients of few elements in the small sweep, which take many calls
EQUAL_LENGTHS = ((65, 65), (203, 203), (1, 1), (128, 128))
# Several query and key tiles with a partial last tile; shorter lengths for cases that take many calls.
STEPPING_LENGTHS = ((113, 203), (150, 139), (97, 230))
STEPPING_SHORT_LENGTHS, STEPPING_EQUAL_LENGTHS = ((65, 97), (97, 65)), ((150, 150), (203, 203))
LARGE_EQUAL_LENGTHS = ((1000, 1000), (2048, 2048))


@dataclass(frozen=True)
class Variant:
    """A mask, a score function, a dropout and a scale, without a head dim and a dtype.

    Attributes:
        mask: the mask.
        score: the score function, or None.
        dropout: the dropout probability.
        equal: whether the variant needs len_q == len_k.
        captures: creates the captures for a shape; None for random captures that fit the way they are indexed.
        scale: the scale of q·k; None for the default of AttentionSpec.
        lengths: the (len_q, len_k) at which to verify the variant; () for those of the sweeps.
        sink: the attention sinks, as in AttentionSpec.
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
        """The name in a sweep: the mask, the score function and the dropout."""
        return f"{self.mask}-{self.score}-{self.dropout}"

    def lengths_of(self, large: bool) -> tuple[tuple[int, int], ...]:
        """Returns the variant's own lengths, or those of the sweeps if it has none.

        Args:
            large: whether to include the larger lengths of the sweeps.
        """
        if self.lengths:
            return self.lengths
        if self.equal:
            return EQUAL_LENGTHS + (LARGE_EQUAL_LENGTHS if large else ())
        return SMALL_LENGTHS + (LARGE_LENGTHS if large else ())


@dataclass(frozen=True)
class Case:
    """A spec at a shape.

    Attributes:
        spec: the spec.
        shape: the sizes of the call.
        captures: creates the captures, as for a Variant.
        lse_gradient: whether the backward also takes a gradient of the LSE.
    """

    spec: AttentionSpec
    shape: Shape
    captures: CaptureMaker | None = None
    lse_gradient: bool = False

    def __str__(self) -> str:
        return f"{self.spec.name} {self.shape}"


def near_or_global(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Keeps a window around each query and the first four keys: the mask of the first spec in the README."""
    return (abs(q - k) <= 128) | (k < 4)


def cliff(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Lowers the scores of the first half of the keys by 30000, so that the running maximum jumps in mid-row."""
    return fg.where(k < fg.len_k // 2, score - 30000, score)


def learned(score: Score) -> Score:
    """Returns the score function with a gradient for each float array that it captures.

    Args:
        score: the score function.
    """
    floats = [capture for capture in score.expression.atoms(Capture) if capture.kind == "float" and capture.ndim]
    with_gradients = {capture: Capture(capture.name, capture.dtype, capture.ndim, True) for capture in floats}
    return replace(score, expression=score.expression.xreplace(with_gradients))


def biased(name: str, bias: Callable[[Any, Any, Any, Any], Any]) -> Score:
    """Returns the score function that adds a bias, which is a function of the indices."""
    return fg.trace_score(lambda score, b, h, q, k: score + bias(b, h, q, k), name)


def learned_variants() -> tuple[Variant, ...]:
    """Returns score functions with learned captures, indexed in all the ways that models use."""
    near = fg.trace_mask(near_or_global)
    bias = fg.Tensor("bias", "float32", 4)
    left, right = fg.Tensor("left", "float32", 3), fg.Tensor("right", "bfloat16", 3)
    of_queries, of_keys = fg.Tensor("of_queries", "float32", 2), fg.Tensor("of_keys", "float32", 1)
    gain, table = fg.Tensor("gain", "float16", 1), fg.Tensor("table", "float16", 2)
    product = biased("low_rank_bias", lambda b, h, q, k: sum(left[h, q, r] * right[h, k, r] for r in range(2)))
    gained = fg.trace_score(lambda score, b, h, q, k: score * (1 + gain[h]), "gain")
    scores = (
        Variant(fg.causal(), fg.alibi("slopes")),
        Variant(fg.full(), fg.relative_bias("table", 24)),
        Variant(fg.causal(), biased("bias", lambda b, h, q, k: bias[b, h, q, k])),
        Variant(fg.full(), product),
        Variant(fg.causal() & near, biased("of_queries_and_keys", lambda b, h, q, k: of_queries[b, q] + of_keys[k])),
        Variant(fg.sliding_window(40), gained),
        Variant(fg.document("ids"), fg.softcap(20)(fg.relative_bias(table, 12)), dropout=0.17, equal=True),
    )
    return tuple(replace(variant, score=learned(variant.score)) for variant in scores if variant.score)


def variants() -> tuple[Variant, ...]:
    """Returns every named mask, every named score function, dropout, and combinations of them."""
    chosen = _chosen_variants()
    called = set(re.findall(r"\w+(?=\()", " ".join(f"{variant.mask} {variant.score}" for variant in chosen)))
    examples = [example for example in (*masks.EXAMPLES, *scores.EXAMPLES) if example.partition("(")[0] not in called]
    return (*chosen, *map(_variant_of, examples))


def _variant_of(example: str) -> Variant:
    """Returns the variant of an entry of EXAMPLES: a mask, or a causal mask with a score function."""
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
        # With the default scale, the row maximum of random inputs never grows enough after the first tile to rescale.
        Variant(fg.causal(), scale=1.5),
        Variant(fg.full(), fg.trace_score(cliff)),
        *learned_variants(),
        Variant(fg.tree("bits"), captures=drafted),
    )


def drafted(shape: Shape, random: np.random.Generator) -> dict[str, Any]:
    """Returns the bits of a random tree over the queries of each sequence, for speculative decoding."""
    parents = random.integers(-1, np.arange(shape.len_q), (shape.batch, shape.len_q))
    return {"bits": fg.tree_bits(parents)}


def named_cases(shapes_each: int = 3) -> tuple[Case, ...]:
    """Returns the small sweep, for the emulator and CI: every variant once, cycling through dims, dtypes and lengths.

    shapes_each: the number of shapes of each variant.
    """
    return _small_sweep(shapes_each, SMALL_LENGTHS, SHORT_LENGTHS, EQUAL_LENGTHS)


def stepping_cases() -> tuple[Case, ...]:
    """Returns the specs of `named_cases` with batch size 1, for different thread orders and for race detectors.

    The lengths take several iterations of each main loop, so that shared memory is reused.
    """
    cases = _small_sweep(1, STEPPING_LENGTHS, STEPPING_SHORT_LENGTHS, STEPPING_EQUAL_LENGTHS)
    return tuple(replace(case, shape=replace(case.shape, batch=1)) for case in cases)


def ragged_cases() -> tuple[Case, ...]:
    """Returns every variant once as a varlen batch; the longest sequence has the lengths of the case."""
    cases = _small_sweep(1, STEPPING_LENGTHS, STEPPING_SHORT_LENGTHS, STEPPING_EQUAL_LENGTHS)
    return tuple(replace(case, spec=in_layout(case.spec, "thd")) for case in cases)


def sink_cases() -> tuple[Case, ...]:
    """Returns cases of sinks with masks, scores, tile lists and dropout, in fixed-length and varlen batches."""
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
        dtype, layout = DTYPES[number % len(DTYPES)], ("bhsd", "thd", "bshd", "thd")[number % 4]
        spec = spec_of(replace(variant, sink=sinks), HEAD_DIMS[number], dtype, layout)
        cases += [_case(variant, spec, pair, number + i) for i, pair in enumerate(STEPPING_LENGTHS)]
    return tuple(cases)


def shard_cases() -> tuple[Case, ...]:
    """Returns cases of shards of q and k at random positions, with masks, scores, tile lists and dropout."""
    chosen = (
        Variant(fg.causal()),
        Variant(fg.sliding_window(40), fg.alibi(4)),
        Variant(fg.causal() & fg.trace_mask(near_or_global), fg.softcap(30), dropout=0.1),
        Variant(fg.prefix_lm(200), learned(fg.alibi("slopes"))),
    )
    cases = []
    for number, variant in enumerate(chosen):
        spec = spec_of(variant, HEAD_DIMS[number], DTYPES[number % len(DTYPES)], ("bhsd", "bshd")[number % 2]).shard()
        cases += [_case(variant, spec, pair, number + i) for i, pair in enumerate(STEPPING_LENGTHS)]
    return tuple(cases)


def in_layout(spec: AttentionSpec, layout: str) -> AttentionSpec:
    """Returns the spec in another layout."""
    values = {each.name: getattr(spec, each.name) for each in fields(spec)}
    return AttentionSpec(**{**values, "layout": layout})


def _small_sweep(shapes_each: int, *lengths: tuple[tuple[int, int], ...]) -> tuple[Case, ...]:
    """Returns one case per variant and shape.

    lengths: those for most variants, for variants with gradients of few elements, and for variants with len_q == len_k.
    """
    general, short, equal = map(cycle, lengths)
    dims = cycle(HEAD_DIMS)
    cases = []
    for number, variant in enumerate(variants()):
        dtype, layout = DTYPES[number % len(DTYPES)], ("bhsd", "bshd")[number // 2 % 2]
        spec = spec_of(variant, next(dims), dtype, layout)
        kind = equal if variant.equal else short if _has_few_gradients(spec) else general
        pairs = [next(kind) for _ in range(shapes_each)]
        cases += [_case(variant, spec, pair, number + i) for i, pair in enumerate(pairs)]
    return tuple(cases)


def all_cases() -> tuple[Case, ...]:
    """Returns the full sweep, for a GPU: every variant, head dim and dtype, cycling through small and large lengths."""
    cases = []
    for number, variant in enumerate(variants()):
        lengths = cycle(variant.lengths_of(large=True))
        for head_dim in HEAD_DIMS:
            for dtype in DTYPES:
                spec = spec_of(variant, head_dim, dtype)
                cases += [_case(variant, spec, next(lengths), number + i) for i in range(3)]
    return tuple(cases)


def cases_of(spec: AttentionSpec, large: bool = False, variant: Variant | None = None) -> tuple[Case, ...]:
    """Returns cases of a user's spec at every length, cycling through HEADS.

    Args:
        spec: the spec.
        large: include large lengths.
        variant: the variant of the spec, which determines lengths and captures.
    """
    variant = variant or Variant(spec.mask)
    lengths = variant.lengths_of(large)
    return tuple(_case(variant, spec, pair, number) for number, pair in enumerate(lengths))


def spec_of(variant: Variant, head_dim: int, dtype: str, layout: str = "bhsd") -> AttentionSpec:
    """Returns the spec of a variant at a head dim, with the value dim of VALUE_DIMS.

    Args:
        variant: the variant.
        head_dim: elements of a query or key.
        dtype: "float16" or "bfloat16".
        layout: the layout of the spec.
    """
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
    """Returns whether a learned capture may have as few elements as there are heads."""
    return any(capture.grad and capture.ndim == 1 for capture in spec.captures)


def _case(variant: Variant, spec: AttentionSpec, lengths: tuple[int, int], number: int) -> Case:
    """Returns a case with the heads and the LSE gradient that its number in the sweep determines.

    For short lengths, the batch is large enough for ENOUGH rows of q and k, so that a single call can be judged.
    """
    heads = RECORD_HEADS if spec.kv_record else HEADS
    heads_q, heads_kv = heads[number % len(heads)]
    batch = max(2, -(-ENOUGH // (min(lengths) * heads_kv)))
    shape = Shape(*lengths, batch=batch, heads_q=heads_q, heads_kv=heads_kv)
    return Case(spec, shape, variant.captures, lse_gradient=number % 2 == 1)
