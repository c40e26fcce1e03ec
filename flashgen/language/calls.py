"""Running a user's mask or score function with traced values, and checking what it takes and returns."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import sympy

from flashgen.errors import SpecError
from flashgen.language.bound import BoundArray, fresh
from flashgen.language.closures import StandIns, capture_name
from flashgen.language.computed import refusing_computed
from flashgen.language.expression_json import node_from_trace
from flashgen.language.operations import Capture, captures_of
from flashgen.language.trace import Traced, lift, of_node, watch_gradient_mode
from flashgen.language.well_formed import check_expression, literal

_OWN_FILES = str(Path(__file__).parent)
_MADE = ("Mask", "Score")  # what functions of the named ones say that they return


class Found:
    """What a function gave when it was traced, and the arrays that it read."""

    def __init__(self, result: Any, what: str, names: StandIns) -> None:
        self.result, self._what, self._names = result, what, names

    def named(self) -> tuple[sympy.Basic, dict[str, BoundArray]]:
        """The expression, and its arrays by the names of their captures."""
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
                final[key] = fresh(capture_name(self._names.name_of(array.original)), taken)
                taken.add(final[key])
            node = _node(traced, arrays, final)
            check_expression(node)
        except SpecError as error:
            raise SpecError(f"{self._what}: {error}") from error
        return node, {final[key]: array for key, array in arrays.items()}


def _node(traced: Traced, arrays: dict[int, BoundArray], names: dict[int, str]) -> sympy.Basic:
    """The expression with its numbers as constants and its arrays as captures of these names."""
    captures = [
        Capture(names[id(array)], bound.dtype, bound.ndim, bound.grad)
        for array in traced.arrays
        for bound in [arrays[id(array)]]
    ]
    return node_from_trace(traced.text, map(literal, traced.numbers), captures)


def run_traced(function: Callable[..., Any], symbols: tuple[sympy.Symbol, ...], what: str) -> Found:
    """Call `function` with proxies of the symbols. Errors say which function, and at which line of it."""
    check_signature(function, symbols, what)
    names = StandIns(function)
    with _gradients(), refusing_computed(what):
        result = call_traced(names.function, [of_node(symbol) for symbol in symbols], what)
    return Found(result, what, names)


def _gradients() -> AbstractContextManager[Any]:
    """Has torch's gradient mode be what a function makes of it, and not of where the function is traced."""
    torch = sys.modules.get("torch")
    if torch is None:
        return nullcontext()
    watch_gradient_mode(torch.is_grad_enabled)
    return torch.enable_grad()


# What Python says where a traced value lacks a method. With these methods torch would take an index for a sequence, and
# look at its length in every call.
_OF_PYTHON = {
    "'Traced' has no len()": "a traced value is one number and has no length; len_q and len_k are the sequence lengths",
    "'Traced' object is not subscriptable": "a traced value is one number and cannot be indexed; a flashgen.Tensor "
    "can, by traced indices",
}


def call_traced(function: Callable[..., Any], operands: Any, what: str) -> Any:
    """What a function returns for traced operands, with errors that say which function, and at which line of it."""
    try:
        return function(*operands)
    except SpecError as error:
        raise SpecError(f"{what}{_line_of(error)}: {error}") from error
    except ArithmeticError as error:
        raise SpecError(
            f"{what}{_line_of(error)} raised {type(error).__name__}: {error}; it computes with Python's numbers before "
            "flashgen sees them: mend the function"
        ) from error
    except Exception as error:
        for end, explained in _OF_PYTHON.items():
            if str(error).endswith(end):
                raise SpecError(f"{what}{_line_of(error)}: {explained}") from error
        # NumPy and torch hide the error of __index__ behind their own.
        error.add_note(
            f"while flashgen traced {what}: traced are elements, array[index], of arrays that are made outside of the "
            "function, and not of dicts; or declare flashgen.Tensor(name, dtype, ndim), and give the array at the call"
        )
        raise


def check_signature(function: Callable[..., Any], symbols: tuple[sympy.Symbol, ...], what: str) -> None:
    """SpecError for what cannot be called with the symbols."""
    if not callable(function):
        raise SpecError(f"{what} must be a function of ({_listed(symbols)}), got {function!r}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins may not tell
        return
    try:
        signature.bind(*symbols)
    except TypeError:
        if signature.return_annotation in _MADE:
            raise SpecError(
                f"{what} is no {what.split()[0]} but makes them: call it, {function.__name__}(...)"
            ) from None
        raise SpecError(
            f"{what} takes {signature}; it must take the {len(symbols)} positional arguments ({_listed(symbols)})"
        ) from None


def _listed(symbols: tuple[sympy.Symbol, ...]) -> str:
    return ", ".join(symbol.name for symbol in symbols)


def _line_of(error: BaseException) -> str:
    """The place, as " (file.py:12)", of the innermost frame that is not of this package."""
    found, step = "", error.__traceback__
    while step is not None:
        filename = step.tb_frame.f_code.co_filename
        if not filename.startswith(_OWN_FILES):
            found = f" ({Path(filename).name}:{step.tb_lineno})"
        step = step.tb_next
    return found
