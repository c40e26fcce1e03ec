"""Backward calls on a GPU: arrays of every library, streams, graphs, memory, reproducible bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.attention import Gradients
from flashgen.build import nvrtc
from flashgen.errors import ArgumentError
from flashgen.verify import Inputs, Shape, random_gradients, random_inputs

pytestmark = pytest.mark.gpu

# Sixteen heads, because the largest error of few slope gradients may be small by chance.
SHAPE, SQUARE = Shape(70, 150, 1, 16, 8), Shape(150, 150, 1, 16, 8)
CAUSAL = fg.AttentionSpec(64, mask=fg.causal())
DOCUMENT = fg.AttentionSpec(64, mask=fg.document("ids"))
LATENT = fg.AttentionSpec(192, "bfloat16", value_dim=128, mask=fg.causal())  # sm_90a computes dQ in chunks
DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
MODES = pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
MASKS = pytest.mark.parametrize("spec", [CAUSAL, DOCUMENT], ids=["ranges", "lists"])
SLOPES, BIAS = fg.Tensor("slopes", grad=True), fg.Tensor("bias", "float16", 2, grad=True)


def learned(dtype: str, dropout: float = 0.0) -> fg.AttentionSpec:
    """A causal spec with two captures that have gradients."""

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + SLOPES[h] * (k - q) + BIAS[h, k]

    return fg.AttentionSpec(64, dtype, mask=fg.causal(), score=score, dropout=dropout)


def rows_on_gpu(cupy: Any, inputs: Inputs) -> list[Any]:
    return [cupy.asarray(array) for array in (inputs.q, inputs.k, inputs.v)]


def captures_on_gpu(cupy: Any, inputs: Inputs) -> dict[str, Any]:
    return {name: cupy.asarray(array) for name, array in inputs.captures.items()}


def at_home(gradients: Gradients, move: Any) -> Gradients:
    return Gradients(*map(move, gradients[:3]), {name: move(array) for name, array in gradients.captures.items()})


@MODES
@DTYPES
@pytest.mark.quick
def test_cupy(dtype: str, deterministic: bool, cupy: Any, gradients_right: Any) -> None:
    spec = learned(dtype)
    compiled, inputs = attention.compile(spec, deterministic=deterministic), random_inputs(spec, SHAPE)
    d_out, d_lse = random_gradients(spec, SHAPE, of_lse=True)
    rows, captures = rows_on_gpu(cupy, inputs), captures_on_gpu(cupy, inputs)
    _, pullback = compiled.vjp(*rows, **captures)
    gradients = pullback(cupy.asarray(d_out), cupy.asarray(d_lse))
    assert all(isinstance(gradient, cupy.ndarray) for gradient in gradients)
    assert [gradient.dtype for gradient in gradients[:3]] == [rows[0].dtype] * 3
    gradients_right(spec, inputs, d_out, at_home(gradients, cupy.asnumpy), d_lse=d_lse)
    into = tuple(cupy.full_like(gradient, np.nan) for gradient in gradients)
    given = pullback(cupy.asarray(d_out), cupy.asarray(d_lse), into=into)
    assert all(one is other for one, other in zip(given, into, strict=True))
    gradients_right(spec, inputs, d_out, at_home(given, cupy.asnumpy), d_lse=d_lse)


@MODES
@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("layout", ["bhsd", "thd"])
@pytest.mark.quick
def test_sinks_without_a_key(layout: str, library: str, deterministic: bool) -> None:
    """Arrays without elements have a null address; the gradient of a sink is that of the LSE."""
    module = pytest.importorskip(library)
    spec = fg.AttentionSpec(64, layout=layout, sink=fg.Tensor("sinks", "float32", 1, grad=True))
    compiled = attention.compile(spec, deterministic=deterministic)
    for len_q, len_k in ((5, 0), (0, 5), (0, 0), (1, 0), (1, 1)):
        shape = (len_q, 4, 64) if layout == "thd" else (1, 4, len_q, 64)
        of_keys = (len_k, 2, 64) if layout == "thd" else (1, 2, len_k, 64)
        with_device = {"device": "cuda"} if library == "torch" else {}
        q, d_out = (module.ones(shape, dtype=module.float16, **with_device) for _ in range(2))
        k, v = (module.ones(of_keys, dtype=module.float16, **with_device) for _ in range(2))
        sinks = module.ones(4, dtype=module.float32, **with_device)
        starts = {name: [0, rows] for name, rows in (("cu_seqlens_q", len_q), ("cu_seqlens_k", len_k))}
        make = module.asarray if library == "cupy" else module.tensor
        ragged = {name: make(each, dtype=module.int32, **with_device) for name, each in starts.items()}
        given = {"sinks": sinks} | (ragged if layout == "thd" else {})
        out, lse = compiled(q, k, v, return_lse=True, **given)
        made = compiled.backward(d_out, q, k, v, out, lse, d_lse=module.ones_like(lse), **given)
        assert made.dq.shape == q.shape and made.dk.shape == k.shape
        if not len_k:
            assert bool((made.dq == 0).all()) and made.captures["sinks"].tolist() == [len_q] * 4


@DTYPES
@pytest.mark.quick
def test_numpy(dtype: str, cupy: Any, gradients_right: Any) -> None:
    spec = learned(dtype)
    compiled, inputs = attention.compile(spec), random_inputs(spec, SHAPE)
    d_out, d_lse = random_gradients(spec, SHAPE, of_lse=True)
    _, pullback = compiled.vjp(inputs.q, inputs.k, inputs.v, **inputs.captures)
    gradients = pullback(d_out, d_lse)
    assert all(isinstance(gradient, np.ndarray) for gradient in gradients)
    gradients_right(spec, inputs, d_out, gradients, d_lse=d_lse)
    into = tuple(np.full_like(gradient, np.nan) for gradient in gradients)
    given = pullback(d_out, d_lse, into=into)
    assert all(one is other for one, other in zip(given, into, strict=True))
    gradients_right(spec, inputs, d_out, given, d_lse=d_lse)
    mixed = inputs.captures | {"bias": cupy.asarray(inputs.captures["bias"])}  # stays in the memory of the caller
    _, pullback = compiled.vjp(inputs.q, inputs.k, inputs.v, **mixed)
    gradients = pullback(d_out)
    assert isinstance(gradients.captures["bias"], cupy.ndarray) and isinstance(gradients.captures["slopes"], np.ndarray)


@MODES
@DTYPES
@pytest.mark.quick
def test_torch(dtype: str, deterministic: bool, gradients_right: Any) -> None:
    torch = pytest.importorskip("torch")
    spec = learned(dtype)
    compiled, inputs = attention.compile(spec, deterministic=deterministic), random_inputs(spec, SHAPE)
    d_out, _ = random_gradients(spec, SHAPE)

    def tensor(array: np.ndarray[Any, Any]) -> Any:
        kind = getattr(torch, str(array.dtype))
        return torch.from_numpy(array.astype(np.float32)).cuda().to(kind)

    def home(gradient: Any) -> np.ndarray[Any, Any]:
        kinds = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16, torch.float32: np.float32}
        return gradient.float().cpu().numpy().astype(kinds[gradient.dtype])

    q, k, v = (tensor(array) for array in (inputs.q, inputs.k, inputs.v))
    captures = {name: tensor(array) for name, array in inputs.captures.items()}
    out, lse = compiled(q, k, v, return_lse=True, **captures)
    gradients = compiled.backward(tensor(d_out), q, k, v, out, lse, **captures)
    assert all(isinstance(gradient, torch.Tensor) and gradient.device == q.device for gradient in gradients)
    gradients_right(spec, inputs, d_out, at_home(gradients, home))
    into = tuple(torch.full_like(gradient, float("nan")) for gradient in gradients)
    strided = tensor(d_out).transpose(1, 2).contiguous().transpose(1, 2)
    given = compiled.backward(strided, q, k, v, out, lse, into=into, **captures)
    assert all(one is other for one, other in zip(given, into, strict=True))
    gradients_right(spec, inputs, d_out, at_home(given, home))
    with torch.cuda.stream(torch.cuda.Stream()):
        again = compiled.backward(tensor(d_out), q, k, v, out, lse, **captures)
        torch.cuda.current_stream().synchronize()
    gradients_right(spec, inputs, d_out, at_home(again, home))
    with pytest.raises(ArgumentError, match="d_out is a torch tensor on cpu"):
        compiled.backward(tensor(d_out).cpu(), q, k, v, out, lse, **captures)


@DTYPES
@pytest.mark.quick
def test_jax(dtype: str, gradients_right: Any) -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    spec = learned(dtype)
    compiled, inputs = attention.compile(spec), random_inputs(spec, SHAPE)
    d_out, _ = random_gradients(spec, SHAPE)
    q, k, v = (jax.numpy.asarray(array) for array in (inputs.q, inputs.k, inputs.v))
    captures = {name: jax.numpy.asarray(array) for name, array in inputs.captures.items()}
    _, pullback = compiled.vjp(q, k, v, **captures)
    gradients = pullback(jax.numpy.asarray(d_out))
    assert all(isinstance(gradient, jax.Array) for gradient in gradients)
    gradients_right(spec, inputs, d_out, at_home(gradients, np.asarray))
    with pytest.raises(ArgumentError, match="dq is read-only"):
        pullback(jax.numpy.asarray(d_out), into=gradients)


@pytest.mark.quick
def test_arrays_on_different_devices_are_refused(cupy: Any) -> None:
    inputs, compiled = random_inputs(CAUSAL, SHAPE), attention.compile(CAUSAL)
    d_out, _ = random_gradients(CAUSAL, SHAPE)
    rows = rows_on_gpu(cupy, inputs)
    out, lse = compiled(*rows, return_lse=True)
    with pytest.raises(ArgumentError, match="d_out is on the CPU and q on GPU 0; move it to the device of q"):
        compiled.backward(d_out, *rows, out, lse)
    with pytest.raises(ArgumentError, match="lse is on the CPU and q on GPU 0"):
        compiled.backward(cupy.asarray(d_out), *rows, out, cupy.asnumpy(lse))
    with pytest.raises(ArgumentError, match="dv is on the CPU"):
        into = (*map(cupy.empty_like, rows[:2]), np.empty_like(inputs.v))
        compiled.backward(cupy.asarray(d_out), *rows, out, lse, into=into)


@MODES
@MASKS
@pytest.mark.quick
def test_the_callers_stream_is_used(
    spec: fg.AttentionSpec, deterministic: bool, cupy: Any, gradients_right: Any
) -> None:
    """The inputs are computed late on a stream of the caller; the call waits because it uses the same stream."""
    compiled, inputs = attention.compile(spec, deterministic=deterministic), random_inputs(spec, SQUARE)
    d_out, _ = random_gradients(spec, SQUARE)
    captures, rows = captures_on_gpu(cupy, inputs), rows_on_gpu(cupy, inputs)
    there = [cupy.asarray(d_out), *rows, *compiled(*rows, return_lse=True, **captures)]
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        late = [cupy.zeros_like(array) for array in there]
        busy = cupy.ones((4096, 4096), cupy.float32)
        for _ in range(10):
            busy = busy @ busy * 1e-4
        for source, target in zip(there, late, strict=True):
            target[...] = source
        gradients = compiled.backward(*late, **captures)
        stream.synchronize()
    gradients_right(spec, inputs, d_out, at_home(gradients, cupy.asnumpy))


@MODES
@pytest.mark.parametrize(
    "spec", [CAUSAL, DOCUMENT, learned("float16"), LATENT], ids=["ranges", "lists", "captures", "chunks"]
)
@pytest.mark.quick
def test_graph_capture(spec: fg.AttentionSpec, deterministic: bool, cupy: Any, gradients_right: Any) -> None:
    """Both passes are captured once and replayed on new inputs, after other calls have used the memory in between."""
    compiled, inputs = attention.compile(spec, deterministic=deterministic), random_inputs(spec, SQUARE)
    rows, captures = rows_on_gpu(cupy, inputs), captures_on_gpu(cupy, inputs)
    d_out = cupy.asarray(random_gradients(spec, SQUARE)[0])
    results = compiled(*rows, return_lse=True, **captures)
    into = tuple(compiled.backward(d_out, *rows, *results, **captures))

    def both() -> None:
        compiled(*rows, return_lse=True, out=results, **captures)
        compiled.backward(d_out, *rows, *results, into=into, **captures)

    with cupy.cuda.Stream(non_blocking=True) as stream:
        both()
        stream.synchronize()
        stream.begin_capture()
        both()
        graph = stream.end_capture()
        for seed in (5, 6):
            new, (new_d_out, _) = random_inputs(spec, SQUARE, seed), random_gradients(spec, SQUARE, seed)
            d_out[...] = cupy.asarray(new_d_out)
            for target, source in zip(rows, rows_on_gpu(cupy, new), strict=True):
                target[...] = source
            for name, array in captures.items():
                array[...] = cupy.asarray(new.captures[name])
            littered = [cupy.full(size, 0x7F, cupy.int8) for size in (64, 512, 4096, 65536, 10**6) for _ in range(8)]
            for array in (*results, *into):
                array[...] = cupy.nan
            graph.launch(stream)
            stream.synchronize()
            assert littered
            names = [capture.name for capture in spec.captures if capture.grad]
            found = Gradients(*into[:3], dict(zip(names, into[3:], strict=True)))
            gradients_right(spec, new, new_d_out, at_home(found, cupy.asnumpy))


def test_deterministic_bits_in_a_hundred_runs(cupy: Any) -> None:
    spec = learned("float16", dropout=0.1)
    shape = Shape(1000, 1000, 2, 8, 2)
    compiled, inputs = attention.compile(spec, deterministic=True), random_inputs(spec, shape)
    d_out = cupy.asarray(random_gradients(spec, shape)[0])
    rows, captures = rows_on_gpu(cupy, inputs), captures_on_gpu(cupy, inputs)
    _, pullback = compiled.vjp(*rows, seed=3, **captures)
    first = [cupy.asnumpy(gradient).tobytes() for gradient in pullback(d_out)]
    busy = cupy.ones((2048, 2048), cupy.float32)
    for run in range(100):
        with cupy.cuda.Stream(non_blocking=True):
            cupy.matmul(busy, busy)  # runs concurrently, so that blocks run in another order
        again = [cupy.asnumpy(gradient).tobytes() for gradient in pullback(d_out)]
        assert again == first, f"run {run} differs"


@MODES
def test_memory_at_length_65536(deterministic: bool, cupy: Any) -> None:
    """Beside the gradients at most 1.3 times q in float32, measured with an empty memory pool."""
    spec = fg.AttentionSpec(128, "bfloat16", mask=fg.sliding_window(1024))
    compiled = attention.compile(spec, deterministic=deterministic)
    q, k, v, d_out = (cupy.zeros((1, 16, 65536, 128), ml_dtypes.bfloat16) for _ in range(4))
    out, lse = compiled(q, k, v, return_lse=True)
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        gradients = compiled.backward(d_out, q, k, v, out, lse)
    beside = pool.total_bytes() - sum(gradient.nbytes for gradient in gradients)
    assert 0 < beside <= 1.3 * 4 * q.size, f"{beside / 2**20:.0f} MiB"
    assert pool.used_bytes() <= sum(gradient.nbytes for gradient in gradients) + 4096


def test_memory_of_torch_at_length_65536() -> None:
    torch = pytest.importorskip("torch")
    compiled = attention.compile(fg.AttentionSpec(128, "bfloat16", mask=fg.sliding_window(1024)))
    q, k, v, d_out = (torch.zeros(1, 16, 65536, 128, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    out, lse = compiled(q, k, v, return_lse=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = compiled.backward(d_out, q, k, v, out, lse)
    results = sum(gradient.nbytes for gradient in gradients)
    beside = torch.cuda.max_memory_allocated() - before - results
    assert 0 < beside <= 1.3 * 4 * q.numel(), f"{beside / 2**20:.0f} MiB"
    assert torch.cuda.memory_allocated() - before <= results + 4096


@pytest.mark.quick
def test_sizes_do_not_recompile(cupy: Any, monkeypatch: pytest.MonkeyPatch, gradients_right: Any) -> None:
    """The first calls compile everything:

    a forward of few queries, and query heads that share few KV heads, have kernels of their own.
    """
    compiled = attention.compile(CAUSAL)
    compiled.build_backward()
    shapes = (Shape(1, 1, 1, 1, 1), Shape(33, 70, 3, 6, 6), Shape(500, 20, 1, 2, 2), Shape(0, 9, 1, 1, 1))
    given = [(random_inputs(CAUSAL, shape), random_gradients(CAUSAL, shape)[0]) for shape in shapes]
    pullbacks = [compiled.vjp(*rows_on_gpu(cupy, inputs))[1] for inputs, _ in given]

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a call compiled a kernel")

    monkeypatch.setattr(nvrtc, "compile", refuse)
    for pullback, (inputs, d_out) in zip(pullbacks, given, strict=True):
        gradients_right(CAUSAL, inputs, d_out, at_home(pullback(cupy.asarray(d_out)), cupy.asnumpy))
