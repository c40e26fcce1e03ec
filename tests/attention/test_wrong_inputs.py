"""Wrong inputs raise an error that names the argument, before anything is launched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.attention.problem import checked_sizes
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.codegen.sizes import Sizes
from flashgen.errors import ArgumentError, LaunchError, SpecError, UnsupportedError

SPEC = fg.AttentionSpec(16)
LONG, SHORT = (1, 2, 30, 16), (1, 2, 20, 16)


def ones(*shape: int, dtype: Any = np.float16) -> np.ndarray[Any, Any]:
    return np.ones(shape, dtype)


def call(spec: fg.AttentionSpec = SPEC, /, **changed: Any) -> Any:
    """Makes a call that is valid except for what `changes` replaces."""
    given = {"q": ones(*SHORT), "k": ones(*LONG), "v": ones(*LONG), **changed}
    return attention.compile(spec, emulate=True)(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def misaligned(*shape: int) -> np.ndarray[Any, Any]:
    """Returns an array that starts 2 bytes after a multiple of 16."""
    memory = np.ones(np.prod(shape) + 16, np.float16)
    first = -(memory.ctypes.data // 2) % 8 + 1
    return memory[first : first + np.prod(shape)].reshape(shape)


def unaligned_floats(count: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(4 * count + 1), np.float32, count, 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": ones(2, 20, 16)}, r"q has shape \(2, 20, 16\); give 4 dimensions \(batch, heads, length, dim\)"),
        ({"v": ones(30)}, r"v has shape \(30,\)"),
        ({"q": ones(1, 2, 20, 24)}, r"q has shape \(1, 2, 20, 24\); .*head_dim=16"),
        ({"k": ones(1, 2, 30, 8)}, r"k has shape .*head_dim=16"),
        ({"v": ones(1, 2, 30, 8)}, r"v has shape .*value_dim=16"),
        ({"k": ones(2, 2, 30, 16)}, "k has batch 2 and q has 1"),
        ({"v": ones(2, 2, 30, 16)}, "v has batch 2 and q has 1"),
        ({"v": ones(1, 2, 31, 16)}, r"v has \(heads, length\) \(2, 31\) and k has \(2, 30\)"),
        ({"v": ones(1, 1, 30, 16)}, r"v has \(heads, length\) \(1, 30\)"),
        ({"q": ones(1, 3, 20, 16)}, "q has 3 heads, no multiple of the 2 heads of k and v"),
        ({"k": ones(1, 0, 30, 16), "v": ones(1, 0, 30, 16)}, "q has 2 heads, no multiple of the 0 heads"),
        ({"q": ones(*SHORT, dtype=np.float32)}, "q has dtype float32; the spec was compiled for float16"),
        ({"k": ones(*LONG, dtype=ml_dtypes.bfloat16)}, "k has dtype bfloat16"),
        ({"v": ones(*LONG, dtype=np.int16)}, "v has dtype int16"),
        ({"q": ones(*SHORT).astype(">f2")}, "q has dtype byte-swapped float16"),
        ({"q": ones(1, 2, 20, 32)[..., ::2]}, r"q has strides .*the last dimension must be contiguous"),
        ({"k": ones(*LONG)[..., ::-1]}, r"k has strides .*the last dimension must be contiguous"),
        ({"v": ones(1, 2, 30, 20)[..., :16]}, "v at address .*every row must start at a multiple of 16 bytes"),
        ({"q": misaligned(*SHORT)}, "q at address .*every row must start at a multiple of 16 bytes"),
        ({"k": misaligned(*LONG)}, "k at address "),
        ({"q": ones(*SHORT).tolist()}, "q of type list: the emulator takes NumPy arrays"),
        ({"v": None}, "v is missing: give q, k and v, or declare shared_kv=True"),
        ({"q": np.float16(1)}, "q of type float16"),
        ({"seed_": 3}, "unknown argument 'seed_'; the spec declares these captures: none"),
        ({"slopes": ones(2)}, "unknown argument 'slopes'"),
        ({"q": ones(*SHORT)[..., ::-1]}, r"must be contiguous: copy it, as numpy\.ascontiguousarray"),
        ({"q": ones(1, 20, 3, 16), "k": ones(1, 30, 3, 16), "v": ones(1, 30, 3, 16)}, "20 heads, .*as layout='bhsd'"),
    ],
)  # fmt: skip
def test_wrong_arrays(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(**changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"out": ones(*LONG)}, r"out is float16 \(1, 2, 30, 16\); give float16 \(1, 2, 20, 16\)"),
        ({"out": ones(*SHORT, dtype=np.float32)}, "out is float32"),
        ({"out": ones(1, 2, 20, 32)[..., ::2]}, "out has strides"),
        ({"out": misaligned(*SHORT)}, "out at address"),
        ({"out": ones(*SHORT).tolist()}, "out of type list"),
        ({"out": "here"}, "out of type str"),
        ({"out": (ones(*SHORT), ones(*SHORT))}, "out of type tuple: give one array, or add return_lse=True"),
        ({"out": ones(*SHORT), "return_lse": True}, "out of type ndarray: with return_lse=True give a pair"),
        ({"out": (ones(*SHORT),), "return_lse": True}, "out of type tuple: with return_lse=True give a pair"),
        ({"out": (ones(*SHORT), ones(1, 2, 20, dtype=np.float64)), "return_lse": True}, "lse is float64"),
        ({"out": (ones(*SHORT), ones(1, 2, 30, dtype=np.float32)), "return_lse": True}, r"lse is float32 \(1, 2, 30\)"),
        ({"out": (ones(*SHORT), ones(1, 2, 40, dtype=np.float32)[..., ::2]), "return_lse": True}, "lse has strides"),
        ({"out": (ones(*SHORT), unaligned_floats(40).reshape(1, 2, 20)), "return_lse": True}, "lse at address"),
        ({"out": np.lib.stride_tricks.as_strided(ones(*SHORT), SHORT, (0, 0, 32, 2))}, "its elements share memory"),
        ({"out": np.broadcast_to(ones(1, 1, 20, 16), SHORT)}, "out is read-only"),
    ],
)  # fmt: skip
def test_wrong_outputs(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(**changed)


def test_wrong_arrays_after_a_valid_call_are_refused() -> None:
    """Checks of the first call that cannot change are cached; the others are repeated."""
    call(q=ones(*SHORT), out=ones(*SHORT))
    for name in ("q", "k", "v"):
        with pytest.raises(ArgumentError, match=f"{name} at address"):
            call(out=ones(*SHORT), **{name: misaligned(*(SHORT if name == "q" else LONG))})
    with pytest.raises(ArgumentError, match="out at address"):
        call(out=misaligned(*SHORT))


ALIBI = fg.AttentionSpec(16, score=fg.alibi("slopes"))
WINDOW = fg.AttentionSpec(
    16, mask=fg.sliding_window(fg.Scalar("window")), score=fg.softcap(fg.Scalar("cap", "float32"))
)
TABLE = fg.AttentionSpec(16, score=fg.relative_bias("table", 8))


@pytest.mark.parametrize(
    ("spec", "given", "message"),
    [
        (ALIBI, {}, "capture 'slopes' is missing: give slopes=<float32 array of 1 dimension"),
        (WINDOW, {"cap": 30}, "capture 'window' is missing: give window=<int32 number>"),
        (ALIBI, {"slopes": ones(2, dtype=np.float32), "window": 3}, "unknown argument 'window'; .*captures: slopes"),
        (ALIBI, {"slope": ones(2)}, "capture 'slopes' is missing: .*; 'slope' is no capture of the spec"),
        (ALIBI, {"slopes": ones(2, dtype=np.float64)}, "has dtype float64; it was declared float32: convert it"),
        (ALIBI, {"slopes": ones(2, dtype=np.float16)}, "capture 'slopes' has dtype float16"),
        (ALIBI, {"slopes": ones(2).astype(">f4")}, "capture 'slopes' has dtype byte-swapped float32"),
        (ALIBI, {"slopes": ones(2, 2, dtype=np.float32)}, r"capture 'slopes' has shape \(2, 2\); .*ndim=1"),
        (ALIBI, {"slopes": ones(0, dtype=np.float32)}, "capture 'slopes' .*at least one element"),
        (ALIBI, {"slopes": [1.0, 2.0]}, "slopes of type list"),
        (ALIBI, {"slopes": unaligned_floats(2)}, "capture 'slopes' at address .*multiples of 4 bytes"),
        (TABLE, {"table": ones(1, 17, dtype=np.float32).T[:1].T}, None),
        (TABLE, {"table": ones(3, 17, dtype=np.float32)[:, :1]}, None),
        (WINDOW, {"window": 1.5, "cap": 1.0}, "capture 'window' is 1.5; it was declared int32"),
        (WINDOW, {"window": 2**31, "cap": 1.0}, "capture 'window' is 2147483648"),
        (WINDOW, {"window": True, "cap": 1.0}, "capture 'window' is True; give a Python number"),
        (WINDOW, {"window": float("nan"), "cap": 1.0}, "capture 'window' is nan"),
        (WINDOW, {"window": float("inf"), "cap": 1.0}, "capture 'window' is inf"),
        (WINDOW, {"window": "3", "cap": 1.0}, "capture 'window' is '3'"),
        (WINDOW, {"window": np.array(3), "cap": 1.0}, r"capture 'window' is array\(3\)"),
        (WINDOW, {"window": None, "cap": 1.0}, "capture 'window' is None"),
        (WINDOW, {"window": 3, "cap": float("nan")}, "capture 'cap' is nan"),
        (WINDOW, {"window": 3, "cap": 1e40}, "capture 'cap' is 1e.40"),
        (WINDOW, {"window": 3, "cap": 10**400}, "capture 'cap' is 1000"),
        (WINDOW, {"window": np.int64(3), "cap": np.float32(2)}, None),
        (WINDOW, {"window": 3.0, "cap": 2}, None),
    ],
)  # fmt: skip
def test_captures(spec: fg.AttentionSpec, given: dict[str, Any], message: str | None) -> None:
    if message is None:
        call(spec, **given)
    else:
        with pytest.raises(ArgumentError, match=message):
            call(spec, **given)


def test_a_short_capture_is_refused_and_one_element_broadcasts() -> None:
    many = {"q": ones(1, 4, 20, 16)}
    with pytest.raises(ArgumentError, match=r"capture 'slopes' has shape \(3,\); axis 0 is indexed by h, .* up to 3"):
        call(ALIBI, slopes=ones(3, dtype=np.float32), **many)
    for size in (1, 4, 9):
        call(ALIBI, slopes=ones(size, dtype=np.float32), **many)
    document = fg.AttentionSpec(16, mask=fg.document("ids"))
    with pytest.raises(ArgumentError, match=r"capture 'ids' has shape \(29,\)"):
        call(document, ids=np.zeros(29, np.int32))


DROPOUT = fg.AttentionSpec(16, dropout=0.1)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True, "7", float("nan")])
def test_wrong_seeds(seed: Any) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"seed={seed!r} must be an integer from 0 to {2**64 - 1}")):
        call(DROPOUT, seed=seed)


@pytest.mark.parametrize("offset", [-1, 2**32, 1.5, None, False])
def test_wrong_offsets(offset: Any) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"offset={offset!r} must be an integer from 0 to {2**32 - 1}")):
        call(DROPOUT, seed=1, offset=offset)


def test_a_missing_seed() -> None:
    with pytest.raises(ArgumentError, match=r"seed is missing: the spec has dropout=0\.1"):
        call(DROPOUT)
    call(DROPOUT, seed=2**64 - 1, offset=2**32 - 1)
    call(DROPOUT, seed=np.int64(5))


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (np.zeros(2, np.int64), r"seed is int64 of shape \(2,\): give a number, or one int64"),
        (np.zeros(1, np.uint32), r"seed is uint32 of shape \(1,\)"),
        (np.zeros((), np.float64), r"seed is float64 of shape \(\)"),
        (np.zeros(4, np.uint32)[::2], "its 8 bytes must be contiguous"),
        (np.zeros(4, np.uint32)[1:3], "its 8 bytes must be contiguous and start at a multiple of 8"),
    ],
)
def test_wrong_seeds_in_memory(seed: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(DROPOUT, seed=seed)


@pytest.mark.parametrize("batch", [65536, 65537])
@pytest.mark.parametrize("spec", [SPEC, DROPOUT], ids=["plain", "dropout"])
def test_more_batches_than_a_grid_and_the_counter_of_dropout_hold(batch: int, spec: fg.AttentionSpec) -> None:
    one = np.lib.stride_tricks.as_strided(ones(1, 1, 1, 16), (batch, 1, 1, 16), (0, 0, 0, 2))
    with pytest.raises(ArgumentError, match=f"batch {batch} and heads 1 must be at most 65535"):
        call(spec, q=one, k=one, v=one, **({"seed": 1} if spec.dropout else {}))


@pytest.mark.parametrize("name", ["q", "k"])
def test_lengths_beyond_what_int32_sums_hold(name: str) -> None:
    """Nothing is read: the arrays are one row, as often as is asked for."""
    long = np.lib.stride_tricks.as_strided(ones(1, 1, 1, 16), (1, 2, 10**9 + 1, 16), (0, 0, 0, 2))
    given = {"q": long} if name == "q" else {"k": long, "v": long}
    with pytest.raises(ArgumentError, match=rf"len_{name} {10**9 + 1} .*must be at most {10**9}"):
        call(SPEC, **given)
    with pytest.raises(ArgumentError, match=f"len_q={10**9 + 1} must be at most {10**9}"):
        attention.compile(SPEC, emulate=True).tiles(10**9 + 1, 1)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), 1e-50, -1e-50, "1", None])
def test_scales(scale: Any) -> None:
    if scale is None:
        fg.AttentionSpec(16, scale=scale)
    else:
        with pytest.raises(SpecError, match=re.escape(f"scale={scale!r}")):
            fg.AttentionSpec(16, scale=scale)


@pytest.mark.parametrize("target", ["sm_70", "ampere", "", 80, ["sm_80"]])
def test_unsupported_targets(target: Any) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(f"target={target!r} is not supported; choose one of sm_75")):
        attention.compile(SPEC, target=target, emulate=True)


def test_bfloat16_on_turing() -> None:
    with pytest.raises(UnsupportedError, match=r"dtype='bfloat16' is not supported on sm_75 .*use float16"):
        attention.compile(fg.AttentionSpec(16, "bfloat16"), target="sm_75", emulate=True)


def test_a_plan_that_does_not_fit() -> None:
    with pytest.raises(UnsupportedError, match="bytes of shared memory"):
        attention.compile(fg.AttentionSpec(256), target="sm_86", emulate=True, plan=ForwardPlan(128, 128, 4, 2))
    with pytest.raises(UnsupportedError, match="asynchronous copies"):
        attention.compile(SPEC, target="sm_75", emulate=True, plan=ForwardPlan(64, 64, 4, 2))


def test_what_is_no_spec() -> None:
    with pytest.raises(SpecError, match=r"spec='causal\(\)' must be a flashgen.AttentionSpec"):
        attention.compile("causal()", emulate=True)  # type: ignore[arg-type]


def test_options_of_the_emulator_without_it() -> None:
    with pytest.raises(SpecError, match=r"sanitize='address'.*add emulate=True"):
        attention.compile(SPEC, target="sm_80", sanitize="address")


def test_without_a_gpu_a_call_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgen.runtime import gpu

    def no_gpu() -> Any:
        raise LaunchError("no usable GPU: none; emulate=True runs the kernel on the CPU")

    monkeypatch.setattr(gpu, "compute_capability", no_gpu)
    with pytest.raises(LaunchError, match="no usable GPU"):
        attention.compile(SPEC)
    compiled = attention.compile(SPEC, target="sm_80")
    with pytest.raises(LaunchError, match="no usable GPU"):
        compiled(ones(*SHORT), ones(*LONG), ones(*LONG))


@dataclass(frozen=True)
class Fake:
    """An array without data, as compilers trace with."""

    shape: tuple[int, ...]
    dtype: str = "float16"


def test_shapes_are_checked_without_data() -> None:
    spec = fg.AttentionSpec(64, value_dim=32)
    arrays = {"q": Fake((2, 4, 10, 64)), "k": Fake((2, 2, 20, 64)), "v": Fake((2, 2, 20, 32))}
    assert checked_sizes(spec, arrays) == Sizes(2, 4, 2, 10, 20, total_q=10, total_k=20)
    with pytest.raises(ArgumentError, match="v has batch 3 and q has 2"):
        checked_sizes(spec, arrays | {"v": Fake((3, 2, 20, 32))})
    with pytest.raises(ArgumentError, match="k has dtype bfloat16"):
        checked_sizes(spec, arrays | {"k": Fake((2, 2, 20, 64), "bfloat16")})
