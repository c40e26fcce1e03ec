"""Draws masks by Hypothesis: predicates of the language, from plain windows to ones that no closed form describes.

The first choice of each table is the simplest, as Hypothesis shrinks towards it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from random_variants.constants import (
    AWKWARD,
    BITMASKS,
    DIVISORS,
    EXTREMES,
    FLOATS,
    INT32_MAX,
    SHIFTS,
    SMALL,
)
from random_variants.terms import COMPARISONS, INDICES, LENGTHS, Declared, Kind, Term, integer, number

ALIGNMENTS = ("bottom_right", "top_left")
INTEGER_DTYPES = ("int32", "int8", "uint8", "int16", "int64")
FLOAT_DTYPES = ("float32", "float16", "bfloat16")
MAX_CAPTURES = 4

# What the values of a capture must be. A capture whose role is not ANY is read in one place only.
ANY, POSITIVE, IDS, BLOCKS, CAP, BIAS, DISTANCE = "any", "positive", "ids", "blocks", "cap", "bias", "distance"

Draw = Callable[[st.SearchStrategy[Any]], Any]


@functools.cache
def _below(end: int) -> st.SearchStrategy[int]:
    return st.integers(0, end - 1)


class Source:
    """Choices that Hypothesis makes and shrinks; `draw` is the argument of a composite strategy."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    def pick(self, *values: Any) -> Any:
        """One of the values; shrinks to the first."""
        return values[self.draw(_below(len(values)))]

    def chance(self, percent: int) -> bool:
        """True in so many of a hundred cases; shrinks to False."""
        return self.draw(_below(100)) >= 100 - percent

    def seed(self) -> int:
        return self.draw(_below(2**16))

    def integer(self) -> int:
        """Mostly a small number of either sign, now and then an extreme one."""
        if self.chance(12):
            return self.pick(*EXTREMES)
        value = self.pick(*AWKWARD) if self.chance(20) else self.pick(*SMALL)
        return -value if self.chance(20) else value

    def scalar_integer(self) -> int:
        """Often an end of int32, at which closed forms that add to it would overflow."""
        return self.pick(*EXTREMES) if self.chance(45) else self.integer()


class Grammar(Source):
    """Draws terms, and declares the captures that they read."""

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.declared: dict[str, Declared] = {}
        self.roles: dict[str, str] = {}

    def mask(self) -> Term:
        return self.term("bool", self.pick(1, 1, 2, 2, 3))

    def term(self, kind: Kind, depth: int) -> Term:
        """A term of a kind, with at most `depth` further levels; never a mere Python number."""
        return self.pick(*(PRODUCTIONS if depth > 0 else LEAVES)[kind])(self, depth - 1)

    def operand(self, kind: Kind, depth: int) -> Term:
        """A term, or about as often a literal."""
        if kind == "bool" or self.chance(55):
            return self.term(kind, depth)
        return integer(self.integer()) if kind == "int" else number(self.pick(*FLOATS))

    def binary(self, operations: Sequence[str], kind: Kind, depth: int) -> Term:
        """An operation on a term and an operand, in either order."""
        left, right = self.term(kind, depth), self.operand(kind, depth)
        return Term(self.pick(*operations), *((right, left) if self.chance(20) else (left, right)))

    def compared(self, left: Term, right: Term) -> Term:
        return Term(self.pick(*COMPARISONS), left, right)

    def capture(self, dtypes: Sequence[str], ndims: Sequence[int], prefix: str, role: str = ANY, grad: int = 0) -> str:
        """The name of a capture of one of these types, declared earlier or now; grad: how likely it has a gradient."""
        fits = [name for name, each in self.declared.items() if each.dtype in dtypes and each.ndim in ndims]
        fits = [name for name in fits if self.roles[name] == ANY]
        if role == ANY and fits and (len(self.declared) >= MAX_CAPTURES or self.chance(50)):
            return self.pick(*fits)
        name = f"{prefix}{len(self.declared)}"
        self.declared[name] = Declared(self.pick(*dtypes), self.pick(*ndims), bool(grad) and self.chance(grad))
        self.roles[name] = role
        return name

    def loaded(self, dtypes: Sequence[str], depth: int, prefix: str) -> Term:
        """A load whose indices are plain ones, or integers that may mistake anywhere."""
        name = self.capture(dtypes, (1, 1, 2, 3, 4), prefix)

        def index() -> Term:
            return self.term("int", depth - 1) if depth > 0 and self.chance(30) else Term(self.pick("k", "q", "h", "b"))

        return Term("load", name, *(index() for _ in range(self.declared[name].ndim)))

    def scalar(self, dtype: str, prefix: str, role: str = ANY) -> Term:
        return Term("scalar", self.capture((dtype,), (0,), prefix, role))


