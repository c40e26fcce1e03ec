"""The Jinja environment of all templates, and the device primitives that a kernel's text calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import jinja2

from flashgen.codegen.expressions.printer import float_literal
from flashgen.codegen.targets import Target
from flashgen.templates_path import template_root

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@cache
def environment() -> jinja2.Environment:
    """Returns the environment of all templates. Undefined names are errors; block tags leave no blank lines."""
    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_root()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    jinja.filters["float_literal"] = float_literal
    jinja.filters["mentions"] = _mentions
    jinja.filters["dedent"] = _dedent
    return jinja


def _mentions(text: str, *names: str) -> bool:
    """Whether a text contains any of the identifiers."""
    return not set(names).isdisjoint(_IDENTIFIER.findall(text))


def _dedent(text: str) -> str:
    """Removes the indentation of one block, two blanks, from each line that has it."""
    return re.sub(r"^  ", "", text, flags=re.MULTILINE)


@cache
def _primitive_templates() -> dict[str, tuple[str, str | None]]:
    """Returns primitive name -> template, and the element type if the template has several."""
    found: dict[str, tuple[str, str | None]] = {}
    for path in sorted((template_root() / "device").glob("*.cuh.jinja")):
        template, stem = f"device/{path.name}", path.name.removesuffix(".cuh.jinja")
        dtypes = getattr(environment().get_template(template).make_module({"target": None}), "dtypes", None)
        if dtypes is None:
            found[stem] = (template, None)
        else:
            found.update({f"{stem}_{dtype}": (template, dtype) for dtype in dtypes})
    return found


def _primitive_text(name: str, target: Target, sizes: Mapping[str, Any]) -> tuple[bool, str]:
    """Returns whether host and device share the primitive, and its text."""
    template, dtype = _primitive_templates()[name]
    module: Any = environment().get_template(template).make_module({"target": target, **sizes})
    shared = hasattr(module, "shared")
    macro = module.shared if shared else module.device
    return shared, str(macro(dtype) if dtype else macro()).strip()


def _called(text: str) -> list[str]:
    words = set(_IDENTIFIER.findall(text))
    return [name for name in _primitive_templates() if name in words]


def primitives_for(text: str, target: Target, sizes: Mapping[str, Any] | None = None) -> tuple[list[str], list[str]]:
    """Returns the texts of the primitives that `text` calls, directly or indirectly.

    Args:
        sizes: Sizes for which the size-dependent primitives (wgmma) are written out.

    Returns:
        The device-only primitives, and those that host and device share. In each list callees come before their
        callers. Device-only primitives never call shared ones.
    """
    done: dict[str, tuple[bool, str]] = {}

    def visit(name: str) -> None:
        if name in done:
            return
        shared, body = _primitive_text(name, target, sizes or {})
        for callee in _called(body):
            if callee != name:
                visit(callee)
        done[name] = (shared, body)

    for name in _called(text):
        visit(name)
    return [body for shared, body in done.values() if not shared], [body for shared, body in done.values() if shared]


def tidy(text: str) -> str:
    """Removes trailing blanks, repeated empty lines, and empty lines after { or before }."""
    text = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip() + "\n"
    return re.sub(r"\n\n( +\})", r"\n\1", re.sub(r"\{\n\n", "{\n", text))
