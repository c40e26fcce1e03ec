"""Features of layers and pools, over several steps of a server: prompts, chunks beside single tokens, single tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

import flashgen.torch
import flashgen_sglang
from flashgen.errors import ArgumentError, UnsupportedError
from serving import Layer, Server, runner_of

BF16 = torch.bfloat16
LAYERS = {
    "page_1": Layer(page_size=1),
    "softcap_sinks_mqa_page_4": Layer(page_size=4, heads_kv=1, cap=5.0, sinks=torch.float32),
    "sinks_mha_page_64": Layer(page_size=64, heads_kv=4, dtype=BF16, sinks=BF16),
    "window_softcap_page_256": Layer(page_size=256, dim=64, window=20, cap=5.0),
    "float8": Layer(dtype=BF16, scales=(0.02, 0.05)),
    "float8_without_scales": Layer(page_size=1, window=20, sinks=BF16, scales=(None, None)),
    "window_pool": Layer(window=20, in_window_pool=True),
}


def check(server: Server, which: list[int], counts: list[int], mode: ForwardMode) -> None:
    out, ref, limit = server.step(which, counts, mode)
    assert out.shape == ref.shape and out.dtype == server.layer.dtype
    assert float((out.double() - ref).abs().max()) <= limit


def serve(server: Server) -> None:
    """Steps of a server with three sequences, two of which begin later than the first."""
    check(server, [1], [37], ForwardMode.EXTEND)
    check(server, [0, 2, 1], [5, 36, 1], ForwardMode.MIXED)  # two prompts, and a token of the first sequence
    check(server, [2, 0, 1], [1, 1, 1], ForwardMode.DECODE)
    check(server, [0, 1], [30, 1], ForwardMode.MIXED)  # another chunk of a prompt


@pytest.mark.parametrize("name", LAYERS)
def test_steps(name: str, device: str) -> None:
    serve(Server(LAYERS[name], 3, device))


def test_heads_before_tokens(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool may store the heads of a page before its tokens."""
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    server = Server(Layer(heads_kv=2), 3, device)
    assert server.runner.token_to_kv_pool.get_key_buffer(0).ndim == 4
    serve(server)


def test_keys_that_were_written_before(device: str) -> None:
    """Fused operators write keys and values themselves, and pass save_kv_cache=False."""
    server = Server(Layer(), 1, device)
    check(server, [0], [20], ForwardMode.EXTEND)
    batch, (q, k, v) = server.batch([0], [1], ForwardMode.DECODE), server.inputs(1)
    server.backend.init_forward_metadata(batch)
    rows = (each.clone().unflatten(-1, (2, -1)) for each in (k, v))
    server.runner.token_to_kv_pool.set_kv_buffer(server.module, batch.out_cache_loc, *rows)
    out = server.backend.forward_decode(q, k * 0, v * 0, server.module, batch, save_kv_cache=False)
    server.remember([0], [1], k, v)
    ref, limit = server.expected([0], [1], q)
    assert float((out.double() - ref).abs().max()) <= limit


def test_padding_tokens(device: str) -> None:
    """Tokens after the last sequence, which pad a batch, get zeros."""
    server = Server(Layer(), 1, device)
    batch, (q, k, v) = server.batch([0], [4], ForwardMode.EXTEND), server.inputs(6)
    batch.out_cache_loc = torch.cat((batch.out_cache_loc, batch.out_cache_loc.new_zeros(2)))
    server.backend.init_forward_metadata(batch)
    assert not server.run(batch, q, k, v)[4:].any()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "page_size": ({"page_size": 48}, "--page-size 64"),
    "large_page_size": ({"page_size": 512}, "--page-size 64"),
    "latent": ({"use_mla_backend": True}, "MLA"),
    "speculative": ({"spec_algorithm": SpeculativeAlgorithm.EAGLE}, "--speculative-algorithm"),
    "chunks": ({"attention_chunk_size": 64}, "chunks"),
    "e5m2": ({"kv_cache_dtype": torch.float8_e5m2}, "--kv-cache-dtype"),
    "float32": ({"dtype": torch.float32}, "--dtype"),
    "unified": ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "--enable-unified-memory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_of_a_server_that_are_refused(name: str, device: str) -> None:
    fields, message = REFUSED[name]
    runner = runner_of(Layer(), 1, device)
    for field, value in fields.items():
        setattr(runner, field, value)
    with pytest.raises(UnsupportedError, match=message):
        flashgen_sglang.create_backend(runner)


REFUSED_LAYERS: dict[str, tuple[dict[str, Any], str]] = {
    "cross": ({"is_cross_attention": True}, "cross-attention"),
    "encoder": ({"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only"),
    "cap": ({"logit_cap": 3.0, "logit_capping_method": "silu"}, "silu"),
    "positions": ({"pos_encoding_mode": "ALIBI"}, "ALIBI"),
    "temperature": ({"xai_temperature_len": 1024}, "temperature"),
}


@pytest.mark.parametrize("name", REFUSED_LAYERS)
def test_layers_that_are_refused(name: str, device: str) -> None:
    fields, message = REFUSED_LAYERS[name]
    server = Server(Layer(), 1, device)
    for field, value in fields.items():
        setattr(server.module, field, value)
    with pytest.raises(UnsupportedError, match=message):
        server.step([0], [3], ForwardMode.EXTEND)


def test_arguments_of_a_layer_that_are_refused(device: str) -> None:
    server = Server(Layer(), 1, device)
    batch, (q, k, v) = server.batch([0], [3], ForwardMode.EXTEND), server.inputs(3)
    server.backend.init_forward_metadata(batch)
    with pytest.raises(UnsupportedError, match="return_lse"):
        server.backend.forward_extend(q, k, v, server.module, batch, return_lse=True)


@pytest.mark.parametrize("mode", [ForwardMode.TARGET_VERIFY, ForwardMode.DLLM_EXTEND, ForwardMode.DRAFT_EXTEND_V2])
def test_modes_that_are_refused(mode: ForwardMode, device: str) -> None:
    server = Server(Layer(), 1, device)
    batch = server.batch([0], [3], mode)
    for initialise in (server.backend.init_forward_metadata, server.backend.init_forward_metadata_out_graph):
        with pytest.raises(UnsupportedError, match=mode.name):
            initialise(batch)


def test_cpu_tensors_need_the_emulator(device: str) -> None:
    """A server on a CPU does not fall back to the emulator."""
    if device != "cpu":
        pytest.skip("tensors are on a GPU")
    with flashgen.torch.emulated(False), pytest.raises(ArgumentError, match="emulate"):
        serve(Server(Layer(), 3, device))
