"""The Jinja environment of all templates, and the device primitives that a kernel's text calls."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from functools import cache
from typing import Any

import jinja2

from flashgen.codegen.expressions.printer import float_literal
from flashgen.codegen.targets import Target
from flashgen.templates_path import template_root

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_COMMENT = re.compile(r"^( *)// \S.*\n(?:\1// \S.*\n)*", re.MULTILINE)
_SETS_DTYPES = "{% set dtypes = "
_COLUMNS = 120
_MAX_SLACK = 24  # columns that a line of a comment leaves free although the next word fits


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
    """Returns primitive name -> template, and the element type if the template has several.

    Only templates that set `dtypes` are compiled: a kernel calls few of the others.
    """
    found: dict[str, tuple[str, str | None]] = {}
    for path in sorted((template_root() / "device").glob("*.cuh.jinja")):
        template, stem = f"device/{path.name}", path.name.removesuffix(".cuh.jinja")
        if _SETS_DTYPES not in path.read_text(encoding="utf-8"):
            found[stem] = (template, None)
            continue
        module: Any = environment().get_template(template).make_module({"target": None})
        found.update({f"{stem}_{dtype}": (template, dtype) for dtype in module.dtypes})
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
    """Removes trailing blanks, repeated empty lines, and empty lines after { or before }, and wraps comments.

    Comments that templates assemble have lines that are too long or too short. The header, the text before the first
    empty line, keeps its lines.
    """
    text = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip() + "\n"
    text = re.sub(r"\n\n( +\})", r"\n\1", re.sub(r"\{\n\n", "{\n", text))
    header, separator, body = text.partition("\n\n")
    return header + separator + _COMMENT.sub(_wrap_comment, body)


def _wrap_comment(comment: re.Match[str]) -> str:
    """Returns a comment of whole lines with at most 120 columns. Tables and comments that fit keep their lines."""
    lines, start = comment[0].splitlines(), comment[1] + "// "
    words = [line.removeprefix(start).split(" ", 1)[0] for line in lines[1:]]
    is_short = any(
        line[-1] not in ".:;" and len(line) + 1 + len(word) <= _COLUMNS - _MAX_SLACK
        for line, word in zip(lines, words, strict=False)
    )
    if any("   " in line.strip() or "----" in line for line in lines) or not (
        is_short or max(map(len, lines)) > _COLUMNS
    ):
        return comment[0]
    content = " ".join(line.removeprefix(start) for line in lines)
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(content, _COLUMNS, initial_indent=start, subsequent_indent=start, **options) + "\n"
