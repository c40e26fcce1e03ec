"""Calls on a GPU: arrays of every library, streams, and graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.build import nvrtc
from flashgen.codegen.targets import TARGETS
from flashgen.errors import ArgumentError, LaunchError
from flashgen.verify import Inputs, Shape, random_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.quick]

SHAPE = Shape(70, 150, 2, 4, 2)
CAUSAL = fg.AttentionSpec(64, mask=fg.causal())
DOCUMENT = fg.AttentionSpec(64, mask=fg.document("ids"))
DTYPES = ("float16", "bfloat16")


@pytest.fixture(params=["by default", "the other family"])
def here(request: pytest.FixtureRequest) -> Callable[..., attention.Attention]:
    """Returns `compile` for this GPU, for each family that runs on it."""
    target = None if request.param == "by default" else request.getfixturevalue("other_target")
    return partial(attention.compile, target=target)


def spec_of(dtype: str) -> fg.AttentionSpec:
    return fg.AttentionSpec(64, dtype, mask=fg.causal(), score=fg.alibi("slopes"))


def on_gpu(cupy: Any, inputs: Inputs) -> list[Any]:
    return [cupy.asarray(array) for array in (inputs.q, inputs.k, inputs.v)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy(dtype: str, cupy: Any, right: Any, here: Any) -> None:
    spec = spec_of(dtype)
    inputs, compiled = random_inputs(spec, SHAPE), here(spec)
    q, k, v = on_gpu(cupy, inputs)
    slopes = cupy.asarray(inputs.captures["slopes"])
    out, lse = compiled(q, k, v, slopes=slopes, return_lse=True)
    assert isinstance(out, cupy.ndarray) and out.dtype == q.dtype and lse.dtype == np.float32
    right(spec, inputs, cupy.asnumpy(out), cupy.asnumpy(lse))
    given = cupy.full_like(out, np.nan)
    assert compiled(q, k, v, slopes=slopes, out=given) is given
    assert (given == out).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy(dtype: str, right: Any, here: Any) -> None:
    spec = spec_of(dtype)
    inputs, compiled = random_inputs(spec, SHAPE), here(spec)
    out, lse = compiled(inputs.q, inputs.k, inputs.v, return_lse=True, **inputs.captures)
    assert isinstance(out, np.ndarray) and out.dtype == inputs.q.dtype
    right(spec, inputs, out, lse)
    given = np.full_like(out, np.nan)
    assert compiled(inputs.q, inputs.k, inputs.v, out=given, **inputs.captures) is given
    np.testing.assert_array_equal(given, out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch(dtype: str, right: Any, here: Any) -> None:
    torch = pytest.importorskip("torch")
    spec = spec_of(dtype)
    inputs, compiled = random_inputs(spec, SHAPE), here(spec)

    def tensor(array: np.ndarray[Any, Any]) -> Any:
        return torch.from_numpy(array.astype(np.float32)).cuda().to(getattr(torch, dtype))

    q, k, v = (tensor(array) for array in (inputs.q, inputs.k, inputs.v))
    slopes = torch.from_numpy(inputs.captures["slopes"]).cuda()
    out, lse = compiled(q, k, v, slopes=slopes, return_lse=True)
    assert isinstance(out, torch.Tensor) and out.dtype == q.dtype and out.device == q.device
    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    right(spec, inputs, out.float().cpu().numpy().astype(numpy_dtype), lse.cpu().numpy())
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(compiled(strided, k, v, slopes=slopes), out)
    given = torch.full_like(out, float("nan"))
    assert compiled(q, k, v, slopes=slopes, out=given) is given and torch.equal(given, out)
    with torch.cuda.stream(torch.cuda.Stream()):
        again = compiled(q, k, v, slopes=slopes)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(again, out)
    with pytest.raises(ArgumentError, match="k is a torch tensor on cpu"):
        compiled(q, k.cpu(), v, slopes=slopes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax(dtype: str, right: Any, here: Any) -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    spec = spec_of(dtype)
    inputs, compiled = random_inputs(spec, SHAPE), here(spec)
    q, k, v, slopes = (jax.numpy.asarray(array) for array in (inputs.q, inputs.k, inputs.v, inputs.captures["slopes"]))
    out, lse = compiled(q, k, v, slopes=slopes, return_lse=True)
    assert isinstance(out, jax.Array) and out.dtype == q.dtype
    right(spec, inputs, np.asarray(out), np.asarray(lse))
    with pytest.raises(ArgumentError, match="out is read-only"):
        compiled(q, k, v, slopes=slopes, out=q)


def test_arrays_on_different_devices_are_refused(cupy: Any) -> None:
    inputs, compiled = random_inputs(CAUSAL, SHAPE), attention.compile(CAUSAL)
    q, k, v = on_gpu(cupy, inputs)
    with pytest.raises(ArgumentError, match="k is on the CPU and q on GPU 0; move it to the device of q"):
        compiled(q, inputs.k, v)
    with pytest.raises(ArgumentError, match="out is on the CPU and q on GPU 0"):
        compiled(q, k, v, out=np.empty_like(inputs.q))
    with pytest.raises(ArgumentError, match="q of type list"):
        compiled([1.0], k, v)
    odd = cupy.empty(q.size + 8, q.dtype)[1 : q.size + 1].reshape(q.shape)
    with pytest.raises(ArgumentError, match="out at address"):
        compiled(q, k, v, out=odd)


def test_a_kernel_for_another_gpu_is_refused(cupy: Any) -> None:
    own = int(cupy.cuda.Device().compute_capability)
    other = next(name for name, target in TARGETS.items() if target.compute_capability // 10 != own // 10)
    q, k, v = on_gpu(cupy, random_inputs(CAUSAL, SHAPE))
    with pytest.raises(LaunchError, match=f"compiled for {other}"):
        attention.compile(CAUSAL, target=other)(q, k, v)


@pytest.mark.parametrize("spec", [CAUSAL, DOCUMENT], ids=["ranges", "lists"])
def test_the_callers_stream_is_used(spec: fg.AttentionSpec, cupy: Any, right: Any, here: Any) -> None:
    """The inputs are computed late on a stream of the caller; the call waits because it uses the same stream."""
    compiled = here(spec)
    shape = Shape(150, 150, 2, 4, 2)
    inputs = random_inputs(spec, shape)
    captures = {name: cupy.asarray(array) for name, array in inputs.captures.items()}
    there = on_gpu(cupy, inputs)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        late = [cupy.zeros_like(array) for array in there]
        busy = cupy.ones((4096, 4096), cupy.float32)
        for _ in range(10):
            busy = busy @ busy * 1e-4
        for source, target in zip(there, late, strict=True):
            target[...] = source
        out, lse = compiled(*late, return_lse=True, **captures)
        stream.synchronize()
    right(spec, inputs, cupy.asnumpy(out), cupy.asnumpy(lse))


@pytest.mark.parametrize("spec", [CAUSAL, DOCUMENT], ids=["ranges", "lists"])
def test_graph_capture(spec: fg.AttentionSpec, cupy: Any, right: Any, here: Any) -> None:
    """A call is captured once and replayed on new inputs, after other calls have used the memory in between."""
    compiled, shape = here(spec), Shape(150, 150, 2, 4, 2)
    inputs = random_inputs(spec, shape)
    q, k, v = on_gpu(cupy, inputs)
    captures = {name: cupy.asarray(array) for name, array in inputs.captures.items()}
    out, lse = compiled(q, k, v, return_lse=True, **captures)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        compiled(q, k, v, return_lse=True, out=(out, lse), **captures)
        stream.synchronize()
        stream.begin_capture()
        compiled(q, k, v, return_lse=True, out=(out, lse), **captures)
        graph = stream.end_capture()
        for seed in (5, 6):
            new = random_inputs(spec, shape, seed)
            for target, source in zip((q, k, v), on_gpu(cupy, new), strict=True):
                target[...] = source
            for name, array in captures.items():
                array[...] = cupy.asarray(new.captures[name])
            littered = [cupy.full(size, 0x7F, cupy.int8) for size in (64, 512, 4096, 65536) for _ in range(8)]
            out[...], lse[...] = cupy.nan, cupy.nan
            graph.launch(stream)
            stream.synchronize()
            assert littered
            right(spec, new, cupy.asnumpy(out), cupy.asnumpy(lse))


GRAPHS = Shape(200, 200, 4, 48, 12)


def test_concurrent_graphs_and_streams_have_separate_counters(cupy: Any, here: Any, right: Any) -> None:
    """Two graphs and calls run at once; a replay writes to no memory that others hold."""
    compiled, inputs = here(CAUSAL), random_inputs(CAUSAL, GRAPHS)
    rows = on_gpu(cupy, inputs)
    out, lse = compiled(*rows, return_lse=True)
    expected = cupy.asnumpy(out)
    right(CAUSAL, inputs, expected, cupy.asnumpy(lse))
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    outs, graphs = [cupy.empty_like(out) for _ in streams], []
    cupy.cuda.Device().synchronize()
    for stream, into in zip(streams[:2], outs, strict=False):
        with stream:
            stream.begin_capture()
            for _ in range(3):
                compiled(*rows, out=into)
            graphs.append(stream.end_capture())
    held = [cupy.full(size, 0x7F, cupy.int8) for size in (4, 64, 512, 4096, 65536) for _ in range(20)]
    for _ in range(20):
        for into in outs:
            into[...] = cupy.nan
        cupy.cuda.Device().synchronize()
        for stream, graph in zip(streams[:2], graphs, strict=True):
            graph.launch(stream)
        with streams[2]:
            compiled(*rows, out=outs[2])
        cupy.cuda.Device().synchronize()
        for into in outs:
            np.testing.assert_array_equal(cupy.asnumpy(into), expected)
    assert all((array == 0x7F).all() for array in held)


def test_graph_capture_with_torch(here: Any) -> None:
    torch = pytest.importorskip("torch")
    compiled = here(CAUSAL)
    q, k, v = (torch.randn(4, 48, 200, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    expected = compiled(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(q, k, v)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


def test_strides(cupy: Any, here: Any) -> None:
    """Broadcast arrays, views of larger ones, dimensions of size 1, outputs with other strides."""
    compiled = here(CAUSAL)
    q, k, v = on_gpu(cupy, random_inputs(CAUSAL, Shape(150, 150, 2, 4, 4)))

    def same(*rows: Any) -> None:
        expected = compiled(*map(cupy.ascontiguousarray, rows))
        cupy.testing.assert_array_equal(compiled(*rows), expected)
        larger = cupy.full((2, 150, 4, 2, 80), np.nan, q.dtype)
        batch, heads, length, _ = rows[0].shape
        out = larger[:batch, :length, :heads, 1, 8:72].transpose(0, 2, 1, 3)
        assert compiled(*rows, out=out) is out
        cupy.testing.assert_array_equal(out, expected)
        assert int(cupy.isnan(larger).sum()) == larger.size - out.size

    same(q, k, v)
    same(q[:, :, ::2], k[:, :2, 3:], v[:, 2:, 3:])
    same(*(row.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3) for row in (q, k, v)))
    for axes in ((0,), (1,), (0, 1), (2,)):
        one = tuple(slice(1) if axis in axes else slice(None) for axis in range(4))
        k_all, v_all = (cupy.broadcast_to(array[one], array.shape) for array in (k, v))
        assert all(k_all.strides[axis] == 0 for axis in axes)
        same(q, k_all, v_all)
        same(cupy.broadcast_to(q[one], q.shape), k_all, v)
    base = cupy.arange(2 * 4 * 2048, dtype=np.float32).astype(q.dtype) % 7 - 3
    same(q, cupy.lib.stride_tricks.as_strided(base, q.shape, (4 * 2048 * 2, 2048 * 2, 16, 2)), v)  # overlapping rows
    odd = [cupy.lib.stride_tricks.as_strided(row, (1, 1, 150, 64), (6, 10, 128, 2)) for row in (q, k, v)]
    same(*odd)
    nothing = cupy.zeros(9, q.dtype)[1:][:0].reshape(2, 4, 0, 64)
    assert (compiled(q, nothing, nothing) == 0).all() and compiled(nothing, k, v).shape == nothing.shape


def test_sizes_do_not_recompile(cupy: Any, monkeypatch: pytest.MonkeyPatch, right: Any, here: Any) -> None:
    compiled = here(CAUSAL)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a call compiled a kernel")

    monkeypatch.setattr(nvrtc, "compile", refuse)
    for shape in (Shape(1, 1, 1, 1, 1), Shape(33, 70, 3, 6, 2), Shape(500, 20, 1, 2, 1), Shape(0, 9, 1, 1, 1)):
        inputs = random_inputs(CAUSAL, shape)
        out, lse = compiled(*on_gpu(cupy, inputs), return_lse=True)
        right(CAUSAL, inputs, cupy.asnumpy(out), cupy.asnumpy(lse))


def test_lengths_of_0(cupy: Any, here: Any) -> None:
    compiled = here(CAUSAL)
    for shape in (Shape(0, 5, 1, 2, 2), Shape(5, 0, 1, 2, 2), Shape(5, 5, 0, 2, 2), Shape(5, 5, 1, 0, 0)):
        out, lse = compiled(*on_gpu(cupy, random_inputs(CAUSAL, shape)), return_lse=True)
        assert out.shape == (shape.batch, shape.heads_q, shape.len_q, 64)
        assert (out == 0).all() and (lse == -np.inf).all()


def test_the_second_gpu(cupy: Any, right: Any) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU is visible, two are needed")
    inputs, compiled = random_inputs(CAUSAL, SHAPE), attention.compile(CAUSAL)
    first = on_gpu(cupy, inputs)
    with cupy.cuda.Device(1):
        second = on_gpu(cupy, inputs)
    for arrays, device in ((second, 1), (first, 0)):
        out, lse = compiled(*arrays, return_lse=True)
        assert out.device.id == device
        with cupy.cuda.Device(device):
            cupy.cuda.Device().synchronize()
            right(CAUSAL, inputs, cupy.asnumpy(out), cupy.asnumpy(lse))
    with pytest.raises(ArgumentError, match="k is on GPU 1 and q on GPU 0"):
        compiled(first[0], second[1], first[2])
