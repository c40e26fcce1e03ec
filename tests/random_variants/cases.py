"""Draws whole cases by Hypothesis: a variant, the target and plan of its kernels, and the calls that check it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from hypothesis import strategies as st

import flashgen.language as fg
import random_variants.scores as scores
from flashgen.codegen.candidates import MAX_CANDIDATES
from flashgen.codegen.stages import Pass
from flashgen.codegen.targets import TARGETS
from flashgen.language import AttentionSpec
from flashgen.runtime.schedule import COPIES, ORDERS, Schedule
from flashgen.verify.problems import Shape
from random_variants.captures import Fill, draw_values
from random_variants.grammar import Draw, Grammar, Source
from random_variants.terms import Declared, Term, text_of
from random_variants.tracing import mask_of, score_of

SINKS = "sinks"  # the name of the capture of sinks, which the grammar gives to no other
Inputs = Literal["normal", "large", "tiny", "huge", "ones", "zeros", "garbage", "padding"]
Sanitizer = Literal["address", "thread"]

_DIMS = (32, 32, 32, 16, 16, 8, 24, 40, 64, 64, 72, 96, 128)
_LARGE_DIMS = (160, 192, 208, 256)
_CACHED_DIMS = (32, 32, 64, 64, 96, 128, 256)  # those that caches of 8 bits have
# Lengths around the borders of tiles of 16 to 192, and others between them.
_BORDERS = (1, 2, 3, 8, *range(15, 18), 31, 33, 47, *range(63, 66), 80, 96, 97, *range(127, 130), 150, 176)
_LENGTHS = (*_BORDERS, 191, 193, 200, 256, 257, *range(1, 300, 13))
_LONG = ((32_769, 64), (64, 33_000), (40_000, 16), (2_049, 300))
_BATCHES = (*(1,) * 12, *(2,) * 6, *(3,) * 6, 0)
_HEADS = ((1, 1), (2, 2), (2, 1), (4, 2), (3, 1), (6, 2))
# The calls of a server: few queries of several heads for each head of keys.
_FEW_QUERIES = (1, 1, 1, 1, 2, 3, 4, 7, 8, 17, 40, 70)
_CACHED_KEYS = (1, 0, 2, 7, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 511, 513, 700)
_CACHED_HEADS = ((1, 1), (4, 1), (4, 2), (4, 4), (6, 2), (12, 1), (16, 2))
_PAGE_SIZES = (None, None, 16, 16, 16, 64, 64, 1, 2, 4, 8, 32, 128, 256)
_INPUTS = (*("normal",) * 8, *("large", "tiny") * 2, "huge", "ones", "zeros", "garbage", "padding")
_GRADIENTS = {"float16": (1e-3, 100.0), "bfloat16": (1e-30, 1e30)}  # factors that leave room for sums of products
_COMMON_TARGETS = ("sm_80", "sm_75", "sm_90", "sm_90a", "sm_90a", "sm_90a", "sm_100", "sm_120")

PREDICATE_CALLS = 6  # of a case that compiles no kernel
EMULATED_CALLS = 3  # of a case that does: compiling takes most of its time
GPU_CALLS = 12  # of such a case on a GPU, where a call takes no time but that of the reference


@dataclass(frozen=True)
class Problem:
    """One call: sizes, values of captures, how q, k and v are drawn, whether the LSE has a gradient too, and a factor
    of the gradients of both."""

    shape: Shape
    values: Mapping[str, int | float | Fill]
    inputs: Inputs = "normal"
    seed: int = 0
    d_lse: bool = False
    gradient: float = 1.0

    def __str__(self) -> str:
        values = [f"{name}={value!r}" for name, value in self.values.items()]
        values += [f"gradients times {self.gradient:g}"] if self.gradient != 1 else []
        return f"call: {self.shape}, {self.inputs} inputs{''.join(f', {each}' for each in values)}"


@dataclass(frozen=True)
class Case:
    """A variant, its kernels and calls. Without `passes` predicates alone are checked, and no kernel is compiled.

    plan: the place of the forward's plan among those that tuning would time; that of the default is 0. nvrtc: the
    compiler for GPUs compiles the kernels, too. varlen: kernels are those of layout "thd", which get the same
    sequences packed. sharded: kernels are those of shards, and calls are made in parts. page_size, kv_dtype: k and v
    are in pages, of lengths that differ, or have 8 bits. splits: the decode kernel, with the keys in so many splits.
    sink: each head has a score without a value. out_dtype, grad_dtype: those of the spec.
    """

    mask: Term
    score: Term | None
    declared: Mapping[str, Declared]
    problems: tuple[Problem, ...]
    head_dim: int = 32
    value_dim: int = 32
    dtype: str = "float16"
    scale: float | None = None
    layout: str = "bhsd"
    dropout: float = 0.0
    target: str | None = None
    passes: tuple[Pass, ...] = ("forward",)
    deterministic: bool = False
    emulate: bool = True
    sanitize: Sanitizer | None = None
    schedule: Schedule | None = None
    nvrtc: bool = False
    plan: int = 0
    varlen: bool = False
    sharded: bool = False
    page_size: int | None = None
    kv_dtype: str | None = None
    splits: int | None = None
    sink: bool = False
    out_dtype: str | None = None
    grad_dtype: str | None = None

    def spec(self) -> AttentionSpec:
        """The spec, traced. Raises SpecError where the language refuses it."""
        return AttentionSpec(
            head_dim=self.head_dim,
            dtype=self.dtype,
            value_dim=self.value_dim,
            scale=self.scale,
            layout="bshd" if self.varlen else self.layout,  # in which sequences mistake as they do where packed
            dropout=self.dropout,
            score=score_of(self.score, self.declared) if self.score else None,
            mask=mask_of(self.mask, self.declared),
            page_size=self.page_size,
            kv_dtype=self.kv_dtype,
            out_dtype=self.out_dtype,
            grad_dtype=self.grad_dtype,
            sink=fg.Tensor(SINKS, "float32", 1, grad="backward" in self.passes) if self.sink else None,
        )

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """Has Hypothesis print the Python that makes the case."""
        printer.text(repr(self))

    def __str__(self) -> str:
        """A few lines of Python and words, for a person."""
        lines = [f"{name} = {each.declaration(name)}" for name, each in self.declared.items()]
        lines += [f"mask = lambda b, h, q, k: {text_of(self.mask)}"]
        lines += [f"score = lambda score, b, h, q, k: {text_of(self.score)}"] if self.score else []
        plain = Case(self.mask, self.score, self.declared, self.problems)
        shown = [f"{name}={value!r}" for name, value in vars(self).items() if value != getattr(plain, name)]
        return "\n".join([*lines, f"case: {', '.join(shown)}", *map(str, self.problems)])


@dataclass(frozen=True)
class Options:
    """What narrows cases. No targets are all that kernels are generated for; on a GPU they are those that it runs."""

    targets: tuple[str, ...] = ()
    passes: tuple[Pass, ...] = ("forward", "backward")
    sanitize: Sanitizer | None = None
    emulate: bool = True
    nvrtc: bool = True


@st.composite
def cases(draw: Draw, options: Options = Options()) -> Case:
    """Three of four cases check predicates alone, in a hundredth of the time; half of the others run the backward."""
    grammar = Grammar(draw)
    passes = _passes(grammar, options)
    case = Case(Term("full"), None, {}, (), passes=passes, **(draw_kernels(grammar, options) if passes else {}))
    if passes == ("forward",) and grammar.chance(50):
        case = replace(case, **draw_serving(grammar))
    mask, score = grammar.mask(), scores.score(grammar) if grammar.chance(50) else None
    count = PREDICATE_CALLS if not passes else EMULATED_CALLS if options.emulate else GPU_CALLS
    count = 1 if case.sanitize else count
    terms = [term for term in (mask, score) if term is not None]
    # Each call but the first may be left out, which Hypothesis does where it makes a case small.
    problems = tuple(_problem(grammar, case, terms) for number in range(count) if not number or grammar.chance(96))
    return replace(case, mask=mask, score=score, declared=grammar.declared, problems=problems)


def _passes(source: Source, options: Options) -> tuple[Pass, ...]:
    if options.sanitize is None and not source.chance(25):
        return ()
    both = "backward" in options.passes and ("forward" not in options.passes or source.chance(50))
    return ("forward", "backward") if both else ("forward",)


def draw_kernels(source: Source, options: Options) -> dict[str, Any]:
    """What decides the kernels of a case, beside its mask and its score function."""
    common = _COMMON_TARGETS if source.chance(80) else tuple(TARGETS)
    target = source.pick(*(options.targets or common))
    head_dim = source.pick(*_LARGE_DIMS) if source.chance(6) else source.pick(*_DIMS)
    layout = source.pick(*("equal",) * 14, *("varlen",) * 3, *("sharded",) * 3)
    return {
        "target": target,
        # A dtype that the target does not multiply is refused, which is worth a look now and then.
        "dtype": source.pick(*(("float16", "bfloat16") if source.chance(5) else TARGETS[target].dtypes)),
        "head_dim": head_dim,
        "value_dim": source.pick(*_DIMS) if source.chance(30) else head_dim,
        "scale": source.pick(None, None, None, None, 1.0, 0.01, 1.5),
        "layout": source.pick("bhsd", "bhsd", "bshd"),
        "dropout": source.pick(*(0.0,) * 6, 0.17, 0.5, 0.9),
        "deterministic": source.chance(30),
        "varlen": layout == "varlen",
        "sharded": layout == "sharded",
        "sink": source.chance(15),
        "out_dtype": source.pick(*(None,) * 5, "float32"),
        "grad_dtype": source.pick(*(None,) * 5, "float32"),
        "plan": source.pick(0, 0, 0, *range(1, MAX_CANDIDATES)),
        **(_emulated(source, options) if options.emulate else {"emulate": False}),
    }


def _emulated(source: Source, options: Options) -> dict[str, Any]:
    sanitize = options.sanitize or (source.pick("address", "thread") if source.chance(6) else None)
    schedule = Schedule(source.pick(*ORDERS), source.pick(*COPIES), source.seed())
    return {"sanitize": sanitize, "schedule": schedule, "nvrtc": options.nvrtc and source.chance(20)}


def draw_serving(source: Source) -> dict[str, Any]:
    """What makes the calls of a case those of a server that decodes."""
    page_size, kv_dtype = source.pick(*_PAGE_SIZES), source.pick(None, None, None, "float8_e4m3fn", "int8")
    varlen = page_size is not None and source.chance(35)
    splits = None if varlen else source.pick(None, None, 1, 2, 3, 7)
    if page_size is None and kv_dtype is None:
        splits = splits or 2
    dims = {}
    if kv_dtype:
        head_dim = source.pick(*_CACHED_DIMS)
        dims = {"head_dim": head_dim, "value_dim": source.pick(*_CACHED_DIMS) if source.chance(30) else head_dim}
    cache = {"page_size": page_size, "kv_dtype": kv_dtype, "splits": splits, **dims}
    return cache | {"plan": 0, "varlen": varlen, "sharded": False}


def _problem(grammar: Grammar, case: Case, terms: list[Term]) -> Problem:
    serves = bool(case.page_size or case.kv_dtype or case.splits)
    shape = _few_queries(grammar) if serves else _shape(grammar, long=case.sanitize is None)
    values = draw_values(grammar, terms, shape)
    inputs = grammar.pick(*_INPUTS)
    if inputs == "huge" and case.dtype == "float16":
        inputs = "large"  # float16 ends at 65504
    if (inputs == "ones" and serves) or (inputs in ("garbage", "padding") and case.kv_dtype):
        # Few rows that are all alike have errors of single numbers, by luck; a pattern of NaN is a number in 8 bits.
        inputs = "normal"
    gradients = (1.0, 1.0, 1.0, *_GRADIENTS[case.dtype]) if inputs not in ("huge", "large") else (1.0,)
    return Problem(shape, values, inputs, grammar.seed(), grammar.chance(40), grammar.pick(*gradients))


def _shape(source: Source, long: bool) -> Shape:
    """Mostly a few hundred tokens, now and then 0 or 1; with `long`, sometimes tens of thousands for one head."""
    if long and source.chance(5):
        return Shape(*source.pick(*_LONG), 1, 1, 1)
    len_q, len_k = source.pick(*_LENGTHS), source.pick(*_LENGTHS)
    if source.chance(35):
        len_k = len_q
    if source.chance(10):
        shortest = ((1, 1), (1, len_k), (len_q, 1), (0, len_k), (len_q, 0), (len_q, 0), (0, 0))
        len_q, len_k = source.pick(*shortest)
    return Shape(len_q, len_k, source.pick(*_BATCHES), *source.pick(*_HEADS))


def _few_queries(source: Source) -> Shape:
    keys, batch = source.pick(*_CACHED_KEYS), source.pick(1, 2, 2, 3)
    return Shape(source.pick(*_FEW_QUERIES), keys, batch, *source.pick(*_CACHED_HEADS))


def targets_of_gpu(major: int, minor: int) -> tuple[str, ...]:
    """The targets whose kernels a GPU of this compute capability runs."""
    return tuple(name for name, target in TARGETS.items() if target.runs_on(major, minor))
