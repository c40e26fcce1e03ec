"""Stream-K decoding of sequences of different lengths: correct with and without a schedule; on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import attention
from flashgen.attention import DecodeSchedule
from flashgen.attention.callable import Attention
from flashgen.bench.decode import with_cache
from flashgen.codegen.mma_sync import stream_k
from flashgen.codegen.mma_sync.decode_plans import DecodePlan
from flashgen.codegen.mma_sync.stream_k import INTS_PER_WORK_UNIT
from flashgen.codegen.targets import target_named
from flashgen.errors import ArgumentError
from flashgen.launch.engines import Emulator
from flashgen.runtime.schedule import Schedule
from flashgen.verify import variants
from flashgen.verify.check import judged
from flashgen.verify.problems import Inputs, Shape, poisoned_outputs, random_inputs
from flashgen.verify.variants import spec_of
from paged import call

CAUSAL = fg.AttentionSpec(64, mask=fg.causal(), page_size=16)
PLAN = DecodePlan(16, 16, 2, 2, scheduled=True)
VARIANTS = [variant for variant in variants() if not variant.equal]
DIMS = (64, 128, 40, 96, 32, 256, 80, 192, 8, 160)
LENGTHS = {
    "equal": (96, 96, 96, 96, 96),
    "one is all": (0, 0, 400, 0, 0),
    "borders of pages and tiles": (16, 15, 17, 32, 1),
    "from one to many": (1, 400, 3, 50, 7),
    "none": (0, 0, 0, 0, 0),
    "the first is long": (400, 1, 1, 1, 1),
    "the last is long": (1, 1, 1, 1, 400),
}


def inputs_of(spec: fg.AttentionSpec, lengths: Any, len_q: int = 1, heads: tuple[int, int] = (4, 2)) -> Inputs:
    """Returns pages for 400 keys of each sequence, of which it uses `lengths`."""
    inputs = random_inputs(spec, Shape(len_q, 400, len(lengths), *heads), seed=len_q)
    return with_lengths(inputs, lengths)


def with_lengths(inputs: Inputs, lengths: Any) -> Inputs:
    """Replaces the NaN of unused rows by numbers, since some of them become keys later."""
    for array in (inputs.k, inputs.v):
        if array.dtype.itemsize > 1:
            array[np.isnan(array.astype(np.float32))] = 0
    inputs.captures["seqused_k"] = np.asarray(lengths, np.int32)
    return inputs


def schedule_of(compiled: Attention, inputs: Inputs, made_of: Any = None, **how: Any) -> DecodeSchedule:
    """Returns the schedule of a call, or one for other lengths."""
    heads, len_q = (1, 2) if compiled.spec.layout == "bhsd" else (2, 1)
    return compiled.decode_schedule(
        inputs.q.shape[len_q],
        page_table=inputs.captures["page_table"],
        seqused_k=inputs.captures["seqused_k"] if made_of is None else np.asarray(made_of, np.int32),
        heads=inputs.q.shape[heads],
        heads_kv=inputs.k.shape[2],
        **how,
    )


def assert_right(spec: fg.AttentionSpec, inputs: Inputs, **how: Any) -> None:
    """Checks a call without a schedule, with a schedule (the same bits), and with one for other lengths."""
    compiled = attention.compile(spec, target="sm_80", emulate=True, **how)
    lengths = inputs.captures["seqused_k"]
    schedules = (None, schedule_of(compiled, inputs), schedule_of(compiled, inputs, lengths[::-1] // 2 + 20))
    found = []
    for schedule in schedules:
        found.append(call(compiled, inputs, decode_schedule=schedule))
        verdict = judged(spec, inputs.q, inputs.k, inputs.v, *found[-1], inputs.captures)
        assert verdict.ok, f"{schedule}: {verdict}"
    for own, scheduled in zip(found[0], found[1], strict=True):
        np.testing.assert_array_equal(own, scheduled)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))
@pytest.mark.parametrize(("order", "copies"), [("reverse", "early"), ("greedy_warp", "late"), ("random", "random")])
def test_lengths_and_thread_orders(lengths: tuple[int, ...], order: Any, copies: Any) -> None:
    assert_right(CAUSAL, inputs_of(CAUSAL, lengths), schedule=Schedule(order, copies, seed=len(order)))


@pytest.mark.rotated(3)
@pytest.mark.parametrize(
    ("spec", "len_q", "heads"),
    [
        (fg.AttentionSpec(64, page_size=1), 1, (3, 3)),
        (fg.AttentionSpec(64, mask=fg.sliding_window(70), score=fg.softcap(8.0), page_size=4), 3, (6, 2)),
        (fg.AttentionSpec(40, value_dim=72, layout="bshd", mask=fg.causal(), page_size=256), 9, (4, 1)),
        (fg.AttentionSpec(128, "bfloat16", mask=fg.causal(), page_size=64), 5, (8, 1)),
        (fg.AttentionSpec(64, mask=fg.causal(), page_size=16, kv_dtype="int8"), 2, (4, 2)),
        (fg.AttentionSpec(32, mask=fg.causal(align="top_left"), page_size=8), 20, (2, 1)),
        (fg.AttentionSpec(512, "bfloat16", mask=fg.causal(), page_size=16), 2, (4, 2)),
        (fg.AttentionSpec(264, value_dim=320, mask=fg.sliding_window(70), page_size=64), 9, (2, 1)),
        (fg.AttentionSpec(512, mask=fg.causal(), page_size=16, kv_dtype="int8"), 2, (4, 2)),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_specs(spec: fg.AttentionSpec, len_q: int, heads: tuple[int, int]) -> None:
    """Tiles of rows of several queries and heads, and several such tiles with masks that need different keys."""
    assert_right(spec, inputs_of(spec, (1, 333, 40, 0, 97), len_q, heads))


@pytest.mark.slow
@pytest.mark.rotated(9)
@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=lambda number: f"{VARIANTS[number].mask}-{number}")
def test_every_variant(number: int) -> None:
    """Random lengths with pages of every size; rows that are no keys are NaN; also with dropout."""
    variant = VARIANTS[number]
    spec = spec_of(variant, DIMS[number % 10], ("float16", "bfloat16")[number % 2], ("bhsd", "bshd")[number // 2 % 2])
    spec = with_cache(spec, 1 << number % 9)
    shape = (Shape(1, 301, 5, 4, 2), Shape(5, 280, 4, 6, 2), Shape(20, 90, 3, 3, 1))[number % 3]
    inputs = random_inputs(spec, shape, captures=variant.captures)
    compiled = attention.compile(spec, emulate=True, schedule=Schedule("random", "late", seed=number))
    captures = {name: value for name, value in inputs.captures.items() if name not in ("page_table", "seqused_k")}
    dropout: dict[str, Any] = {"seed": 7} if spec.dropout else {}
    for schedule in (None, schedule_of(compiled, inputs, **captures)):
        found = call(compiled, inputs, decode_schedule=schedule, **dropout)
        verdict = judged(spec, inputs.q, inputs.k, inputs.v, *found, inputs.captures, **dropout)
        assert verdict.ok, f"{schedule}: {verdict}"


@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_under_sanitizers(sanitize: Any) -> None:
    for number, name in enumerate(("from one to many", "borders of pages and tiles", "one is all")):
        schedule = Schedule("random", "late", seed=number)
        assert_right(CAUSAL, inputs_of(CAUSAL, LENGTHS[name], 2), plan=PLAN, sanitize=sanitize, schedule=schedule)


def test_more_sequences_than_threads_in_the_prefix_sum() -> None:
    lengths = np.random.default_rng(0).integers(0, 40, 300).astype(np.int32)
    inputs = with_lengths(random_inputs(CAUSAL, Shape(1, 40, 300, 1, 1)), lengths)
    assert_right(CAUSAL, inputs, plan=DecodePlan(16, 16, 1, 2, scheduled=True))


def test_more_work_units_than_threads_of_the_scheduling_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most units are empty, and one sequence spans dozens."""
    monkeypatch.setattr(Emulator, "multiprocessors", lambda self, device: 300)
    monkeypatch.setattr(stream_k, "choose_splits", lambda *given: 1024)  # as for longer sequences
    spec = fg.AttentionSpec(32, mask=fg.causal(), page_size=16)
    inputs = with_lengths(random_inputs(spec, Shape(1, 2400, 2, 1, 1)), (2400, 5))
    plan = DecodePlan(16, 16, 1, 2, scheduled=True)
    compiled = Attention(spec, target_named("sm_80"), Emulator(), plan)
    schedule = schedule_of(compiled, inputs)
    assert schedule.sizes.num_ctas > 256
    for given in (None, schedule):
        found = call(compiled, inputs, decode_schedule=given)
        assert judged(spec, inputs.q, inputs.k, inputs.v, *found, inputs.captures).ok


