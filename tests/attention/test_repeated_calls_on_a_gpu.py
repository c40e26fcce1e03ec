"""Repeated calls with CuPy arrays: each has the results of its own arguments, also after calls of other kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.attention.repeated_calls import RepeatedLaunch
from flashgen.errors import ArgumentError
from flashgen.verify import Shape, random_gradients, random_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.quick]

CAUSAL = fg.AttentionSpec(64, mask=fg.causal(), scale=0.1201)  # of no other test: compiled attentions are cached
SHAPE = Shape(150, 170, 2, 4, 2)
CALLS = 6


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RepeatedLaunch]]:
    """The launches that calls have repeated."""
    seen: list[RepeatedLaunch] = []
    launch = RepeatedLaunch.launch

    def recorded(self: RepeatedLaunch, *given: Any) -> Any:
        seen.append(self)
        return launch(self, *given)

    monkeypatch.setattr(RepeatedLaunch, "launch", recorded)
    yield seen


def _rows(cupy: Any, shape: Shape, seed: int) -> list[Any]:
    inputs = random_inputs(CAUSAL, shape, seed)
    return [cupy.asarray(array) for array in (inputs.q, inputs.k, inputs.v)]


def _expected(rows: list[Any]) -> tuple[Any, Any]:
    """Returns the results of the same arrays in host memory, which are copied and go through all checks."""
    out, lse = fg.compile(CAUSAL)(*[array.get() for array in rows], return_lse=True)
    return out, lse


def _moved(cupy: Any, array: Any) -> Any:
    """Returns a copy whose address is no multiple of 16 bytes, which kernels cannot read."""
    memory = cupy.empty(array.size + 1, array.dtype)
    memory[1:] = array.ravel()
    return memory[1:].reshape(array.shape)


def test_calls_of_several_kinds_in_turns(cupy: Any, launched: list[RepeatedLaunch]) -> None:
    """New arrays, given outputs, the LSE, other lengths and another stream."""
    compiled = fg.compile(CAUSAL)
    shapes = (SHAPE, SHAPE, Shape(90, 170, 2, 4, 2))
    for seed in range(CALLS):
        shape = shapes[seed % 3]
        rows = _rows(cupy, shape, seed)
        expected, lse = _expected(rows)
        into = cupy.full_like(rows[0], cupy.nan)
        cupy.cuda.Device().synchronize()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            found = compiled(*rows), *compiled(*rows, return_lse=True), compiled(*rows, out=into)
            stream.synchronize()
        for each, wanted in zip(found, (expected, expected, lse, expected), strict=True):
            assert np.array_equal(each.get(), wanted)
        assert found[-1] is into
    assert len(launched) >= 3 * (CALLS - 3), "calls were not repeated: nothing was tested"


def test_calls_that_must_not_be_repeated(cupy: Any) -> None:
    compiled = fg.compile(CAUSAL)
    q, k, v = _rows(cupy, SHAPE, 1)
    for _ in range(3):
        compiled(q, k, v, out=cupy.empty_like(q))
    with pytest.raises(ArgumentError, match="out"):
        compiled(q, k, v, out=q)
    with pytest.raises(ArgumentError, match="16 bytes"):
        compiled(_moved(cupy, q), k, v)
    with pytest.raises(ArgumentError, match="float32"):
        compiled(q.astype("float32"), k, v)
    expected, _ = _expected([q, k, v])
    q[...], expected_of_zeros = 0, _expected([cupy.zeros_like(q), k, v])[0]
    assert np.array_equal(compiled(q, k, v).get(), expected_of_zeros) and not np.array_equal(
        expected, expected_of_zeros
    )


def test_gradients(cupy: Any, launched: list[RepeatedLaunch]) -> None:
    compiled = fg.compile(CAUSAL, deterministic=True)
    for seed in range(3):
        rows = _rows(cupy, SHAPE, seed)
        d_out = cupy.asarray(random_gradients(CAUSAL, SHAPE, seed)[0])
        out, lse = compiled(*rows, return_lse=True)
        into = tuple(map(cupy.empty_like, rows))
        found = compiled.backward(d_out, *rows, out, lse)
        given = compiled.backward(d_out, *rows, out, lse, into=into)
        on_host = [array.get() for array in (d_out, *rows, out, lse)]
        for each, written, expected in zip(found, given, compiled.backward(*on_host), strict=True):
            assert np.array_equal(each.get(), expected) and np.array_equal(written.get(), expected)
    assert len(launched) >= 4


def test_seeds_are_those_of_each_call(cupy: Any, launched: list[RepeatedLaunch]) -> None:
    compiled, rows = fg.compile(fg.AttentionSpec(64, dropout=0.3, scale=0.1203)), _rows(cupy, SHAPE, 0)
    seeds = [1, 2, cupy.asarray([1]), 1, 2**40]
    found = [compiled(*rows, seed=seed, offset=offset).get() for seed in seeds for offset in (0, 8)]
    assert all(np.array_equal(found[first], found[first + 4]) for first in (0, 1))  # of the number 1 and of the array
    assert all(np.array_equal(found[first], found[first + 6]) for first in (0, 1))
    assert len({each.tobytes() for each in found}) == 6
    with pytest.raises(ArgumentError, match="seed is missing"):
        compiled(*rows)
    with pytest.raises(ArgumentError, match="offset=-1"):
        compiled(*rows, seed=1, offset=-1)
    assert len(launched) >= 5
