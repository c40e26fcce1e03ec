"""Launches and memory of a backward call: workspaces are linear in the lengths, initialized and released."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.attention import Attention
from flashgen.attention.launches import workspaces
from flashgen.attention.problem import Problem
from flashgen.build import host
from flashgen.codegen.backward_kernels import PREPROCESS_ROWS
from flashgen.dtypes import numpy_dtype
from flashgen.launch.engines import EmulatorRunner
from flashgen.verify import Shape, random_gradients, random_inputs

CAUSAL = fg.AttentionSpec(32, mask=fg.causal())
LISTS = fg.AttentionSpec(16, mask=fg.document("ids"))
MODES = pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])


@dataclass(frozen=True)
class Launched:
    """A launch as the emulator received it: kernel role, grid, arrays, and which arrays held only zeros."""

    part: str
    grid: tuple[int, int, int]
    arrays: dict[str, np.ndarray[Any, Any]]
    zeros: frozenset[str]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    """Records every launch in order."""
    seen: list[Launched] = []
    launch = EmulatorRunner.launch

    def note(self: EmulatorRunner, what: Any, arrays: Any, numbers: Any, place: Any) -> None:
        own = {name: arrays[name] for name in what.writer.pointer_names if name in arrays}
        with np.errstate(invalid="ignore"):  # unwritten memory may hold anything
            zeros = frozenset(name for name, array in own.items() if not array.any())
        seen.append(Launched(self._kernel.name.split("-sm80")[0], what.grid, own, zeros))
        launch(self, what, arrays, numbers, place)

    monkeypatch.setattr(EmulatorRunner, "launch", note)
    yield seen
    seen.clear()


def run(compiled: Attention, shape: Shape, **options: Any) -> Any:
    inputs, (d_out, _) = random_inputs(compiled.spec, shape), random_gradients(compiled.spec, shape)
    _, pullback = compiled.vjp(inputs.q, inputs.k, inputs.v, **inputs.captures)
    return pullback(d_out, **options)


@MODES
def test_launches_of_a_call(deterministic: bool, launched: list[Launched]) -> None:
    compiled = attention.compile(CAUSAL, emulate=True, deterministic=deterministic)
    gradients = run(compiled, Shape(37, 170, 2, 4, 2))
    kernels, (_, prepare, keys, last) = compiled.backward_kernels, launched
    assert [each.part for each in launched[1:]] == ["bwd-preprocess", "bwd-dkdv", last.part]
    rows = prepare.grid[0] * PREPROCESS_ROWS
    assert rows % kernels["dkdv"].plan.tile_q == 0 and rows >= 37 and prepare.grid[1:] == (4, 2)
    assert keys.grid == (-(-170 // kernels["dkdv"].plan.tile_k), 2, 2)
    assert keys.arrays["dk"] is gradients.dk and keys.arrays["dv"] is gradients.dv
    assert prepare.arrays["lse_and_d"].shape == (2, 4, rows, 2)
    assert prepare.arrays["lse_and_d"] is keys.arrays["lse_and_d"] and "d_lse" not in prepare.arrays
    assert last.arrays["dq"] is gradients.dq
    if deterministic:
        assert last.part == "bwd-dq"
        assert last.grid == (-(-37 // kernels["dq"].plan.tile_q), 4, 2) and "dq_accum" not in keys.arrays
    else:
        assert last.part == "bwd-postprocess" and last.grid == (rows // kernels["postprocess"].plan.tile_q, 4, 2)
        assert keys.arrays["dq_accum"].shape == (2, 4, rows, 32) and "dq_accum" in keys.zeros - last.zeros
        assert last.arrays["dq_accum"] is keys.arrays["dq_accum"]


@MODES
def test_launches_of_a_mask_with_lists(deterministic: bool, launched: list[Launched]) -> None:
    compiled = attention.compile(LISTS, emulate=True, deterministic=deterministic)
    run(compiled, Shape(150, 150, 1, 2, 2))
    parts = ["query-lists", "lists"] if deterministic else ["query-lists"]
    own = ["bwd-preprocess", "bwd-dkdv", "bwd-dq" if deterministic else "bwd-postprocess"]
    assert [each.part for each in launched[2:]] == parts + own
    lists, keys = launched[2], next(each for each in launched if each.part == "bwd-dkdv")
    assert keys.arrays["tile_counts"] is lists.arrays["counts"]
    launched.clear()
    run(compiled, Shape(150, 150, 1, 2, 2), tile_lists=compiled.backward_tile_lists(150, ids=np.zeros(150, np.int32)))
    assert [each.part for each in launched[-3:]] == own


def test_workspaces_are_initialized_as_needed_and_fully_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not zeroed is filled with NaN."""
    empty = np.empty

    def poisoned(shape: Any, dtype: Any = float, **options: Any) -> Any:
        array = empty(shape, dtype, **options)
        array.fill(np.nan if array.dtype.kind == "f" else -1)
        return array

    shape = Shape(37, 70, 2, 4, 2)
    for deterministic in (False, True):
        compiled = attention.compile(CAUSAL, emulate=True, deterministic=deterministic)
        run(compiled, shape)  # compiles the kernels
        with monkeypatch.context() as patched:
            patched.setattr(np, "empty", poisoned)
            gradients = run(compiled, shape)
        assert all(np.isfinite(gradient).all() for gradient in gradients)


