"""Draws masks: predicates of the language, from the plainest window to compositions that no closed form describes.

Every choice is a named production, so that a test can ask that each of them is drawn.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from flashgen.verify.random import constants
from flashgen.verify.random.terms import COMPARISONS, INDICES, LENGTHS, Declared, Kind, Operand, Term

ALIGNMENTS = ("bottom_right", "top_left")
INTEGER_DTYPES = ("int8", "uint8", "int16", "int32", "int64")
FLOAT_DTYPES = ("float16", "bfloat16", "float32")
MOST_CAPTURES = 4

# The roles that captures' values may have.
ANY, POSITIVE, IDS, BLOCKS, CAP, BIAS, DISTANCE = "any", "positive", "ids", "blocks", "cap", "bias", "distance"

Draw = Callable[["Grammar", int], Term]
Production = tuple[str, int, Draw]


def integer(value: int) -> Term:
    """A literal."""
    return Term("int", (value,))


class Grammar:
    """Draws terms, and declares the captures that they read. `drawn` counts productions by name."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.declared: dict[str, Declared] = {}
        self.roles: dict[str, str] = {}
        self.drawn: Counter[str] = Counter()

    def mask(self) -> Term:
        """A boolean term; one in three is a named mask or made of several."""
        return self.draw("bool", self.rng.choice((1, 1, 2, 2, 3)))

    def draw(self, kind: Kind, depth: int) -> Term:
        """A term of a kind, with at most `depth` further levels; never just a Python number."""
        table = _LEAVES[kind] if depth <= 0 else _PRODUCTIONS[kind]
        name, _, production = self.rng.choices(table, [weight for _, weight, _ in table])[0]
        term = production(self, depth - 1)
        self.drawn[f"{kind}: {name}"] += 1
        return term

    def operand(self, kind: Kind, depth: int) -> Term:
        """A term, or as often a literal."""
        if kind == "bool" or self.rng.random() < 0.55:
            return self.draw(kind, depth)
        if kind == "int":
            return integer(constants.literal_int(self.rng))
        return Term("float", (constants.literal_float(self.rng),))

    def pick(self, values: Sequence[Operand]) -> Operand:
        return self.rng.choice(values)

    def capture(self, dtypes: Sequence[str], ndims: Sequence[int], prefix: str, role: str = ANY) -> str:
        """The name of a capture of one of these types, declared before or now.

        role: what its values must be (`values.FILLS`); a capture with a role is read in one place alone.
        """
        fits = [name for name, each in self.declared.items() if each.dtype in dtypes and each.ndim in ndims]
        fits = [name for name in fits if self.roles[name] == ANY]
        if role == ANY and fits and (self.rng.random() < 0.5 or len(self.declared) >= MOST_CAPTURES):
            return self.rng.choice(fits)
        name = f"{prefix}{len(self.declared)}"
        self.declared[name] = Declared(self.rng.choice(dtypes), self.rng.choice(ndims))
        self.roles[name] = role
        return name

    def loaded(self, dtypes: Sequence[str], depth: int, prefix: str) -> Term:
        """A load whose indices are plain ones, or integers that may lie anywhere."""
        name = self.capture(dtypes, (1, 1, 2, 3, 4), prefix)
        indices = []
        for axis in range(self.declared[name].ndim):
            if depth > 0 and self.rng.random() < 0.3:
                indices.append(self.draw("int", depth - 1))
            else:
                indices.append(Term(self.rng.choice(("q", "k", "h", "b") if axis else ("q", "k", "k", "h", "b"))))
        return Term("load", (name, *indices))

    def scalar(self, dtype: str, prefix: str, role: str = ANY) -> Term:
        return Term("scalar", (self.capture((dtype,), (0,), prefix, role),))


# Booleans ------------------------------------------------------------------------------------------------------------


def _compared(kind: Kind) -> Draw:
    def draw(grammar: Grammar, depth: int) -> Term:
        left, right = grammar.draw(kind, depth), grammar.operand(kind, depth)
        pair = (left, right) if grammar.rng.random() < 0.8 else (right, left)
        return Term(grammar.pick(COMPARISONS), pair)

    return draw


