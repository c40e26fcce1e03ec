"""`import flashgen` is lazy, and offers what it lists."""

import subprocess
import sys

import pytest

import flashgen
import flashgen.language


def test_names_of_the_language_are_reexported():
    assert set(flashgen.language.__all__) <= set(flashgen.__all__)
    for name in flashgen.language.__all__:
        assert getattr(flashgen, name) is getattr(flashgen.language, name)
    assert flashgen.__version__ == "0.1.0"
    assert flashgen.errors.SpecError is not None
    assert set(flashgen.__all__) <= set(dir(flashgen))
    assert flashgen.__all__ == sorted(flashgen.__all__)


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
