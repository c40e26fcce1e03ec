"""Arrays and tensor maps of Hopper's forward: strides, lengths of 0, outputs of the caller, addresses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.attention.launches import launch_of
from flashgen.attention.problem import Problem
from flashgen.codegen.dispatch import render_forward
from flashgen.codegen.hopper.decode_plans import HopperDecodePlan
from flashgen.codegen.targets import target_named
from flashgen.errors import ArgumentError, LaunchError
from flashgen.launch.tensor_map_writer import TensorMapWriter
from flashgen.runtime import tensor_maps
from flashgen.runtime.tensor_maps import MAP_BYTES, MapShape, map_shape

CAUSAL = fg.AttentionSpec(64, mask=fg.causal())
SHAPE = (2, 3, 70, 64)
ADDRESSES = {"q": 0x1000, "k": 0x2000, "v": 0x3000, "o": 0x4000, "next_tile": 0x5000}


def arrays(seed: int = 0) -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(SHAPE).astype(np.float16) for _ in range(3)]


@pytest.fixture(scope="module")
def compiled() -> attention.Attention:
    return attention.compile(CAUSAL, target="sm_90a", emulate=True)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_an_output_of_the_caller_is_written_by_its_strides(layout: Any) -> None:
    """It is a view of a larger array, and nothing else of that array is written."""
    spec = fg.AttentionSpec(64, mask=fg.causal(), layout=layout)
    compiled, rows = attention.compile(spec, target="sm_90a", emulate=True), arrays()
    larger = np.full((2, 70, 3, 2, 80), np.nan, np.float16)
    out = larger[:, :, :, 1, 8:72].transpose(0, 2, 1, 3)
    rows, out = (rows, out) if layout == "bhsd" else ([row.swapaxes(1, 2) for row in rows], out.swapaxes(1, 2))
    assert compiled(*rows, out=out) is out
    np.testing.assert_array_equal(out, compiled(*rows))
    assert np.isnan(larger).sum() == larger.size - out.size


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1), (2,)], ids=str)
def test_broadcast_keys_and_values(compiled: attention.Attention, axes: tuple[int, ...]) -> None:
    q, k, v = arrays()
    one = tuple(slice(1) if axis in axes else slice(None) for axis in range(4))
    k, v = (np.broadcast_to(array[one], SHAPE) for array in (k, v))
    assert all(k.strides[axis] == 0 for axis in axes)
    np.testing.assert_array_equal(compiled(q, k, v), compiled(q, *map(np.ascontiguousarray, (k, v))))


def test_a_dimension_of_size_1_has_any_stride(compiled: attention.Attention) -> None:
    q, k, v = (array[:1, :1] for array in arrays())
    for odd in (6, -6, 2**45, 0):
        strided = [np.lib.stride_tricks.as_strided(array, (1, 1, 70, 64), (odd, odd, 128, 2)) for array in (q, k, v)]
        np.testing.assert_array_equal(compiled(*strided), compiled(q, k, v))
    row = [np.lib.stride_tricks.as_strided(array, (1, 1, 1, 64), (-6, 6, 10, 2)) for array in (q, k, v)]
    np.testing.assert_array_equal(compiled(*row), v[:, :, :1])


def test_empty_arrays_may_have_any_address_and_strides(compiled: attention.Attention) -> None:
    """Keys of length 0 are not read, whatever their address."""
    q = arrays()[0]
    odd = np.lib.stride_tricks.as_strided(np.zeros(9, np.float16)[1:], (2, 3, 0, 64), (-10, 6, 2, 2))
    out, lse = compiled(q, odd, odd, return_lse=True, out=(np.full_like(q, np.nan), np.ones(SHAPE[:3], np.float32)))
    assert (out == 0).all() and (lse == -np.inf).all()
    for nothing in (q[:, :, :0], q[:0], q[:, :0]):
        assert compiled(nothing, nothing, nothing).shape == nothing.shape


def test_arrays_that_tma_does_not_support_are_refused_by_argument_name(
    compiled: attention.Attention,
) -> None:
    q, k, v = arrays()
    with pytest.raises(ArgumentError, match=r"v has strides .* from 0 .*contiguous array, or compile .*'sm_90'"):
        compiled(q, k, v[:, ::-1])
    with pytest.raises(ArgumentError, match="out has strides"):
        compiled(q, k, v, out=np.empty_like(q)[:, :, ::-1])
    with pytest.raises(ArgumentError, match="k has strides"):
        map_shape("k", "float16", (64, 70, 3, 2), (64, 2**39, 2**40), (64, 64))


def writer(len_k: int = 1000, batch: int = 8) -> TensorMapWriter:
    problem = Problem(batch, 4, 4, 1000, len_k, dict.fromkeys("qkvo", (4 * 1000 * 64, 1000 * 64, 64)))
    made = launch_of(render_forward(CAUSAL, target_named("sm_90a")), CAUSAL, problem, {}).writer
    assert isinstance(made, TensorMapWriter)
    return made


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the addresses for which a mock driver is asked to encode tensor maps."""
    asked: list[int] = []

    def encode(address: int, shape: MapShape) -> bytes:
        asked.append(address)
        return address.to_bytes(8, "little") * (MAP_BYTES // 8)

    monkeypatch.setattr(tensor_maps, "tensor_map", encode)
    return asked


def test_maps_are_written_where_the_struct_has_them(encoded: list[int]) -> None:
    """Whatever the order of the kernel's boxes: a barrier waits forever for the bytes of another array's box."""
    kernel = render_forward(CAUSAL, target_named("sm_90a"))
    problem = Problem(8, 4, 4, 1000, 1000, dict.fromkeys("qkvo", (4 * 1000 * 64, 1000 * 64, 64)))
    turned = replace(kernel, boxes=dict(reversed(kernel.boxes.items())))
    made = launch_of(turned, CAUSAL, problem, {}).writer
    assert made.write(ADDRESSES, {}) == writer().write(ADDRESSES, {})


def test_a_map_is_encoded_when_an_address_is_new(encoded: list[int]) -> None:
    it = writer()
    first = it.write(ADDRESSES, {})
    assert encoded == [0x1000, 0x2000, 0x3000, 0x4000] and it.write(ADDRESSES, {}) == first
    other = it.write(ADDRESSES | {"o": 0x9000, "next_tile": 0x7000}, {})
    assert encoded[4:] == [0x9000] and it.write(ADDRESSES, {}) == first != other
    assert len(encoded) == 5, "maps of alternating addresses are cached"
    for number, name in enumerate("qkvo"):
        assert first[MAP_BYTES * number :][:8] == ADDRESSES[name].to_bytes(8, "little")
    assert other[it.offsets["next_tile"] :][:8] == (0x7000).to_bytes(8, "little")


def test_a_struct_with_one_map(encoded: list[int]) -> None:
    """The decode kernel of V as a part of K has no other."""
    spec = fg.AttentionSpec(320, shared_kv=True)
    kernel = render_forward(spec, target_named("sm_90a"), HopperDecodePlan(64))
    strides = dict.fromkeys("qko", (32 * 1000 * 320, 1000 * 320, 320))
    made = launch_of(kernel, spec, Problem(2, 32, 1, 1, 1000, strides), {}).writer
    written = made.write(ADDRESSES, {})
    assert encoded == [ADDRESSES["k"]] and written[:8] == ADDRESSES["k"].to_bytes(8, "little")
    by_position = made.by_position({"k": 1, "q": 0, "o": 2})
    struct = made.template.copy()
    by_position.write_into(struct, [0x1000, 0x5000, 0x2000], {})
    assert struct[:8] == (0x5000).to_bytes(8, "little")


@pytest.mark.parametrize("name", "qkvo")
def test_each_address_has_its_own_map(name: str, encoded: list[int]) -> None:
    """After a call that differs in one address, and after two addresses are swapped."""
    it = writer()
    it.write(ADDRESSES, {})
    other = "q" if name == "k" else "k"
    for changed in ({name: 0x8000}, {name: ADDRESSES[other], other: ADDRESSES[name]}):
        addresses = ADDRESSES | changed
        written = it.write(addresses, {})
        for number, array in enumerate("qkvo"):
            assert written[MAP_BYTES * number :][:8] == addresses[array].to_bytes(8, "little")


def test_the_map_cache_is_small(encoded: list[int]) -> None:
    it = writer()
    for number in range(1000):
        it.write(ADDRESSES | {"q": 0x10000 + number}, {})
    assert len(it._maps) <= 64 and all(len(maker._maps) <= 64 for maker in it._makers)


def test_the_map_of_an_empty_array_uses_the_output_address(encoded: list[int]) -> None:
    """Empty keys have no address: CuPy's is null, and that of a slice may be anything."""
    writer(len_k=0).write(ADDRESSES | {"k": 0, "v": 0x2002}, {})
    assert encoded == [0x1000, 0x4000, 0x4000, 0x4000]


def test_a_map_that_the_driver_rejects_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def cuTensorMapEncodeTiled(self, *given: Any) -> int:
            assert len(given) == 12
            return 1

    monkeypatch.setattr(tensor_maps, "driver", Driver)
    with pytest.raises(LaunchError, match=r"at 0x1000: CUDA error 1 .*contiguous array, or compile"):
        tensor_maps.tensor_map(0x1000, map_shape("q", "bfloat16", (64, 70, 3, 2), (64, 4480, 0), (64, 64)))
