"""flashgen activated in torch's registry, on a GPU: calls of torch's flash operators, beside torch's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashgen.torch as ours
from flashgen.torch.sdpa_registry import why_no_registry

if why_no_registry():
    pytest.skip(str(why_no_registry()), allow_module_level=True)

from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from in_torch import sdpa_models

pytestmark = [pytest.mark.gpu, pytest.mark.quick]


@contextmanager
def flashgen_active() -> Iterator[None]:
    activate_flash_attention_impl("flashgen")
    ours.sdpa_calls(reset=True)
    try:
        yield
    finally:
        restore_flash_attention_impl()


@pytest.fixture(autouse=True)
def flash_operators() -> Iterator[None]:
    """torch prefers cuDNN on some GPUs."""
    torch.compiler.reset()
    ours.register_sdpa()
    with ours.emulated(False), sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        yield


def rows(
    heads: int = 4, heads_kv: int | None = None, length: int = 300, dim: int = 64, device: str = "cuda"
) -> list[Any]:
    sizes = ((2, length, each, dim) for each in (heads, heads_kv or heads, heads_kv or heads))
    return [torch.randn(size, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for size in sizes]


def results(run: Callable[..., Any], inputs: list[Any]) -> list[Any]:
    """Returns the output and the gradients."""
    out = run(*inputs)
    generator = torch.Generator(out.device).manual_seed(1)
    d_out = torch.randn(out.shape, device=out.device, dtype=out.dtype, generator=generator)
    return [out, *torch.autograd.grad(out, inputs, d_out)]


def assert_like_torch(run: Callable[..., Any], inputs: list[Any], calls: tuple[int, int] = (1, 1)) -> None:
    wanted = results(run, inputs)
    with flashgen_active():
        got = results(run, inputs)
        assert ours.sdpa_calls() == (*calls, {})
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        assert one.stride() == other.stride()


@pytest.mark.parametrize(("dim", "is_causal"), [(36, False), (64, True), (128, True)])
def test_scaled_dot_product_attention(dim: int, is_causal: bool) -> None:
    """torch pads a head dim that is no multiple of 8."""
    run = partial(functional.scaled_dot_product_attention, is_causal=is_causal)
    assert_like_torch(run, rows(dim=dim))
    assert_like_torch(partial(run, enable_gqa=True), rows(heads_kv=2, dim=dim))


def test_packed_sequences() -> None:
    at = torch.tensor([0, 100, 100, 300], device="cuda", dtype=torch.int32)
    inputs = [x.detach()[0].transpose(0, 1).requires_grad_() for x in rows(heads_kv=2)]
    for window in ((-1, -1), (-1, 0), (32, 0)):
        run = lambda q, k, v, w=window: varlen_attn(q, k, v, at, at, 200, 200, window_size=w, **sdpa_models.GROUPED)
        assert_like_torch(run, inputs)


def test_repeated_calls_read_their_own_tensors() -> None:
    """Each of several calls runs four times, in turn and with other tensors: later ones repeat an earlier launch."""
    at = torch.tensor([0, 100, 300], device="cuda", dtype=torch.int32)
    dense = functional.scaled_dot_product_attention
    packed = lambda q, k, v: varlen_attn(q, k, v, at, at, 200, 200, window_size=(-1, 0))
    kinds: list[tuple[Callable[..., Any], Callable[[], list[Any]]]] = [
        (dense, lambda: rows(4, 4, 300, 64)),
        (partial(dense, is_causal=True), lambda: rows(4, 4, 300, 64)),
        (partial(dense, is_causal=True), lambda: rows(4, 4, 200, 64)),
        (packed, lambda: [torch.randn_like(x[0].transpose(0, 1)).requires_grad_() for x in rows(4, 4, 300, 64)]),
    ]
    calls = [(run, make()) for _ in range(4) for run, make in kinds]
    wanted = [results(run, inputs) for run, inputs in calls]
    stream = torch.cuda.Stream()
    with flashgen_active():
        got = [results(run, inputs) for run, inputs in calls]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            got += [results(run, inputs) for run, inputs in calls]
        torch.cuda.synchronize()
        assert ours.sdpa_calls() == (32, 32, {})
    for one, other in zip(got, wanted * 2, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


def test_refused_calls_run_torchs_own_kernels() -> None:
    run = partial(functional.scaled_dot_product_attention, dropout_p=1e-4)  # less than flashgen's dropout can be
    inputs = rows()
    torch.manual_seed(0)
    wanted = results(run, inputs)
    with flashgen_active(), pytest.warns(UserWarning, match="torch's own kernel"):
        torch.manual_seed(0)
        got = results(run, inputs)
        forward, backward, refused = ours.sdpa_calls()
    assert (forward, backward) == (0, 0) and sorted(refused.values()) == [1, 1]
    assert torch.equal(got[0], wanted[0])


def test_errors_of_torchs_own_kernels_are_passed_on() -> None:
    """torch is built without alibi."""
    given = (*(x.detach().transpose(1, 2) for x in rows()), None, None, 300, 300, 0.0, True, False)
    run = partial(torch.ops.aten._flash_attention_forward, *given, alibi_slopes=torch.rand(4, device="cuda"))
    with pytest.raises(RuntimeError) as plain:
        run()
    with flashgen_active(), pytest.warns(UserWarning, match="alibi_slopes"), pytest.raises(RuntimeError) as caught:
        run()
    assert str(caught.value) == str(plain.value) and "alibi" in str(plain.value)


def test_dropout_and_captured_graphs() -> None:
    """A graph of both passes draws new dropout at each replay, from the generator that torch.manual_seed sets."""
    q, k, v = (x.detach() for x in rows())
    learned = q.clone().requires_grad_()
    run = partial(functional.scaled_dot_product_attention, dropout_p=0.25)

    def step() -> tuple[Any, Any]:
        out = run(learned, k, v)
        return out, torch.autograd.grad(out, learned, torch.ones_like(out))[0]

    with flashgen_active():
        torch.manual_seed(5)
        first, again = run(q, k, v), run(q, k, v)
        torch.manual_seed(5)
        assert torch.equal(first, run(q, k, v)) and not torch.equal(first, again)
        mean = torch.stack([run(q, k, v) for _ in range(200)]).float().mean(0)
        torch.testing.assert_close(mean, functional.scaled_dot_product_attention(q, k, v).float(), rtol=0.1, atol=0.05)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, gradient = step()
        seen = []
        for seed in (1, 1, None):
            if seed is not None:
                torch.cuda.manual_seed(seed)
            graph.replay()
            seen.append((out.clone(), gradient.clone()))
    assert torch.equal(seen[0][0], seen[1][0]) and not torch.equal(seen[1][0], seen[2][0])
    torch.testing.assert_close(seen[0][1], seen[1][1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_compiled_in_one_graph(mode: str, dropout: float) -> None:
    attend = partial(functional.scaled_dot_product_attention, is_causal=True, dropout_p=dropout)
    compiled = torch.compile(lambda q, k, v: attend(q * 1, k, v).sin(), fullgraph=True, mode=mode)
    inputs = rows()
    wanted = results(lambda q, k, v: attend(q * 1, k, v).sin(), inputs)
    with flashgen_active():
        for _ in range(4):  # warms up, records and replays a graph
            torch.compiler.cudagraph_mark_step_begin()
            got = [each.clone() for each in results(compiled, inputs)]
        assert ours.sdpa_calls().forward >= 1 and not ours.sdpa_calls().torch
    for one, other in zip(got, wanted, strict=True):
        assert one.isfinite().all()
        if not dropout:
            torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)


def test_streams_and_in_place_updates() -> None:
    q, k, v = rows(length=2000)
    with flashgen_active():
        stream, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
        wanted = functional.scaled_dot_product_attention(q + 1, k, v)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(10):
                busy = busy @ busy
            out = functional.scaled_dot_product_attention(q + 1, k, v)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(out, wanted)
        scaled = q * 2
        out = functional.scaled_dot_product_attention(scaled, k, v)
        scaled.detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu_that_is_not_the_current_one() -> None:
    assert_like_torch(partial(functional.scaled_dot_product_attention, is_causal=True), rows(device="cuda:1"))
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize(
    ("name", "compiled"), [("encoder", False), ("llama", False), ("packed llama", False), ("llama", True)]
)
def test_fifty_training_steps(name: str, compiled: bool) -> None:
    build: dict[str, Callable[[], nn.Module]] = {
        "encoder": lambda: sdpa_models.Encoder(256, 4),
        "llama": lambda: sdpa_models.Llama(256, 4),
        "packed llama": lambda: sdpa_models.Llama(256, 4, packed=True),
    }
    train = partial(sdpa_models.losses, device="cuda", steps=50, batch=4, length=256)
    theirs = train(build[name], compiled=compiled)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        exact = train(build[name.removeprefix("packed ")], compiled=compiled)
    with flashgen_active():
        mine = train(build[name], compiled=compiled)
        assert ours.sdpa_calls() == (100, 100, {})
    sdpa_models.assert_equal_within_noise(mine, theirs, exact)
