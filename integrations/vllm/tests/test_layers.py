"""vLLM's layer of attention, in its forward context: it makes the implementation, and calls it as in a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip(
    "vllm.model_executor.layers.attention", reason="vLLM's layers need more packages", exc_type=ImportError
)

from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

import flashgen_vllm
from batches import Setup, make
from flashgen.torch import emulated
from flashgen_vllm.backend import FlashgenBackend
from sdpa_reference import expected

NAME = "model.layers.0.self_attn.attn"
CASES: dict[str, dict[str, Any]] = {
    "all keys": {},
    "window": {"sliding_window": 10},
    "softcap and sinks": {"logits_soft_cap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.fixture(autouse=True)
def dtype_of_the_model() -> Iterator[None]:
    """vLLM sets the type of a model as torch's default while it makes the layers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("queries", [[1, 1, 1, 1], [1, 1, 5, 66]], ids=["decode", "mixed"])
def test_a_layer(queries: list[int], case: str, cache_dtype: str) -> None:
    flashgen_vllm.register()
    torch.manual_seed(0)
    setup = Setup(queries, [33, 48, 40, 66], layer=CASES[case], cache_dtype=cache_dtype)
    made = make(setup, torch.device("cpu"))
    cache = CacheConfig(block_size=setup.block_size, cache_dtype=cache_dtype)
    config = VllmConfig(device_config=DeviceConfig(device="cpu"), cache_config=cache)
    options = {"per_layer_sliding_window" if name == "sliding_window" else name: v for name, v in setup.layer.items()}
    with set_current_vllm_config(config):
        sizes = (setup.heads, setup.dim, setup.dim**-0.5, setup.heads_kv)
        layer = Attention(*sizes, cache_config=cache, prefix=NAME, attn_backend=FlashgenBackend, **options)
        spec = layer.get_kv_cache_spec(config)
        assert type(spec) is (SlidingWindowSpec if case == "window" else FullAttentionSpec)
        assert layer.backend is AttentionBackendEnum["FLASHGEN"]
        metadata = FlashgenBackend.get_builder_cls()(spec, [NAME], config, made.q.device).build(0, made.common)
        layer.kv_cache = made.cache
        slots = {NAME: metadata.slot_mapping}
        rows = [each.reshape(setup.tokens, -1) for each in (made.q, made.k_new, made.v_new)]
        with emulated(), set_forward_context({NAME: metadata}, config, num_tokens=setup.tokens, slot_mapping=slots):
            out = layer(*rows)
    torch.testing.assert_close(out.view(made.q.shape).double(), expected(setup, made), atol=4e-3, rtol=4e-3)
