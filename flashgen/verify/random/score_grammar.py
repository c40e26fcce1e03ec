"""Draws score functions: continuous in the score, as a jump in it cannot be judged in lower precision.

They may jump where indices alone decide, which float32 does bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from flashgen.verify.random import constants
from flashgen.verify.random.grammar import BIAS, CAP, DISTANCE, FLOAT_DTYPES, Grammar, integer
from flashgen.verify.random.terms import Term

Step = Callable[[Grammar, Term], Term]

_FACTORS = (0.25, 0.5, -1.0, 1.5, 2.0)
_SMALL = (0.05, 0.1, -0.05, 1 / 3)


MINUS_INFINITY = Term("float", (float("-inf"),))


def real(value: float) -> Term:
    """A literal."""
    return Term("float", (value,))


def score(grammar: Grammar) -> Term:
    """One to three steps from the score."""
    term = Term("score")
    for _ in range(grammar.pick((1, 1, 2, 3))):
        name, _, step = grammar.rng.choices(_STEPS, [weight for _, weight, _ in _STEPS])[0]
        term = step(grammar, term)
        grammar.drawn[f"score: {name}"] += 1
        if any(part == MINUS_INFINITY for part in term.walk()):
            break  # a further step might make infinity or NaN of it
    return term


def _learned(grammar: Grammar, ndims: Sequence[int], prefix: str, dtypes: Sequence[str] = FLOAT_DTYPES) -> str:
    """A new capture of small floats, half of the time with a gradient."""
    name = grammar.capture(dtypes, ndims, prefix, BIAS)
    grammar.declared[name] = replace(grammar.declared[name], grad=grammar.rng.random() < 0.6)
    return name


def _bias(grammar: Grammar) -> Term:
    """A small number that follows from the indices."""
    which = grammar.pick(("integers", "load", "load", "quotient", "where"))
    if which == "integers":
        inner = grammar.draw("int", 1)
        return Term("*", (Term("%", (inner, integer(grammar.pick((2, 7, 13, 64))))), real(grammar.pick(_SMALL))))
    if which == "load":
        name = _learned(grammar, (1, 1, 2, 3, 4), "bias")
        axes = [grammar.pick((Term(index), Term(index), grammar.draw("int", 0))) for index in _axes(grammar, name)]
        return Term("load", (name, *axes))
    if which == "quotient":
        quotient = Term("/", (Term(grammar.pick("qk")), integer(grammar.pick(constants.AWKWARD))))
        return grammar.pick((quotient, Term("floor", (quotient,))))
    return Term("where", (grammar.draw("bool", 0), real(grammar.pick(_SMALL)), real(grammar.pick(_SMALL))))


def _axes(grammar: Grammar, name: str) -> tuple[str, ...]:
    """Indices for the axes of a capture, each another one."""
    indices = list("bhqk")
    grammar.rng.shuffle(indices)
    return tuple(indices[: grammar.declared[name].ndim])


def _biased(grammar: Grammar, inner: Term) -> Term:
    return Term(grammar.pick("++-"), (inner, _bias(grammar)))


def _scaled(grammar: Grammar, inner: Term) -> Term:
    if grammar.rng.random() < 0.4:
        return Term("/", (inner, integer(grammar.pick(constants.AWKWARD[-3:]))))
    return Term("*", (inner, real(grammar.pick(_FACTORS))))


def _gained(grammar: Grammar, inner: Term) -> Term:
    name = _learned(grammar, (1,), "gain")
    return Term("*", (inner, Term("+", (integer(1), Term("load", (name, Term("h")))))))


def _softcap(grammar: Grammar, inner: Term) -> Term:
    cap = grammar.scalar("float32", "cap", CAP) if grammar.rng.random() < 0.4 else real(grammar.pick((2.0, 5.0, 30.0)))
    return Term("softcap", (inner, cap, grammar.pick(("fast", "accurate"))))


def _alibi(grammar: Grammar, inner: Term) -> Term:
    if grammar.rng.random() < 0.5:
        return Term("alibi", (inner, integer(grammar.pick((1, 2, 4, 8)))))
    return Term("alibi_table", (_learned(grammar, (1, 2), "slopes"), inner))


def _relative_bias(grammar: Grammar, inner: Term) -> Term:
    table = _learned(grammar, (1, 2), "table")
    if grammar.rng.random() < 0.3:
        return Term("relative_bias", (inner, table, grammar.scalar("int32", "distance", DISTANCE)))
    return Term("relative_bias", (inner, table, integer(grammar.pick((0, 1, 5, 24)))))


def _smooth(grammar: Grammar, inner: Term) -> Term:
    """A function of the score that stays small."""
    name = grammar.pick(("tanh", "fast_tanh", "sigmoid", "sin", "cos", "exp", "exp2", "log", "log2", "sqrt"))
    grammar.drawn[f"function: {name}"] += 1
    if name in ("exp", "exp2"):
        return Term(name, (Term("min", (inner, real(2.0))),))
    if name in ("log", "log2", "sqrt"):
        return Term(name, (Term("+", (Term("abs", (inner,)), real(1.0))),))
    return Term(name, (inner,))


def _chosen(grammar: Grammar, inner: Term) -> Term:
    """Another score at some of the elements: lower by much, less, or -inf as a mask."""
    others = (
        Term("-", (inner, real(3.0))),
        Term("*", (inner, real(0.5))),
        MINUS_INFINITY,
        Term("-", (inner, real(30000.0))),
    )
    other = grammar.rng.choices(others, (3, 3, 3, 1))[0]
    pair = (inner, other) if grammar.rng.random() < 0.5 else (other, inner)
    return Term("where", (grammar.draw("bool", grammar.pick((0, 0, 1))), *pair))


def _clamped(grammar: Grammar, inner: Term) -> Term:
    bound = real(grammar.pick((-1.0, 0.0, 0.5)))
    return grammar.pick((Term("max", (inner, bound)), Term("min", (inner, bound)), Term("abs", (inner,))))


_STEPS: tuple[tuple[str, int, Step], ...] = (
    ("bias", 5, _biased),
    ("scale", 2, _scaled),
    ("gain", 1, _gained),
    ("softcap", 2, _softcap),
    ("alibi", 2, _alibi),
    ("relative_bias", 2, _relative_bias),
    ("smooth", 3, _smooth),
    ("where", 3, _chosen),
    ("clamp", 1, _clamped),
)


def production_names() -> set[str]:
    """Every production of scores, as `Grammar.drawn` counts them."""
    return {f"score: {name}" for name, _, _ in _STEPS}
