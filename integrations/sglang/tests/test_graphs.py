"""CUDA graphs: one memory for all steps, no reads by the host, and replays that follow pages and lengths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from flashgen_sglang.metadata import MetadataBuilder
from serving import Layer, Server

LAYERS = {
    "page_1": Layer(page_size=1),
    "page_64": Layer(page_size=64, dtype=torch.bfloat16, sinks=torch.bfloat16),
    "window_pool": Layer(window=20, in_window_pool=True, scales=(0.02, 0.05)),
}


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Lets torch raise an error where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tokens_of(slots: torch.Tensor) -> torch.Tensor:
    """Stands for the map of a pool from its slots to those of the sliding windows."""
    return torch.zeros(10, dtype=torch.int64, device=slots.device)[slots]


@pytest.mark.parametrize("to_window", [None, tokens_of], ids=["one_pool", "two_pools"])
def test_the_host_reads_no_metadata(to_window: Any) -> None:
    """Tensors of the device "meta" have no values: each operation that reads one raises an error."""
    with torch.device("meta"):
        builder = MetadataBuilder(torch.empty(8, 128, dtype=torch.int32), 16, 128, to_window)
        batch = SimpleNamespace(
            batch_size=3,
            req_pool_indices=torch.empty(3, dtype=torch.int64),
            seq_lens=torch.empty(3, dtype=torch.int64),
            out_cache_loc=torch.empty(5, dtype=torch.int64),
            extend_seq_lens=torch.empty(3, dtype=torch.int32),
            extend_seq_lens_cpu=[2, 2, 1],
        )
        for read in (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.nonzero, lambda lengths: lengths[0].item()):
            with pytest.raises((RuntimeError, NotImplementedError)):
                read(batch.seq_lens)
        step = builder.build(batch, extends=True)
        builder.fill(builder.allocate(3), batch)
        assert step.max_seqlen_q == 63  # Hopper's prefill kernel, for 64 queries or more, is not launched
        batch.extend_seq_lens_cpu = [2, 64, 1]
        assert builder.build(batch, extends=True).max_seqlen_q is None
    assert step.page_table.shape == (3, 8) and step.cu_seqlens_q is not None and step.cu_seqlens_q.shape == (4,)


def test_captured_steps_share_memory(device: str) -> None:
    """The metadata of a later step, or of a smaller batch, is where captured kernels read it."""
    server = Server(Layer(), 3, device)
    server.backend.init_cuda_graph_state(3, 3)
    addresses = set()
    for which in ([0, 1, 2], [2, 1, 0], [1]):
        batch = server.batch(which, [1] * len(which), ForwardMode.DECODE)
        server.backend.init_forward_metadata_out_graph(batch, in_capture=not addresses)
        server.backend.init_forward_metadata_in_graph(batch)
        step = server.backend.forward_metadata
        assert len(step.page_table) == len(step.cache_seqlens_int32) == len(which)
        addresses.add((step.page_table.data_ptr(), step.cache_seqlens_int32.data_ptr()))
        server.backend.init_forward_metadata(batch)  # a step without a graph has memory of its own
        assert server.backend.forward_metadata.page_table.data_ptr() != next(iter(addresses))[0]
    assert len(addresses) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_replays(name: str, device: str) -> None:
    """A graph is captured once, with sequences that pad the batch, and replayed for other sequences and lengths."""
    if device != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    server = Server(LAYERS[name], 4, device)
    for i, length in enumerate((37, 5, 90, 16)):
        server.step([i], [length], ForwardMode.EXTEND)
    server.backend.init_cuda_graph_state(3, 3)
    batch, inputs = server.batch([0, 1, 2], [1, 1, 1], ForwardMode.DECODE), server.inputs(3)
    graph, out = capture(server, batch, inputs)
    for which in ([3, 1, 0], [2, 3], [1, 2, 3]):
        replay(server, batch, inputs, which, graph)
        ref, limit = server.expected(which, [1] * len(which), inputs[0][: len(which)])
        assert float((out[: len(which)].double() - ref).abs().max()) <= limit


def capture(server: Server, batch: Any, inputs: Any) -> tuple[Any, torch.Tensor]:
    """Returns a graph of a step over the memory of `batch` and `inputs`, and where it writes its output."""
    backend, graph = server.backend, torch.cuda.CUDAGraph()
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    server.run(batch, *inputs)  # compiles
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        backend.init_forward_metadata_in_graph(batch)
        out = server.run(batch, *inputs)
    return graph, out


def replay(server: Server, batch: Any, inputs: Any, which: list[int], graph: Any) -> None:
    """Replays a graph for the next tokens of sequences. Others pad the batch, as in SGLang: they write to slot 0."""
    live, counts, padding = server.batch(which, [1] * len(which), ForwardMode.DECODE), [1] * len(which), len(which)
    for target, source in zip(inputs, server.inputs(batch.batch_size), strict=True):
        target.copy_(source)
    batch.seq_lens.fill_(server.backend.get_cuda_graph_seq_len_fill_value())
    batch.req_pool_indices.zero_()
    batch.out_cache_loc.zero_()
    for field in ("seq_lens", "req_pool_indices", "out_cache_loc"):
        getattr(batch, field)[:padding].copy_(getattr(live, field))
    with no_synchronisation():
        server.backend.init_forward_metadata_out_graph(batch)
        graph.replay()
    server.remember(which, counts, inputs[1][:padding], inputs[2][:padding])