def test_windows_with_captured_sizes() -> None:
    """A schedule is computed, and updated, from the tiles that the mask needs."""
    spec = fg.AttentionSpec(32, mask=fg.sliding_window(fg.Scalar("window", "int32")), page_size=16)
    inputs = inputs_of(spec, (400, 30, 300))
    compiled = attention.compile(spec, target="sm_80", emulate=True)
    schedule = schedule_of(compiled, inputs, window=40)
    narrow = int(schedule.memory[-1])
    schedule.update(seqused_k=inputs.captures["seqused_k"], window=10**6)
    assert narrow < int(schedule.memory[-1])
    inputs.captures["window"] = 40
    found = call(compiled, inputs, decode_schedule=schedule)
    assert judged(spec, inputs.q, inputs.k, inputs.v, *found, inputs.captures).ok
    with pytest.raises(ArgumentError, match="capture 'window' is missing: which keys sliding_window"):
        schedule_of(compiled, inputs)


# ---- schedules


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))
def test_work_units_are_equal_and_cover_every_tile_once(lengths: tuple[int, ...]) -> None:
    compiled = attention.compile(CAUSAL, target="sm_80", emulate=True)
    schedule = schedule_of(compiled, inputs_of(CAUSAL, lengths))
    sizes, memory = schedule.sizes, schedule.memory
    runs = memory[: sizes.num_ctas * INTS_PER_WORK_UNIT].reshape(-1, INTS_PER_WORK_UNIT)
    starts = memory[sizes.num_ctas * INTS_PER_WORK_UNIT :]
    tiles = np.maximum(-(-np.asarray(lengths) // sizes.plan.tile_k), 1)
    np.testing.assert_array_equal(np.diff(starts), tiles + sizes.plan.tile_overhead)
    assert starts[0] == 0 and len(set(runs[:, 2])) == 1
    length = int(runs[0, 2])
    assert length == max(-(-int(starts[-1]) // sizes.num_ctas), sizes.plan.warps)
    for column, (start, stop, _, unit) in enumerate(runs.tolist()):
        later = [u for u in range(len(tiles)) if starts[u] + tiles[u] > column * length]
        assert unit == (later[0] if later else len(tiles)), (
            "the first sequence with a tile at or after the begin of the work unit"
        )
        if later:
            assert (start, stop) == (starts[unit], starts[unit + 1])


def test_which_calls_use_stream_k() -> None:
    compiled = attention.compile(CAUSAL, target="sm_80", emulate=True)
    several, one = compiled.plan_for(1, 512, 2, 4, 2), compiled.plan_for(1, 512, 1, 4, 2)
    assert isinstance(several, DecodePlan) and several.scheduled
    assert isinstance(one, DecodePlan) and not one.scheduled
    plain = attention.compile(fg.AttentionSpec(64), target="sm_80", emulate=True)
    assert not plain.plan_for(1, 512, 2, 4, 2).scheduled, "the host knows the lengths"


def test_an_update_allocates_nothing_and_other_lengths_are_right() -> None:
    compiled = attention.compile(CAUSAL, target="sm_80", emulate=True)
    inputs = inputs_of(CAUSAL, (50, 60, 70))
    schedule = schedule_of(compiled, inputs)
    memory = schedule.memory
    for lengths in ((400, 1, 0), (0, 0, 0), (17, 300, 16)):
        inputs.captures["seqused_k"] = np.asarray(lengths, np.int32)
        schedule.update(seqused_k=inputs.captures["seqused_k"])
        assert schedule.memory is memory
        found = call(compiled, inputs, decode_schedule=schedule)
        assert judged(CAUSAL, inputs.q, inputs.k, inputs.v, *found, inputs.captures).ok


def test_layers_with_another_mask_share_a_schedule() -> None:
    full = attention.compile(CAUSAL, target="sm_80", emulate=True)
    spec = fg.AttentionSpec(64, mask=fg.sliding_window(30), page_size=16)
    inputs = inputs_of(spec, (400, 50, 3))
    found = call(
        attention.compile(spec, target="sm_80", emulate=True), inputs, decode_schedule=schedule_of(full, inputs)
    )
    assert judged(spec, inputs.q, inputs.k, inputs.v, *found, inputs.captures).ok


def test_counters_are_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a schedule of other lengths, so that later launches count correctly."""
    made: list[np.ndarray[Any, Any]] = []

    def counter(self: Emulator, place: Any, count: int) -> np.ndarray[Any, Any]:
        made.append(np.zeros(count, np.uint32))
        return made[-1]

    monkeypatch.setattr(Emulator, "counter", counter)
    compiled = attention.compile(CAUSAL, target="sm_80", emulate=True)
    inputs = inputs_of(CAUSAL, (400, 3, 170))
    for schedule in (None, schedule_of(compiled, inputs), schedule_of(compiled, inputs, (0, 400, 3))):
        call(compiled, inputs, decode_schedule=schedule)
    assert len(made) == 3 and all(len(counters) for counters in made)
    assert not any(counters.any() for counters in made)


def test_num_splits_makes_bits_independent_of_the_batch() -> None:
    """The bits of a sequence do not depend on the other sequences."""
    compiled = attention.compile(CAUSAL, target="sm_80", emulate=True)
    inputs = inputs_of(CAUSAL, (400, 3, 170))
    first, _ = call(compiled, inputs, num_splits=3)
    inputs.captures["seqused_k"] = np.array([400, 200, 1], np.int32)
    np.testing.assert_array_equal(call(compiled, inputs, num_splits=3)[0][0], first[0])


# ---- refusals


def test_a_schedule_of_other_sizes_is_refused() -> None:
    compiled = attention.compile(CAUSAL, target="sm_80", emulate=True)
    inputs = inputs_of(CAUSAL, (50, 60, 70))
    others = {
        "batch=2 and this call has 3": inputs_of(CAUSAL, (50, 60)),
        "heads=6 and this call has 4": inputs_of(CAUSAL, (50, 60, 70), heads=(6, 2)),
        "heads_kv=4 and this call has 2": inputs_of(CAUSAL, (50, 60, 70), heads=(4, 4)),
        "len_q=2 and this call has 1": inputs_of(CAUSAL, (50, 60, 70), 2),
    }
    for said, other in others.items():
        with pytest.raises(ArgumentError, match=f"decode_schedule was made for {said}"):
            call(compiled, inputs, decode_schedule=schedule_of(compiled, other))
    wide = attention.compile(fg.AttentionSpec(128, page_size=16), target="sm_80", emulate=True)
    with pytest.raises(ArgumentError, match="make it by an attention of the same head dims"):
        call(compiled, inputs, decode_schedule=schedule_of(wide, inputs))


def test_invalid_schedules_are_refused() -> None:
    compiled = attention.compile(CAUSAL, target="sm_80", emulate=True)
    inputs = inputs_of(CAUSAL, (50, 60, 70))
    with pytest.raises(ArgumentError, match=r"of type int: give what attention\.decode_schedule\(\.\.\.\) made"):
        call(compiled, inputs, decode_schedule=3)
    schedule = schedule_of(compiled, inputs)
    with pytest.raises(ArgumentError, match="decode_schedule and num_splits=2 both"):
        call(compiled, inputs, decode_schedule=schedule, num_splits=2)
    plain = attention.compile(fg.AttentionSpec(64), target="sm_80", emulate=True)
    q = np.zeros((3, 4, 1, 64), np.float16)
    with pytest.raises(ArgumentError, match="decode_schedule is for keys in pages"):
        plain(q, q, q, decode_schedule=schedule)
    with pytest.raises(ArgumentError, match="decode_schedule is for keys in pages"):
        schedule_of(plain, inputs)
    split = attention.compile(CAUSAL, target="sm_80", emulate=True, plan=DecodePlan(16, 16, 2, 2))
    with pytest.raises(ArgumentError, match="takes no schedule; compile without plan="):
        call(split, inputs, decode_schedule=schedule)
    shared = attention.compile(CAUSAL, target="sm_80", emulate=True, plan=PLAN)
    with pytest.raises(ArgumentError, match=r"num_splits=2: DecodePlan\(.*\) splits keys by the lengths of"):
        call(shared, inputs, num_splits=2)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        (np.array([1, 2, 3], np.int64), "seqused_k is int64"),
        (np.array([1, 2], np.int32), r"seqused_k is int32 \(2,\); give int32 \(3,\)"),
        (np.array([1, 2, 3, 4, 5, 6], np.int32)[::2], "seqused_k has strides"),
    ],
    ids=["dtype", "batch", "strides"],
)
def test_invalid_lengths_are_refused(lengths: Any, said: str) -> None:
    compiled = attention.compile(CAUSAL, target="sm_80", emulate=True)
    schedule = schedule_of(compiled, inputs_of(CAUSAL, (50, 60, 70)))
    with pytest.raises(ArgumentError, match=said):
        schedule.update(seqused_k=lengths)


# ---- on a GPU


def on_gpu(cupy: Any, inputs: Inputs) -> tuple[list[Any], dict[str, Any]]:
    arrays = [cupy.asarray(array) for array in (inputs.q, inputs.k, inputs.v)]
    return arrays, {name: cupy.asarray(value) for name, value in inputs.captures.items()}


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))
def test_lengths_on_a_gpu(lengths: tuple[int, ...]) -> None:
    cupy = pytest.importorskip("cupy")
    inputs = with_lengths(random_inputs(CAUSAL, Shape(2, 6400, 40, 8, 2)), np.tile(np.asarray(lengths) * 16, 8))
    arrays, captures = on_gpu(cupy, inputs)
    compiled = attention.compile(CAUSAL)
    schedule = compiled.decode_schedule(2, **captures, heads=8, heads_kv=2)
    stale = compiled.decode_schedule(2, page_table=captures["page_table"], heads=8, heads_kv=2,
                                     seqused_k=captures["seqused_k"][::-1].copy())  # fmt: skip
    found = []
    for given in (None, schedule, stale):
        out, lse = (cupy.asarray(array) for array in poisoned_outputs(CAUSAL, inputs.q))
        compiled(*arrays, return_lse=True, out=(out, lse), decode_schedule=given, **captures)
        found.append((cupy.asnumpy(out), cupy.asnumpy(lse)))
        assert judged(CAUSAL, inputs.q, inputs.k, inputs.v, *found[-1], inputs.captures).ok
    np.testing.assert_array_equal(found[0][0], found[1][0])


@pytest.mark.gpu
@pytest.mark.quick
def test_a_graph_with_schedule_and_attention_follows_the_lengths() -> None:
    cupy = pytest.importorskip("cupy")
    inputs = with_lengths(random_inputs(CAUSAL, Shape(1, 3200, 24, 8, 2)), [3200] * 24)
    arrays, captures = on_gpu(cupy, inputs)
    compiled, random = attention.compile(CAUSAL), np.random.default_rng(0)
    schedule = compiled.decode_schedule(**captures, heads=8, heads_kv=2)
    outs = [cupy.empty_like(arrays[0]) for _ in range(3)]
    compiled(*arrays, decode_schedule=schedule, **captures)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        schedule.update(seqused_k=captures["seqused_k"])
        for out in outs:
            compiled(*arrays, out=out, decode_schedule=schedule, **captures)
        graph = stream.end_capture()
        for _ in range(20):
            lengths = random.integers(0, 3200, 24).astype(np.int32)
            captures["seqused_k"].set(lengths)
            graph.launch(stream)
            stream.synchronize()
            inputs.captures["seqused_k"] = lengths
            out, lse = compiled(*arrays, return_lse=True, **captures)
            host = cupy.asnumpy(outs[-1])
            assert judged(CAUSAL, inputs.q, inputs.k, inputs.v, host, cupy.asnumpy(lse), inputs.captures).ok
            for other in (out, *outs[:-1]):
                np.testing.assert_array_equal(cupy.asnumpy(other), host)


@pytest.mark.gpu
@pytest.mark.quick
def test_threads_and_streams_share_a_schedule() -> None:
    """The schedule is computed on one stream and waited for; two threads launch on each of four streams."""
    cupy = pytest.importorskip("cupy")
    inputs = with_lengths(random_inputs(CAUSAL, Shape(1, 3200, 24, 8, 2)), [3200, 1, 70, 500] * 6)
    arrays, captures = on_gpu(cupy, inputs)
    compiled = attention.compile(CAUSAL)
    schedule = compiled.decode_schedule(**captures, heads=8, heads_kv=2)
    expected = compiled(*arrays, decode_schedule=schedule, **captures)
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]

    def work(number: int) -> bool:
        with streams[number % 4]:
            outs = [compiled(*arrays, decode_schedule=schedule, **captures) for _ in range(50)]
            streams[number % 4].synchronize()
            return all(bool((out == expected).all()) for out in outs)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))


@pytest.mark.gpu
def test_a_schedule_is_bound_to_its_gpu() -> None:
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    inputs = with_lengths(random_inputs(CAUSAL, Shape(1, 320, 3, 4, 2)), [320, 1, 70])
    compiled = attention.compile(CAUSAL)
    with cupy.cuda.Device(1):
        arrays, captures = on_gpu(cupy, inputs)
    schedule = compiled.decode_schedule(**captures, heads=4, heads_kv=2)  # another GPU is current
    out, lse = compiled(*arrays, decode_schedule=schedule, return_lse=True, **captures)
    with cupy.cuda.Device(1):
        found = cupy.asnumpy(out), cupy.asnumpy(lse)
    assert judged(CAUSAL, inputs.q, inputs.k, inputs.v, *found, inputs.captures).ok
    with pytest.raises(ArgumentError, match="seqused_k is on GPU 0, the schedule on 1"):
        schedule.update(seqused_k=cupy.asarray(inputs.captures["seqused_k"]))