Production = Callable[[Grammar, int], Term]


# Booleans ------------------------------------------------------------------------------------------------------------


def _mixed(g: Grammar, depth: int) -> Term:
    """An integer beside a float, or a number beside a boolean."""
    return g.compared(g.term("int", depth), g.term("bool" if g.chance(30) else "float", depth))


def _distance(g: Grammar, _depth: int) -> Term:
    """The form of windows: k, q, q - k, k - q or |q - k| against a number, which is a capture half of the time."""
    shift = Term("-", Term("len_k"), Term("len_q"))
    q, k = Term("+", Term("q"), shift) if g.chance(40) else Term("q"), Term("k")
    term = g.pick(k, Term("q"), Term("-", q, k), Term("-", k, q), Term("abs", Term("-", q, k)))
    return g.compared(term, g.scalar("int32", "limit") if g.chance(50) else integer(g.scalar_integer()))


def _blocks(g: Grammar, _depth: int) -> Term:
    """Indices in blocks: q // n against k // m, or shifted."""

    def block(index: str) -> Term:
        if g.chance(30):
            return Term(">>", Term(index), integer(g.pick(*SHIFTS)))
        return Term("//", Term(index), integer(g.pick(*DIVISORS)))

    left, right = block("q"), Term("k") if g.chance(30) else block("k")
    return g.compared(right, left) if g.chance(50) else g.compared(left, right)


def _periodic(g: Grammar, _depth: int) -> Term:
    q, k = Term("q"), Term("k")
    period = Term("%", g.pick(k, q, Term("-", q, k), Term("^", q, k)), integer(g.pick(*DIVISORS)))
    return g.compared(period, integer(g.pick(0, 0, 1, 3, 8, -20)))


def _divided(g: Grammar, _depth: int) -> Term:
    """Float division by an awkward constant, floored or compared."""
    divisor = integer(g.pick(*AWKWARD))

    def quotient(index: str) -> Term:
        divided = Term("/", Term(index), divisor)
        return g.pick(divided, Term("floor", divided), Term("to_int", divided))

    if g.chance(60):
        return g.compared(quotient("q"), quotient("k"))
    return g.compared(quotient("k"), integer(g.pick(0, 1, 2, 3)))


def _scaled(g: Grammar, _depth: int) -> Term:
    """q * a - k * b, which is right where each product is rounded by itself, and wrong where it is contracted."""
    left = number(g.pick(0.1, 1 / 3, 0.7, 1.1))
    right = number(g.pick(0.1, 1 / 3, 0.7, 1.1)) if g.chance(40) else left
    return g.compared(Term("-", Term("*", Term("q"), left), Term("*", Term("k"), right)), number(0.0))


def _count(g: Grammar) -> Term:
    """A number of positions of a named mask: a literal from 0 to the end of int32, or a Scalar."""
    return g.scalar("int32", "count") if g.chance(40) else integer(abs(g.scalar_integer()) % 2**31)


def _dilation(g: Grammar) -> Term:
    """A dilation of at least 1: the language leaves multiples of 0 open."""
    return g.scalar("int32", "positive", POSITIVE) if g.chance(25) else integer(g.pick(1, 2, 3, 4, 7, 64, INT32_MAX))


NAMED: Mapping[str, Callable[[Grammar], tuple[Any, ...]]] = {
    "full": lambda g: (),
    "causal": lambda g: (g.pick(*ALIGNMENTS),),
    "sliding_window": lambda g: (_count(g), _count(g) if g.chance(50) else integer(0), g.pick(*ALIGNMENTS)),
    "dilated_window": lambda g: (_count(g), _dilation(g), g.pick(*ALIGNMENTS)),
    "prefix_lm": lambda g: (
        g.capture(INTEGER_DTYPES, (1,), "ints") if g.chance(40) else _count(g),
        g.pick(*ALIGNMENTS),
    ),
    "document": lambda g: (g.capture(INTEGER_DTYPES, (1, 2), "ids", IDS),),
    "block_sparse": lambda g: (
        g.capture(("bool", "bool", "uint8", "int32"), (2, 3, 4), "layout", BLOCKS),
        *(integer(g.pick(1, 3, 16, 32, 64, 100)) for _ in range(2)),
    ),
}