def _mixed(grammar: Grammar, depth: int) -> Term:
    """An integer beside a float, or a boolean beside a number."""
    left = grammar.draw("int", depth)
    right = grammar.draw("float", depth) if grammar.rng.random() < 0.7 else grammar.draw("bool", depth)
    return Term(grammar.pick(COMPARISONS), (left, right))


def _position(grammar: Grammar) -> Term:
    """Where a query stands: q, or aligned to the bottom right."""
    q = Term("q")
    return q if grammar.rng.random() < 0.6 else Term("+", (q, Term("-", (Term("len_k"), Term("len_q")))))


def _limit(grammar: Grammar) -> Term:
    """A number to compare with, which the call gives half of the time."""
    if grammar.rng.random() < 0.5:
        return grammar.scalar("int32", "limit")
    return integer(constants.scalar_int(grammar.rng))


def _distance(grammar: Grammar, _depth: int) -> Term:
    """The shape of windows: q - k, |q - k|, k - q or k alone against a number."""
    position, k = _position(grammar), Term("k")
    term = grammar.pick(
        (
            Term("-", (position, k)),
            Term("-", (k, position)),
            Term("abs", (Term("-", (position, k)),)),
            k,
            Term("q"),
        )
    )
    return Term(grammar.pick(COMPARISONS), (term, _limit(grammar)))


def _blocks(grammar: Grammar, _depth: int) -> Term:
    """Indices in blocks: q // n against k // m, or shifted."""

    def block(index: str) -> Term:
        if grammar.rng.random() < 0.7:
            return Term("//", (Term(index), integer(grammar.pick(constants.DIVISORS))))
        return Term(">>", (Term(index), integer(grammar.pick(constants.SHIFTS))))

    right = block("k") if grammar.rng.random() < 0.7 else Term("k")
    return Term(grammar.pick(COMPARISONS), (block("q"), right) if grammar.rng.random() < 0.5 else (right, block("q")))


def _periodic(grammar: Grammar, _depth: int) -> Term:
    """A comparison of something modulo a number with a small number."""
    inner = grammar.pick((Term("-", (Term("q"), Term("k"))), Term("^", (Term("q"), Term("k"))), Term("k"), Term("q")))
    period = Term("%", (inner, integer(grammar.pick(constants.DIVISORS))))
    return Term(grammar.pick(COMPARISONS), (period, integer(grammar.pick((0, 0, 1, 3, 8, -20)))))


def _divided(grammar: Grammar, _depth: int) -> Term:
    """Float division by an awkward constant, floored or compared."""
    divisor = integer(grammar.pick(constants.AWKWARD))

    def quotient(index: str) -> Term:
        divided = Term("/", (Term(index), divisor))
        return grammar.pick((Term("floor", (divided,)), Term("to_int", (divided,)), divided))

    right = quotient("k") if grammar.rng.random() < 0.6 else integer(grammar.pick((0, 1, 2, 3)))
    return Term(grammar.pick(COMPARISONS), (quotient("q" if right.op != "int" else "k"), right))


def _scaled(grammar: Grammar, _depth: int) -> Term:
    """q * a - k * b: exact where each product is rounded, not where two roundings become one."""
    factors = [Term("float", (grammar.pick((0.1, 1 / 3, 0.7, 1.1)),)) for _ in range(2)]
    if grammar.rng.random() < 0.6:
        factors[1] = factors[0]
    difference = Term("-", (Term("*", (Term("q"), factors[0])), Term("*", (Term("k"), factors[1]))))
    return Term(grammar.pick(COMPARISONS), (difference, Term("float", (0.0,))))


def _logic(grammar: Grammar, depth: int) -> Term:
    return Term(grammar.pick(("and", "and", "or", "xor")), (grammar.draw("bool", depth), grammar.draw("bool", depth)))


