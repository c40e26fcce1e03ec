"""Wrong inputs of backward calls raise an error that names the argument, before anything is launched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.errors import ArgumentError, UnsupportedError

SPEC = fg.AttentionSpec(16)
LONG, SHORT, ROWS = (1, 2, 30, 16), (1, 4, 20, 16), (1, 4, 20)


def ones(*shape: int, dtype: Any = np.float16) -> np.ndarray[Any, Any]:
    return np.ones(shape, dtype)


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


def call(spec: fg.AttentionSpec = SPEC, /, **changed: Any) -> Any:
    """Makes a call that is valid except for what `changes` replaces."""
    given = {"d_out": ones(*SHORT), "q": ones(*SHORT), "k": ones(*LONG), "v": ones(*LONG)}
    given |= {"out": ones(*SHORT), "lse": floats(*ROWS), **changed}
    return attention.compile(spec, emulate=True).backward(**given)


def misaligned(*shape: int) -> np.ndarray[Any, Any]:
    """Returns an array that starts 2 bytes after a multiple of 16."""
    memory = np.ones(np.prod(shape) + 16, np.float16)
    first = -(memory.ctypes.data // 2) % 8 + 1
    return memory[first : first + np.prod(shape)].reshape(shape)


def unaligned_floats(*shape: int) -> np.ndarray[Any, Any]:
    count = int(np.prod(shape))
    return np.frombuffer(bytearray(4 * count + 1), np.float32, count, 1).reshape(shape)


def test_a_valid_call() -> None:
    call()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": ones(2, 20, 16)}, r"q has shape \(2, 20, 16\); give 4 dimensions"),
        ({"k": ones(1, 2, 30, 8)}, "k has shape .*head_dim=16"),
        ({"q": ones(1, 3, 20, 16)}, "q has 3 heads, no multiple of the 2 heads of k and v"),
        ({"v": ones(1, 2, 31, 16)}, r"v has \(heads, length\) \(2, 31\)"),
        ({"d_out": ones(1, 4, 30, 16)}, r"d_out is float16 \(1, 4, 30, 16\); give float16 \(1, 4, 20, 16\)"),
        ({"d_out": ones(*SHORT, dtype=np.float32)}, "d_out is float32 .*give float16"),
        ({"d_out": ones(*SHORT, dtype=ml_dtypes.bfloat16)}, "d_out is bfloat16"),
        ({"d_out": ones(1, 4, 20, 32)[..., ::2]}, "d_out has strides .*the last dimension must be contiguous"),
        ({"d_out": np.broadcast_to(ones(1), SHORT)}, "d_out has strides .*the last dimension must be contiguous"),
        ({"d_out": misaligned(*SHORT)}, "d_out at address .*every row must start at a multiple of 16 bytes"),
        ({"d_out": ones(*SHORT).tolist()}, "d_out of type list"),
        ({"d_out": None}, "d_out of type NoneType"),
        ({"out": ones(1, 2, 20, 16)}, r"out is float16 \(1, 2, 20, 16\); give float16 \(1, 4, 20, 16\)"),
        ({"out": ones(*SHORT, dtype=np.float32)}, "out is float32"),
        ({"out": misaligned(*SHORT)}, "out at address"),
        ({"out": (ones(*SHORT), floats(*ROWS))}, "out of type tuple"),
        ({"lse": floats(1, 2, 20)}, r"lse is float32 \(1, 2, 20\); give float32 \(1, 4, 20\)"),
        ({"lse": ones(*ROWS)}, "lse is float16"),
        ({"lse": floats(1, 4, 40)[..., ::2]}, "lse has strides .*give a C-contiguous array"),
        ({"lse": np.broadcast_to(floats(1), ROWS)}, "lse has strides"),
        ({"lse": unaligned_floats(*ROWS)}, "lse at address .*multiples of 4 bytes"),
        ({"lse": None}, "lse is missing: give d_out, q, k, v, out and lse"),
        ({"d_lse": floats(1, 20, 4)}, r"d_lse is float32 \(1, 20, 4\); give float32 \(1, 4, 20\)"),
        ({"d_lse": ones(*ROWS, dtype=np.float64)}, "d_lse is float64"),
        ({"d_lse": np.broadcast_to(floats(1), ROWS)}, "d_lse has strides"),
        ({"d_lse": unaligned_floats(*ROWS)}, "d_lse at address"),
        ({"d_lse": 1.0}, "d_lse of type float"),
        ({"slopes": floats(4)}, "unknown argument 'slopes'; the spec declares these captures: none"),
        ({"tile_lists": 3}, "tile_lists: the kernels of full.* read none; leave them out"),
    ],
)  # fmt: skip
def test_wrong_arrays(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(**changed)


def test_wrong_arrays_after_a_valid_call_are_refused() -> None:
    """Checks of the first call that cannot change are cached; the others are repeated."""
    call()
    for name, shape in (("d_out", SHORT), ("out", SHORT), ("q", SHORT), ("k", LONG), ("v", LONG)):
        with pytest.raises(ArgumentError, match=f"{name} at address"):
            call(**{name: misaligned(*shape)})
    for name in ("lse", "d_lse"):
        call(**{name: floats(*ROWS)})
        with pytest.raises(ArgumentError, match=f"{name} at address"):
            call(**{name: unaligned_floats(*ROWS)})


BIAS = fg.AttentionSpec(16, score=lambda s, b, h, q, k: s + fg.Tensor("bias", grad=True)[k])


def into(count: int = 4, **changed: Any) -> dict[str, Any]:
    right = {"dq": ones(*SHORT), "dk": ones(*LONG), "dv": ones(*LONG), "bias": floats(30), **changed}
    return {"into": tuple(right.values())[:count], "bias": floats(30)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"into": ones(*SHORT), "bias": floats(30)}, "into of type ndarray: give a tuple of 4 arrays"),
        (into(3), "into has 3 arrays: give a tuple of 4 arrays, dq, dk, dv, the gradient of 'bias'"),
        (into(dq=ones(*LONG)), r"dq is float16 \(1, 2, 30, 16\); give float16 \(1, 4, 20, 16\)"),
        (into(dk=ones(*LONG, dtype=np.float32)), "dk is float32"),
        (into(dv=misaligned(*LONG)), "dv at address"),
        (into(dv=ones(1, 2, 30, 32)[..., ::2]), "dv has strides"),
        (into(dk=np.broadcast_to(ones(1, 1, 30, 16), LONG)), "dk is read-only"),
        (into(dk=np.lib.stride_tricks.as_strided(ones(*LONG), LONG, (0, 0, 32, 2))), "dk .*its elements share memory"),
        (into(bias=floats(31)), r"the gradient of 'bias' is float32 \(31,\); give float32 \(30,\)"),
        (into(bias=ones(30)), "the gradient of 'bias' is float16"),
        (into(bias=floats(60)[::2]), "the gradient of 'bias' has strides .*C-contiguous"),
        (into(bias=[1.0] * 30), "the gradient of 'bias' of type list"),
    ],
)  # fmt: skip
def test_wrong_gradient_outputs(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(BIAS, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "capture 'bias' is missing: give bias=<float32 array of 1 dimension"),
        ({"bias": ones(30)}, "capture 'bias' has dtype float16; it was declared float32"),
        ({"bias": floats(29)}, r"capture 'bias' has shape \(29,\)"),
        ({"bias": floats(30), "seed_": 1}, "unknown argument 'seed_'"),
    ],
)
def test_wrong_captures(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(BIAS, **given)


def test_seeds() -> None:
    dropout = fg.AttentionSpec(16, dropout=0.1)
    with pytest.raises(ArgumentError, match=r"seed is missing: the spec has dropout=0\.1"):
        call(dropout)
    with pytest.raises(ArgumentError, match="seed=-1 must be an integer"):
        call(dropout, seed=-1)
    with pytest.raises(ArgumentError, match="offset=4294967296 must be an integer"):
        call(dropout, seed=1, offset=2**32)


def test_the_pullback_refuses_a_wrong_gradient() -> None:
    compiled = attention.compile(SPEC, emulate=True)
    _, pullback = compiled.vjp(ones(*SHORT), ones(*LONG), ones(*LONG))
    with pytest.raises(ArgumentError, match=r"d_out is float16 \(1, 2, 30, 16\)"):
        pullback(ones(*LONG))


LISTS = fg.AttentionSpec(16, mask=fg.document("ids"))


def test_tile_lists_of_another_kind_are_refused() -> None:
    compiled, ids = attention.compile(LISTS, emulate=True), np.zeros(30, np.int32)
    exact = attention.compile(LISTS, emulate=True, deterministic=True)
    lists = compiled.backward_tile_lists(20, 30, ids=ids)
    call(LISTS, ids=ids, tile_lists=lists)
    assert lists.keys is not None
    wrong = {
        "tile_lists of type TileLists: give what attention.backward_tile_lists": compiled.tile_lists(20, 30, ids=ids),
        r"tile_lists are for the kernels of \['dkdv', 'dq'\]": exact.backward_tile_lists(20, 30, ids=ids),
        r"made for \(len_q, len_k\) \(20, 31\)": compiled.backward_tile_lists(20, 31, ids=np.zeros(31, np.int32)),
        "made for direction keys": replace(lists, keys=replace(lists.keys, direction="keys")),
        "made for tile": replace(lists, keys=replace(lists.keys, tile=(8, 8))),
    }
    for message, given in wrong.items():
        with pytest.raises(ArgumentError, match=message):
            call(LISTS, ids=ids, tile_lists=given)
    with pytest.raises(ArgumentError, match="needs no lists: its tiles are known in closed form"):
        attention.compile(SPEC, emulate=True).backward_tile_lists(20)
    with pytest.raises(ArgumentError, match="capture 'ids' is missing"):
        compiled.backward_tile_lists(20)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    plan = replace(attention.compile(SPEC, emulate=True).backward_plan, tile_k=24)
    compiled = attention.compile(SPEC, emulate=True, backward_plan=plan)
    with pytest.raises(UnsupportedError, match="tile_k=24 must be a multiple"):
        compiled.backward_kernels
    assert compiled.plan == attention.compile(SPEC, emulate=True).plan
    assert attention.compile(SPEC, emulate=True, plan=ForwardPlan(32, 32, 2)).backward_plan is not None


@pytest.mark.parametrize("name", ["d_out", "d_lse", "into", "lse", "out"])
def test_captures_cannot_have_names_of_arguments(name: str) -> None:
    with pytest.raises(ValueError, match="already names an argument"):
        fg.Tensor(name)
