"""The key of the launch cache: two calls that differ in one part of it do not share an entry."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.attention.tile_lists import sizes_of
from flashgen.codegen.mma_sync.forward_plans import ForwardPlan
from flashgen.errors import ArgumentError
from flashgen.launch.engines import Emulator, Place
from flashgen.runtime.arrays import CUPY, NUMPY, TORCH, Library
from flashgen.runtime.streams import identity
from flashgen.verify import Shape, random_inputs

PLAN = ForwardPlan(32, 32, 2)


def rim(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A band whose bounds depend on lengths, batch and head; no closed form, so that it needs lists."""
    ends = (k >= fg.len_k - 40) & (q < 4) | (q >= fg.len_q - 3) & (k < 9)
    return (abs(q - k) < 20) | ends | (b == 1) & (k < 4) | (h == 1) & (q < 4)


@pytest.fixture(scope="module")
def rimmed() -> attention.Attention:
    return attention.compile(fg.AttentionSpec(32, mask=rim), emulate=True, plan=PLAN)


SIZES = {"len_q": 150, "len_k": 160, "batch": 2, "heads": 2}


@pytest.mark.parametrize("other", [{"len_q": 140}, {"len_k": 130}, {"batch": 3}, {"heads": 3}], ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_tile_lists_of_other_sizes(other: dict[str, int], backward: bool, rimmed: attention.Attention) -> None:
    """The number of tiles is the same, so lists of the wrong sizes would be read without a fault."""

    def lists(**sizes: int) -> Any:
        return rimmed.backward_tile_lists(**sizes).keys if backward else rimmed.tile_lists(**sizes)

    first, found = lists(**SIZES), lists(**SIZES | other)
    sizes = SIZES | other
    assert (found.len_q, found.len_k, *found.counts.shape[:2]) == tuple(sizes.values())
    assert first is not found and lists(**SIZES) is first and lists(**sizes) is found
    if not backward:
        np.testing.assert_array_equal(found.tile_map().classes, rimmed.tiles(**sizes).classes)


@pytest.mark.parametrize("lengths", [((150, 160), (150, 130)), ((150, 160), (140, 160))], ids=["len_k", "len_q"])
def test_calls_of_other_lengths(lengths: Any, rimmed: attention.Attention, right: Any, gradients_right: Any) -> None:
    """One after the other, and the first once more: outputs, LSEs and gradients belong to each."""
    for number, pair in enumerate((*lengths, lengths[0])):
        inputs = random_inputs(rimmed.spec, Shape(*pair, 1, 2, 2), seed=number)
        (out, lse), pullback = rimmed.vjp(inputs.q, inputs.k, inputs.v, return_lse=True)
        right(rimmed.spec, inputs, out, lse)
        d_out = random_inputs(rimmed.spec, Shape(*pair, 1, 2, 2), seed=7).q
        gradients_right(rimmed.spec, inputs, d_out, pullback(d_out))


def test_tile_lists_of_other_streams_and_devices(rimmed: attention.Attention) -> None:
    """A list from another stream may not be ready, and one on another GPU cannot be read."""
    lister, problem, made = rimmed.forward.lister, sizes_of(50, 60, 1, 1), []

    def make() -> Any:
        made.append(SimpleNamespace(arguments=dict))
        return made[-1]

    assert lister is not None
    shape = lister._shape(problem)
    places = [Place(stream, device) for stream in (0, 0x5560, 0x5570) for device in (0, 1)]
    first = [lister._cached(problem, shape, place, make)[0] for place in places]
    assert len(made) == 6 and [lister._cached(problem, shape, place, make)[0] for place in places] == first == made


def test_tile_lists_of_per_thread_streams(at_once: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """cudaStreamPerThread is one handle for many streams, which do not wait for each other."""
    monkeypatch.setattr(Emulator, "stream_key", lambda engine, place: identity(place.stream))
    lister = attention.compile(fg.AttentionSpec(16, mask=rim), emulate=True, plan=PLAN).forward.lister
    assert lister is not None
    problem = sizes_of(50, 60, 1, 1)
    shape = lister._shape(problem)

    def lists() -> Any:
        return SimpleNamespace(arguments=dict)

    found = at_once(lambda number: lister._cached(problem, shape, Place(2, 0), lists))
    assert len({id(each) for each, _ in found}) == 8


def test_a_stream_under_capture_caches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its lists, which are built when the graph runs, nor earlier lists, which may be released by then."""
    compiled = attention.compile(fg.AttentionSpec(16, mask=rim), emulate=True, plan=PLAN)
    lister, inputs = compiled.forward.lister, random_inputs(compiled.spec, Shape(50, 60, 1, 1, 1))
    assert lister is not None
    made: list[Any] = []
    launch = lister._launch
    monkeypatch.setattr(lister, "_launch", lambda *given: made.append(given) or launch(*given))
    lister._cache.clear()
    for captured, count in ((True, 1), (True, 2), (False, 3), (True, 4), (False, 4)):
        monkeypatch.setattr(Emulator, "is_captured", lambda engine, place, captured=captured: captured)
        compiled(inputs.q, inputs.k, inputs.v)
        assert len(made) == count and len(lister._cache) == (count > 2)


def test_tile_lists_of_captures_are_built_in_each_call(right: Any) -> None:
    """The array is the same, but its contents differ."""
    spec = fg.AttentionSpec(32, mask=fg.document("ids"))
    compiled, ids = attention.compile(spec, emulate=True, plan=PLAN), np.zeros(150, np.int32)
    inputs = random_inputs(spec, Shape(150, 150, 1, 2, 2))
    for borders in ((75,), (20, 90), ()):
        ids[:] = np.searchsorted(borders, np.arange(150), side="right")
        inputs.captures["ids"] = ids
        right(spec, inputs, *compiled(inputs.q, inputs.k, inputs.v, ids=ids, return_lse=True))


BIASED = fg.AttentionSpec(
    16, mask=fg.causal(), score=lambda s, b, h, q, k: s + fg.Tensor("bias", "float32", 2)[h, k]
)  # fmt: skip
ROWS = (1, 4, 40, 16)


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(3)
    made = {name: random.standard_normal(ROWS).astype(np.float16) for name in "qkv"}
    return made | {"bias": random.standard_normal((4, 40)).astype(np.float32)}


def shifted(array: np.ndarray[Any, Any], by: int) -> np.ndarray[Any, Any]:
    """Returns a copy that begins `offset` bytes behind a multiple of 16."""
    memory = np.zeros(array.nbytes + 32, np.uint8)
    first = -memory.ctypes.data % 16 + by
    copy = np.ndarray(array.shape, array.dtype, memory[first:].data)
    copy[...] = array
    return copy


def in_other_strides(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns an equal array with the memory order of its first two dimensions of more than one element swapped."""
    axes = (0, 2, 1, 3) if array.ndim == 4 else (1, 0)
    return np.ascontiguousarray(array.transpose(axes)).transpose(axes)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_an_array_that_differs_from_the_first_call(name: str, target: str) -> None:
    """Other strides give the same result. Another dtype or alignment is refused, as in a first call."""
    compiled, given = attention.compile(BIASED, target, emulate=True), arrays()

    def call(array: np.ndarray[Any, Any]) -> Any:
        q, k, v, bias = (given | {name: array}).values()
        return compiled(q, k, v, bias=bias)

    expected = call(given[name])
    np.testing.assert_array_equal(call(in_other_strides(given[name])), expected)
    other = ml_dtypes.bfloat16 if name in "qkv" else np.int32
    with pytest.raises(ArgumentError, match=f"{name}.* dtype {np.dtype(other).name}"):
        call(given[name].view(other))
    with pytest.raises(ArgumentError, match=f"{name}.* at address"):
        call(shifted(given[name], by=8 if name in "qkv" else 2))
    shape = {"q": (1, 4, 39, 16), "k": (1, 4, 39, 16), "v": (1, 4, 39, 16), "bias": (4, 39)}[name]
    fewer = given[name].reshape(-1)[: np.prod(shape)].reshape(shape)
    if name == "q":
        assert call(fewer).shape == shape
    else:
        with pytest.raises(ArgumentError, match=r"39"):
            call(fewer)
    np.testing.assert_array_equal(call(given[name]), expected)


def test_calls_with_and_without_an_output_are_separate() -> None:
    """The output has the strides of the array that was passed, otherwise those of a new one."""
    compiled, given = attention.compile(BIASED, emulate=True), arrays()
    rows, bias = [given[name] for name in "qkv"], given["bias"]
    expected = compiled(*rows, bias=bias)
    for _ in range(2):
        out = in_other_strides(np.full(ROWS, np.nan, np.float16))
        np.testing.assert_array_equal(compiled(*rows, bias=bias, out=out), expected)
        wide = np.full((*ROWS[:3], 32), np.nan, np.float16)
        np.testing.assert_array_equal(compiled(*rows, bias=bias, out=wide[..., :16]), expected)
        assert np.isnan(wide[..., 16:]).all()
        np.testing.assert_array_equal(compiled(*rows, bias=bias), expected)


class Made(SimpleNamespace):
    """A mock array of any library, with the attributes that the cache key reads."""

    def stride(self) -> tuple[int, ...]:
        return tuple(self.strides)

    def data_ptr(self) -> int:
        return 64


LOOKS: dict[str, tuple[Library, dict[str, Any], dict[str, Any]]] = {
    "numpy": (NUMPY, {"ctypes": SimpleNamespace(data=64)}, {}),
    "cupy": (CUPY, {"data": SimpleNamespace(device_id=0, ptr=64)}, {"data": SimpleNamespace(device_id=1, ptr=64)}),
    "torch": (TORCH, {"device": "cuda:0"}, {"device": "cuda:1"}),
}


@pytest.mark.parametrize("name", LOOKS)
def test_the_cache_key_has_shape_strides_dtype_and_device(name: str) -> None:
    """The arrays are mocks because few machines have a second GPU."""
    library, device, other_device = LOOKS[name]
    alike: dict[str, Any] = {"shape": (2, 3), "strides": (6, 2), "dtype": "float16", **device}
    (seen, address), (again, _) = library.look(Made(**alike)), library.look(Made(**alike))
    assert seen == again and hash(seen) == hash(again) and address == library.pointer(Made(**alike)) == 64
    changes = [{"shape": (3, 2)}, {"strides": (2, 4)}, {"dtype": "bfloat16"}]
    for change in (*changes, *([other_device] if other_device else [])):
        assert library.look(Made(**alike | change))[0] != seen, change