@MODES
def test_workspaces_are_released(deterministic: bool, launched: list[Launched]) -> None:
    compiled = attention.compile(CAUSAL, emulate=True, deterministic=deterministic)
    gradients = run(compiled, Shape(37, 70, 1, 2, 1))
    work = {
        name: array for each in launched for name, array in each.arrays.items() if name in ("lse_and_d", "dq_accum")
    }
    kept = [weakref.ref(array) for array in work.values()]
    launched.clear()
    work.clear()
    assert kept and not any(array() is not None for array in kept) and gradients


def taken(compiled: Attention, problem: Problem) -> int:
    """Returns the bytes of a call's workspaces."""
    memory = workspaces(compiled.backward_kernels, problem, {}).values()
    return sum(int(np.prod(each.shape)) * numpy_dtype(each.dtype).itemsize for each in memory)


@MODES
def test_workspaces_are_linear_in_the_lengths(deterministic: bool) -> None:
    compiled = attention.compile(fg.AttentionSpec(128), emulate=True, deterministic=deterministic)
    bytes_at = [taken(compiled, Problem(1, 16, 16, length, length, {})) for length in (16384, 32768, 65536)]
    assert bytes_at[1] == 2 * bytes_at[0] and bytes_at[2] == 4 * bytes_at[0]
    assert taken(compiled, Problem(1, 16, 16, 16384, 10**6, {})) == bytes_at[0]
    query_bytes = 65536 * 16 * 128 * 4  # in float32
    assert bytes_at[2] <= (0.02 if deterministic else 1.02) * query_bytes


def test_repeated_shapes_prepare_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = attention.compile(CAUSAL, emulate=True)
    first = run(compiled, Shape(37, 70, 1, 2, 1))
    work_out, calls = compiled._backward._prepare, []
    monkeypatch.setattr(compiled._backward, "_prepare", lambda *given: calls.append(1) or work_out(*given))
    np.testing.assert_array_equal(run(compiled, Shape(37, 70, 1, 2, 1)).dk, first.dk)
    assert not calls
    run(compiled, Shape(38, 70, 1, 2, 1))
    run(compiled, Shape(38, 70, 1, 2, 1), into=tuple(np.empty((1, n, m, 32), np.float16) for n, m in SIZES))
    assert len(calls) == 2


SIZES = ((2, 38), (1, 70), (1, 70))


def test_the_first_backward_call_compiles_and_later_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_host, built = host.compile_host, []  # finds on disk what an earlier run compiled
    monkeypatch.setattr(host, "compile_host", lambda *how: built.append(1) or compile_host(*how))
    compiled = attention.compile(fg.AttentionSpec(16, scale=0.2890625), emulate=True)
    forward = len(built)
    assert forward == 1
    run(compiled, Shape(5, 5))
    assert len(built) == forward + len(compiled.backward_kernels)
    for shape in (Shape(1, 1), Shape(90, 3, 1, 4, 2), Shape(0, 3)):
        run(compiled, shape)
    assert len(built) == forward + len(compiled.backward_kernels)
