"""Measures of the structure: conditions on the batch layout, lengths of functions, plans, and records of functions.

Lines that a pattern must find are test cases, too, so that no count is low because a pattern finds nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "flashgen"
SOURCES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")])

MAX_LAYOUT_CONDITIONS = 14
MAX_LINES = 60  # of a function, without its docstring
MAX_FUNCTIONS = 6  # of a record that is filled by position

# A test of the property, or a comparison with a layout. The definitions of layouts own these names.
LAYOUT_CONDITION = re.compile(
    r"""\b(if|elif|else|and|or|not|while)\b.*\bis_(varlen|ragged)\b"""
    r"""|\bis_(varlen|ragged)\b.*\b(if|else|and|or)\b"""
    r"""|[{][{%].*\b(varlen|ragged)\b.*[%}][}]"""
    r"""|\blayout\b\)?\s*([!=]=|(not )?in\b)\s*[(\[{]?["']"""
    r"""|["'](bhsd|bshd|thd)["']\s*[!=]="""
    r"""|\blayout\s+is\s+(not\s+)?PAGES\b"""
)
DEFINITIONS = {"flashgen/language/batch_layout.py"}


def layout_conditions(text: str) -> list[str]:
    lines = (line for line in text.splitlines() if not line.lstrip().startswith(("#", "{#", '"""')))
    return [line.strip() for line in lines if LAYOUT_CONDITION.search(line)]


def test_few_places_ask_for_the_batch_layout() -> None:
    files = [*PACKAGE.rglob("*.py"), *(path for path in (ROOT / "templates").rglob("*") if path.is_file())]
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted(files)
        if str(path.relative_to(ROOT)) not in DEFINITIONS
        for line in layout_conditions(path.read_text("utf-8"))
    ]
    assert len(found) <= MAX_LAYOUT_CONDITIONS, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "if spec.is_varlen or spec.shared_kv:",
        "return _VARLEN if spec.is_varlen else _DENSE",
        "{% if varlen and longest_first %}",
        '{{ "rows" if varlen else "length" }}',
        'if spec.layout != "bhsd":',
        'elif layout in ("bshd", "thd"):',
    ],
)
def test_a_condition_on_the_layout_is_noticed(line: str) -> None:
    assert layout_conditions(line) == [line]


def functions(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Yields each function of a file: its name, its lines without the docstring, and whether it declares a command."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            documented = ast.get_docstring(node, clean=False) is not None
            docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
            declares = "cli" in path.parts and any("Annotated" in ast.unparse(each) for each in node.args.args)
            yield node.name, (node.end_lineno or 0) - node.lineno + 1 - docstring, declares


def test_functions_fit_a_screen() -> None:
    """Declarations of command-line options do not count: the statements of such a function do."""
    long = [
        f"{path.relative_to(ROOT)}: {name} has {lines} lines"
        for path in SOURCES
        for name, lines, declares in functions(path)
        if lines > MAX_LINES and not declares
    ]
    assert not long, "\n".join(long)


def test_commands_have_few_statements() -> None:
    for path in (PACKAGE / "cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or 0) - node.body[0].lineno + 1
                docstring = len((ast.get_docstring(node, clean=False) or "").splitlines())
                assert lines - docstring <= MAX_LINES, f"{path.relative_to(ROOT)}: {node.name}"


def test_no_isinstance_of_plans_outside_of_their_modules() -> None:
    texts = {path: path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    home = {
        name: path for path, text in texts.items() for name in re.findall(r"^class (\w*Plan)\b", text, re.MULTILINE)
    }
    assert len(home) > 8
    found = [
        f"{path.relative_to(ROOT)}: {call}"
        for path, text in texts.items()
        for call in re.findall(r"isinstance\([^()]*\)", text)
        if any(home.get(name, path) != path for name in re.findall(r"\w+Plan\b", call))
    ]
    assert not found, "\n".join(found)


def test_no_record_holds_many_functions_by_position() -> None:
    records, calls = {}, []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
                records[node.name] = sum("Callable" in ast.unparse(each.annotation) for each in fields)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                calls.append((f"{path.name}:{node.lineno}", node.func.id, len(node.args)))
    assert max(records.values()) >= 3, "a record of functions is recognised"
    found = [f"{where}: {name}" for where, name, given in calls if min(records.get(name, 0), given) > MAX_FUNCTIONS]
    assert not found


OPTIONAL = ("torch", "jax", "transformers")


@pytest.mark.parametrize("name", OPTIONAL)
def test_modules_of_tests_skip_without_an_optional_package(name: str) -> None:
    """An import at the top of a test module follows a `pytest.importorskip`: without the package, its tests skip."""
    checked = 0
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text("utf-8")
        imported = re.search(rf"^(import|from) {name}\b", text, re.MULTILINE)
        if imported:
            checked += 1
            skips = re.search(rf"^(?:\w+ = )?pytest\.importorskip\(\s*\"{name}\"", text, re.MULTILINE)
            assert skips and skips.start() < imported.start(), path
    assert checked > 0
