"""Parses masks and scores from text: "causal() & ~document('ids')", "softcap(30)(alibi(8))".

Python's own parser reads the text, and only listed kinds of nodes are accepted. Nothing is evaluated.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from flashgen.errors import SpecError
from flashgen.language import captures, masks, scores
from flashgen.language.modifiers import Mask, Score

MAX_LENGTH = 2000
MAX_LEVELS = 100

MASKS: dict[str, Callable[..., Mask]] = {name: getattr(masks, name) for name in masks.__all__}
SCORES: dict[str, Callable[..., Score]] = {name: getattr(scores, name) for name in scores.__all__}
CAPTURES: dict[str, Callable[..., Any]] = {"Tensor": captures.Tensor, "Scalar": captures.Scalar}

_OPERATORS = {ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^"}


def parse_mask(text: str) -> Mask:
    """Returns the mask of an expression of named masks, `& | ^ ~` and parentheses.

    Args:
        text: the expression, such as "causal() & sliding_window(1024)".

    Raises:
        SpecError: The text cannot be parsed. The message shows the column of the error.
    """
    tree = _tree(text, "mask")
    return _Parser(text, "mask", MASKS, masks.EXAMPLES).mask(tree)


def parse_score(text: str) -> Score:
    """Returns the score of an expression such as "softcap(30)(alibi(8))".

    Args:
        text: the expression.

    Raises:
        SpecError: The text cannot be parsed. The message shows the column of the error.
    """
    tree = _tree(text, "score")
    return _Parser(text, "score", SCORES, scores.EXAMPLES).score(tree)


def _tree(text: Any, what: str) -> ast.expr:
    if not isinstance(text, str) or not text.strip() or len(text) > MAX_LENGTH:
        raise SpecError(f"a {what} expression must be a text of 1 to {MAX_LENGTH} characters, got {text!r:.60}")
    if "\n" in text or not text.isascii() or not text.isprintable():
        raise SpecError(f"a {what} expression must be one line of printable ASCII, got {text!r:.60}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise _syntax_error(text.strip(), what, error) from None
    except (RecursionError, MemoryError, ValueError):
        raise SpecError(f"the {what} expression is nested too deep") from None
    level, nodes = 0, [tree]
    while nodes:
        level, nodes = level + 1, [child for node in nodes for child in ast.iter_child_nodes(node)]  # type: ignore[misc]
        if level > MAX_LEVELS:
            raise SpecError(f"the {what} expression is nested more than {MAX_LEVELS} levels deep")
    return tree


def _syntax_error(text: str, what: str, error: SyntaxError) -> SpecError:
    """Returns the error at Python's column. If Python reports another line, the end of the text is incomplete."""
    offset = error.offset or 0
    if error.lineno == 1 and 1 <= offset <= len(text):
        return _error(text, what, error.msg, offset - 1)
    return _error(text, what, f"the expression ends where a {what} should follow", len(text))


def _error(text: str, what: str, problem: str, column: int) -> SpecError:
    return SpecError(f"{what} expression, column {column + 1}: {problem}\n    {text}\n    {' ' * column}^")


class _Parser:
    def __init__(
        self, text: str, what: str, factories: Mapping[str, Callable[..., Any]], examples: tuple[str, ...]
    ) -> None:
        self.text, self.what, self.factories, self.listed = text.strip(), what, factories, ", ".join(examples)

    def error(self, node: ast.AST, problem: str) -> SpecError:
        return _error(self.text, self.what, problem, getattr(node, "col_offset", 0))

    def mask(self, node: ast.expr) -> Mask:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = self.mask(node.left), self.mask(node.right)
            operator = _OPERATORS[type(node.op)]
            return left & right if operator == "&" else left | right if operator == "|" else left ^ right
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            return ~self.mask(node.operand)
        if isinstance(node, (ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp)):
            raise self.error(
                node,
                "masks combine with & | ^ ~ only (not and, or, not); a function of b, h, q, k must be in a file, which "
                "the command line accepts as file.py:name",
            )
        return self.call(node)

    def score(self, node: ast.expr) -> Score:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Call):
            if len(node.args) != 1 or node.keywords:
                raise self.error(node, "a score is applied to one score, as in softcap(30)(alibi(8))")
            return self.score(node.func)(self.score(node.args[0]))
        if isinstance(node, (ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp)):
            raise self.error(node, "scores compose by calling only, as in softcap(30)(alibi(8))")
        return self.call(node)

    def call(self, node: ast.expr) -> Any:
        """Returns a named mask or score called with its arguments."""
        if isinstance(node, ast.Name):
            self.factory(node)
            raise self.error(node, f"{node.id} needs parentheses: {node.id}(...)")
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise self.error(node, f"expected a {self.what}: {self.listed}")
        return self.instance(node, self.factory(node.func))

    def factory(self, node: ast.Name) -> Callable[..., Any]:
        if node.id in self.factories:
            return self.factories[node.id]
        if node.id in SCORES:
            raise self.error(
                node, f"{node.id} is a score function, not a mask: give it as score=, or as --score on the command line"
            )
        if node.id in MASKS:
            raise self.error(
                node, f"{node.id} is a mask, not a score function: give it as mask=, or as SPEC on the command line"
            )
        close = difflib.get_close_matches(node.id, self.factories, n=1)
        guess = f", did you mean {close[0]}?" if close else ";"
        raise self.error(node, f"unknown {self.what} {node.id!r}{guess} known: {self.listed}")

    def instance(self, node: ast.Call, factory: Callable[..., Any]) -> Any:
        arguments = [self.argument(item) for item in node.args]
        if any(keyword.arg is None for keyword in node.keywords):
            raise self.error(node, "** is not allowed here")
        keywords = {str(keyword.arg): self.argument(keyword.value) for keyword in node.keywords}
        try:
            return factory(*arguments, **keywords)
        except (SpecError, TypeError) as error:  # TypeError: wrong number or names of arguments
            raise self.error(node, str(error).replace("\n", " ")) from None

    def argument(self, node: ast.expr) -> Any:
        """Returns a literal, a Tensor or a Scalar."""
        if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float, str)):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
            value = self.argument(node.operand)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return -value if isinstance(node.op, ast.USub) else value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CAPTURES:
            return self.instance(node, CAPTURES[node.func.id])
        raise self.error(
            node, "an argument is a number, a text in quotes, Tensor('name', 'dtype', ndim=1) or Scalar('name')"
        )
