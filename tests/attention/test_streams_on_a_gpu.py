"""State that launches share on a GPU: reused stream handles, and allocations during graph capture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.runtime import counters
from flashgen.runtime.streams import identity
from flashgen.verify import Shape, random_gradients, random_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.quick]

CAUSAL = fg.AttentionSpec(64, mask=fg.causal())
MANY_TILES = Shape(700, 700, 4, 48, 12)  # more than the multiprocessors of any GPU


@pytest.fixture
def called(cupy: Any) -> Any:
    """Returns a compiled spec, its arrays, and the output of an undisturbed call."""
    inputs, compiled = random_inputs(CAUSAL, MANY_TILES), attention.compile(CAUSAL)
    rows = [cupy.asarray(array) for array in (inputs.q, inputs.k, inputs.v)]
    out = compiled(*rows)
    cupy.cuda.Device().synchronize()
    return compiled, rows, cupy.asnumpy(out)


def test_a_stream_with_the_handle_of_a_destroyed_one(cupy: Any, called: Any) -> None:
    """A stream may be destroyed while it works; the next one gets its handle, but must not get its counter."""
    compiled, rows, expected = called
    outs = [cupy.full(expected.shape, np.nan, rows[0].dtype) for _ in range(400)]
    cupy.cuda.Device().synchronize()
    handles, numbers = set(), set()
    for out in outs:
        stream = cupy.cuda.Stream(non_blocking=True)
        handles.add(stream.ptr)
        numbers.add(identity(stream.ptr))
        with stream:
            compiled(*rows, out=out)
        del stream
    cupy.cuda.Device().synchronize()
    assert len(numbers) == len(outs) > len(handles), "no handle was reused: nothing was tested"
    wrong = sum(not np.array_equal(cupy.asnumpy(out), expected) for out in outs)
    assert wrong == 0, f"{wrong} of {len(outs)}"


def test_counters_are_allocated_during_capture(cupy: Any, called: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of a process may be captured, and a graph may need more counters than one allocation has."""
    compiled, rows, expected = called
    monkeypatch.setattr(counters, "_COUNTERS_PER_ALLOCATION", 2)
    counters.counters.cache_clear()
    outs = [cupy.empty(expected.shape, rows[0].dtype) for _ in range(5)]
    cupy.cuda.Device().synchronize()
    try:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            for out in outs:
                compiled(*rows, out=out)
            graph = stream.end_capture()
        for _ in range(3):
            for out in outs:
                out[...] = cupy.nan
            cupy.cuda.Device().synchronize()
            graph.launch(stream)
            stream.synchronize()
            for out in outs:
                np.testing.assert_array_equal(cupy.asnumpy(out), expected)
    finally:
        counters.counters.cache_clear()


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_a_replay_writes_to_no_other_memory(deterministic: bool, cupy: Any) -> None:
    """Lists and accumulators of a captured call belong to the graph: replays do not write to later allocations."""
    slopes = fg.Tensor("slopes", "float32", 1, grad=True)
    spec = fg.AttentionSpec(64, mask=fg.document("ids"), score=fg.alibi(slopes))
    shape = Shape(300, 300, 2, 4, 2)
    inputs, compiled = random_inputs(spec, shape), attention.compile(spec, deterministic=deterministic)
    rows = [cupy.asarray(array) for array in (inputs.q, inputs.k, inputs.v)]
    captures = {name: cupy.asarray(array) for name, array in inputs.captures.items()}
    d_out = cupy.asarray(random_gradients(spec, shape)[0])
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out, lse = compiled(*rows, return_lse=True, **captures)
        into = tuple(compiled.backward(d_out, *rows, out, lse, **captures))
        expected = [cupy.asnumpy(array) for array in (out, *into)]
        stream.synchronize()
        stream.begin_capture()
        compiled(*rows, return_lse=True, out=(out, lse), **captures)
        compiled.backward(d_out, *rows, out, lse, into=into, **captures)
        graph = stream.end_capture()
        sizes = (64, 512, 1024, 2048, 4096, 16384, 65536, 2**18, 2**20)
        held = [cupy.full(size, 0x7F, cupy.int8) for size in sizes for _ in range(20)]
        for _ in range(3):
            for array in (out, lse, *into):
                array[...] = cupy.nan
            graph.launch(stream)
        stream.synchronize()
        assert all((array == 0x7F).all() for array in held)
    for array, wanted in zip((out, *into), expected, strict=True):
        if deterministic:
            np.testing.assert_array_equal(cupy.asnumpy(array), wanted)
        else:
            np.testing.assert_allclose(cupy.asnumpy(array), wanted, rtol=0, atol=1e-2 * float(abs(wanted).max()))
