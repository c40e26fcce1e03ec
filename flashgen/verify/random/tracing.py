"""Makes the language's masks and scores of terms, as users do: by operators on traced values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import flashgen.language as fg
from flashgen.errors import SpecError
from flashgen.language import Mask, Score
from flashgen.verify.random.terms import LENGTHS, LITERALS, LOGIC, MASKS, SCORES, SYMBOLS, Declarations, Term

_OPERATORS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_, "|": operator.or_,
    "^": operator.xor, "and": operator.and_, "or": operator.or_, "xor": operator.xor, "==": operator.eq,
    "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "neg": operator.neg, "not": operator.invert, "abs": fg.abs, "min": fg.minimum, "max": fg.maximum,
    "floor": fg.floor, "to_float": fg.to_float, "to_int": fg.to_int, "sqrt": fg.sqrt, "exp": fg.exp, "exp2": fg.exp2,
    "log": fg.log, "log2": fg.log2, "tanh": fg.tanh, "fast_tanh": lambda x: fg.tanh(x, "fast"),
    "sigmoid": fg.sigmoid, "sin": fg.sin, "cos": fg.cos, "where": fg.where,
}  # fmt: skip


class Captures:
    """The captures that a case declares, as the language's own."""

    def __init__(self, declared: Declarations) -> None:
        self._made = {
            name: fg.Tensor(name, each.dtype, each.ndim, each.grad) if each.ndim else fg.Scalar(name, each.dtype)
            for name, each in declared.items()
        }

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            raise SpecError(f"random case: capture {name!r} is read and not declared")
        return self._made[name]


def mask_of(term: Term, declared: Declarations) -> Mask:
    """The mask of a boolean term: named masks and their combinations by masks' own operators, the rest traced."""
    captures = Captures(declared)
    if term.op in MASKS:
        return _named_mask(term, captures)
    if term.op in (*LOGIC, "not") and all(_is_named(operand) for operand in term.terms):
        return _OPERATORS[term.op](*(mask_of(operand, declared) for operand in term.terms))
    return fg.trace_mask(lambda b, h, q, k: _traced(term, captures, {"b": b, "h": h, "q": q, "k": k}), "random")


def score_of(term: Term, declared: Declarations) -> Score:
    """The score function of a float term."""
    captures = Captures(declared)

    def score(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return _traced(term, captures, {"score": score, "b": b, "h": h, "q": q, "k": k})

    return fg.trace_score(score, "random")


def _is_named(term: Term) -> bool:
    return term.op in MASKS or (term.op in (*LOGIC, "not") and all(_is_named(operand) for operand in term.terms))


def _traced(term: Term, captures: Captures, indices: Mapping[str, Any]) -> Any:
    """What the user's function computes: a traced value, or the Python number of a literal."""
    op, args = term.op, term.args
    if op in LITERALS:
        return args[0]
    if op in SYMBOLS:
        return getattr(fg, op) if op in LENGTHS else indices[op]
    if op == "scalar":
        return captures[args[0]]
    if op == "load":
        return captures[args[0]][tuple(_traced(index, captures, indices) for index in args[1:])]
    if op in MASKS:
        return _named_mask(term, captures)(*(indices[index] for index in "bhqk"))
    if op in SCORES:
        inner = _traced(args[1] if op == "alibi_table" else args[0], captures, indices)
        return _named_score(term, captures)(inner, *(indices[index] for index in "bhqk"))
    operands = [_traced(operand, captures, indices) for operand in args]
    if all(isinstance(operand, (bool, int, float)) for operand in operands):
        raise SpecError(f"random case: {term} is a number of Python's, which the language never sees")
    return _OPERATORS[op](*operands)


def _named_mask(term: Term, captures: Captures) -> Mask:
    arguments = [_argument(value, captures) for value in term.args]
    aligned = term.op in ("causal", "sliding_window", "dilated_window", "prefix_lm")
    factory = getattr(fg, term.op)
    return factory(*arguments[:-1], align=arguments[-1]) if aligned else factory(*arguments)


def _named_score(term: Term, captures: Captures) -> Score:
    if term.op == "alibi_table":
        return fg.alibi(captures[term.args[0]])
    return getattr(fg, term.op)(*(_argument(value, captures) for value in term.args[1:]))


def _argument(value: Any, captures: Captures) -> Any:
    """A named variant's argument: a literal's number, a Scalar, a Tensor by its name, or a word as it is."""
    if isinstance(value, Term):
        return captures[value.args[0]] if value.op == "scalar" else value.args[0]
    return value if value in ("bottom_right", "top_left", "fast", "accurate") else captures[value]
