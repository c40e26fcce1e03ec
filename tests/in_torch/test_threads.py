"""Eight threads call torch's operators: whatever they begin at once, each gets the results of a single thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import torch

import flashgen as fg
from flashgen.runtime.caching import Cache
from flashgen.torch import (
    BlockMask,
    append_kv,
    create_block_mask,
    emulated,
    flex_attention,
    scaled_dot_product_attention,
    table,
    variants,
    varlen_attention,
)
from flashgen.torch import attention as operator

pytestmark = pytest.mark.usefixtures("hurried", "deterministic")

AtOnce = Callable[..., list[Any]]
Attend = Callable[..., Any]

THREADS, STREAMS, LENGTHS = 8, 4, (40, 33, 64, 24)
slopes = fg.Tensor("slopes", "float32", 1, grad=True)
BIAS, DOCUMENTS = torch.tensor([0.1, -0.2]), torch.arange(64) // 19


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Deterministic, so that gradients can be compared bitwise."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@functools.cache
def of_documents(length: int) -> BlockMask:
    """Shared by all calls, because a stream under capture cannot copy arrays to a GPU."""
    return create_block_mask(documents, None, None, length, length)


def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k)


@functools.cache
def integers(device: torch.device, *numbers: int) -> Any:
    """Shared by all calls, int32."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def packed(q: Any, k: Any, v: Any, bias: Any, scale: float, emulate: bool) -> Any:
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    starts = integers(q.device, 0, 11, 11, q.shape[2] + 7, 2 * q.shape[2])
    how: Any = {"softmax_scale": scale, "alibi_slopes": bias, "emulate": emulate}
    return varlen_attention(*rows, starts, starts, causal=True, **how)


def paged(q: Any, k: Any, v: Any, spec: fg.AttentionSpec, emulate: bool) -> Any:
    """A key is appended to sequences of 16 and 13, in pages of 8; then 4 queries of each attend. No gradient."""
    q, k, v = (x.detach().transpose(1, 2) for x in (q[:, :, :4], k, v))
    pages = [x[:, :24].reshape(6, 8, 2, 32).clone() for x in (k, v)]
    where: Any = {"page_table": integers(q.device, 4, 0, 2, 1, 5, 3).view(2, 3), "emulate": emulate}
    used = integers(q.device, 16, 13)
    append_kv(k[:, :1], v[:, :1], *pages, seqused_k=used, **where)
    return operator(spec, q, *pages, seqused_k=used + 1, num_splits=2, **where)


def attends(emulate: bool, width: int) -> dict[str, Attend]:
    """Returns calls of every kind; `width` makes their specs differ from those of earlier tests."""
    biased = fg.AttentionSpec(32, "bfloat16", score=lambda s, b, h, q, k: s + slopes[h] * (q - k) / width)
    pages = fg.AttentionSpec(32, "bfloat16", layout="bshd", scale=1 / width, mask=fg.causal(), page_size=8)
    seed = functools.partial(torch.full, (), 3, dtype=torch.int64)
    dropped = fg.AttentionSpec(32, "bfloat16", mask=fg.sliding_window(width), dropout=0.25)
    return {
        "learned": lambda q, k, v, bias: operator(biased, q, k, v, slopes=bias, emulate=emulate),
        "dropped": lambda q, k, v, bias: operator(dropped, q, k, v, seed=seed(device=q.device), emulate=emulate),
        "sdpa": lambda q, k, v, bias: scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=1 / width, emulate=emulate
        ),
        "flex": lambda q, k, v, bias: flex_attention(
            q, k, v, None, of_documents(q.shape[2]), 1 / width, emulate=emulate
        ),
        "packed": lambda q, k, v, bias: packed(q, k, v, bias, 1 / width, emulate),
        "paged": lambda q, k, v, bias: paged(q, k, v, pages, emulate),
    }


def inputs(length: int, device: str) -> list[Any]:
    random = torch.Generator().manual_seed(length)
    made = [torch.randn(2, 2, length, 32, generator=random).to(device, torch.bfloat16) for _ in range(3)]
    return [each.requires_grad_() for each in (*made, BIAS.to(device).clone())]


def results(attend: Attend, given: list[Any]) -> list[Any]:
    """Returns the output, without a graph and with one, and the gradients that exist."""
    with torch.no_grad():
        alone = attend(*given)
    out = attend(*given)
    if not out.requires_grad:
        return [alone, out]
    gradients = torch.autograd.grad(out, given, torch.ones_like(out), allow_unused=True)
    return [alone, out.detach(), *(each for each in gradients if each is not None)]


@pytest.mark.rotated(2)
@pytest.mark.parametrize("name", attends(True, 1))
def test_threads_that_start_together(name: str, at_once: AtOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the specs is registered when they start: one entry is created for each, with the bits of one thread."""
    monkeypatch.setattr(table, "_BY_SPEC", Cache())
    monkeypatch.setattr(variants, "_VARIANTS", Cache())
    variants.CALLS.clear()
    attend = attends(True, 5)[name]

    def work(thread: int) -> list[Any]:
        order = [LENGTHS[(thread + step) % len(LENGTHS)] for step in range(2 * len(LENGTHS))]
        return [(length, results(attend, inputs(length, "cpu"))) for length in order]

    found = at_once(work, THREADS)
    entries = [*table._BY_SPEC.values(), *(e for v in variants._VARIANTS.values() for e in v._entries.values())]
    assert len(entries) == 1
    expected = {length: results(attend, inputs(length, "cpu")) for length in LENGTHS}
    for each in found:
        for length, made in each:
            assert all(torch.equal(one, other) for one, other in zip(made, expected[length], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", attends(False, 1))
@pytest.mark.parametrize("graphs", [0, 2])
def test_threads_and_streams_on_a_gpu(name: str, graphs: int, at_once: AtOnce) -> None:
    """Four streams for eight threads, forward and backward, beside two that replay graphs of both."""
    attend, steps = attends(False, 7)[name], 30
    with emulated(False):
        given = {length: inputs(length, "cuda") for length in LENGTHS}
        expected = {length: results(attend, given[length]) for length in LENGTHS}
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(STREAMS + graphs)]
        recorded = []
        for number in range(graphs):  # one after another: during capture nothing else may be launched
            with torch.cuda.stream(streams[STREAMS + number]):
                results(attend, given[LENGTHS[number]])
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=streams[STREAMS + number]):
                recorded.append((graph, results(attend, given[LENGTHS[number]])))

        def work(thread: int) -> int:
            replays = thread < graphs
            wrong = torch.zeros((), dtype=torch.int64, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.stream(streams[STREAMS + thread if replays else thread % STREAMS]):
                for step in range(steps):
                    length = LENGTHS[thread if replays else (thread + step) % len(LENGTHS)]
                    if replays:
                        graph, made = recorded[thread]
                        for each in made:
                            each.fill_(float("nan"))
                        graph.replay()
                    else:
                        made = results(attend, given[length])
                    for one, other in zip(made, expected[length], strict=True):
                        wrong += (one != other).any()
                torch.cuda.current_stream().synchronize()
            return int(wrong)

        found = at_once(work, THREADS)
    assert not any(found), f"of {steps} steps of each thread {found} results were wrong"
