"""`import flashgen` is lazy and offers the names that it lists."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import flashgen
import flashgen.language


def test_names_of_the_language_are_reexported():
    assert set(flashgen.language.__all__) <= set(flashgen.__all__)
    for name in flashgen.language.__all__:
        assert getattr(flashgen, name) is getattr(flashgen.language, name)
    assert flashgen.errors.SpecError is not None
    assert flashgen.__all__ == sorted(flashgen.__all__)


def test_dir_has_public_names_only():
    """Also after submodules, which Python makes attributes of the package, were imported and names were used."""
    code = """
import flashgen
before = dir(flashgen)
import flashgen.build.cache, flashgen.cli, flashgen.language, flashgen.report
flashgen.causal, flashgen.compile, flashgen.__all__
assert dir(flashgen) == before == sorted([*flashgen.__all__, "__version__"]), dir(flashgen)
import flashgen.release
assert set(dir(flashgen)) - set(before) == {"release"}
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def literal_names(module):
    """Returns the names that a module's `__all__` holds as literals, which is all that mypy reads."""
    changes = [node for node in syntax_of(module).body if isinstance(node, ast.Assign | ast.AugAssign)]
    return {
        item.value
        for node in changes
        if "__all__" in ast.unparse(node).partition("=")[0]
        for item in ast.walk(node.value)
        if isinstance(item, ast.Constant)
    }


def syntax_of(module):
    return ast.parse(Path(find_spec(module).origin).read_text(encoding="utf-8"))


def test_type_checkers_see_the_existing_names():
    imports = next(node.body for node in syntax_of("flashgen").body if isinstance(node, ast.If))
    seen = set()
    for line in imports:
        for alias in line.names:
            seen |= literal_names(line.module) if alias.name == "*" else {alias.asname}
    assert sorted(seen) == flashgen.__all__


def test_star_import_gives_the_listed_names():
    found = {}
    exec("from flashgen import *", found)
    assert sorted(found.keys() - {"__builtins__"}) == flashgen.__all__


def test_unknown_names():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        flashgen.nonsense


def test_importing_loads_nothing_heavy():
    code = """
import sys, flashgen
assert not {"sympy", "numpy", "jinja2", "cupy", "typer"} & set(sys.modules), "eager"
flashgen.causal()
assert not {"jinja2", "cupy", "typer", "torch", "ml_dtypes"} & set(sys.modules), "heavy"
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
