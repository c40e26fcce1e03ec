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
