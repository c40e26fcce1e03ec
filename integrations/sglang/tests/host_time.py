"""Times of a decode step in SGLang's classes, of the backend "flashgen" and of backends of SGLang. Needs a GPU.

    python integrations/sglang/tests/host_time.py triton flashinfer

A row has the host time of the metadata of a step and of a layer, without a graph; and the time on the GPU of a layer of
a captured step, with its share of the metadata.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import absent

absent.stand_in(*absent.UNUSED)

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from serving import Layer, Server

LAYERS, REPEATS = 16, 50
STEPS = ((1, 1024), (32, 1024), (8, 8192))
"""Numbers of sequences, and of keys of each."""


def median(call: Callable[[], Any], count: int = 1) -> float:
    """Returns the median of the host's microseconds of a call, divided by `count`, while the GPU is idle."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6 / count)
    return statistics.median(times)


def replayed(graph: torch.cuda.CUDAGraph) -> float:
    """Returns the median of a replay's microseconds on the GPU, divided by the number of layers."""
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / LAYERS)
    return statistics.median(times)


def row(backend: str, page_size: int, sequences: int, keys: int) -> str:
    layer = Layer(page_size, torch.bfloat16, heads=32, heads_kv=8, dim=128, longest=keys + 256, backend=backend)
    server = Server(layer, sequences, "cuda")
    which = list(range(sequences))
    batch, inputs = server.batch(which, [1] * sequences, ForwardMode.DECODE), server.inputs(sequences)
    batch.seq_lens.fill_(keys)
    batch.seq_lens_sum = keys * sequences
    batch.seq_lens_cpu = batch.seq_lens.cpu()

    def layers() -> None:
        for _ in range(LAYERS):
            server.run(batch, *inputs)

    server.backend.init_forward_metadata(batch)
    layers()
    metadata = median(lambda: server.backend.init_forward_metadata(batch))
    host = median(layers, LAYERS)
    server.backend.init_cuda_graph_state(sequences, sequences)
    server.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        server.backend.init_forward_metadata_in_graph(batch)
        layers()
    server.backend.init_forward_metadata_out_graph(batch)
    outside = median(lambda: server.backend.init_forward_metadata_out_graph(batch))
    return (
        f"{backend:10} page {page_size:3} {sequences:3} x {keys:5}  host: metadata {metadata:6.1f} us, "
        f"layer {host:6.1f} us, before a replay {outside:6.1f} us  GPU: layer {replayed(graph):6.1f} us"
    )


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    with torch.no_grad():
        for sequences, keys in STEPS:
            for page_size in (1, 64):
                for backend in ("flashgen", *(sys.argv[1:] or ["triton"])):
                    try:
                        print(row(backend, page_size, sequences, keys), flush=True)
                    except Exception as error:  # also those of compilers, whose classes have no common base
                        reason = str(error).strip().rpartition("\n")[2]
                        print(f"{backend:10} cannot be run here: {type(error).__name__}: {reason}", flush=True)
