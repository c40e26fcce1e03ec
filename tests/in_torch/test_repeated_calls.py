"""Repeated calls: they launch what the first call launched, with the addresses of their own arrays, and only then."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import torch

import flashgen as fg
from flashgen.attention.call_pass import Pass
from flashgen.errors import ArgumentError
from flashgen.launch.engines import Gpu
from flashgen.runtime import gpu
from flashgen.torch.views import CallsOfViews
from in_torch.recorded import Launched, Memory

BATCH, HEADS, HEADS_KV, DIM, PAGE, PAGES = 4, 8, 2, 64, 16, 24
_SCALES = count(3001)
KINDS: dict[str, dict[str, Any]] = {
    "single tokens": {},
    "packed tokens": {"layout": "thd"},
    "float8": {"kv_dtype": "float8_e4m3fn"},
    "packed, float8, sinks": {"layout": "thd", "kv_dtype": "float8_e4m3fn", "sink": fg.Tensor("sinks", "float16", 1)},
    "sinks": {"sink": fg.Tensor("sinks", "float16", 1)},
}


def _compiled(target: str = "sm_90a", **options: Any) -> Any:
    """Returns a spec that no other test has, because compiled attentions are cached."""
    options = {"layout": "bshd", "mask": fg.causal(), "page_size": PAGE, **options}
    return fg.compile(fg.AttentionSpec(DIM, "float16", scale=1 / next(_SCALES), **options), target=target)


def _arrays(spec: Any, batch: int = BATCH) -> dict[str, Any]:
    """Returns the arguments of a decode call. K and V are halves of one tensor, as in vLLM's cache."""
    element = getattr(torch, spec.kv_dtype or "float16")
    k, v = torch.zeros(PAGES, PAGE, HEADS_KV, 2 * DIM).to(element).chunk(2, -1)
    rows = (batch, 1) if spec.layout == "bshd" else (batch,)
    arrays = {"q": torch.zeros(*rows, HEADS, DIM, dtype=torch.float16), "k": k, "v": v}
    arrays["page_table"] = torch.zeros(batch, 8, dtype=torch.int32)
    arrays["seqused_k"] = torch.ones(batch, dtype=torch.int32)
    if spec.layout == "thd":
        arrays |= {"cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32), "max_seqlen_q": 16}
    if spec.kv_dtype:
        arrays |= {name: torch.ones(1) for name in ("k_scale", "v_scale")}
    if spec.sink:
        arrays["sinks"] = torch.zeros(HEADS, dtype=torch.float16)
    return arrays


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The arrays of each look-up in a launch cache, which repeated calls do not need."""
    seen: list[Any] = []
    find = Pass._find

    def recorded(*given: Any) -> Any:
        seen.append(given[1])
        return find(*given)

    monkeypatch.setattr(Pass, "_find", recorded)
    yield seen


def _expected(attention: Any, arrays: dict[str, Any], launched: Launched, monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Returns the launches of a call that repeats none."""
    launched.clear()
    with monkeypatch.context() as without:
        without.setattr(attention, "_repeats", None)
        attention(**arrays)
    found = launched.copy()
    launched.clear()
    return found


@pytest.mark.parametrize("has_out", [True, False], ids=["out", "new output"])
@pytest.mark.parametrize("kind", KINDS)
def test_launches_of_a_repeated_call(
    kind: str, has_out: bool, launched: Launched, memory: Memory, lookups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte, with the addresses of another layer's arrays."""
    attention = _compiled(**KINDS[kind])
    layers = [_arrays(attention.spec) for _ in range(3)]
    if has_out:
        layers = [arrays | {"out": torch.zeros_like(arrays["q"])} for arrays in layers]
    attention(**layers[0])
    for arrays in layers[1:]:
        memory.again()
        expected = _expected(attention, arrays, launched, monkeypatch)
        lookups.clear()
        memory.again()
        out = attention(**arrays)
        assert launched == expected and expected and not lookups
        assert out is arrays["out"] if has_out else out.shape == arrays["q"].shape
    assert len({struct for _, struct, *_ in (expected[0], *_expected(attention, layers[0], launched, monkeypatch))}) > 1


def test_a_repeated_dense_call_with_its_lse(launched: Launched, memory: Memory, lookups: Any) -> None:
    attention = _compiled(page_size=None)
    q, k, v = (torch.zeros(2, 48, HEADS, DIM, dtype=torch.float16) for _ in range(3))
    seen = []
    for _ in range(3):
        memory.again()
        lookups.clear()
        out, lse = attention(q, k, v, return_lse=True)
        seen.append((launched.copy(), out.data_ptr(), lse.data_ptr(), lse.shape))
        launched.clear()
    assert seen[0] == seen[1] == seen[2] and seen[0][0] and not lookups


BACKWARD: dict[str, dict[str, Any]] = {
    "rows": {},
    "heads first": {"layout": "bhsd"},
    "packed tokens": {"layout": "thd"},
    "accumulators": {"mask": fg.full()},
    "values are keys": {"shared_kv": True, "value_dim": 32},
}


def _backward_arrays(spec: Any, has_into: bool, has_d_lse: bool) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Returns the arguments of a backward call of two sequences of 96 tokens."""
    shapes = {"bshd": (2, 96, HEADS), "bhsd": (2, HEADS, 96), "thd": (192, HEADS)}
    rows, groups = shapes[spec.layout], [HEADS_KV if size == HEADS else size for size in shapes[spec.layout]]
    q, k = (torch.zeros(*sizes, DIM, dtype=torch.float16) for sizes in (rows, groups))
    d_out, out = (torch.zeros(*rows, spec.value_dim, dtype=torch.float16) for _ in range(2))
    values = [] if spec.shared_kv else [torch.zeros_like(k)]
    lse = torch.zeros(HEADS, 192) if spec.layout == "thd" else torch.zeros(2, HEADS, 96)
    named: dict[str, Any] = {"d_lse": torch.zeros_like(lse)} if has_d_lse else {}
    if has_into:
        named["into"] = tuple(map(torch.zeros_like, (q, k, *values)))
    if spec.layout == "thd":
        named["cu_seqlens_q"] = torch.tensor([0, 96, 192], dtype=torch.int32)
    return [d_out, q, k, *values, out, lse], named


@pytest.mark.parametrize("has_d_lse", [True, False], ids=["d_lse", "no d_lse"])
@pytest.mark.parametrize("has_into", [True, False], ids=["into", "new gradients"])
@pytest.mark.parametrize("kind", BACKWARD)
def test_launches_of_a_repeated_backward_call(
    kind: str,
    has_into: bool,
    has_d_lse: bool,
    launched: Launched,
    memory: Memory,
    lookups: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Byte for byte, with the addresses of another layer's arrays."""
    attention = _compiled(page_size=None, **BACKWARD[kind])
    layers = [_backward_arrays(attention.spec, has_into, has_d_lse) for _ in range(3)]
    seen = []
    for repeats in (False, True):
        with monkeypatch.context() as without:
            if not repeats:
                without.setattr(attention, "_repeated_backward", None)
            else:
                attention.backward(*layers[0][0], **layers[0][1])
            for arrays, named in layers:
                memory.again()
                launched.clear()
                lookups.clear()
                gradients = attention.backward(*arrays, **named)
                assert bool(lookups) is not repeats
                assert not has_into or all(a is b for a, b in zip(gradients, named["into"], strict=True))
                assert [each.shape for each in gradients] == [each.shape for each in arrays[1 : len(gradients) + 1]]
                seen.append((launched.copy(), [each.data_ptr() for each in gradients]))
    assert seen[:3] == seen[3:] and seen[0][0] and seen[0] != seen[1]


def test_backward_calls_that_differ_repeat_nothing(launched: Launched, memory: Memory, lookups: Any) -> None:
    attention = _compiled(page_size=None)
    arrays, _ = _backward_arrays(attention.spec, has_into=False, has_d_lse=False)
    attention.backward(*arrays)
    into = tuple(map(torch.zeros_like, arrays[1:4]))
    others: list[tuple[int, Any]] = [(2, torch.zeros(2, 96, HEADS_KV, 2 * DIM).half()[..., :DIM])]
    others += [(position, torch.zeros(2, 192, HEADS, DIM).half()[:, ::2]) for position in (0, 1, 4)]
    for position, other in others:
        lookups.clear()
        attention.backward(*arrays[:position], other, *arrays[position + 1 :])
        assert lookups, position
    for other in ({"into": into}, {"d_lse": arrays[-1].clone()}):
        lookups.clear()
        attention.backward(*arrays, **other)
        assert lookups, other
    with pytest.raises(ArgumentError, match="shares memory"):
        attention.backward(*arrays, into=(into[0], into[1], into[1]))
    with pytest.raises(ArgumentError, match="lse"):
        attention.backward(*arrays[:-1], arrays[-1].half())
    lookups.clear()
    attention.backward(*arrays)
    assert not lookups, "the first call is still repeated"


def test_gradients_of_sinks_are_summed_in_each_call(launched: Launched, lookups: Any) -> None:
    """They are cleared before the launch, so that such calls do more than launch kernels."""
    attention = _compiled(page_size=None, sink=fg.Tensor("sinks", "float16", 1, grad=True))
    arrays, _ = _backward_arrays(attention.spec, has_into=False, has_d_lse=False)
    for _ in range(3):
        lookups.clear()
        attention.backward(*arrays, sinks=torch.zeros(HEADS, dtype=torch.float16))
        assert lookups


def test_one_array_of_offsets_for_queries_and_keys(launched: Launched, memory: Memory, lookups: Any) -> None:
    attention = _compiled(layout="thd", page_size=None)
    q, k, v = (torch.zeros(96, HEADS, DIM, dtype=torch.float16) for _ in range(3))
    starts = torch.tensor([0, 40, 96], dtype=torch.int32)
    seen = []
    for _ in range(2):
        memory.again()
        lookups.clear()
        attention(q, k, v, cu_seqlens_q=starts)
        seen.append(launched.copy())
        launched.clear()
    assert seen[0] == seen[1] and seen[0] and not lookups


def _moved(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """Returns a copy that begins so many elements after a multiple of 16 bytes."""
    buffer = torch.zeros(tensor.numel() + 32, dtype=tensor.dtype)
    first = -buffer.data_ptr() % 16 // buffer.element_size() + elements
    return buffer[first : first + tensor.numel()].view(tensor.shape)


def _others(arrays: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns calls that differ from one in a single thing that launches depend on."""
    q, k = arrays["q"], arrays["k"]
    wide = torch.zeros(2, *q.shape[:-1], 2 * DIM, dtype=q.dtype)[..., :DIM]
    more = torch.zeros(PAGES + 1, PAGE, HEADS_KV, 2 * DIM, dtype=k.dtype).chunk(2, -1)
    apart = torch.zeros(2, PAGES, PAGE, HEADS_KV, DIM, dtype=k.dtype)
    return {
        "strides of q": {"q": wide[0]},
        "strides of out": {"out": wide[1]},
        "strides of k and v": {"k": apart[0], "v": apart[1]},
        "pages": {"k": more[0], "v": more[1]},
        "width of the table": {"page_table": torch.zeros(len(q), 9, dtype=torch.int32)},
        "pitch of the table": {"page_table": torch.zeros(len(q), 16, dtype=torch.int32)[:, :8]},
        "alignment of lengths": {"seqused_k": _moved(arrays["seqused_k"], 1)},
        "alignment of the table": {"page_table": _moved(arrays["page_table"], 2)},
        "splits": {"num_splits": 3},
        "no output": {"out": None},
        "heads": {
            "q": torch.zeros(*q.shape[:-2], 2, DIM, dtype=q.dtype),
            "out": torch.zeros(*q.shape[:-2], 2, DIM).half(),
        },
    }


def test_calls_that_differ_repeat_nothing(launched: Launched, memory: Memory, lookups: Any) -> None:
    """The launches are those of an attention that has had no other call, and the first call is still repeated."""
    attention = _compiled()
    arrays = _arrays(attention.spec)
    arrays["out"] = torch.zeros_like(arrays["q"])
    for what, other in _others(arrays).items():
        attention(**arrays)
        attention(**arrays)
        lookups.clear()
        launched.clear()
        memory.again()
        attention(**arrays | other)
        assert lookups, what
        found = launched.copy()
        launched.clear()
        memory.again()
        attention.forward.clear_cache()
        attention(**arrays | other)
        assert found == launched and found, what


@pytest.mark.parametrize("name", ["q", "page_table", "seqused_k"])
def test_wrong_arrays_are_refused_after_right_ones(name: str, launched: Launched) -> None:
    attention = _compiled()
    arrays = _arrays(attention.spec)
    for _ in range(2):
        attention(**arrays)
    launched.clear()
    wrong = {"q": arrays["q"].bfloat16(), "page_table": arrays["page_table"].long(), "seqused_k": torch.ones(3).int()}
    with pytest.raises(ArgumentError, match=name):
        attention(**arrays | {name: wrong[name]})
    with pytest.raises(ArgumentError, match="page_table is missing"):
        attention(**arrays | {"page_table": None})
    with pytest.raises(ArgumentError, match="unknown"):
        attention(**arrays, unknown=arrays["seqused_k"])
    with pytest.raises(ArgumentError, match="num_splits"):
        attention(**arrays, num_splits=0)
    assert not launched


def test_bounds_of_packed_tokens(launched: Launched, memory: Memory, lookups: Any) -> None:
    attention = _compiled(layout="thd")
    arrays = _arrays(attention.spec)
    seen = []
    for bound in (16, 16, None, 2, 16):
        lookups.clear()
        launched.clear()
        memory.again()
        attention(**arrays | {"max_seqlen_q": bound})
        seen.append((launched.copy(), bool(lookups)))
    assert [looked for _, looked in seen] == [True, False, True, True, False]
    assert seen[0][0] == seen[1][0] == seen[4][0] != seen[3][0]


def test_a_cleared_cache_repeats_nothing(launched: Launched, lookups: Any) -> None:
    """Tuning clears it."""
    attention = _compiled()
    arrays = _arrays(attention.spec)
    for _ in range(2):
        lookups.clear()
        attention(**arrays)
    assert not lookups
    attention.forward.clear_cache()
    attention(**arrays)
    assert lookups
    lookups.clear()
    attention(**arrays)
    assert not lookups


def test_an_output_over_the_queries_is_refused(launched: Launched) -> None:
    attention = _compiled()
    arrays = _arrays(attention.spec)
    packed = torch.zeros(BATCH, 1, 2 * HEADS, DIM, dtype=torch.float16)
    q, out = packed.split(HEADS, 2)  # rows side by side in one buffer do not overlap
    calls = arrays | {"q": q, "out": out}
    for _ in range(3):
        attention(**calls)
    launched.clear()
    with pytest.raises(ArgumentError, match="shares memory"):
        attention(**calls | {"out": packed[:, :, 4 : HEADS + 4]})
    assert not launched


def test_the_stream_the_device_and_the_counters_are_those_of_the_call(
    launched: Launched, lookups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that is captured into a graph has counters of its own, which `Gpu.counter` returns."""
    attention = _compiled()
    arrays = _arrays(attention.spec)
    attention(**arrays)
    counters, places = count(1 << 20, 1 << 10), []

    def counter(_engine: Any, place: Any, _count: int) -> int:
        places.append(place)
        return next(counters)

    monkeypatch.setattr(Gpu, "counter", counter)
    library = Gpu().library(arrays["q"], "q")
    launches = attention._repeats._launches
    lookups.clear()
    for stream in (7, 9):
        ((shape, (each,)),) = launches._recent.items()
        launches._recent = {shape: (each._replace(library=replace(library, stream=partial(_value, stream))),)}
        attention(**arrays)
    assert [launch[2] for launch in launched[-2:]] == [7, 9] == [place.stream for place in places]
    assert launched[-1][1] != launched[-2][1], "the same counters"
    assert not lookups
    monkeypatch.setattr(gpu, "current_device", lambda: 1)
    monkeypatch.setattr(Gpu, "device_context", lambda *_: nullcontext())
    attention(**arrays)
    assert lookups, "the launch of another device"


def _value(value: Any, _array: Any) -> Any:
    return value


def test_eight_threads(launched: Launched, memory: Memory, lookups: Any, at_once: Any) -> None:
    """Threads with calls of different shapes: each launch has the addresses of its own arrays."""
    attention = _compiled()
    calls = [_arrays(attention.spec, batch) for batch in (1, 2, 3, 4, 1, 2, 3, 4)]
    calls = [arrays | {"out": torch.zeros_like(arrays["q"]), "num_splits": 1} for arrays in calls]  # without workspaces
    expected = []
    for arrays in calls:
        launched.clear()
        attention(**arrays)
        expected += [*launched] * 200
    launched.clear()
    barrier = threading.Barrier(8)

    def run(number: int) -> None:
        barrier.wait()
        for round_ in range(200):
            attention(**calls[number])
            if number == 0 and round_ == 100:
                attention.forward.clear_cache()

    at_once(run)
    assert sorted(map(repr, launched)) == sorted(map(repr, expected))


@pytest.mark.parametrize(("name", "most"), [("q", 64), ("page_table", 8)])
def test_how_many_calls_are_remembered(name: str, most: int, launched: Launched, lookups: Any) -> None:
    """Shapes of queries, and calls with one shape of queries. If there are more, one of eight calls is added."""
    attention = _compiled(mask=fg.full())
    arrays, calls = _arrays(attention.spec), []
    for number in range(1, most + 2):
        q, table = torch.zeros(BATCH, number, HEADS, DIM).half(), torch.zeros(BATCH, number, dtype=torch.int32)
        calls.append(arrays | {name: q if name == "q" else table})
    for given in calls:
        attention(**given)
    found = []
    for given in (calls[-1], calls[1], calls[0], *[calls[0]] * 9):
        lookups.clear()
        attention(**given)
        found.append(not lookups)
    assert found == [True, True, *[False] * 8, True, True], found


def test_repeated_calls_have_their_own_seeds(
    launched: Launched, memory: Memory, lookups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = _compiled(page_size=None, dropout=0.5)
    q, k, v = (torch.zeros(1, 48, HEADS, DIM, dtype=torch.float16) for _ in range(3))
    rows = {"q": q, "k": k[:, :, :HEADS_KV], "v": v[:, :, :HEADS_KV]}
    attention(**rows, seed=1)
    structs = []
    for named in ({"seed": 1}, {"seed": 2**40 + 5}, {"seed": 1, "offset": 8}):
        memory.again()
        expected = _expected(attention, rows | named, launched, monkeypatch)
        lookups.clear()
        memory.again()
        attention(**rows, **named)
        assert launched == expected and expected and not lookups
        structs.append(launched[0][1])
    assert len(set(structs)) == 3
    with pytest.raises(ArgumentError, match="seed is missing"):
        attention(**rows)
    with pytest.raises(ArgumentError, match="offset=-1"):
        attention(**rows, seed=1, offset=-1)


def test_specs_whose_calls_do_more_repeat_nothing(launched: Launched, lookups: Any) -> None:
    """A seed in memory is one more array, tile lists are made in each call, captured numbers may change."""
    q, k, v = (torch.zeros(1, 48, 2, DIM, dtype=torch.float16) for _ in range(3))
    calls: list[tuple[Any, dict[str, Any]]] = [
        (_compiled(page_size=None, dropout=0.5), {"seed": torch.tensor([3])}),
        (_compiled(page_size=None, mask=fg.sliding_window(fg.Scalar("window"), 0)), {"window": 7}),
        (_compiled(page_size=None, mask=fg.document("ids")), {"ids": torch.zeros(48, dtype=torch.int32)}),
    ]
    for attention, named in calls:
        for _ in range(3):
            lookups.clear()
            attention(q, k, v, **named)
            assert lookups


def _step(calls: CallsOfViews, sources: list[torch.Tensor], tokens: int) -> Any:
    """Runs a layer as a server does: the sources are more tokens than the call has, and keys beside values."""
    found = calls.repeat(tokens, sources)
    if found is not None:
        return found
    rows, cache, out, table, lengths = sources
    k, v = cache.transpose(1, 2).chunk(2, -1)
    named = {"page_table": table, "seqused_k": lengths, "out": out[:tokens, None]}
    roles = {"q": 0, "k": 1, "v": 1, "out": 2, "page_table": 3, "seqused_k": 4}
    calls.run(tokens, sources, roles, rows[:tokens, None], k, v=v, **named)
    return None


def _sources(tokens: int) -> list[torch.Tensor]:
    packed = torch.zeros(tokens + 3, HEADS + 2, DIM, dtype=torch.float16)
    cache = torch.zeros(PAGES, HEADS_KV, PAGE, 2 * DIM, dtype=torch.float16)
    out = torch.zeros(tokens + 3, HEADS, DIM, dtype=torch.float16)
    return [packed[:, :HEADS], cache, out, torch.zeros(tokens, 8, dtype=torch.int32), torch.ones(tokens).int()]


def test_views_of_sources(launched: Launched, memory: Memory, lookups: Any) -> None:
    attention = _compiled()
    calls, first = CallsOfViews(attention), _sources(4)
    assert _step(calls, first, 4) is None
    for sources in (_sources(4), first, _sources(4)):
        launched.clear()
        lookups.clear()
        memory.again()
        assert _step(calls, sources, 4) == [] and not lookups
        found = launched.copy()
        launched.clear()
        memory.again()
        _step(CallsOfViews(attention), sources, 4)
        assert found == launched and found
    lookups.clear()
    for sources, tokens in ((first, 3), (_sources(5), 4)):
        sources = [*sources[:3], sources[3][:tokens], sources[4][:tokens]]
        assert _step(calls, sources, tokens) is None, "another number of tokens, or other sources"
    with pytest.raises(ArgumentError, match="shares memory"):
        calls.repeat(4, [first[0], first[1], first[0].as_strided(first[2].shape, first[2].stride()), *first[3:]])


def test_a_copy_of_a_source_is_never_repeated(launched: Launched) -> None:
    attention = _compiled()
    calls, sources = CallsOfViews(attention), _sources(4)
    rows, cache, out, table, lengths = sources
    k, v = cache.transpose(1, 2).chunk(2, -1)
    roles = {"q": 0, "k": 1, "v": 1, "out": 2, "page_table": 3, "seqused_k": 4}
    for q, named in ((rows[:4, None].clone(), roles), (rows[:4, None], {k: n for k, n in roles.items() if k != "v"})):
        given = {"page_table": table, "seqused_k": lengths, "out": out[:4, None]}
        calls.run(4, sources, named, q, k, v=v, **given)
        assert calls.repeat(4, sources) is None
