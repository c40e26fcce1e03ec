"""Masks and scores of random cases as small trees, which print as the Python that a user writes, and as JSON.

They are not the language's own expressions: `tracing` takes a tree through the language's front door, `meaning` gives
it a meaning of its own, and neither judges itself.

A term is an operation's name and its operands. Operands of most operations are terms; the rest are plain values: the
number of a literal, the name of a capture, the words of a named mask.

    Term("<=", (Term("k"), Term("scalar", ("width",))))                 k <= width
    Term("load", ("ids", Term("q")))                                    ids[q]
    Term("sliding_window", (Term("int", (3,)), Term("int", (0,)), "bottom_right"))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flashgen.errors import SpecError

Kind = Literal["bool", "int", "float"]
Operand = Any  # a Term, or a plain value


@dataclass(frozen=True)
class Declared:
    """A capture as a case declares it; a Scalar has `ndim` 0."""

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


@dataclass(frozen=True)
class Term:
    """An operation on operands, or a leaf."""

    op: str
    args: tuple[Operand, ...] = ()

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

_INFIX = {
    **{op: op for op in (*COMPARISONS, "+", "-", "*", "/", "//", "%", "<<", ">>", "&", "|", "^")},
    "and": "&",
    "or": "|",
    "xor": "^",
}
_CALLED = {"min": "minimum", "max": "maximum"}


def kind_of(term: Term, declared: Declarations) -> Kind:
    """The kind of value that a term stands for."""
    if term.op in ("scalar", "load"):
        return declared[term.args[0]].kind
    if term.op in LITERALS:
        return term.op  # type: ignore[return-value]
    if term.op in (*COMPARISONS, *LOGIC, *MASKS, "not"):
        return "bool"
    if term.op in (*INDICES, *LENGTHS, *BITS, "to_int"):
        return "int"
    if term.op in (*ARITHMETIC, "neg", "abs"):
        return "float" if "float" in (kind_of(operand, declared) for operand in term.terms) else "int"
    if term.op == "where":
        kinds = {kind_of(operand, declared) for operand in term.terms[1:]}
        return "float" if "float" in kinds else "int" if "int" in kinds else "bool"
    return "float"


def captures_of(*terms: Term | None) -> set[str]:
    """The names of the captures that terms read."""
    read = set()
    for term in terms:
        for part in term.walk() if term else ():
            if part.op in ("scalar", "load", "document", "block_sparse", "alibi_table"):
                read.add(part.args[0])
            if part.op == "prefix_lm" and isinstance(part.args[0], str):
                read.add(part.args[0])
            if part.op == "relative_bias":
                read.add(part.args[1])
    return read


# Text ----------------------------------------------------------------------------------------------------------------


def text_of(term: Term) -> str:
    """The Python that a user writes for a term; `fg` is the module, and captures stand by their names."""
    op, args = term.op, term.args
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
    if op in MASKS:
        return f"fg.{op}({', '.join(map(_argument, args))})(b, h, q, k)"
    if op in SCORES:
        inner, rest = (args[-1], args[:-1]) if op == "alibi_table" else (args[0], args[1:])
        name = "alibi" if op == "alibi_table" else op
        return f"fg.{name}({', '.join(map(_argument, rest))})({text_of(inner)}, b, h, q, k)"
    return f"fg.{_CALLED.get(op, op)}({', '.join(map(text_of, args))})"


def _argument(value: Operand) -> str:
    """An argument of a named mask or score: a term, the name of a capture, or a keyword's word."""
    if isinstance(value, Term):
        return text_of(value)
    if value in ("bottom_right", "top_left"):
        return f"align={value!r}"
    return repr(value) if value in ("fast", "accurate") else str(value)


def _literal(value: Any) -> str:
    return f"float('{value}')" if value in (float("inf"), float("-inf")) else repr(value)


# JSON ----------------------------------------------------------------------------------------------------------------


def to_data(term: Term) -> Any:
    """The term as what `json` writes: [op, operand, ...], floats in hexadecimal."""
    if term.op == "float":
        return ["float", float(term.args[0]).hex()]
    return [term.op, *(to_data(operand) if isinstance(operand, Term) else operand for operand in term.args)]


def from_data(data: Any) -> Term:
    """The term of `to_data`'s result. SpecError for anything else."""
    if not isinstance(data, list) or not data or data[0] not in EVERYTHING:
        raise SpecError(f"random case: {data!r:.80} is no term; a term is [operation, operand, ...]")
    op, *rest = data
    if op == "float":
        return Term(op, (float.fromhex(rest[0]),))
    return Term(op, tuple(from_data(operand) if isinstance(operand, list) else operand for operand in rest))
