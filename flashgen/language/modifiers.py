"""`Mask` and `Score`: traced functions with a name, the counterparts of FlexAttention's mask_mod and score_mod.

Masks combine with `& | ^ ~`, and scores compose by calling.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy

from flashgen.errors import SpecError
from flashgen.language import operations as ops
from flashgen.language.bound import Bound, is_array, merge_bound
from flashgen.language.calls import run_traced
from flashgen.language.expression_json import ARRAY, AT, canonical, node_to_data
from flashgen.language.operations import Capture, captures_of, kind_of
from flashgen.language.trace import PLACEHOLDERS, Traced, lift, logic, negate, traced_node
from flashgen.language.well_formed import build, check_expression

MaskFunction = Callable[[Any, Any, Any, Any], Any]
ScoreFunction = Callable[[Any, Any, Any, Any, Any], Any]

MASK_SYMBOLS = ops.INDICES
SCORE_SYMBOLS = (ops.SCORE, *ops.INDICES)

MAX_FUNCTION_NAME = 100
MAX_NAME = 2000
# Names appear in comments of emitted C++: they may hold nothing that ends a comment or continues a line.
_NAME = re.compile(r"[A-Za-z0-9_ ()&|^~.,=+'-]+")
# Python's precedence of the operators of masks, weakest first. An atom binds stronger than all of them.
_PRECEDENCE = {"|": 0, "^": 1, "&": 2, "~": 3}
_ATOM = 4


@dataclass(frozen=True, repr=False)
class Mask:
    """A mask: a boolean function of b, h, q and k that says which keys each query attends to.

    Masks combine with `& | ^ ~`, also with plain functions `f(b, h, q, k)`. They can be called inside other traced
    functions: `causal()(b, h, q, k)`.

    Attributes:
        name: What the mask prints as.
        expression: A boolean expression of the language.
        bound: The arrays that the function closed over, keyed by the names of their captures. Calls need not supply
            them.
    """

    name: str
    expression: sympy.Basic
    bound: Bound = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        _check_name(self.name, "mask")
        check_expression(self.expression)
        if kind_of(self.expression) != "bool":
            raise SpecError(
                f"mask {self.name!r} must be boolean, got {kind_of(self.expression)}: compare it, e.g. x != 0"
            )
        if ops.SCORE in self.expression.free_symbols:
            raise SpecError(
                f"mask {self.name!r} reads the score: a mask sees b, h, q, k, len_q, len_k and captures only"
            )
        object.__setattr__(self, "_template", _template(self.expression, self.bound))

    @property
    def captures(self) -> tuple[Capture, ...]:
        """The captures that the mask reads, sorted by name."""
        return captures_of(self.expression)

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Traced:
        """Returns the mask at these traced or literal indices, inside a traced function.

        Args:
            b: the index of the sequence.
            h: the index of the query head.
            q: the position of the query.
            k: the position of the key.
        """
        return _apply_template(self._template, (b, h, q, k))  # type: ignore[attr-defined]

    def __and__(self, other: Any) -> Mask:
        return _combine("&", self, other)

    def __rand__(self, other: Any) -> Mask:
        return _combine("&", other, self)

    def __or__(self, other: Any) -> Mask:
        return _combine("|", self, other)

    def __ror__(self, other: Any) -> Mask:
        return _combine("|", other, self)

    def __xor__(self, other: Any) -> Mask:
        return _combine("^", self, other)

    def __rxor__(self, other: Any) -> Mask:
        return _combine("^", other, self)

    def __invert__(self) -> Mask:
        return Mask(
            f"~{_parenthesized(self.name, _PRECEDENCE['~'])}", negate(traced_node(self.expression)).node, self.bound
        )

    def __bool__(self) -> bool:
        raise SpecError(f"mask {self.name!r} is neither true nor false: combine masks with & | ~, not and, or, not")

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Mask({self.name})"


@dataclass(frozen=True, repr=False)
class Score:
    """A score function: a function of the score scale·q·k and of b, h, q and k, applied before the mask.

    Scores compose by calling: `softcap(30)(alibi(8))` applies alibi first. Inside a traced function,
    `softcap(30)(score, b, h, q, k)` is the value at these operands.

    Attributes:
        name: What the score function prints as.
        expression: A float expression of the language.
        bound: The arrays that the function closed over, keyed by the names of their captures. Calls need not supply
            them.
    """

    name: str
    expression: sympy.Basic
    bound: Bound = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        _check_name(self.name, "score")
        check_expression(self.expression)
        if kind_of(self.expression) != "float":
            raise SpecError(f"score {self.name!r} must be a float, got {kind_of(self.expression)}: use to_float(x)")
        object.__setattr__(self, "_template", _template(self.expression, self.bound))

    @property
    def captures(self) -> tuple[Capture, ...]:
        """The captures that the score function reads, sorted by name."""
        return captures_of(self.expression)

    def __call__(self, *operands: Any) -> Any:
        """Composes two scores, as in softcap(30)(alibi(8)), or returns the score at traced or literal operands.

        Args:
            operands: a Score, which is applied first; or (score, b, h, q, k), inside a traced function.
        """
        if len(operands) == 1:
            return self._compose(as_score(operands[0]))
        if len(operands) != len(SCORE_SYMBOLS):
            raise SpecError(
                f"score {self.name!r} is called with another score, as in softcap(30)(alibi(8)), or with "
                f"(score, b, h, q, k) in a traced function; got {len(operands)} arguments"
            )
        return _apply_template(self._template, operands)  # type: ignore[attr-defined]

    def _compose(self, first: Score) -> Score:
        own, inner, bound = merge_bound(self.expression, self.bound, first.expression, first.bound)
        return Score(f"{self.name}({first.name})", own.xreplace({ops.SCORE: inner}), bound)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Score({self.name})"


def trace_mask(function: MaskFunction, name: str | None = None) -> Mask:
    """Returns the mask of `function(b, h, q, k)`, which is called once with traced indices.

    Args:
        function: The function to trace.
        name: The name of the mask. None means the name of the function.

    Raises:
        SpecError: The function does something that cannot be traced. The message says what.
    """
    name = name or name_of(function, "mask")
    what = f"mask {name!r}"
    found = run_traced(function, MASK_SYMBOLS, what)
    if isinstance(found.result, Mask):
        return Mask(name, found.result.expression, found.result.bound)
    node, bound = found.named()
    if kind_of(node) != "bool":
        raise SpecError(f"{what} must return a boolean, got {kind_of(node)}: compare it, e.g. return x != 0")
    return Mask(name, node, bound)


def trace_score(function: ScoreFunction, name: str | None = None) -> Score:
    """Returns the score function of `function(score, b, h, q, k)`, which is called once with traced values.

    Args:
        function: The function to trace.
        name: The name of the score function. None means the name of the function.

    Raises:
        SpecError: The function does something that cannot be traced. The message says what.
    """
    name = name or name_of(function, "score")
    what = f"score {name!r}"
    found = run_traced(function, SCORE_SYMBOLS, what)
    if isinstance(found.result, Score):
        return Score(name, found.result.expression, found.result.bound)
    if isinstance(found.result, Mask):
        raise SpecError(
            f"{what} returned a mask: return where(mask(b, h, q, k), score, float('-inf')), or pass it as mask="
        )
    node, bound = found.named()
    kind = kind_of(node)
    if kind == "bool":
        raise SpecError(f"{what} must return a number, got bool: a condition belongs in the mask, or in where(c, a, b)")
    return Score(name, node if kind == "float" else build(ops.ToFloat, node), bound)


def as_mask(value: Any, argument: str = "mask") -> Mask:
    """Returns a Mask unchanged, and traces a plain function."""
    if isinstance(value, Mask):
        return value
    if isinstance(value, Score):
        raise SpecError(
            f"{argument}={value!r} is a score function: give it as score=, or on the command line as --score"
        )
    if is_array(value):
        shape = tuple(value.shape)
        raise SpecError(f"{argument} is an array {shape}: read it in a function, lambda b, h, q, k: array[q, k]")
    if isinstance(value, Traced) or not callable(value):
        parsed = "; flashgen.parse_mask parses the text of one" if isinstance(value, str) else ""
        raise SpecError(f"{argument}={value!r} must be a mask such as causal(), or a function f(b, h, q, k){parsed}")
    return trace_mask(value)


def as_score(value: Any) -> Score:
    """Returns a Score unchanged, and traces a plain function."""
    if isinstance(value, Score):
        return value
    if isinstance(value, Mask):
        raise SpecError(f"score={value!r} is a mask: give it as mask=")
    if isinstance(value, Traced) or not callable(value):
        parsed = "; flashgen.parse_score parses the text of one" if isinstance(value, str) else ""
        raise SpecError(
            f"score={value!r} must be a score such as softcap(30), or a function f(score, b, h, q, k){parsed}"
        )
    return trace_score(value)


def _combine(operator: str, left: Any, right: Any) -> Mask:
    """Returns `left operator right`, where one side is a mask and the other a mask or a plain function."""
    classes = {"&": (ops.And, ops.BitAnd), "|": (ops.Or, ops.BitOr), "^": (ops.Xor, ops.BitXor)}[operator]
    if isinstance(left, Traced) or isinstance(right, Traced):
        raise SpecError(f"{operator} of a mask and a traced value: call the mask there, as in causal()(b, h, q, k)")
    left, right = as_mask(left, f"left side of {operator}"), as_mask(right, f"right side of {operator}")
    # & | ^ are left-associative, so the right side needs parentheses at the same precedence already.
    level = _PRECEDENCE[operator]
    name = f"{_parenthesized(left.name, level)} {operator} {_parenthesized(right.name, level + 1)}"
    left_expression, right_expression, bound = merge_bound(left.expression, left.bound, right.expression, right.bound)
    return Mask(name, logic(*classes, traced_node(left_expression), traced_node(right_expression)).node, bound)


def _template(expression: sympy.Basic, bound: Bound) -> Traced:
    """Returns the expression as a traced value that holds the bound arrays instead of their captures."""
    arrays: list[Any] = []

    def with_arrays(data: Any) -> Any:
        if isinstance(data, list):
            return [with_arrays(item) for item in data]
        array = bound.get(data["capture"]) if isinstance(data, dict) and "capture" in data else None
        if array is None:
            return data
        arrays.append(array.original)
        return [ARRAY, array.dtype, array.ndim, array.grad]

    text = canonical(with_arrays(node_to_data(expression)))
    return Traced(text, kind_of(expression), tuple(arrays))


def _parenthesized(name: str, level: int) -> str:
    return name if _precedence(name) >= level else f"({name})"


def _precedence(name: str) -> int:
    """Returns the precedence of the weakest operator of a name outside all parentheses."""
    weakest, depth = _ATOM, 0
    for character in name:
        depth += (character == "(") - (character == ")")
        if depth == 0 and character in _PRECEDENCE:
            weakest = min(weakest, _PRECEDENCE[character])
    return weakest


_MASK_TEXTS = tuple(f'"{symbol.name}"' for symbol in MASK_SYMBOLS)
_SCORE_TEXTS = tuple(f'"{symbol.name}"' for symbol in SCORE_SYMBOLS)


def _apply_template(template: Traced, operands: tuple[Any, ...]) -> Any:
    return PLACEHOLDERS[-1].at(template, operands) if PLACEHOLDERS else at_operands(template, operands)


def at_operands(template: Traced, operands: tuple[Any, ...]) -> Traced:
    """Returns the expression of a mask or score with these values in place of its indices and of the score."""
    values = [lift(operand) for operand in operands]
    names = ("score", "b", "h", "q", "k")[-len(values) :]
    for name, value in zip(names, values, strict=True):
        if name == "score" and value.kind == "bool":
            raise SpecError("the score must be a number, got bool: use where(c, a, b)")
        if name != "score" and value.kind != "int":
            raise SpecError(f"the index {name} must be an integer, got {value.kind}: use // or to_int(x)")
    texts = tuple([value.text for value in values])
    if texts in (_MASK_TEXTS, _SCORE_TEXTS):
        return template
    arrays, numbers = template.arrays, template.numbers
    for value in values:
        arrays, numbers = arrays + value.arrays, numbers + value.numbers
    return Traced(f'["{AT}",{template.text},[{",".join(texts)}]]', template.kind, arrays, numbers)


def _check_name(name: Any, what: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise SpecError(
            f"{what} name {name!r:.80}: at most {MAX_NAME} of A-Z a-z 0-9 _ ( ) & | ^ ~ . , = + ' - and space"
        )


def name_of(function: Any, fallback: str) -> str:
    """Returns the name of a function, or `fallback` for lambdas and for names that cannot appear in C++ comments."""
    while isinstance(function, functools.partial):
        function = function.func
    named = getattr(function, "__name__", None) if inspect.isroutine(function) else type(function).__name__
    return named if named and len(named) <= MAX_FUNCTION_NAME and _NAME.fullmatch(named) else fallback
