"""Running a user's mask or score function once, with traced values, and checking what it takes and returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sympy

from flashgen.errors import SpecError
from flashgen.language.closures import UNTIL_NAMED, standing_in
from flashgen.language.trace import Traced, lift
from flashgen.language.well_formed import check_expression

_OWN_FILES = str(Path(__file__).parent)
_MADE = ("Mask", "Score")  # what functions of the named ones say that they return


def run_traced(function: Callable[..., Any], symbols: tuple[sympy.Symbol, ...], what: str) -> Any:
    """Call `function` once with proxies of the symbols. Errors say which function, and at which line of it."""
    _check_signature(function, symbols, what)
    try:
        return standing_in(function)(*(Traced(symbol) for symbol in symbols))
    except SpecError as error:
        raise SpecError(f"{what}{_line_of(error)}: {_told(error)}") from error
    except Exception as error:
        # NumPy and torch hide the error of __index__ behind their own.
        error.add_note(
            f"while flashgen traced {what}: traced are elements, array[index], of arrays that are made outside of the "
            "function, and not of dicts; or declare flashgen.Tensor(name, dtype, ndim), and give the array at the call"
        )
        raise


def _check_signature(function: Callable[..., Any], symbols: tuple[sympy.Symbol, ...], what: str) -> None:
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


def _told(error: SpecError) -> str:
    """The error's text, with arrays that the function closed over by the names that they have there."""
    return str(error).replace(UNTIL_NAMED, "")


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


def checked_result(result: Any, what: str) -> sympy.Basic:
    """The node that a traced function returned, checked as a whole."""
    if result is None:
        raise SpecError(f"{what} returned None: did it forget to return its result?")
    try:
        node = lift(result)
        check_expression(node)
    except SpecError as error:
        raise SpecError(f"{what}: {_told(error)}") from error
    return node
