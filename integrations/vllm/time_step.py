"""Times a step of attention layers through vLLM's interface, without an engine: FLASHGEN beside other backends.

    python integrations/vllm/time_step.py --requests 64 --keys 4096 --others TRITON_ATTN FLASH_ATTN

For each backend it prints, in microseconds, what the host takes to build the metadata of a step, to launch the update
of the cache of a layer, and to launch its attention, and what the GPU takes for both in a captured graph of all layers.
Each layer has a cache of its own, so that no keys are read from the GPU's L2 cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm import _custom_ops
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

import flashgen_vllm

HEADS, HEADS_KV, DIM, BLOCK, LAYERS = 32, 8, 128, 16, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--keys", type=int, default=4096, help="keys of each request")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of one further request, a prompt")
    parser.add_argument("--others", nargs="*", default=["TRITON_ATTN"], help="backends to compare with")
    options = parser.parse_args()
    flashgen_vllm.register()
    if not hasattr(torch.ops._C_cache_ops, "reshape_and_cache_flash"):
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

        print("vLLM's compiled operators are missing: its Triton kernel writes the cache")
        for module in (_custom_ops, torch.ops._C_cache_ops):  # backends call either
            module.reshape_and_cache_flash = triton_reshape_and_cache_flash
    queries = [1] * options.requests + [options.prompt] * (options.prompt > 0)
    keys = [options.keys] * options.requests + [options.prompt] * (options.prompt > 0)
    print(
        f"{torch.cuda.get_device_name()}, {options}; heads {HEADS}/{HEADS_KV}, dim {DIM}, blocks of {BLOCK}, bfloat16"
    )
    print(f"{'backend':<14}{'build, host':>14}{'update, host':>14}{'attention, host':>17}{'layer, GPU':>12}")
    for name in ("FLASHGEN", *options.others):
        build, update, attention, layer = timed(name, queries, keys)
        print(f"{name:<14}{build:14.1f}{update:14.1f}{attention:17.1f}{layer:12.1f}", flush=True)


def timed(name: str, queries: list[int], keys: list[int]) -> tuple[float, float, float, float]:
    """Returns times in microseconds: of the metadata, an update and an attention on the host, a layer on the GPU."""
    device, backend = torch.device("cuda"), AttentionBackendEnum[name].get_class()
    common = batch_of(queries, keys, device)
    impl, builder = made(backend, len(queries), device)
    one = torch.ones((), device=device)
    scales = {f"_{name}_scale": one for name in "qkv"} | {f"_{name}_scale_float": 1.0 for name in "qkv"}
    layer: Any = SimpleNamespace(**scales)
    tokens = common.num_actual_tokens
    packed = torch.randn(tokens, HEADS + 2 * HEADS_KV, DIM, dtype=torch.bfloat16, device=device)
    q, k, v = packed.split([HEADS, HEADS_KV, HEADS_KV], 1)
    blocks = int(common.block_table_tensor.max()) + 1
    caches = torch.randn(LAYERS, blocks, BLOCK, HEADS_KV, 2 * DIM, dtype=torch.bfloat16, device=device).transpose(2, 3)
    out = torch.empty(tokens, HEADS, DIM, dtype=torch.bfloat16, device=device)
    metadata = builder.build(0, common)

    def update() -> None:
        for cache in caches:
            impl.do_kv_cache_update(layer, k, v, cache, metadata.slot_mapping)

    def attend() -> None:
        for cache in caches:
            impl.forward(layer, q, k, v, cache, metadata, out)

    def step() -> None:
        update()
        attend()

    for _ in range(3):
        step()
    build = host_time(lambda: builder.build(0, common))
    return build, host_time(update) / LAYERS, host_time(attend) / LAYERS, gpu_time(step) / LAYERS


def made(backend: Any, requests: int, device: torch.device) -> tuple[Any, Any]:
    """Returns the attention of a layer, and the builder of metadata, as an engine makes them."""
    config = configuration(requests)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS_KV, head_size=DIM, dtype=torch.bfloat16)
    with set_current_vllm_config(config):
        impl = backend.get_impl_cls()(HEADS, DIM, DIM**-0.5, HEADS_KV, None, None, "auto")
        config.compilation_config.static_forward_context["layer"] = Layer(impl)
        return impl, backend.get_builder_cls()(spec, ["layer"], config, device)


class Layer(AttentionLayerBase):
    """What builders read of a layer."""

    def __init__(self, impl: Any) -> None:
        self.impl = impl

    def get_attn_backend(self) -> Any:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        raise NotImplementedError


def batch_of(queries: list[int], keys: list[int], device: torch.device) -> CommonAttentionMetadata:
    """Returns a batch whose requests have their blocks at random places."""
    used = [-(-length // BLOCK) for length in keys]
    order = torch.randperm(sum(used), dtype=torch.int32) + 1
    table = torch.zeros(len(keys), max(used), dtype=torch.int32)
    for row, blocks in zip(table, order.split(used), strict=True):
        row[: len(blocks)] = blocks
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    places = [(b, p) for b, n in enumerate(queries) for p in range(keys[b] - n, keys[b])]
    rows, positions = torch.tensor(places).unbind(1)
    slots = table[rows, positions // BLOCK].long() * BLOCK + positions % BLOCK
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(keys, dtype=torch.int32, device=device),
        num_reqs=len(keys),
        num_actual_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=max(keys),
        block_table_tensor=table.to(device),
        slot_mapping=slots.to(device),
    )


def configuration(requests: int) -> Any:
    """Returns the parts of vLLM's configuration that builders of backends read."""
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        max_model_len=8192,
        is_mm_prefix_lm=False,
        rswa_window=None,
        get_num_attention_heads=lambda parallel: HEADS,
        get_num_kv_heads=lambda parallel: HEADS_KV,
        get_head_size=lambda: DIM,
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, cp_kv_cache_interleave_size=1),
        attention_config=SimpleNamespace(
            flash_attn_max_num_splits_for_cuda_graph=32,
            use_trtllm_attention=None,
            disable_flashinfer_q_quantization=False,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
        scheduler_config=SimpleNamespace(max_num_seqs=max(requests, 256), max_num_batched_tokens=8192),
        compilation_config=SimpleNamespace(
            static_forward_context={},
            cudagraph_mode=CUDAGraphMode.FULL,
            cudagraph_capture_sizes=[1, 16, 64, 256],
            max_cudagraph_capture_size=256,
        ),
        speculative_config=None,
        num_speculative_tokens=0,
    )


def host_time(function: Callable[[], Any], repeats: int = 20) -> float:
    """Returns the median time of a call in microseconds, without that of the GPU."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return sorted(times)[repeats // 2] * 1e6


def gpu_time(function: Callable[[], Any], repeats: int = 20) -> float:
    """Returns the median time of a captured call in microseconds."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2] * 1e3


if __name__ == "__main__":
    main()
