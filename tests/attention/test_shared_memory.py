"""Outputs that overlap other arrays of a call are refused by name; disjoint slices of one buffer are accepted."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.attention import aliasing
from flashgen.attention.aliasing import AliasCheck, check_on_host
from flashgen.errors import ArgumentError
from flashgen.runtime.arrays import view_numpy
from flashgen.verify import Shape, random_inputs

Array = np.ndarray[Any, Any]

SPEC = fg.AttentionSpec(16, score=lambda s, b, h, q, k: s + fg.Tensor("bias", "float16", 1, grad=True)[k])
ROWS, LSE = (1, 2, 30, 16), (1, 2, 30)
TARGETS = pytest.mark.parametrize("target", ["sm_80", "sm_90a"])


def fresh() -> dict[str, Array]:
    random = np.random.default_rng(1)
    rows = {name: random.standard_normal(ROWS).astype(np.float16) for name in "qkv"}
    return rows | {"bias": random.standard_normal(30).astype(np.float16)}


def given_memory(array: Array, shape: tuple[int, ...], dtype: Any = np.float16, at: int = 0) -> Array:
    """Returns an array of a shape in the memory of another, starting at byte `at`."""
    return np.ndarray(shape, dtype, memoryview(array.reshape(-1).view(np.uint8)), at)  # type: ignore[arg-type]


def forward(target: str = "sm_80", **given: Any) -> Any:
    q, k, v = (given.pop(name) for name in "qkv")
    return attention.compile(SPEC, target, emulate=True)(q, k, v, **given)


@TARGETS
@pytest.mark.parametrize("name", ["q", "k", "v", "capture 'bias'"])
@pytest.mark.parametrize("at", [0, 32, -32], ids=["exactly", "a row later", "a row earlier"])
def test_an_output_that_overlaps_an_input(target: str, name: str, at: int) -> None:
    memory = np.zeros(8192, np.uint8)
    arrays = fresh()
    own = name.removeprefix("capture ").strip("'")
    arrays[own] = given_memory(memory, arrays[own].shape, at=64)
    out = given_memory(memory, ROWS, at=64 + at)
    with pytest.raises(ArgumentError, match=f"out shares memory with {name}: .* give out memory of its own"):
        forward(target, out=out, **arrays)
    lse = np.empty(LSE, np.float32)
    with pytest.raises(ArgumentError, match=f"out shares memory with {name}: a call reads {name} while it writes"):
        forward(target, out=(out, lse), return_lse=True, **arrays)


@pytest.mark.parametrize("name", ["q", "k", "v", "capture 'bias'"])
def test_an_lse_that_overlaps_an_input(name: str) -> None:
    arrays = fresh()
    memory = np.zeros(8192, np.uint8)
    own = name.removeprefix("capture ").strip("'")
    arrays[own] = given_memory(memory, arrays[own].shape)
    lse = given_memory(memory, LSE, np.float32, at=56)
    with pytest.raises(ArgumentError, match=f"lse shares memory with {name}"):
        forward(out=(np.empty(ROWS, np.float16), lse), return_lse=True, **arrays)


def test_an_output_and_an_lse_that_overlap() -> None:
    out = np.empty(ROWS, np.float16)
    with pytest.raises(ArgumentError, match="out shares memory with lse: a call writes to both"):
        forward(out=(out, given_memory(out, LSE, np.float32, at=1024)), return_lse=True, **fresh())


def test_overlaps_are_checked_for_new_addresses() -> None:
    """The second call differs only in addresses, so all its other checks are cached."""
    arrays, out = fresh(), np.empty(ROWS, np.float16)
    forward(out=out, **arrays)
    for name in "qkv":
        with pytest.raises(ArgumentError, match=f"out shares memory with {name}"):
            forward(out=arrays[name], **arrays)
    assert forward(out=out, **arrays) is out


def test_inputs_may_be_the_same_array() -> None:
    arrays = fresh()
    same = arrays | {"k": arrays["q"], "v": arrays["q"]}
    np.testing.assert_array_equal(
        forward(out=np.empty(ROWS, np.float16), **same), forward(**{name: same[name].copy() for name in same})
    )


PACKED = {
    "heads side by side in a token": ((1, 30, 4, 2, 16), lambda it, i: it[:, :, i].transpose(0, 2, 1, 3)),
    "rows side by side": ((1, 2, 30, 4, 16), lambda it, i: it[..., i, :]),
    "one after another": ((4, *ROWS), lambda it, i: it[i]),
    "a token's heads from the last to the first": ((1, 30, 8, 16), lambda it, i: it[:, :, 2 * i : 2 * i + 2][:, :, ::-1]
                                                   .transpose(0, 2, 1, 3)),
    "every fourth head": ((1, 8, 30, 16), lambda it, i: it[:, i::4]),
    "a row's columns": ((1, 2, 30, 64), lambda it, i: it[..., 16 * i : 16 * i + 16]),
    "rows that take turns": ((1, 2, 120, 16), lambda it, i: it[:, :, i::4]),
}  # fmt: skip


@pytest.mark.parametrize("how", PACKED)
def test_slices_of_one_buffer(how: str) -> None:
    """q, k, v and the output in one buffer, as users pack them: accepted, and only the output is written."""
    shape, slot = PACKED[how]
    buffer, arrays = np.full(shape, np.nan, np.float16), fresh()
    for number, name in enumerate("qkv"):
        slot(buffer, number)[...] = arrays[name]
    expected, out = forward(**arrays), slot(buffer, 3)
    packed = {name: slot(buffer, number) for number, name in enumerate("qkv")}
    assert all(np.may_share_memory(out, array) for array in packed.values()) != (how == "one after another")
    assert forward(out=out, **packed, bias=arrays["bias"]) is out
    np.testing.assert_array_equal(out, expected)
    for name in "qkv":
        np.testing.assert_array_equal(packed[name], arrays[name])
    with pytest.raises(ArgumentError, match="out shares memory with v"):
        forward(out=slot(buffer, 2), **packed, bias=arrays["bias"])


def test_empty_arrays_overlap_nothing() -> None:
    arrays = fresh()
    nothing = arrays["k"][:, :, :0]
    assert (forward(**arrays | {"k": nothing, "v": nothing}, out=np.ones(ROWS, np.float16)) == 0).all()
    empty = arrays["q"][:, :, :0]
    assert forward(**arrays | {"q": empty}, out=arrays["k"][:, :, :0]).shape == empty.shape


CAPTURED, LEARNED = "capture 'bias'", "the gradient of 'bias'"
INPUTS = {**dict.fromkeys(("d_out", "q", "k", "v", "out"), ROWS), "lse": LSE, "d_lse": LSE, CAPTURED: (30,)}
RESULTS = {"dq": ROWS, "dk": ROWS, "dv": ROWS, LEARNED: (30,)}


def backward(inputs: dict[str, Array], into: dict[str, Array]) -> Any:
    given = {name.removeprefix("capture ").strip("'"): array for name, array in inputs.items()}
    return attention.compile(SPEC, emulate=True).backward(**given, into=tuple(into.values()))


def gradient_arrays() -> tuple[dict[str, Array], dict[str, Array]]:
    inputs = {name: np.ones(shape, np.float32 if "lse" in name else np.float16) for name, shape in INPUTS.items()}
    return inputs, {name: np.empty(shape, np.float16) for name, shape in RESULTS.items()}


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("name", INPUTS)
def test_a_gradient_that_overlaps_an_input(result: str, name: str) -> None:
    inputs, into = gradient_arrays()
    backward(inputs, into)
    memory = np.zeros(8192, np.uint8)
    inputs[name] = given_memory(memory, INPUTS[name], inputs[name].dtype)
    into[result] = given_memory(memory, RESULTS[result], at=16)
    with pytest.raises(ArgumentError, match=f"{result} shares memory with {name}: a call reads {name}"):
        backward(inputs, into)


@pytest.mark.parametrize(("result", "other"), [("dq", "dk"), ("dq", "dv"), ("dk", "dv"), ("dv", LEARNED)])
def test_one_array_for_two_gradients(result: str, other: str) -> None:
    inputs, into = gradient_arrays()
    into[other] = given_memory(into[result], RESULTS[other])
    with pytest.raises(ArgumentError, match=f"{result} shares memory with {other}: a call writes to both"):
        backward(inputs, into)


def test_gradients_in_slices_of_one_buffer() -> None:
    """dq, dk and dv side by side in a token, next to q, k and v."""
    inputs, into = gradient_arrays()
    expected = backward(inputs, into)
    buffer = np.ones((1, 30, 6, 2, 16), np.float16)
    for number, name in enumerate("qkv"):
        inputs[name] = buffer[:, :, number].transpose(0, 2, 1, 3)
        into[f"d{name}"] = buffer[:, :, 3 + number].transpose(0, 2, 1, 3)
    for found, right in zip(backward(inputs, into)[:3], expected, strict=False):
        np.testing.assert_allclose(found, right, rtol=2e-3, atol=1e-4)  # dq is summed in another order


def slices(random: np.random.Generator, memory: Array) -> Array:
    """Returns a random view of a memory of 4096 bytes, also with negative strides."""
    dtype = random.choice([np.uint8, np.float16, np.float32])
    array = memory[: random.integers(1, 4096 // 4) * 4].view(dtype)
    rows = int(random.integers(1, 9))
    array = array[: array.size // rows * rows].reshape(rows, -1)
    for _ in range(2):
        start, step = random.integers(0, 4), random.choice([1, 1, 2, 3, 7, -1, -2])
        array = array.T[int(start) :: int(step)] if step > 0 else array.T[:: int(step)]
    return array


def check_by_addresses(arrays: dict[str, Array], written: list[str], named: Any) -> None:
    """Uses the check of calls."""
    views = {name: view_numpy(array, name) for name, array in arrays.items()}
    AliasCheck(views, written, named).check({name: view.pointer for name, view in views.items()})


def test_overlap_detection_is_exact() -> None:
    """Compared with the sets of all bytes, for random views of one memory; only addresses are used."""
    random, memory, found = np.random.default_rng(5), np.zeros(8192, np.uint8), {True: 0, False: 0}
    for _ in range(600):
        one, other = slices(random, memory[:4096]), slices(random, memory[int(random.integers(0, 64)) * 64 :][:4096])
        touched = []
        for array in (one, other):
            memory[:] = 0
            array[...] = np.frombuffer(b"\xff" * array.itemsize, array.dtype)[0]
            touched.append(memory != 0)
        shared = bool((touched[0] & touched[1]).any())
        found[shared] += 1
        for check in (check_by_addresses, check_on_host):
            with pytest.raises(ArgumentError, match="out shares memory with k") if shared else nullcontext():
                check({"out": one, "k": other}, ["out"], str)
    assert min(found.values()) > 100


@pytest.mark.parametrize("backwards", [False, True])
def test_overlaps_of_one_byte(backwards: bool) -> None:
    """Arrays of 4 and 6 bytes, moved across each other."""
    memory = np.zeros(40, np.uint8)
    for at in range(30):
        one, other = memory[at : at + 4], memory[15:21]
        shared = 11 < at < 21
        with pytest.raises(ArgumentError, match="out shares") if shared else nullcontext():
            check_by_addresses({"out": one[::-1] if backwards else one, "k": other}, ["out"], str)


def test_arrays_that_are_too_complex_to_compare_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aliasing, "_MAX_WORK", 1)
    memory, strided = np.zeros(2**20, np.uint8), np.lib.stride_tricks.as_strided
    one, other = (
        strided(memory[at:], (7, 2, 9), strides) for at, strides in ((0, (1388, 4079, 3355)), (2188, (15, 1971, 4287)))
    )
    assert not np.shares_memory(one, other)
    with pytest.raises(np.exceptions.TooHardError):
        np.shares_memory(one, other, max_work=1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="out shares memory with k"):
        check_on_host({"out": one, "k": other}, ["out"], str)


def test_no_memory_is_kept_alive() -> None:
    import weakref

    array = np.zeros(8, np.float16)
    alive = weakref.ref(array)
    kept = AliasCheck({"out": view_numpy(array, "out"), "k": view_numpy(np.ones(8), "k")}, ["out"], str)
    del array
    assert alive() is None and kept


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("target", [None, "sm_90"])
def test_arrays_of_every_library_on_a_gpu(target: str | None) -> None:
    import cupy

    if target and cupy.cuda.Device().compute_capability != "90":
        pytest.skip("one family of kernels runs here")
    spec = fg.AttentionSpec(64)
    compiled, inputs = attention.compile(spec, target), random_inputs(spec, Shape(70, 70, 1, 2, 2))
    libraries: list[Any] = [lambda array: array, cupy.asarray]
    try:
        import torch

        libraries.append(lambda array: torch.from_numpy(array.copy()).cuda())
    except ImportError:
        pass
    for made in libraries:
        q, k, v = (made(array) for array in (inputs.q, inputs.k, inputs.v))
        with pytest.raises(ArgumentError, match="out shares memory with v"):
            compiled(q, k, v, out=v)
        out, lse = compiled(q, k, v, return_lse=True)
        with pytest.raises(ArgumentError, match="dq shares memory with k: a call reads k while it writes to dq"):
            compiled.backward(out, q, k, v, out, lse, into=(k, v, k))
        packed = made(np.zeros((1, 70, 4, 2, 64), np.float16))
        slots = [packed[:, :, number].swapaxes(1, 2) for number in range(4)]
        for slot, array in zip(slots, (q, k, v), strict=False):
            slot[...] = array
        compiled(*slots[:3], out=slots[3])
        assert bool((slots[3] == out).all())
