"""Runs one case and gives its outcome."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from flashgen.errors import ArgumentError, BuildError, LaunchError, SpecError, UnsupportedError
from flashgen.verify.random.outcome import Counts, Found, Outcome
from flashgen.verify.random.predicates import check_predicates
from flashgen.verify.random.recipe import Recipe

_LONGEST = 4000  # characters of a message


def check(recipe: Recipe) -> Outcome:
    """The outcome of a case: its predicates against brute force, and its kernels against the reference.

    A spec that the language or the target refuses by name is "refused", with the message; every other failure is
    "found". What ends the process ends it: `runner` runs cases in processes of their own.
    """
    counts: Counts = Counts()
    try:
        spec = recipe.spec()
        checked = check_predicates(recipe, spec, counts)
        if recipe.passes:
            from flashgen.verify.random.kernels import check_kernels

            check_kernels(recipe, spec, checked, counts)
    except (SpecError, UnsupportedError) as error:
        return Outcome("refused", "", f"{type(error).__name__}: {error}"[:_LONGEST], counts)
    except Found as finding:
        return Outcome("found", finding.kind, str(finding)[:_LONGEST], counts)
    except Exception as error:
        kind, describe = _KINDS.get(type(error), ("raised", _traced))
        if recipe.sanitize and kind == "emulator":
            kind = "sanitizer"
        return Outcome("found", kind, describe(error)[:_LONGEST], counts)
    return Outcome("passed", counts=counts)


def _traced(error: Exception) -> str:
    return "".join(traceback.format_exception(error)[-6:])


_KINDS: dict[type[Exception], tuple[str, Callable[[Any], str]]] = {
    BuildError: ("compile", str),
    LaunchError: ("emulator", str),
    ArgumentError: ("refused call", _traced),
}
