"""Captures of every dtype, number of dimensions and stride in masks and scores; captured numbers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.dtypes import CAPTURES, numpy_dtype
from flashgen.errors import ArgumentError
from flashgen.verify import Inputs, Shape, random_inputs

SHAPE = Shape(40, 70, 2, 4, 2)


def of_dtype(dtype: str, *shape: int) -> np.ndarray[Any, Any]:
    """Returns values that the dtype represents exactly, of both signs where it has them."""
    random = np.random.default_rng(2)
    if dtype == "bool":
        return random.random(shape) < 0.6
    values = random.integers(0 if dtype.startswith("u") else -8, 8, shape)
    return (values / 4 if "float" in dtype else values).astype(numpy_dtype(dtype))


def check(spec: fg.AttentionSpec, right: Any, sanitize: Any = None, **captures: Any) -> None:
    inputs = random_inputs(spec, SHAPE)
    compiled = attention.compile(spec, emulate=True, sanitize=sanitize)
    out, lse = compiled(inputs.q, inputs.k, inputs.v, return_lse=True, **captures)
    right(spec, Inputs(inputs.q, inputs.k, inputs.v, captures), out, lse)


@pytest.mark.rotated(3)
@pytest.mark.parametrize("dtype", CAPTURES)
def test_every_dtype(dtype: str, right: Any) -> None:
    table = fg.Tensor("table", dtype, 2)
    number = fg.where(table[0, 0], 1.5, -0.5) if dtype == "bool" else table[0, 0] * 0.25

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        value = table[h, k]
        return s + (fg.where(value, 1.5, -0.5) if dtype == "bool" else value * 0.25)

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        value = table[h, q]
        return (value if dtype == "bool" else value > 0) | (q >= k)

    assert number is not None
    array = of_dtype(dtype, 4, 70)
    check(fg.AttentionSpec(16, score=score), right, table=array)
    check(fg.AttentionSpec(16, mask=mask), right, table=array)


def bias(ndim: int) -> Any:
    table = fg.Tensor("bias", "float32", ndim)
    return lambda s, b, h, q, k: s + table[(b, h, q, k)[4 - ndim :] if ndim > 1 else k]


@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
def test_bias_of_every_number_of_dimensions_and_broadcasting(ndim: int, right: Any) -> None:
    whole = (2, 4, 40, 70)[4 - ndim :]
    spec = fg.AttentionSpec(16, score=bias(ndim))
    check(spec, right, bias=of_dtype("float32", *whole))
    for axis in range(ndim):
        check(spec, right, bias=of_dtype("float32", *(1 if i == axis else size for i, size in enumerate(whole))))


@pytest.mark.parametrize("sanitize", [None, "address"])
def test_strides_of_captures(sanitize: str | None, right: Any) -> None:
    spec = fg.AttentionSpec(16, score=bias(2))
    array = of_dtype("float32", 40, 70)
    wide = np.full((80, 140), np.nan, np.float32)
    wide[::2, ::2] = array
    for same in (np.asfortranarray(array), wide[::2, ::2], np.ascontiguousarray(array[::-1, ::-1])[::-1, ::-1]):
        np.testing.assert_array_equal(same, array)
        check(spec, right, sanitize=sanitize, bias=same)
    check(spec, right, sanitize=sanitize, bias=np.broadcast_to(array[:1], (40, 70)))


def test_eight_dimensions(right: Any) -> None:
    table = fg.Tensor("table", "int8", 8)
    spec = fg.AttentionSpec(16, score=lambda s, b, h, q, k: s + table[b, h, 0, q % 2, 0, k % 3, 1, h])
    check(spec, right, table=of_dtype("int8", 2, 4, 1, 2, 1, 3, 2, 4))


def test_captures_as_indices_of_captures(right: Any) -> None:
    ids, kinds = fg.Tensor("ids", "int32", 1), fg.Tensor("kinds", "uint8", 1)
    spec = fg.AttentionSpec(16, mask=lambda b, h, q, k: kinds[ids[q]] == kinds[ids[k]])
    random = np.random.default_rng(4)
    check(spec, right, ids=random.integers(0, 9, 70).astype(np.int32), kinds=random.integers(0, 3, 9).astype(np.uint8))


@pytest.mark.parametrize("sanitize", [None, "address"])
def test_indices_are_clamped_at_both_ends(sanitize: str | None, right: Any) -> None:
    table = fg.Tensor("table", "float32", 2)
    spec = fg.AttentionSpec(16, score=lambda s, b, h, q, k: s + table[q - k, k * 2 - 30])
    check(spec, right, sanitize=sanitize, table=of_dtype("float32", 9, 11))


def test_an_index_beyond_32_bits_is_clamped(right: Any) -> None:
    table = fg.Tensor("table", "float32", 1)
    for index in (
        lambda q, k: q * 60_000_000 + k * 60_000_000,
        lambda q, k: (q + 1) * (q + 1) * 1_500_000,
        lambda q, k: q * 65536 * 65536 + k,  # k has 32 of the bits
        lambda q, k: (q - k) * 2_000_000_000 + 3,
        lambda q, k: (q - k) * (k * 2_000_000_000) * 2_000_000_000,  # the product wraps
    ):
        spec = fg.AttentionSpec(16, score=lambda s, b, h, q, k, index=index: s + table[index(q, k)])
        check(spec, right, sanitize="address", table=of_dtype("float32", 9))


def test_numbers_may_change_from_call_to_call(right: Any) -> None:
    spec = fg.AttentionSpec(
        16, mask=fg.sliding_window(fg.Scalar("window")), score=fg.softcap(fg.Scalar("cap", "float32"))
    )
    for window, cap in ((0, 1.0), (10, 0.5), (1000, 30), (np.int64(5), np.float32(2))):
        check(spec, right, window=window, cap=cap)


def test_infinite_numbers(right: Any) -> None:
    most = fg.Scalar("most", "float32")
    spec = fg.AttentionSpec(16, score=lambda s, b, h, q, k: fg.minimum(s, most))
    check(spec, right, most=float("inf"))
    check(spec, right, most=0.25)


NEAREST = fg.AttentionSpec(16, score=fg.relative_bias("table", 5))
FAR = fg.AttentionSpec(16, score=fg.relative_bias(fg.Tensor("table", "float32", 1), fg.Scalar("far")))
LAYOUT = fg.AttentionSpec(16, mask=fg.block_sparse("layout", 16, 32))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("spec", "captures", "message"),
    [
        (NEAREST, {"table": (1, 7)}, r"'table' has shape \(1, 7\); axis 1 .* distance from -5 to 5: give 11 elements"),
        (NEAREST, {"table": (4, 10)}, "give 11 elements there, or 1 for all"),
        (NEAREST, {"table": (4, 12)}, "give 11 elements there, or 1 for all"),
        (NEAREST, {"table": (3, 11)}, r"'table' has shape \(3, 11\); axis 0 is indexed by h"),
        (NEAREST, {"table": (4, 11)}, None),
        (NEAREST, {"table": (1, 1)}, None),
        (FAR, {"table": (11,), "far": 4}, r"'table' has shape \(11,\); axis 0 .* distance from -4 to 4: give 9"),
        (FAR, {"table": (11,), "far": 6}, "give 13 elements there"),
        (FAR, {"table": (11,), "far": 2**31 - 1}, "give 4294967295 elements there"),
        (FAR, {"table": (11, 1), "far": 5}, r"'table' has shape \(11, 1\); it was declared with ndim=1"),
        (FAR, {"table": (11,), "far": 5}, None),
        (LAYOUT, {"layout": (2, 3)}, r"'layout' has shape \(2, 3\); axis 0 is indexed by q // 16, .* up to 2: give 3"),
        (LAYOUT, {"layout": (3, 2)}, "axis 1 is indexed by k // 32, which goes up to 2: give 3"),
        (LAYOUT, {"layout": (3, 3)}, None),
        (LAYOUT, {"layout": (1, 9)}, None),
    ],
)  # fmt: skip
def test_sizes_of_the_named_variants_captures_are_checked(
    spec: fg.AttentionSpec, captures: dict[str, Any], message: str | None, backward: bool
) -> None:
    """With too few entries the last one would serve the rest; with too many the middle one is not distance 0."""
    dtype = bool if spec is LAYOUT else np.float32
    given = {name: np.ones(value, dtype) if isinstance(value, tuple) else value for name, value in captures.items()}
    inputs, compiled = random_inputs(fg.AttentionSpec(16), SHAPE), attention.compile(spec, emulate=True)
    rows = (inputs.q, inputs.k, inputs.v)
    out, lse = np.zeros_like(inputs.q), np.zeros(inputs.q.shape[:3], np.float32)
    with nullcontext() if message is None else pytest.raises(ArgumentError, match=message):
        compiled.backward(out, *rows, out, lse, **given) if backward else compiled(*rows, **given)


def test_a_number_that_does_not_fit_the_table_is_refused_in_a_later_call() -> None:
    """The launch cache knows shapes, not numbers."""
    inputs, compiled = random_inputs(fg.AttentionSpec(16), SHAPE), attention.compile(FAR, emulate=True)
    table = np.ones(11, np.float32)
    compiled(inputs.q, inputs.k, inputs.v, table=table, far=5)
    with pytest.raises(ArgumentError, match="distance from -3 to 3: give 7"):
        compiled(inputs.q, inputs.k, inputs.v, table=table, far=3)
    compiled(inputs.q, inputs.k, inputs.v, table=np.ones(7, np.float32), far=3)


def test_tile_lists_read_the_blocks_of_an_array() -> None:
    compiled = attention.compile(LAYOUT, emulate=True)
    with pytest.raises(ArgumentError, match="axis 1 is indexed by k // 32, which goes up to 3"):
        compiled.tile_lists(40, 100, layout=np.ones((3, 3), bool))