def _named(g: Grammar, _depth: int) -> Term:
    name = g.pick(*NAMED)
    return Term(name, *NAMED[name](g))


# Numbers -------------------------------------------------------------------------------------------------------------


def _index(g: Grammar, _depth: int) -> Term:
    return Term(g.pick("k", "q", "k", "q", *INDICES, *LENGTHS))


def _binary(kind: Kind, *operations: str) -> Production:
    return lambda g, depth: g.binary(operations, kind, depth)


def _unary(kind: Kind, *operations: str) -> Production:
    return lambda g, depth: Term(g.pick(*operations), g.term(kind, depth))


def _with_literal(operation: str, values: Sequence[int]) -> Production:
    return lambda g, depth: Term(operation, g.term("int", depth), integer(g.pick(*values)))


def _where(kind: Kind) -> Production:
    return lambda g, depth: Term("where", g.term("bool", depth), g.term(kind, depth), g.operand(kind, depth))


def _load(prefix: str, *dtypes: str) -> Production:
    return lambda g, depth: g.loaded(dtypes, depth, prefix)


def _quotient(g: Grammar, depth: int) -> Term:
    """A division, of integers somewhat more often than of floats."""
    kind: Kind = "float" if g.chance(40) else "int"
    left = g.term(kind, depth)
    return Term("/", left, g.operand(kind, depth) if g.chance(40) else integer(g.pick(*AWKWARD)))


def _table(*rows: tuple[int, Production]) -> tuple[Production, ...]:
    """Productions, each as often as its weight says."""
    return tuple(production for weight, production in rows for _ in range(weight))


PRODUCTIONS: Mapping[Kind, tuple[Production, ...]] = {
    "bool": _table(
        (4, _distance),
        (5, _named),
        (2, _blocks),
        (2, _periodic),
        (2, _divided),
        (1, _scaled),
        (1, _load("flags", "bool")),
        (4, _binary("int", *COMPARISONS)),
        (2, _binary("float", *COMPARISONS)),
        (1, _mixed),
        (1, _unary("bool", "not")),
        (5, _binary("bool", "and", "and", "or", "xor")),
        (1, _where("bool")),
    ),
    "int": _table(
        (3, _index),
        (1, lambda g, depth: g.scalar("int32", "number")),
        (3, _load("ints", *INTEGER_DTYPES)),
        (2, _unary("int", "neg", "abs")),
        (1, _unary("float", "to_int")),
        (1, _unary("bool", "to_int")),
        (3, _binary("int", "+", "-", "-", "*")),
        (2, _binary("int", "min", "max")),
        (1, _binary("int", "//", "%")),
        (2, _with_literal("//", DIVISORS)),
        (2, _with_literal("%", DIVISORS)),
        (2, _with_literal(">>", SHIFTS)),
        (1, _with_literal("<<", (0, 1, 2, 3, 7))),
        (2, _with_literal("&", BITMASKS)),
        (1, _binary("int", "&", "|", "^")),
        (1, lambda g, depth: Term(g.pick("<<", ">>"), g.term("int", depth), g.term("int", depth))),
        (1, _where("int")),
    ),
    "float": _table(
        (2, _unary("int", "to_float")),
        (1, lambda g, depth: g.scalar("float32", "real")),
        (3, _load("floats", *FLOAT_DTYPES)),
        (1, _unary("float", "neg", "abs")),
        (2, _unary("float", "floor")),
        (1, _unary("float", "sqrt")),
        (3, _quotient),
        (3, _binary("float", "+", "-", "*", "*")),
        (1, _binary("float", "min", "max")),
        (1, _binary("float", "//", "%")),
        (1, _where("float")),
    ),
}
LEAVES: Mapping[Kind, tuple[Production, ...]] = {
    "bool": _table(
        (4, _distance), (3, _named), (2, _blocks), (2, _periodic), (2, _divided), (1, _load("flags", "bool"))
    ),
    "int": _table((6, _index), (2, lambda g, depth: g.scalar("int32", "number")), (2, _load("ints", *INTEGER_DTYPES))),
    "float": _table(
        (2, lambda g, depth: Term("to_float", _index(g, 0))),
        (1, lambda g, depth: g.scalar("float32", "real")),
        (2, lambda g, depth: Term("/", Term(g.pick("k", "q")), integer(g.pick(*AWKWARD)))),
        (2, _load("floats", *FLOAT_DTYPES)),
    ),
}
