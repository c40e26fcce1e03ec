"""Draws score functions: continuous in the score, as a jump in it cannot be judged in lower precision.

They may jump where indices alone decide, which float32 does bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from random_variants.constants import AWKWARD
from random_variants.grammar import BIAS, CAP, DISTANCE, FLOAT_DTYPES, Grammar
from random_variants.terms import Term, integer, number

MINUS_INFINITY = number(float("-inf"))
_SMALL = (0.05, 0.1, -0.05, 1 / 3)


def score(g: Grammar) -> Term:
    """One to three steps from the score."""
    term = Term("score")
    for _ in range(g.pick(1, 1, 2, 3)):
        term = g.pick(*_STEPS)(g, term)
        if any(part == MINUS_INFINITY for part in term.walk()):
            break  # a further step might make infinity or NaN of it
    return term


def _learned(g: Grammar, ndims: Sequence[int], prefix: str) -> str:
    """A new capture of small floats, mostly with a gradient."""
    return g.capture(FLOAT_DTYPES, ndims, prefix, BIAS, grad=60)


def _index_bias(g: Grammar) -> Term:
    inner = Term("%", g.term("int", 1), integer(g.pick(2, 7, 13, 64)))
    return Term("*", inner, number(g.pick(*_SMALL)))


def _loaded_bias(g: Grammar) -> Term:
    """An element of a learned capture whose axes are read by different indices, or by any integers."""
    name = _learned(g, (1, 1, 2, 3, 4), "bias")
    indices, axes = list("khqb"), []
    for _ in range(g.declared[name].ndim):
        index = g.pick(*indices)
        indices.remove(index)
        axes.append(g.term("int", 0) if g.chance(33) else Term(index))
    return Term("load", name, *axes)


def _quotient_bias(g: Grammar) -> Term:
    quotient = Term("/", Term(g.pick("q", "k")), integer(g.pick(*AWKWARD)))
    return g.pick(quotient, Term("floor", quotient))


def _chosen_bias(g: Grammar) -> Term:
    return Term("where", g.term("bool", 0), number(g.pick(*_SMALL)), number(g.pick(*_SMALL)))


def _biased(g: Grammar, inner: Term) -> Term:
    bias = g.pick(_quotient_bias, _index_bias, _chosen_bias, _loaded_bias, _loaded_bias)
    return Term(g.pick("+", "+", "-"), inner, bias(g))


def _scaled(g: Grammar, inner: Term) -> Term:
    if g.chance(40):
        return Term("/", inner, integer(g.pick(*AWKWARD[-3:])))
    return Term("*", inner, number(g.pick(0.25, 0.5, -1.0, 1.5, 2.0)))


def _gained(g: Grammar, inner: Term) -> Term:
    return Term("*", inner, Term("+", integer(1), Term("load", _learned(g, (1,), "gain"), Term("h"))))


def _softcap(g: Grammar, inner: Term) -> Term:
    cap = g.scalar("float32", "cap", CAP) if g.chance(40) else number(g.pick(2.0, 5.0, 30.0))
    return Term("softcap", inner, cap, g.pick("fast", "accurate"))


def _alibi(g: Grammar, inner: Term) -> Term:
    if g.chance(50):
        return Term("alibi_table", _learned(g, (1, 2), "slopes"), inner)
    return Term("alibi", inner, integer(g.pick(1, 2, 4, 8)))


def _relative_bias(g: Grammar, inner: Term) -> Term:
    table = _learned(g, (1, 2), "table")
    distance = g.scalar("int32", "distance", DISTANCE) if g.chance(30) else integer(g.pick(0, 1, 5, 24))
    return Term("relative_bias", inner, table, distance)


def _smooth(g: Grammar, inner: Term) -> Term:
    """A function of the score that stays small."""
    name = g.pick("tanh", "fast_tanh", "sigmoid", "sin", "cos", "exp", "exp2", "log", "log2", "sqrt")
    if name in ("exp", "exp2"):
        inner = Term("min", inner, number(2.0))
    elif name in ("log", "log2", "sqrt"):
        inner = Term("+", Term("abs", inner), number(1.0))
    return Term(name, inner)


def _chosen(g: Grammar, inner: Term) -> Term:
    """Another score at some of the elements: less, much less, or -inf as a mask."""
    less, half, far = Term("-", inner, number(3.0)), Term("*", inner, number(0.5)), Term("-", inner, number(30000.0))
    other = g.pick(*(less, half, MINUS_INFINITY) * 3, far)
    return Term("where", g.term("bool", g.pick(0, 0, 1)), *((other, inner) if g.chance(50) else (inner, other)))


def _clamped(g: Grammar, inner: Term) -> Term:
    bound = number(g.pick(0.0, -1.0, 0.5))
    return g.pick(Term("abs", inner), Term("max", inner, bound), Term("min", inner, bound))


_Step = Callable[[Grammar, Term], Term]
_STEPS: tuple[_Step, ...] = (
    *(_scaled,) * 2,
    *(_biased,) * 5,
    _gained,
    *(_softcap,) * 2,
    *(_alibi,) * 2,
    *(_relative_bias,) * 2,
    *(_smooth,) * 3,
    *(_chosen,) * 3,
    _clamped,
)
