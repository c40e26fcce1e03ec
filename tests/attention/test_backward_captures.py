"""Gradients of captured arrays: every dtype, number of dimensions and stride; captures read once, often or never."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.attention.launches import workspaces
from flashgen.attention.problem import Problem
from flashgen.dtypes import numpy_dtype
from flashgen.launch.memory import ArraySpec
from flashgen.runtime.arrays import View
from flashgen.runtime.schedule import schedules
from flashgen.verify import Shape, gradients_by_name, random_gradients, random_inputs
from flashgen.verify.gradients import expected_gradients, judged_by_name
from flashgen.verify.problems import ENOUGH
from flashgen.verify.samples import together

SHAPE = Shape(40, 70, 2, 4, 2)
MODES = pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])


def bias(ndim: int, dtype: str = "float32") -> Any:
    table = fg.Tensor("bias", dtype, ndim, grad=True)
    return lambda s, b, h, q, k: s + table[(b, h, q, k)[4 - ndim :] if ndim > 1 else h]


def values(*shape: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.random.default_rng(4).uniform(0.1, 1, shape).astype(numpy_dtype(dtype))


def check(spec: fg.AttentionSpec, deterministic: bool, target: str | None = None, **captures: Any) -> Any:
    """Returns the gradients of the last of several calls, concatenated: a capture may have a single element."""
    compiled = attention.compile(spec, target, emulate=True, deterministic=deterministic)
    fewest = min(captures[capture.name].size for capture in spec.captures if capture.grad)
    found, expected, low = [], [], []
    for seed in range(-(-ENOUGH // fewest)):
        inputs, (d_out, d_lse) = random_inputs(spec, SHAPE, seed), random_gradients(spec, SHAPE, seed, of_lse=True)
        qkv = (inputs.q, inputs.k, inputs.v)
        _, pullback = compiled.vjp(*qkv, **captures)
        gradients = pullback(d_out, d_lse)
        found.append(gradients_by_name(gradients))
        exact, rounded = expected_gradients(spec, *qkv, d_out, d_lse=d_lse, **captures)
        expected.append(exact)
        low.append(rounded)
    verdicts = judged_by_name(*map(together, (found, expected, low)))
    assert all(verdict.ok for verdict in verdicts.values()), f"{spec.name}: {verdicts}"
    for name, gradient in gradients.captures.items():
        assert gradient.shape == captures[name].shape and gradient.dtype == captures[name].dtype
        assert gradient.flags.c_contiguous
    return gradients


@MODES
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.covering(4)
def test_every_dtype(dtype: str, deterministic: bool) -> None:
    spec = fg.AttentionSpec(16, mask=fg.causal(), score=bias(2, dtype))
    check(spec, deterministic, bias=values(40, 70, dtype=dtype))


@MODES
@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
@pytest.mark.covering(6)
def test_every_number_of_dimensions_and_broadcasting(ndim: int, deterministic: bool) -> None:
    spec = fg.AttentionSpec(16, score=bias(ndim))
    whole = (2, 4, 40, 70)[4 - ndim :] if ndim > 1 else (4,)
    check(spec, deterministic, bias=values(*whole))
    broadcast = tuple(1 if axis % 2 == 0 else size for axis, size in enumerate(whole))
    check(spec, deterministic, bias=values(*broadcast))


@MODES
@pytest.mark.parametrize(("target", "head_dim"), [("sm_80", 16), ("sm_90a", 16), ("sm_90a", 160)])
@pytest.mark.covering(4)
def test_two_tables_by_distance(target: str, head_dim: int, deterministic: bool) -> None:
    """Each table has its own sums along the diagonals of a tile, in one function of the kernel."""
    near, far = (fg.Tensor(name, "float32", 1, grad=True) for name in ("near", "far"))
    score = fg.relative_bias(near, 3)(fg.relative_bias(far, 20))
    spec = fg.AttentionSpec(head_dim, score=score)
    check(spec, deterministic, target, near=values(7), far=values(41))


def test_strides() -> None:
    spec = fg.AttentionSpec(16, score=bias(2))
    array = values(40, 70)
    wide = np.full((80, 140), np.nan, np.float32)
    wide[::2, ::2] = array
    for same in (np.asfortranarray(array), wide[::2, ::2], np.broadcast_to(array[:1], (40, 70))):
        check(spec, False, bias=same)


@MODES
def test_captures_gathered_several_times(deterministic: bool) -> None:
    """Reads captures in products, through an index table, and together with captures without a gradient."""
    table = fg.Tensor("table", "float32", 2, grad=True)
    gain, plain = fg.Tensor("gain", "float16", 1, grad=True), fg.Tensor("plain", "float32", 1)
    ids = fg.Tensor("ids", "int32", 1)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * gain[h] + table[h, ids[k]] * table[0, q % 5] + plain[h] * (k - q)

    captures = {
        "table": values(4, 9),
        "gain": values(4, dtype="float16"),
        "plain": values(4) / 100,
        "ids": np.arange(70, dtype=np.int32) % 9,
    }
    spec = fg.AttentionSpec(16, score=score, mask=fg.sliding_window(30, 20))
    gradients = check(spec, deterministic, **captures)
    assert list(gradients.captures) == ["gain", "table"]


@pytest.mark.rotated(3)
@MODES
@pytest.mark.parametrize("by", ["distances", "sums", "steps", "lanes"])
def test_sequences_of_reads_of_element_0(by: str, deterministic: bool) -> None:
    """A lane's sequence of reads of element 0 ends before another element, after one, and at the end of its scores."""
    table = fg.Tensor("table", "float32", 1, grad=True)
    index = {
        "distances": lambda q, k: fg.clamp(k - q, 0, 3),
        "sums": lambda q, k: fg.clamp((q + k) // 16 - 2, 0, 3),
        "steps": lambda q, k: (q // 8 + k) % 4,
        "lanes": lambda q, k: k % 8 // 4 + q // 1000,  # each lane of a warp reads one element, some of them element 0
    }[by]
    spec = fg.AttentionSpec(16, score=lambda s, b, h, q, k: s + table[index(q, k)])
    check(spec, deterministic, table=values(4))


@MODES
def test_captures_that_only_the_mask_reads_have_zero_gradients(deterministic: bool) -> None:
    limit = fg.Tensor("limit", "float32", 1, grad=True)
    spec = fg.AttentionSpec(16, mask=lambda b, h, q, k: limit[k] < 0.6)
    gradients = check(spec, deterministic, limit=values(70))
    assert (gradients.captures["limit"] == 0).all()


def test_captures_named_like_struct_members() -> None:
    names = ("x", "d_x", "sums", "gradient", "count", "lse_and_d", "dq_accum", "rows", "d_o", "heads_kv")
    tables = [fg.Tensor(name, grad=True) for name in names]

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for table in tables:
            s = s + table[h]
        return s

    check(fg.AttentionSpec(16, score=score), False, **{name: values(4) for name in names})


def test_deterministic_gradients_do_not_depend_on_the_order() -> None:
    spec = fg.AttentionSpec(16, dropout=0.1, mask=fg.causal(), score=bias(1))
    shape = Shape(150, 150, 2, 4, 2)
    inputs, (d_out, _) = random_inputs(spec, shape), random_gradients(spec, shape)
    seen = set()
    for schedule in schedules(4):
        compiled = attention.compile(spec, emulate=True, deterministic=True, schedule=schedule)
        _, pullback = compiled.vjp(inputs.q, inputs.k, inputs.v, bias=values(4), seed=1)
        seen.add(tuple(gradient.tobytes() for gradient in pullback(d_out)))
    assert len(seen) == 1


@pytest.mark.parametrize("shift", [100, 80, -100, -115])
def test_deterministic_gradients_of_any_magnitude(shift: int) -> None:
    """Gradients scale with d_out, from 1e-35 to 1e30; fixed point would only cover 2^-112 to 2^80."""
    table = fg.Tensor("table", "float32", 1, grad=True)
    spec = fg.AttentionSpec(16, "bfloat16", score=lambda s, b, h, q, k: s + table[(q - k + 70) % 7])
    inputs, (d_out, _) = random_inputs(spec, SHAPE), random_gradients(spec, SHAPE)
    compiled = attention.compile(spec, emulate=True, deterministic=True)
    _, pullback = compiled.vjp(inputs.q, inputs.k, inputs.v, table=values(7))
    gradient, shifted = (
        pullback(d_out * d_out.dtype.type(2.0**power)).captures["table"].astype(np.float64) for power in (0, shift)
    )
    np.testing.assert_allclose(shifted * 2.0**-shift, gradient, rtol=0, atol=1e-4 * np.abs(gradient).max())


def test_gradient_outputs_are_overwritten() -> None:
    spec = fg.AttentionSpec(16, score=bias(1, "bfloat16"))
    inputs, (d_out, _) = random_inputs(spec, SHAPE), random_gradients(spec, SHAPE)
    table = values(4, dtype="bfloat16")
    _, pullback = attention.compile(spec, emulate=True, deterministic=True).vjp(
        inputs.q, inputs.k, inputs.v, bias=table
    )
    wanted = pullback(d_out)
    arrays = (inputs.q, inputs.k, inputs.v, table)
    into = tuple(np.full(array.shape, np.nan, array.dtype) for array in arrays)
    given = pullback(d_out, into=into)
    assert given.captures["bias"] is into[3] and into[3].dtype == ml_dtypes.bfloat16
    for one, other in zip(given, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@MODES
def test_workspace_memory(deterministic: bool) -> None:
    """Only what is not accumulated in the gradient itself needs a workspace."""
    half, single = fg.Tensor("half", "float16", 2, grad=True), fg.Tensor("single", "float32", 1, grad=True)
    spec = fg.AttentionSpec(16, score=lambda s, b, h, q, k: s + half[h, k] * single[h])
    compiled = attention.compile(spec, emulate=True, deterministic=deterministic)
    kernels = compiled.backward_kernels
    problem = Problem(1, 4, 4, 100, 100, {})
    views = {"half": View(0, (4, 100), (), "float16", None, None), "single": View(0, (4,), (), "float32", None, None)}
    memory = workspaces(kernels, problem, views)
    sums = {name: each for name, each in memory.items() if name.startswith("d_")}
    gradients = compiled._backward._gradient_memory(problem, views)
    if deterministic:
        exact = {"d_half": ArraySpec((4, 100, 10), "int64", True), "d_single": ArraySpec((4, 10), "int64", True)}
        assert sums == exact and not gradients["half"].zeroed and not gradients["single"].zeroed
    else:
        assert sums.pop("d_half") == ArraySpec((4, 100), "float32", True) and not gradients["half"].zeroed
        assert ("d_single" in sums) == ("d_single" in kernels) == (not gradients["single"].zeroed)
