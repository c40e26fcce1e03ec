"""Helpers that call compiled specs and check the results by the numerics rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.verify import (
    Inputs,
    Shape,
    gradients_by_name,
    judged,
    judged_gradients,
    random_gradients,
    random_inputs,
)


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy")


def assert_right(spec: fg.AttentionSpec, inputs: Inputs, out: Any, lse: Any, **dropout: int) -> None:
    """Asserts that an output and its LSE satisfy the bounds of `flashgen verify`."""
    verdict = judged(spec, inputs.q, inputs.k, inputs.v, out, lse, inputs.captures, **dropout)
    assert verdict.ok, f"{spec.name}: {verdict}"


def assert_agrees(spec: fg.AttentionSpec, *shapes: Shape, target: str | None = None, **engine: Any) -> None:
    """Checks random inputs of each shape on the emulator."""
    compiled = attention.compile(spec, target=target, emulate=True, **engine)
    for number, shape in enumerate(shapes):
        inputs = random_inputs(spec, shape, seed=number)
        dropout = {"seed": number} if spec.dropout else {}
        out, lse = compiled(inputs.q, inputs.k, inputs.v, return_lse=True, **inputs.captures, **dropout)
        assert_right(spec, inputs, out, lse, **dropout)


@pytest.fixture(scope="session")
def right() -> Callable[..., None]:
    return assert_right


@pytest.fixture(scope="session")
def agrees() -> Callable[..., None]:
    return assert_agrees


@pytest.fixture(scope="session")
def arrays() -> Callable[..., tuple[np.ndarray[Any, Any], ...]]:
    """Returns q, k and v of a spec at a shape."""

    def made(spec: fg.AttentionSpec, shape: Shape, seed: int = 0) -> tuple[np.ndarray[Any, Any], ...]:
        inputs = random_inputs(spec, shape, seed)
        return inputs.q, inputs.k, inputs.v

    return made


def assert_gradients_right(spec: fg.AttentionSpec, inputs: Inputs, d_out: Any, gradients: Any, **given: Any) -> None:
    """Returns the verdict of `flashgen verify` on each gradient; `given` are d_lse, seed and offset."""
    found = gradients_by_name(gradients)
    verdicts = judged_gradients(spec, inputs.q, inputs.k, inputs.v, d_out, found, **given, **inputs.captures)
    assert all(verdict.ok for verdict in verdicts.values()), f"{spec.name}: {verdicts}"


def assert_gradients_agree(spec: fg.AttentionSpec, *shapes: Shape, of_lse: bool = False, **engine: Any) -> None:
    """Checks random inputs of each shape, forward and backward, on the emulator."""
    compiled = attention.compile(spec, emulate=True, **engine)
    for number, shape in enumerate(shapes):
        inputs = random_inputs(spec, shape, seed=number)
        d_out, d_lse = random_gradients(spec, shape, number, of_lse)
        dropout = {"seed": number} if spec.dropout else {}
        _, pullback = compiled.vjp(inputs.q, inputs.k, inputs.v, **inputs.captures, **dropout)
        assert_gradients_right(spec, inputs, d_out, pullback(d_out, d_lse), d_lse=d_lse, **dropout)


@pytest.fixture(scope="session")
def gradients_right() -> Callable[..., None]:
    return assert_gradients_right


@pytest.fixture(scope="session")
def gradients_agree() -> Callable[..., None]:
    return assert_gradients_agree
