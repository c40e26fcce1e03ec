"""The one Jinja environment, and the primitives: which ones a text calls, and their text."""

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
    """The environment that every kernel is rendered in: undefined names are errors, blocks leave no blank lines."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_root()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    made.filters["float_literal"] = float_literal
    made.filters["mentions"] = _mentions
    return made


def _mentions(text: str, *names: str) -> bool:
    """Whether one of some identifiers stands in a text."""
    return not set(names).isdisjoint(_IDENTIFIER.findall(text))


@cache
def _primitive_templates() -> dict[str, tuple[str, str | None]]:
    """Name of each primitive -> its template and, for one that comes in several element types, the type."""
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
    """Whether host and device share the primitive's text, and the text."""
    template, dtype = _primitive_templates()[name]
    module: Any = environment().get_template(template).make_module({"target": target, **sizes})
    shared = hasattr(module, "shared")
    macro = module.shared if shared else module.device
    return shared, str(macro(dtype) if dtype else macro()).strip()


def _called(text: str) -> list[str]:
    words = set(_IDENTIFIER.findall(text))
    return [name for name in _primitive_templates() if name in words]


def primitives_for(text: str, target: Target, sizes: Mapping[str, Any] | None = None) -> tuple[list[str], list[str]]:
    """Texts of the primitives that `text` calls, directly or through others: those of the device, those shared.

    `sizes`: what primitives written out for some sizes only, those of wgmma, are to be written out for.

    Callees come before their callers within each list; a device primitive calls no shared one.
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
    """A rendered kernel without trailing blanks, and with single empty lines, none after { or before }."""
    text = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip() + "\n"
    return re.sub(r"\n\n( +\})", r"\n\1", re.sub(r"\{\n\n", "{\n", text))
