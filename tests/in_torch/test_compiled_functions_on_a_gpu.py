"""Functions that change, under inductor and in CUDA graphs: replays read the current contents of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import torch

import flashgen as fg
import flashgen.torch as ours

pytestmark = [pytest.mark.gpu, pytest.mark.quick]

HEADS, LENGTH, DIM = 2, 64, 64
MODES = ["default", "reduce-overhead"]


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    torch.compiler.reset()
    with ours.emulated(False):
        yield
    torch.compiler.reset()


@pytest.fixture
def qkv() -> list[torch.Tensor]:
    return [torch.randn(1, HEADS, LENGTH, DIM, device="cuda", dtype=torch.float16) for _ in range(3)]


def assert_same(run: Any, attend: Any, *given: Any) -> None:
    """Asserts equal results with and without compilation; the kernels' bits are equal, because their inputs are."""
    for _ in range(3):  # warms up, records and replays a graph
        with torch.no_grad():
            got, wanted = run(*given).clone(), attend(*given)
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_tensors_modified_between_replays(mode: str, dtype: torch.dtype, qkv: Any) -> None:
    table, number = torch.tensor([1, 2], dtype=dtype, device="cuda"), torch.tensor(2, dtype=dtype, device="cuda")
    ids = torch.zeros(LENGTH, dtype=torch.int64, device="cuda")

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[h] * (i - j) / 10 + number * j / 10

    mask = ours.create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, LENGTH, LENGTH)
    attend = lambda q, k, v: ours.flex_attention(q, k, v, score, mask) * 1
    run = torch.compile(attend, fullgraph=True, mode=mode)
    for step in range(4):
        assert_same(run, attend, *qkv)
        table.add_(1)
        number.sub_(3)
        ids[step * 16 :] += 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_arrays_of_a_spec_modified_between_replays(mode: str, dtype: torch.dtype, qkv: Any) -> None:
    table = torch.tensor([1, 2], dtype=dtype, device="cuda")
    spec = fg.AttentionSpec(DIM, score=lambda s, b, h, q, k: s + table[h] * (q - k) / 10)
    attend = lambda q, k, v: ours.attention(spec, q, k, v) * 1
    run = torch.compile(attend, fullgraph=True, mode=mode)
    for _ in range(3):
        assert_same(run, attend, *qkv)
        table.add_(1)


@pytest.mark.parametrize("mode", MODES)
def test_numbers_and_functions_created_inside(mode: str, qkv: Any) -> None:
    def attend(q: Any, k: Any, v: Any, current: int, w: Any) -> Any:
        end, bias = current + 1, w * 2
        mask = ours.create_block_mask(lambda b, h, i, j: (j <= end) | (i == j), None, None, LENGTH, LENGTH)
        return ours.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias.exp()[h] * j / 10, mask) * 1

    run = torch.compile(attend, fullgraph=True, mode=mode)
    for current in (3, 9, 5, 21):
        assert_same(run, attend, *qkv, current, torch.randn(HEADS, device="cuda"))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(HEADS))

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return ours.flex_attention(q, k, v, lambda s, b, h, i, j: s + self.table.sigmoid()[h] * j / 10)


@pytest.mark.parametrize("mode", MODES)
def test_each_layer_learns_its_own_table(mode: str, qkv: Any) -> None:
    layers = torch.nn.ModuleList(Layer() for _ in range(3)).cuda()
    attend = lambda q, k, v: sum(layer(q, k, v) for layer in layers)
    run = torch.compile(attend, fullgraph=True, mode=mode)
    for _ in range(3):
        found = []
        for call in (run, attend):
            layers.zero_grad()
            out = call(*qkv)
            out.float().square().sum().backward()
            found.append([out.detach().clone(), *(layer.table.grad.clone() for layer in layers)])
        (got, *gradients), (wanted, *expected) = found
        torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-3)
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        with torch.no_grad():
            for layer in layers:
                layer.table.add_(0.5)


def test_a_captured_graph_reads_tensors_at_replay(qkv: Any) -> None:
    table = torch.randn(HEADS, dtype=torch.float64, device="cuda")
    score = lambda s, b, h, i, j: s + table.exp()[h] * (i - j) / 10
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            ours.flex_attention(*qkv, score)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = ours.flex_attention(*qkv, score)
    for _ in range(3):
        table.add_(0.3)
        graph.replay()
        assert torch.equal(out, ours.flex_attention(*qkv, score))


@pytest.mark.parametrize("how", ["flex_attention", "attention", "compiled"])
def test_a_captured_graph_reads_the_copy_of_a_host_array(how: str, qkv: Any) -> None:
    """The copy is overwritten in place when the array has changed, so that the graph's memory stays valid."""
    table = torch.linspace(0, 1, HEADS)
    score = lambda s, b, h, i, j: s + table[h] * (i - j) / 10
    spec = fg.AttentionSpec(DIM, score=score)
    attends = {
        "flex_attention": lambda: ours.flex_attention(*qkv, score),
        "attention": lambda: ours.attention(spec, *qkv),
        "compiled": lambda: fg.compile(spec)(*qkv),
    }
    attend = attends[how]
    with torch.no_grad():
        for _ in range(3):
            attend()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attend()
        for _ in range(3):
            wanted = attend()
            graph.replay()
            assert torch.equal(out, wanted)
            table.add_(1)
