"""Draws a whole case from one integer. Each aspect has a random stream of its own, so options change nothing else."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

from flashgen.codegen.candidates import MOST
from flashgen.codegen.stages import Pass
from flashgen.codegen.targets import TARGETS
from flashgen.runtime.schedule import COPIES, ORDERS, Schedule
from flashgen.verify.problems import Shape
from flashgen.verify.random import score_grammar
from flashgen.verify.random.grammar import Grammar
from flashgen.verify.random.recipe import Inputs, Problem, Recipe
from flashgen.verify.random.terms import Term
from flashgen.verify.random.values import draw_values

_DIMS = (8, 16, 16, 24, 32, 32, 32, 40, 64, 64, 72, 96, 128)
_LARGE_DIMS = (160, 192, 208, 256)
# Around the borders of tiles of 16 to 192.
_LENGTHS = (
    1,
    2,
    3,
    8,
    15,
    16,
    17,
    31,
    33,
    47,
    63,
    64,
    65,
    80,
    96,
    97,
    127,
    128,
    129,
    150,
    176,
    191,
    193,
    200,
    256,
    257,
)
_LONG = ((32_769, 64), (64, 33_000), (40_000, 16), (2_049, 300))
_INPUTS: tuple[Inputs, ...] = ("normal", "large", "tiny", "huge", "ones", "zeros", "garbage", "padding")
_GRADIENTS = {"float16": (1e-3, 100.0), "bfloat16": (1e-30, 1e30)}  # scales that leave room for sums of products
_INPUT_WEIGHTS = (8, 2, 2, 1, 1, 1, 1, 1)
_COMMON_TARGETS = ("sm_75", "sm_80", "sm_90", "sm_90a", "sm_90a", "sm_90a", "sm_100", "sm_120")

PREDICATES_EACH = 6  # calls of a case that compiles no kernel
CALLS_EACH = 3  # calls of a case that does: compiling takes most of its time
CALLS_ON_A_GPU = 12  # of such a case on a GPU, where a call takes no time but the reference's
_SANITIZED = 0.06  # the share of cases on the emulator that run under a sanitizer
_NVRTC = 0.2
_RAGGED = 0.15
_SHARDED = 0.15
_SINK = 0.15
_MIXED = 0.35  # the share of calls over pages whose queries are packed
_SHORTEST = 0.1  # the share of calls whose lengths are 0 or 1 on purpose
_BATCHES = (0, *(1,) * 12, *(2,) * 6, *(3,) * 6)
_SERVING = 0.5  # the share of cases of the forward alone
_CACHED_DIMS = (32, 32, 64, 64, 96, 128, 256)
_FEW_QUERIES = (1, 1, 1, 1, 2, 3, 4, 7, 8, 17, 40, 70)
_KEYS = (0, 1, 2, 7, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 511, 513, 700)
_QUERY_HEADS = ((1, 1), (4, 1), (4, 2), (4, 4), (6, 2), (12, 1), (16, 2))


@dataclass(frozen=True)
class Options:
    """What a user narrows cases to. No targets are all that kernels are generated for; on a GPU, those that it runs."""

    targets: tuple[str, ...] = ()
    passes: tuple[Pass, ...] = ("forward", "backward")
    sanitize: Literal["address", "thread"] | None = None
    emulate: bool = True
    nvrtc: bool = True


def recipe_of(seed: int, options: Options, drawn: Counter[str] | None = None) -> Recipe:
    """The case of a seed. `drawn`, if given, counts the productions that make it up."""
    grammar = Grammar(_stream(seed, "grammar"))
    mask = grammar.mask()
    score = score_grammar.score(grammar) if grammar.rng.random() < 0.5 else None
    if drawn is not None:
        drawn.update(grammar.drawn)
    passes = _passes(seed, options)
    sanitize = _sanitizer(seed, options) if passes else None
    plain = _stream(seed, "plain")
    calls = CALLS_EACH if options.emulate else CALLS_ON_A_GPU
    count = 1 if sanitize else calls if passes else PREDICATES_EACH
    target = _target(seed, options)
    dtype = plain.choice(("float16", "bfloat16") if plain.random() < 0.05 else _dtypes(target))
    serving = _serving(seed, passes)
    long = None if serving else sanitize is None
    problems = tuple(
        _problem(_stream(seed, f"call {number}"), grammar, mask, score, dtype, long=long) for number in range(count)
    )
    head_dim = plain.choice(_LARGE_DIMS if plain.random() < 0.06 else _DIMS)
    drawn_recipe = Recipe(
        mask=mask,
        score=score,
        declared=grammar.declared,
        problems=problems,
        head_dim=head_dim,
        value_dim=plain.choice(_DIMS) if plain.random() < 0.3 else head_dim,
        dtype=dtype,
        scale=plain.choice((None, None, None, None, 1.0, 0.01, 1.5)),
        layout=plain.choice(("bhsd", "bhsd", "bshd")),
        dropout=plain.choice((0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.17, 0.5, 0.9)),
        target=target,
        passes=passes,
        deterministic=plain.random() < 0.3,
        emulate=options.emulate,
        sanitize=sanitize,
        schedule=_schedule(seed) if options.emulate else None,
        plan=_stream(seed, "plan").choice((0, 0, 0, *range(1, MOST))),
        nvrtc=options.nvrtc and options.emulate and bool(passes) and _stream(seed, "nvrtc").random() < _NVRTC,
        ragged=_stream(seed, "ragged").random() < _RAGGED,
        sharded=_stream(seed, "ragged").random() >= 1 - _SHARDED,
        sink=bool(passes) and _stream(seed, "sink").random() < _SINK,
    )
    return _served(seed, drawn_recipe, serving).tidied()


def _serving(seed: int, passes: tuple[Pass, ...]) -> dict[str, Any]:
    """What of a case makes its calls those of a server that decodes; nothing of most cases."""
    rng = _stream(seed, "serving")
    if passes != ("forward",) or rng.random() >= _SERVING:
        return {}
    page_size: int | None = rng.choice((None, None, 1, 2, 4, 8, 16, 16, 16, 32, 64, 64, 128, 256))
    kv_dtype: str | None = rng.choice((None, None, None, "float8_e4m3fn", "int8"))
    splits = rng.choice((None, None, 1, 2, 3, 7))
    if page_size is None and kv_dtype is None:
        splits = splits or 2
    ragged = page_size is not None and rng.random() < _MIXED
    splits = None if ragged else splits
    caching = {"page_size": page_size, "kv_dtype": kv_dtype, "splits": splits}
    return {**caching, "plan": 0, "ragged": ragged, "sharded": False}


def _served(seed: int, recipe: Recipe, serving: dict[str, Any]) -> Recipe:
    """The case with a cache: dims that 8 bits have, and no garbage in these, where a pattern of NaN is a number."""
    if serving.get("kv_dtype") is not None:
        rng = _stream(seed, "cached dims")
        head_dim = rng.choice(_CACHED_DIMS)
        serving |= {"head_dim": head_dim, "value_dim": rng.choice(_CACHED_DIMS) if rng.random() < 0.3 else head_dim}
        plain = ("garbage", "padding")
        serving["problems"] = tuple(
            replace(problem, inputs="normal") if problem.inputs in plain else problem for problem in recipe.problems
        )
    return replace(recipe, **serving)


def _stream(seed: int, aspect: str) -> random.Random:
    return random.Random(f"{seed} {aspect}")


def _passes(seed: int, options: Options) -> tuple[Pass, ...]:
    """Three of four cases check predicates alone, in a hundredth of the time; half of the rest run the backward."""
    rng = _stream(seed, "passes")
    if options.sanitize is None and rng.random() < 0.75:
        return ()
    both = "backward" in options.passes and ("forward" not in options.passes or rng.random() < 0.5)
    return ("forward", "backward") if both else ("forward",)


def _target(seed: int, options: Options) -> str:
    rng = _stream(seed, "target")
    if options.targets:
        return rng.choice(options.targets)
    return rng.choice(_COMMON_TARGETS) if rng.random() < 0.8 else rng.choice(tuple(TARGETS))


def _dtypes(target: str) -> tuple[str, ...]:
    """Dtypes that the target multiplies. It refuses others, which is worth a look only now and then."""
    return TARGETS[target].dtypes if target in TARGETS else ("float16", "bfloat16")


def _sanitizer(seed: int, options: Options) -> Literal["address", "thread"] | None:
    if options.sanitize or not options.emulate:
        return options.sanitize
    rng = _stream(seed, "sanitizer")
    return rng.choice(("address", "thread")) if rng.random() < _SANITIZED else None


def _schedule(seed: int) -> Schedule:
    rng = _stream(seed, "schedule")
    return Schedule(rng.choice(ORDERS), rng.choice(COPIES), rng.randrange(2**16))


def _problem(
    rng: random.Random, grammar: Grammar, mask: Term, score: Term | None, dtype: str, *, long: bool | None
) -> Problem:
    """long: whether there may be many tokens; None: few queries, as a server has."""
    shape = _few_queries(rng) if long is None else _shape(rng, long)
    values = draw_values(mask, score, grammar.declared, grammar.roles, shape, rng)
    inputs = rng.choices(_INPUTS, _INPUT_WEIGHTS)[0]
    if inputs == "huge" and dtype == "float16":
        inputs = "large"  # float16 ends at 65504
    if inputs == "ones" and long is None:
        inputs = "normal"  # few rows that are all alike: the rule's errors would be single numbers, by luck
    gradients = (1.0, 1.0, 1.0, *_GRADIENTS[dtype]) if inputs not in ("huge", "large") else (1.0,)
    return Problem(shape, values, inputs, rng.randrange(2**16), rng.random() < 0.4, rng.choice(gradients))


def _shape(rng: random.Random, long: bool) -> Shape:
    """Mostly a few hundred tokens; with `long`, now and then tens of thousands for one head."""
    if long and rng.random() < 0.05:
        return Shape(*rng.choice(_LONG), 1, 1, 1)
    lengths = (*_LENGTHS, *range(1, 300, 13))
    len_q, len_k = rng.choice(lengths), rng.choice(lengths)
    if rng.random() < 0.35:
        len_k = len_q
    if rng.random() < _SHORTEST:
        len_q, len_k = rng.choice(((0, len_k), (len_q, 0), (len_q, 0), (0, 0), (1, len_k), (len_q, 1), (1, 1)))
    heads_q, heads_kv = rng.choice(((1, 1), (2, 2), (2, 1), (4, 2), (3, 1), (6, 2)))
    return Shape(len_q, len_k, rng.choice(_BATCHES), heads_q, heads_kv)


def _few_queries(rng: random.Random) -> Shape:
    """As a server that decodes has: queries of several heads for each of keys."""
    return Shape(rng.choice(_FEW_QUERIES), rng.choice(_KEYS), rng.choice((1, 2, 2, 3)), *rng.choice(_QUERY_HEADS))


def targets_of_gpu(major: int, minor: int) -> tuple[str, ...]:
    """The targets whose kernels a GPU of this compute capability runs."""
    return tuple(name for name, target in TARGETS.items() if target.runs_on(major, minor))
