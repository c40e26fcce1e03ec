"""Decode, prefill, mixed and speculative batches through vLLM's interface, compared with SDPA of each request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batches import ORDERS, Setup, make, run
from sdpa_reference import expected

BATCHES: dict[str, dict[str, Any]] = {
    "decode": {"queries": [1, 1, 1], "keys": [20, 1, 70]},
    "prefill": {"queries": [40, 3, 17], "keys": [40, 3, 17]},
    "chunks of prompts": {"queries": [20, 70], "keys": [64, 90]},
    "mixed": {"queries": [1, 1, 5, 66], "keys": [33, 48, 40, 66]},
    "speculative": {"queries": [4, 4, 2], "keys": [20, 4, 50], "speculative": 3},
    "padded decode": {"queries": [1, 1], "keys": [20, 33], "padding": 2},
    "padded mixed": {"queries": [1, 18], "keys": [20, 33], "padding": 2},
    "as many tokens as requests": {"queries": [3, 1], "keys": [20, 33], "padding": 2},
}


def compare(setup: Setup, device: torch.device) -> None:
    made = make(setup, device)
    out = run(setup, made)
    reference = expected(setup, made)
    rows = made.common.num_actual_tokens  # the backend writes no others
    bound = 4e-3 if setup.dtype == torch.float16 else 3e-2
    torch.testing.assert_close(out[:rows].double(), reference[:rows], atol=bound, rtol=bound)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_batches(batch: str, dtype: torch.dtype, device: torch.device) -> None:
    compare(Setup(**BATCHES[batch], dtype=dtype), device)


@pytest.mark.parametrize("batch", ["decode", "mixed"])
@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_the_cache(batch: str, order: str, device: torch.device) -> None:
    compare(Setup(**BATCHES[batch], order=order), device)


@pytest.mark.parametrize("batch", ["decode", "mixed"])
@pytest.mark.parametrize("block_size", [32, 64])
def test_block_sizes(batch: str, block_size: int, device: torch.device) -> None:
    compare(Setup(**BATCHES[batch], block_size=block_size), device)


@pytest.mark.parametrize("batch", ["decode", "mixed"])
@pytest.mark.parametrize(("heads", "heads_kv"), [(2, 2), (8, 1), (6, 2)], ids=["MHA", "MQA", "groups of three"])
def test_heads(batch: str, heads: int, heads_kv: int, device: torch.device) -> None:
    compare(Setup(**BATCHES[batch], heads=heads, heads_kv=heads_kv), device)


VARIANTS: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 10},
    "softcap": {"logits_soft_cap": 2.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": [0.5, -1.0, 2.0, 0.0]},
    "window, softcap and sinks": {"sliding_window": 30, "logits_soft_cap": 2.0, "sinks": [0.5, -1.0, 2.0, 0.0]},
}


@pytest.mark.parametrize("batch", ["decode", "mixed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(batch: str, variant: str, device: torch.device) -> None:
    layer = dict(VARIANTS[variant])
    if "sinks" in layer:
        layer["sinks"] = torch.tensor(layer["sinks"], dtype=torch.bfloat16, device=device)
    compare(Setup(**BATCHES[batch], layer=layer), device)


@pytest.mark.parametrize("window", [None, 10])
def test_batches_that_are_not_causal(window: int | None, device: torch.device) -> None:
    compare(Setup(**BATCHES["mixed"], causal=False, layer={"sliding_window": window}), device)


@pytest.mark.parametrize("batch", ["decode", "mixed", "speculative"])
@pytest.mark.parametrize("scales", [(0.5, 2.0), ([0.5, 0.25], [2.0, 0.125])], ids=["scale", "scales of heads"])
def test_float8(batch: str, scales: Any, device: torch.device, request: pytest.FixtureRequest) -> None:
    if device.type == "cuda" and isinstance(scales[0], list) and not request.getfixturevalue("writer"):
        pytest.skip("vLLM's Triton kernel, which writes the cache here, takes one scale only")
    compare(Setup(**BATCHES[batch], cache_dtype="fp8", scales=scales), device)


@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_a_window_over_float8(batch: str, device: torch.device) -> None:
    setup = Setup(**BATCHES[batch], dtype=torch.bfloat16, cache_dtype="fp8_e4m3", layer={"sliding_window": 10})
    compare(setup, device)


RANGES: dict[int, list[tuple[int, int]]] = {0: [(2, 9), (12, 30)], 2: [(5, 8), (10, 39)]}


@pytest.mark.parametrize("layer", [{}, {"sliding_window": 8}], ids=["all keys", "window"])
@pytest.mark.parametrize("clamps", [False, True])
def test_prefix_lm_ranges(layer: dict[str, Any], clamps: bool, device: torch.device) -> None:
    """Ranges of requests 0 and 2: whole, in a chunk that begins within one, and before the chunk."""
    setup = Setup([33, 5, 25], [33, 40, 40], ranges=RANGES, clamps_ranges=clamps, layer=layer)
    compare(setup, device)


@pytest.mark.parametrize(("queries", "ranges"), [([9, 1], {}), ([1, 1], RANGES)], ids=["no ranges", "decode"])
def test_steps_of_a_prefix_lm_without_ranges(queries: list[int], ranges: Any, device: torch.device) -> None:
    compare(Setup(queries, [41, 20], ranges=ranges), device)
