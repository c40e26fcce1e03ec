"""Dense biases: elements of captured arrays that forward kernels load in pairs, before the products."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashgen as fg
from flashgen.codegen.dispatch import render_forward
from flashgen.codegen.expressions.row_elements import paired_elements
from flashgen.codegen.targets import TARGETS
from flashgen.verify import judged, random_inputs
from flashgen.verify.problems import Shape

TARGETS_TESTED = ("sm_80", "sm_90a")
LENGTH_Q, LENGTH_K = 70, 150


def bias(dtype: str = "bfloat16", ndim: int = 3, grad: bool = False) -> fg.Tensor:
    return fg.Tensor("bias", dtype, ndim, grad=grad)


def added(array: fg.Tensor) -> Callable[..., Any]:
    return lambda s, b, h, q, k: s + array[h, q, k]


def numbers(shape: tuple[int, ...], dtype: str) -> Any:
    random = np.random.default_rng(3).standard_normal(shape)
    kinds = {"bool": random > 0, "int32": (random * 3).astype("int32"), "int8": (random * 3).astype("int8")}
    return kinds.get(dtype, random.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype if random.size else ""))


def check(spec: fg.AttentionSpec, array: Any, target: str, heads_kv: int = 2, **options: Any) -> None:
    inputs = random_inputs(spec, Shape(LENGTH_Q, LENGTH_K, 2, 4, heads_kv))
    compiled = fg.compile(spec, target=target, emulate=True, **options)
    captures = {**inputs.captures, "bias": array}
    out, lse = compiled(inputs.q, inputs.k, inputs.v, return_lse=True, **captures)
    verdict = judged(spec, inputs.q, inputs.k, inputs.v, out, lse, captures)
    assert verdict.ok, verdict


@pytest.mark.rotated(3)
@pytest.mark.parametrize("target", TARGETS_TESTED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "int8"])
def test_elements_of_each_type(dtype: str, target: str) -> None:
    score = lambda s, b, h, q, k: s + 0.5 * bias(dtype, 4)[b, h, q, k]
    spec = fg.AttentionSpec(32, score=score)
    assert [element.bytes for element in paired_elements(spec)] == [np.dtype(numbers((1,), dtype).dtype).itemsize]
    check(spec, numbers((2, 4, LENGTH_Q, LENGTH_K), dtype), target)


@pytest.mark.rotated(8)
@pytest.mark.parametrize("target", TARGETS_TESTED)
@pytest.mark.parametrize("grouped", [2, 1])
@pytest.mark.parametrize("mask", [fg.full(), fg.causal(), fg.sliding_window(30)])
def test_bias_of_each_mask_and_group(mask: fg.Mask, grouped: int, target: str) -> None:
    spec = fg.AttentionSpec(48, "bfloat16", score=added(bias()), mask=mask)
    check(spec, numbers((4, LENGTH_Q, LENGTH_K), "bfloat16"), target, heads_kv=grouped)


@pytest.mark.rotated(8)
@pytest.mark.parametrize("target", TARGETS_TESTED)
@pytest.mark.parametrize(
    "view",
    [
        lambda array: array[..., 1 : LENGTH_K + 1],  # pairs are not aligned
        lambda array: array[..., : LENGTH_K + 2],  # rows begin at multiples of 2, and have more elements than keys
        lambda array: np.ascontiguousarray(array[..., : LENGTH_K + 1]),  # rows are odd
        lambda array: np.ascontiguousarray(array[..., :1]),  # one element for all keys
        lambda array: array[:, :, ::2],  # elements are not adjacent
        lambda array: np.broadcast_to(array[:1, :1], array.shape),  # all queries and heads share a row
        lambda array: array[:, ::-1],
        lambda array: array.transpose(0, 2, 1),
    ],
)
def test_arrays_of_any_strides(view: Callable[[Any], Any], target: str) -> None:
    spec = fg.AttentionSpec(32, "bfloat16", score=added(bias()))
    check(spec, view(numbers((4, 320, 320), "bfloat16")), target)


@pytest.mark.parametrize("target", TARGETS_TESTED)
def test_packed_heads_read_their_own_rows(target: str) -> None:
    spec = fg.AttentionSpec(32, "bfloat16", score=added(bias()))
    plan = fg.compile(spec, target="sm_90a").plan.packing(4, spec) if target == "sm_90a" else None
    check(spec, numbers((4, LENGTH_Q, LENGTH_K), "bfloat16"), target, heads_kv=1, **({"plan": plan} if plan else {}))


UNPAIRED: list[tuple[str, dict[str, Any]]] = [
    ("by key first", {"score": lambda s, b, h, q, k: s + bias()[h, k, q]}),
    ("by distance", {"score": lambda s, b, h, q, k: s + bias()[h, q, q - k]}),
    ("by half keys", {"score": lambda s, b, h, q, k: s + bias()[h, q, k // 2]}),
    ("keys alone", {"score": lambda s, b, h, q, k: s + bias("bfloat16", 1)[k]}),
    ("64 bits", {"score": lambda s, b, h, q, k: s + bias("int64", 2)[q, k] * 1.0}),
    ("two arrays", {"score": lambda s, b, h, q, k: s + bias()[h, q, k] * fg.Tensor("other", "float16", 2)[q, k]}),
    ("float32 of wide rows", {"head_dim": 256, "score": added(bias("float32"))}),
    ("dropout", {"score": added(bias()), "dropout": 0.1}),
]


@pytest.mark.parametrize(("name", "options"), UNPAIRED)
def test_what_is_read_for_each_score(name: str, options: dict[str, Any]) -> None:
    spec = fg.AttentionSpec(**{"head_dim": 64, **options})
    assert not paired_elements(spec), name
    assert "ElementPairs" not in render_forward(spec, TARGETS["sm_90a"]).source


@pytest.mark.parametrize(
    ("target", "dtype", "load"),
    [
        ("sm_80", "float16", "load_pairs(pairs,"),
        ("sm_90a", "float32", "load_pairs(pairs,"),
        ("sm_90a", "float16", "read_pairs(pairs,"),
    ],
)
def test_text_loads_before_or_beside_the_products(target: str, dtype: str, load: str) -> None:
    source = render_forward(fg.AttentionSpec(64, score=added(bias(dtype))), TARGETS[target]).source
    product, awaited = (
        ("issue_qk_wgmma(", "await_product<1>") if target == "sm_90a" else ("multiply_by_transpose<",) * 2
    )
    assert (source.rindex(load) < source.rindex(product)) == (load == "load_pairs(pairs,")
    assert source.rindex(load) < source.rindex(awaited) and "bias_of(pairs.element0[n / 2], n % 2)" in source


@pytest.mark.rotated(9)
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("target", TARGETS_TESTED)
def test_loads_stay_within_the_array(target: str, sanitize: Any) -> None:
    spec = fg.AttentionSpec(32, "bfloat16", score=added(bias()), mask=fg.causal())
    for columns in (LENGTH_K, LENGTH_K + 1, 256):
        check(spec, numbers((4, LENGTH_Q, columns), "bfloat16"), target, sanitize=sanitize)
