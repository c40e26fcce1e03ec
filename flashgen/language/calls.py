"""Calls a user's mask or score function with traced values, and checks what it takes and returns."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import sympy

from flashgen.errors import SpecError
from flashgen.language.bound import BoundArray, unused_name
from flashgen.language.closures import StandIns, capture_name
from flashgen.language.computed import refuse_computed_tensors
from flashgen.language.expression_json import node_from_trace
from flashgen.language.operations import Capture, captures_of
from flashgen.language.trace import Traced, lift, traced_node, watch_gradient_mode
from flashgen.language.well_formed import check_expression, literal

_OWN_FILES = str(Path(__file__).parent)
_FACTORY_RESULTS = ("Mask", "Score")  # return annotations of the factories of named masks and scores


class TraceResult:
    """The result of a traced function, and the arrays that it read."""

    def __init__(self, result: Any, what: str, names: StandIns) -> None:
        self.result, self._what, self._names = result, what, names

    def named(self) -> tuple[sympy.Basic, dict[str, BoundArray]]:
        """Returns the expression, and its arrays keyed by the names of their captures."""
        if self.result is None:
            raise SpecError(f"{self._what} returned None: did it forget to return its result?")
        try:
            traced = lift(self.result)
            arrays: dict[int, BoundArray] = {}
            for array in traced.arrays:
                if id(array) not in arrays:
                    arrays[id(array)] = BoundArray(array, self._names.name_of(array))
            provisional = {key: f"bound__{number}" for number, key in enumerate(arrays)}
            taken = {capture.name for capture in captures_of(_node(traced, arrays, provisional))}
            taken -= set(provisional.values())
            final: dict[int, str] = {}
            for key, array in arrays.items():
                final[key] = unused_name(capture_name(self._names.name_of(array.original)), taken)
                taken.add(final[key])
            node = _node(traced, arrays, final)
            check_expression(node)
        except SpecError as error:
            raise SpecError(f"{self._what}: {error}") from error
        return node, {final[key]: array for key, array in arrays.items()}


def _node(traced: Traced, arrays: dict[int, BoundArray], names: dict[int, str]) -> sympy.Basic:
    """Returns the expression with its numbers as constants and its arrays as captures of these names."""
    captures = [
        Capture(names[id(array)], bound.dtype, bound.ndim, bound.grad)
        for array in traced.arrays
        for bound in [arrays[id(array)]]
    ]
    return node_from_trace(traced.text, map(literal, traced.numbers), captures)


def run_traced(function: Callable[..., Any], symbols: tuple[sympy.Symbol, ...], what: str) -> TraceResult:
    """Calls `function` with proxies of the symbols. Errors name the function and the line in it."""
    check_signature(function, symbols, what)
    names = StandIns(function)
    with _enabled_gradients(), refuse_computed_tensors(what):
        result = call_traced(names.function, [traced_node(symbol) for symbol in symbols], what)
    return TraceResult(result, what, names)


def _enabled_gradients() -> AbstractContextManager[Any]:
    """Enables torch's gradient mode while a function is traced, so that only the function itself can disable it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return nullcontext()
    watch_gradient_mode(torch.is_grad_enabled)
    return torch.enable_grad()


# What Python reports where a traced value lacks a method. The methods are missing on purpose: with them torch would
# take an index for a sequence, and read its length in every call.
_PYTHON_ERRORS = {
    "'Traced' has no len()": "a traced value is one number and has no length; len_q and len_k are the sequence lengths",
    "'Traced' object is not subscriptable": "a traced value is one number and cannot be indexed; a flashgen.Tensor "
    "can, by traced indices",
}
_ATTRIBUTES = "flashgen.language lists the functions and the methods that can be traced"
_INDEXING = (
    "it can trace array[index] for arrays that are created outside of the function and are not in dicts; or declare "
    "flashgen.Tensor(name, dtype, ndim), and give it at the call"
)


def call_traced(function: Callable[..., Any], operands: Any, what: str) -> Any:
    """Returns what a function returns for traced operands. Errors name the function and the line in it."""
    try:
        return function(*operands)
    except SpecError as error:
        raise SpecError(f"{what}{_line_of(error)}: {error}") from error
    except ArithmeticError as error:
        raise SpecError(
            f"{what}{_line_of(error)} raised {type(error).__name__}: {error}; it computes with Python's numbers before "
            "flashgen sees them: correct the function"
        ) from error
    except Exception as error:
        for end, explained in _PYTHON_ERRORS.items():
            if str(error).endswith(end):
                raise SpecError(f"{what}{_line_of(error)}: {explained}") from error
        # NumPy and torch replace the error of __index__ by their own.
        lacks_attribute = isinstance(error, AttributeError) and isinstance(error.obj, Traced)
        error.add_note(f"while flashgen traced {what}: {_ATTRIBUTES if lacks_attribute else _INDEXING}")
        raise


def check_signature(function: Callable[..., Any], symbols: tuple[sympy.Symbol, ...], what: str) -> None:
    """Raises SpecError for an object that cannot be called with the symbols."""
    if not callable(function):
        raise SpecError(f"{what} must be a function of ({_listed(symbols)}), got {function!r}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind(*symbols)
    except TypeError:
        if signature.return_annotation in _FACTORY_RESULTS:
            raise SpecError(
                f"{what} is not a {what.split()[0]} but returns one: call it, {function.__name__}(...)"
            ) from None
        raise SpecError(
            f"{what} takes {signature}; it must take the {len(symbols)} positional arguments ({_listed(symbols)})"
        ) from None


def _listed(symbols: tuple[sympy.Symbol, ...]) -> str:
    return ", ".join(symbol.name for symbol in symbols)


def _line_of(error: BaseException) -> str:
    """Returns the location, as " (file.py:12)", of the innermost frame outside this package."""
    location, step = "", error.__traceback__
    while step is not None:
        filename = step.tb_frame.f_code.co_filename
        if not filename.startswith(_OWN_FILES):
            location = f" ({Path(filename).name}:{step.tb_lineno})"
        step = step.tb_next
    return location
