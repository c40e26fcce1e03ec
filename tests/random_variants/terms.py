"""Masks and score functions of random cases as small trees, which print as the Python that a user would write.

These trees are not the expressions of the language: `tracing` has the language trace their Python, and `meaning`
evaluates them independently.

A term is the name of an operation and its operands. Operands of most operations are terms; the others are plain values:
the number of a literal, the name of a capture, a keyword of a named mask.

    Term("<=", Term("k"), Term("scalar", "width"))                    k <= width
    Term("load", "ids", Term("q"))                                    ids[q]
    Term("sliding_window", integer(3), integer(0), "bottom_right")    fg.sliding_window(3, 0, align="bottom_right")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["bool", "int", "float"]


@dataclass(frozen=True)
class Declared:
    """The declaration of a capture; a Scalar has `ndim` 0."""

    dtype: str
    ndim: int
    grad: bool = False

    @property
    def kind(self) -> Kind:
        return "float" if "float" in self.dtype else "bool" if self.dtype == "bool" else "int"

    def declaration(self, name: str) -> str:
        """The Python that declares the capture."""
        if self.ndim == 0:
            return f"fg.Scalar({name!r}, {self.dtype!r})"
        return f"fg.Tensor({name!r}, {self.dtype!r}, {self.ndim}{', grad=True' if self.grad else ''})"


Declarations = Mapping[str, Declared]


@dataclass(frozen=True, init=False, repr=False)
class Term:
    """An operation and its operands, or a leaf. Its repr is the Python that makes it."""

    op: str
    args: tuple[Any, ...]

    def __init__(self, op: str, *args: Any) -> None:
        object.__setattr__(self, "op", op)
        object.__setattr__(self, "args", args)

    @property
    def terms(self) -> tuple[Term, ...]:
        """The operands that are terms."""
        return tuple(operand for operand in self.args if isinstance(operand, Term))

    def walk(self) -> Iterator[Term]:
        """The term and all below it, from the top down."""
        yield self
        for operand in self.terms:
            yield from operand.walk()

    def __str__(self) -> str:
        return text_of(self)

    def __repr__(self) -> str:
        return f"Term({', '.join(map(_literal, (self.op, *self.args)))})"


def integer(value: int) -> Term:
    """An integer literal."""
    return Term("int", value)


def number(value: float) -> Term:
    """A float literal."""
    return Term("float", value)


INDICES = ("b", "h", "q", "k")
LENGTHS = ("len_q", "len_k")
SYMBOLS = (*INDICES, *LENGTHS, "score")
LITERALS = ("int", "float", "bool")
MASKS = ("full", "causal", "sliding_window", "dilated_window", "prefix_lm", "document", "block_sparse")
SCORES = ("alibi", "alibi_table", "softcap", "relative_bias")
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
ARITHMETIC = ("+", "-", "*", "//", "%", "min", "max")
BITS = ("<<", ">>", "&", "|", "^")
LOGIC = ("and", "or", "xor")
FUNCTIONS = (
    *("floor", "to_float", "sqrt", "exp", "exp2", "log", "log2", "tanh", "fast_tanh", "sigmoid", "sin", "cos"),
    *("neg", "abs", "to_int", "not", "where", "/", "load"),
)
OPERATIONS = (*COMPARISONS, *ARITHMETIC, *BITS, *LOGIC, *FUNCTIONS)
EVERYTHING = (*SYMBOLS, *LITERALS, "scalar", *MASKS, *SCORES, *OPERATIONS)

_INFIX = {op: op for op in (*COMPARISONS, "+", "-", "*", "/", "//", "%", *BITS)} | {"and": "&", "or": "|", "xor": "^"}
_CALLED = {"min": "minimum", "max": "maximum"}


def text_of(term: Term) -> str:
    """The Python of a term, in which `fg` is the module and captures stand by their names."""
    op, args = term.op, term.args
    if is_named(term):
        return f"{named_text(term)}(b, h, q, k)"
    if op in LITERALS:
        return _literal(args[0])
    if op in SYMBOLS:
        return f"fg.{op}" if op in LENGTHS else op
    if op == "scalar":
        return str(args[0])
    if op == "load":
        return f"{args[0]}[{', '.join(map(text_of, args[1:]))}]"
    if op in _INFIX:
        return f"({text_of(args[0])} {_INFIX[op]} {text_of(args[1])})"
    if op in ("neg", "not"):
        return f"{'-' if op == 'neg' else '~'}({text_of(args[0])})"
    if op == "fast_tanh":
        return f"fg.tanh({text_of(args[0])}, 'fast')"
    if op in SCORES:
        inner, rest = (args[-1], args[:-1]) if op == "alibi_table" else (args[0], args[1:])
        name = "alibi" if op == "alibi_table" else op
        return f"fg.{name}({', '.join(map(_argument, rest))})({text_of(inner)}, b, h, q, k)"
    return f"fg.{_CALLED.get(op, op)}({', '.join(map(text_of, args))})"


def is_named(term: Term) -> bool:
    """Whether the term is a named mask, or made of named masks alone."""
    return term.op in MASKS or (term.op in (*LOGIC, "not") and all(map(is_named, term.terms)))


def named_text(term: Term) -> str:
    """The Python of a term that `is_named`, as a mask: combined by the operators of masks."""
    if term.op in MASKS:
        return f"fg.{term.op}({', '.join(map(_argument, term.args))})"
    operands = [named_text(operand) for operand in term.terms]
    return f"~{operands[0]}" if term.op == "not" else f"({operands[0]} {_INFIX[term.op]} {operands[1]})"


def _argument(value: Any) -> str:
    """An argument of a named mask or score: a term, the name of a capture, or a keyword."""
    if isinstance(value, Term):
        return text_of(value)
    if value in ("bottom_right", "top_left"):
        return f"align={value!r}"
    return repr(value) if value in ("fast", "accurate") else str(value)


def _literal(value: Any) -> str:
    return f"float('{value}')" if value in (float("inf"), float("-inf")) else repr(value)
