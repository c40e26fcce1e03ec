"""The documentation of each public function and class describes every parameter."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

MODULES = {
    "flashgen": None,
    "flashgen.attention": None,
    "flashgen.reference": None,
    "flashgen.verify": None,
    "flashgen.release": None,
    "flashgen.ranks": None,
    "flashgen.torch": "torch",
    "flashgen.torch.context_parallel": "torch",
    "flashgen.transformers": "transformers",
    "flashgen.jax": "jax",
}
"""Each public module, and the framework that it needs."""
_AS_IN = re.compile(r"[Aa]rguments[^.`]*?\s(?:those\s+of|same\s+as\s+in)\s+`(\w+)`")


def public(module: Any) -> Iterator[tuple[str, Any]]:
    """Yields the functions and classes of a module, and the methods of these classes, by name."""
    for name in module.__all__:
        found = getattr(module, name)
        if inspect.isclass(found) and not issubclass(found, BaseException):
            yield name, found
            for method, function in vars(found).items():
                function = getattr(function, "__func__", function)
                if inspect.isfunction(function) and (not method.startswith("_") or method == "__call__"):
                    yield f"{name}.{method}", function
        elif inspect.isfunction(found):
            yield name, found


def entries(documentation: str) -> set[str]:
    """Returns the names that have an entry, `name: text` or `one, other: text`."""
    found = re.findall(r"^\s*(\*{0,2}\w+(?:, \*{0,2}\w+)*): ", documentation, flags=re.MULTILINE)
    return {name.strip("* ") for names in found for name in names.split(",")}


def documented(name: str, function: Any, siblings: dict[str, Any]) -> set[str]:
    """Returns the documented parameters, with those of the function that the documentation refers to."""
    texts = [inspect.getdoc(function) or "", (inspect.isclass(function) and function.__init__.__doc__) or ""]
    found = set().union(*map(entries, texts))
    for other in _AS_IN.findall(" ".join(texts)):
        referred = siblings.get(f"{name.rpartition('.')[0]}.{other}".lstrip(".")) or siblings.get(other)
        assert referred is not None, f"{name} refers to {other}, which is not public"
        found |= documented(other, referred, siblings)
    return found


def parameters(function: Any) -> set[str]:
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a built-in constructor
        return set()
    return {name for name in signature.parameters if name not in ("self", "cls") and not name.startswith("_")}


def missing(name: str, function: Any, siblings: dict[str, Any]) -> set[str]:
    undocumented = parameters(function) - documented(name, function, siblings)
    if function.__module__ == "flashgen.language.functions":  # "Returns the larger of a and b."
        return {each for each in undocumented if not re.search(rf"\b{each}\b", function.__doc__)}
    return undocumented


@pytest.mark.parametrize(("module", "framework"), MODULES.items())
def test_every_parameter_is_documented(module: str, framework: str | None) -> None:
    if framework:
        pytest.importorskip(framework)
    functions = dict(public(importlib.import_module(module)))
    assert functions
    undocumented = {name: missing(name, function, functions) for name, function in functions.items()}
    assert not {name: names for name, names in undocumented.items() if names}


def test_a_missing_parameter_is_noticed() -> None:
    def judge(out: Any, ref: Any, low: Any) -> None:
        """Judges.

        Args:
            out, ref: arrays.
        """

    def other(out: Any, low: Any) -> None:
        """Arguments are those of `judge`."""

    assert missing("judge", judge, {}) == {"low"}
    assert missing("other", other, {"judge": judge}) == {"low"}