def _named(grammar: Grammar, _depth: int) -> Term:
    name = grammar.pick(("full", "causal", "sliding_window", "dilated_window", "prefix_lm", "document", "block_sparse"))
    grammar.drawn[f"mask: {name}"] += 1
    return _NAMED[name](grammar)


def _count(grammar: Grammar) -> Term:
    """A named mask's number of positions: a literal from 0 to the end of int32, or a Scalar."""
    if grammar.rng.random() < 0.4:
        return grammar.scalar("int32", "count")
    return integer(abs(constants.scalar_int(grammar.rng)) % 2**31)


def _dilation(grammar: Grammar) -> Term:
    """A dilation of at least 1: the language does not say what is a multiple of 0."""
    if grammar.rng.random() < 0.25:
        return grammar.scalar("int32", "positive", POSITIVE)
    return integer(grammar.pick((1, 2, 3, 4, 7, 64, constants.INT32_MOST)))


_NAMED: dict[str, Callable[[Grammar], Term]] = {
    "full": lambda g: Term("full"),
    "causal": lambda g: Term("causal", (g.pick(ALIGNMENTS),)),
    "sliding_window": lambda g: Term(
        "sliding_window",
        (_count(g), g.pick((integer(0), _count(g))), g.pick(ALIGNMENTS)),
    ),
    "dilated_window": lambda g: Term("dilated_window", (_count(g), _dilation(g), g.pick(ALIGNMENTS))),
    "prefix_lm": lambda g: Term(
        "prefix_lm",
        (g.capture(INTEGER_DTYPES, (1,), "ints") if g.rng.random() < 0.4 else _count(g), g.pick(ALIGNMENTS)),
    ),
    "document": lambda g: Term("document", (g.capture(INTEGER_DTYPES, (1, 2), "ids", IDS),)),
    "block_sparse": lambda g: Term(
        "block_sparse",
        (
            g.capture(("bool", "bool", "uint8", "int32"), (2, 3, 4), "layout", BLOCKS),
            *(integer(g.pick((1, 3, 16, 32, 64, 100))) for _ in range(2)),
        ),
    ),
}


# Numbers -------------------------------------------------------------------------------------------------------------


def _arithmetic(kind: Kind, ops: Sequence[str]) -> Draw:
    def draw(grammar: Grammar, depth: int) -> Term:
        left, right = grammar.draw(kind, depth), grammar.operand(kind, depth)
        return Term(grammar.pick(ops), (left, right) if grammar.rng.random() < 0.8 else (right, left))

    return draw


def _with_literal(op: str, values: Sequence[int]) -> Draw:
    return lambda grammar, depth: Term(op, (grammar.draw("int", depth), integer(grammar.pick(values))))


def _unary(kind: Kind, ops: Sequence[str]) -> Draw:
    return lambda grammar, depth: Term(grammar.pick(ops), (grammar.draw(kind, depth),))


def _where(kind: Kind) -> Draw:
    def draw(grammar: Grammar, depth: int) -> Term:
        condition = grammar.draw("bool", depth)
        return Term("where", (condition, grammar.draw(kind, depth), grammar.operand(kind, depth)))

    return draw


def _quotient(grammar: Grammar, depth: int) -> Term:
    """A division whose operands are integers as often as floats."""
    kind: Kind = "int" if grammar.rng.random() < 0.6 else "float"
    if grammar.rng.random() < 0.6:
        return Term("/", (grammar.draw(kind, depth), integer(grammar.pick(constants.AWKWARD))))
    return Term("/", (grammar.draw(kind, depth), grammar.operand(kind, depth)))


def _index(grammar: Grammar, _depth: int) -> Term:
    return Term(grammar.pick((*INDICES, "q", "k", "q", "k", *LENGTHS)))


