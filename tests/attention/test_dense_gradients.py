"""Gradients of arrays from which each query and key reads an element of its own, such as a bias of every score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import attention
from flashgen.codegen.expressions.row_elements import dense_loads, transposed_elements
from flashgen.codegen.stages import backward_kernels
from flashgen.codegen.targets import TARGETS
from flashgen.dtypes import numpy_dtype
from flashgen.runtime.schedule import schedules
from flashgen.verify import Shape, gradients_by_name, random_gradients, random_inputs
from flashgen.verify.gradients import expected_gradients, judged_by_name

Score = Callable[..., Any]

LEN_Q, LEN_K, BATCH, HEADS = 70, 150, 2, 4
TARGETS_TESTED = pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
SIZES = {"b": BATCH, "h": HEADS, "q": LEN_Q, "k": LEN_K}


def learned(ndim: int, dtype: str = "bfloat16") -> fg.Tensor:
    return fg.Tensor("bias", dtype, ndim, grad=True)


def indexed(axes: str, dtype: str = "bfloat16") -> Score:
    """Returns score + bias[axes]; axes is a text such as "hqk"."""
    bias = learned(len(axes), dtype)
    return lambda s, b, h, q, k: s + bias[tuple({"b": b, "h": h, "q": q, "k": k}[axis] for axis in axes)]


def numbers(shape: tuple[int, ...], dtype: str = "bfloat16") -> Any:
    return np.random.default_rng(5).standard_normal(shape).astype(numpy_dtype(dtype))


def check(spec: fg.AttentionSpec, array: Any, target: str, heads_kv: int = 2, **options: Any) -> Any:
    """Compares all gradients with the reference, and returns that of the array."""
    shape, options = Shape(LEN_Q, LEN_K, BATCH, HEADS, heads_kv), {"emulate": True, **options}
    inputs, (d_out, d_lse) = random_inputs(spec, shape), random_gradients(spec, shape, of_lse=True)
    qkv, captures = (inputs.q, inputs.k, inputs.v), {**inputs.captures, "bias": array}
    seed = {"seed": 3} if spec.dropout else {}
    _, pullback = attention.compile(spec, target, **options).vjp(*qkv, **captures, **seed)
    gradients = pullback(d_out, d_lse)
    exact, rounded = expected_gradients(spec, *qkv, d_out, d_lse=d_lse, **captures, **seed)
    verdicts = judged_by_name(gradients_by_name(gradients), exact, rounded)
    assert all(verdict.ok for verdict in verdicts.values()), f"{spec.name}: {verdicts}"
    found = gradients.captures["bias"]
    assert found.shape == array.shape and found.dtype == array.dtype and found.flags.c_contiguous
    return found


@TARGETS_TESTED
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("axes", ["hqk", "bhqk", "qk", "bqk", "qhk", "hbqk"])
@pytest.mark.covering(9)
def test_each_order_of_indices(axes: str, dtype: str, target: str) -> None:
    spec = fg.AttentionSpec(32, score=indexed(axes, dtype))
    assert len(dense_loads(spec)) == 1
    check(spec, numbers(tuple(SIZES[axis] for axis in axes), dtype), target)


@TARGETS_TESTED
@pytest.mark.parametrize("heads_kv", [2, 1])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "mask", [fg.full(), fg.causal(), fg.sliding_window(30), fg.causal("top_left"), fg.dilated_window(30, 2)]
)
@pytest.mark.covering(12)
def test_each_mask_and_group(mask: fg.Mask, heads_kv: int, deterministic: bool, target: str) -> None:
    spec = fg.AttentionSpec(48, "bfloat16", score=indexed("hqk"), mask=mask)
    check(spec, numbers((HEADS, LEN_Q, LEN_K)), target, heads_kv, deterministic=deterministic)


@TARGETS_TESTED
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, LEN_K),
        (BATCH, 1, LEN_Q, 1),
        (1, 1, 1, 1),
        (BATCH, 1, 1, 152),
        (3, 5, 130, 260),  # elements that nothing reads have gradients of 0
    ],
)
@pytest.mark.covering(9)
def test_arrays_smaller_and_larger_than_the_call(shape: tuple[int, ...], target: str) -> None:
    spec = fg.AttentionSpec(32, "bfloat16", score=indexed("bhqk"))
    found = check(spec, numbers(shape), target)
    beyond = found.astype(np.float32)
    assert not beyond[BATCH:].any() and not beyond[:, HEADS:].any() and not beyond[:, :, LEN_Q:].any()
    assert not beyond[..., LEN_K:].any()


@TARGETS_TESTED
@pytest.mark.parametrize(
    "view",
    [
        lambda array: array[..., 1 : LEN_K + 1],  # pairs are not aligned
        lambda array: array[..., : LEN_K + 2],
        lambda array: np.ascontiguousarray(array[..., : LEN_K + 1]),  # rows are odd
        lambda array: array[:, :LEN_Q, :LEN_K],
        lambda array: array[:, :LEN_Q, : 2 * LEN_K : 2],
        lambda array: np.broadcast_to(array[:1, :1, :LEN_K], (HEADS, LEN_Q, LEN_K)),
        lambda array: array[:, ::-1][:, :LEN_Q],
        lambda array: array.transpose(0, 2, 1)[:, :LEN_Q],
    ],
)
@pytest.mark.covering(6)
def test_arrays_of_any_strides(view: Callable[[Any], Any], target: str) -> None:
    check(fg.AttentionSpec(32, "bfloat16", score=indexed("hqk")), view(numbers((HEADS, 320, 320))), target)


def scaled(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * learned(3)[h, q, k]


def capped(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 3.0 * fg.tanh((s + learned(3)[h, q, k]) / 3.0)


def with_others(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    gain, by_key = fg.Tensor("gain", "float32", 1, grad=True), fg.Tensor("by_key", "float32", 1)
    return s * gain[h] + learned(3)[h, q, k] * by_key[k]


@TARGETS_TESTED
@pytest.mark.parametrize("score", [scaled, capped, with_others])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.covering(9)
def test_scores_of_other_forms(score: Score, dropout: float, target: str) -> None:
    spec = fg.AttentionSpec(32, "bfloat16", score=score, dropout=dropout, mask=fg.causal())
    check(spec, numbers((HEADS, LEN_Q, LEN_K)), target)


@pytest.mark.parametrize("dim", [8, 128, 160, 256, 512])
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_86", "sm_90a"])
def test_every_width_has_a_kernel_without_atomic_additions(dim: int, target: str) -> None:
    if target == "sm_75" and dim > 256:
        pytest.skip("sm_75 has no backward of 512 columns")
    spec = fg.AttentionSpec(dim, score=indexed("hqk"))
    kernels = {kernel.role: kernel for kernel in backward_kernels(spec, TARGETS[target]).values()}
    texts = {role: kernel.source.replace("atomicAdd(arguments.dq_next", "") for role, kernel in kernels.items()}
    assert "dense_bias" in kernels and not any(
        "add_to_gradient" in text or "atomicAdd" in text
        for role, text in texts.items()
        if role == "dense_bias" or (role == "dkdv" and target == "sm_90a")
    )


OTHERS: dict[str, Score] = {
    "by key first": lambda s, b, h, q, k: s + learned(3)[h, k, q],
    "by distance": lambda s, b, h, q, k: s + learned(2)[h, q - k + 100],
    "by half keys": lambda s, b, h, q, k: s + learned(3)[h, q, k // 2],
    "of one head": lambda s, b, h, q, k: s + learned(3)[0, q, k],
    "keys alone": lambda s, b, h, q, k: s + learned(2)[h, k],
    "twice": lambda s, b, h, q, k: s + learned(2)[q, k] + learned(2)[q, k + 1],
}


@pytest.mark.parametrize("name", OTHERS)
def test_which_arrays_are_summed_by_score(name: str) -> None:
    spec = fg.AttentionSpec(32, "bfloat16", score=OTHERS[name])
    assert not dense_loads(spec)
    sources = [kernel.source for kernel in backward_kernels(spec, TARGETS["sm_80"]).values()]
    assert not any("ArrayTile" in source for source in sources) and any("d_bias" in source for source in sources)


@TARGETS_TESTED
def test_text_loads_elements_in_pairs_or_as_tiles(target: str) -> None:
    spec = fg.AttentionSpec(64, "bfloat16", score=indexed("hqk"))
    assert transposed_elements(spec) and not transposed_elements(fg.AttentionSpec(64, score=indexed("hqk", "float32")))
    source = backward_kernels(spec, TARGETS[target])["dkdv"].source
    if target == "sm_90a":
        assert "load_pairs(" not in source and "read_pairs(pairs, " in source
    else:
        assert source.index("load_pairs(pairs, ") < source.rindex("multiply_by_transpose<kHeadDimPadded>")
    assert "bias_of(pairs.element0[n / 2], n % 2)" in source and "load_bias" not in source


@TARGETS_TESTED
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.rotated(6)
def test_accesses_stay_within_the_arrays(target: str, sanitize: Any) -> None:
    spec = fg.AttentionSpec(32, "bfloat16", score=indexed("hqk"), mask=fg.causal())
    for columns in (LEN_K, LEN_K + 1, 256):
        check(spec, numbers((HEADS, LEN_Q, columns)), target, sanitize=sanitize)


@TARGETS_TESTED
def test_bits_do_not_depend_on_the_order(target: str) -> None:
    spec = fg.AttentionSpec(16, "bfloat16", score=indexed("qk"))
    array, seen = numbers((1, LEN_K)), set()
    for schedule in schedules(4):
        found = check(spec, array, target, deterministic=True, schedule=schedule)
        seen.add(found.tobytes())
    assert len(seen) == 1