_PRODUCTIONS: dict[Kind, tuple[Production, ...]] = {
    "bool": (
        ("compared integers", 4, _compared("int")),
        ("compared floats", 2, _compared("float")),
        ("compared kinds", 1, _mixed),
        ("distance", 4, _distance),
        ("blocks", 2, _blocks),
        ("periodic", 2, _periodic),
        ("divided", 2, _divided),
        ("scaled", 1, _scaled),
        ("logic", 5, _logic),
        ("not", 1, _unary("bool", ("not",))),
        ("where", 1, lambda g, depth: Term("where", tuple(g.draw("bool", depth) for _ in range(3)))),
        ("load", 1, lambda g, depth: g.loaded(("bool",), depth, "flags")),
        ("named", 5, _named),
    ),
    "int": (
        ("index", 3, _index),
        ("arithmetic", 3, _arithmetic("int", ("+", "-", "-", "*"))),
        ("min and max", 2, _arithmetic("int", ("min", "max"))),
        ("division", 1, _arithmetic("int", ("//", "%"))),
        ("division by a literal", 2, _with_literal("//", constants.DIVISORS)),
        ("modulo a literal", 2, _with_literal("%", constants.DIVISORS)),
        ("shift by a literal", 2, _with_literal(">>", constants.SHIFTS)),
        ("shift to the left", 1, _with_literal("<<", (0, 1, 2, 3, 7))),
        ("shift", 1, lambda g, depth: Term(g.pick(("<<", ">>")), (g.draw("int", depth), g.draw("int", depth)))),
        ("bits", 1, _arithmetic("int", ("&", "|", "^"))),
        ("bits of a literal", 2, _with_literal("&", constants.BITMASKS)),
        ("sign", 2, _unary("int", ("neg", "abs"))),
        ("to_int", 1, _unary("float", ("to_int",))),
        ("counted", 1, _unary("bool", ("to_int",))),
        ("where", 1, _where("int")),
        ("scalar", 1, lambda g, depth: g.scalar("int32", "number")),
        ("load", 3, lambda g, depth: g.loaded(INTEGER_DTYPES, depth, "ints")),
    ),
    "float": (
        ("quotient", 3, _quotient),
        ("arithmetic", 3, _arithmetic("float", ("+", "-", "*", "*"))),
        ("min and max", 1, _arithmetic("float", ("min", "max"))),
        ("division", 1, _arithmetic("float", ("//", "%"))),
        ("sign", 1, _unary("float", ("neg", "abs"))),
        ("floor", 2, _unary("float", ("floor",))),
        ("sqrt", 1, _unary("float", ("sqrt",))),
        ("to_float", 2, _unary("int", ("to_float",))),
        ("where", 1, _where("float")),
        ("scalar", 1, lambda g, depth: g.scalar("float32", "real")),
        ("load", 3, lambda g, depth: g.loaded(FLOAT_DTYPES, depth, "floats")),
    ),
}
_LEAVES: dict[Kind, tuple[Production, ...]] = {
    "bool": (
        ("distance", 4, _distance),
        ("blocks", 2, _blocks),
        ("periodic", 2, _periodic),
        ("divided", 2, _divided),
        ("load", 1, lambda g, depth: g.loaded(("bool",), 0, "flags")),
        ("named", 3, _named),
    ),
    "int": (
        ("index", 6, _index),
        ("scalar", 2, lambda g, depth: g.scalar("int32", "number")),
        ("load", 2, lambda g, depth: g.loaded(INTEGER_DTYPES, 0, "ints")),
    ),
    "float": (
        ("quotient", 2, lambda g, depth: Term("/", (Term(g.pick("qk")), integer(g.pick(constants.AWKWARD))))),
        ("to_float", 2, lambda g, depth: Term("to_float", (_index(g, 0),))),
        ("scalar", 1, lambda g, depth: g.scalar("float32", "real")),
        ("load", 2, lambda g, depth: g.loaded(FLOAT_DTYPES, 0, "floats")),
    ),
}


def production_names() -> set[str]:
    """Every production of masks, as `Grammar.drawn` counts them."""
    tables = (*_PRODUCTIONS.items(), *_LEAVES.items())
    return {f"{kind}: {name}" for kind, table in tables for name, _, _ in table} | {f"mask: {name}" for name in _NAMED}
