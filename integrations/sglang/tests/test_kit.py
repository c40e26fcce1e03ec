"""The dense cases of SGLang's own unit tests of attention backends (`sglang.test.kits.attention_unittest`).

The modes of its runner that draft or verify tokens are not run: the backend refuses speculative decoding, which
test_backend.py checks.
"""

from __future__ import annotations

import dataclasses
import unittest
from typing import Any

import pytest
import sglang.test.kits.attention_unittest.attention_methods.dense_attention as kit
from sglang.test.kits.attention_unittest.runner_modes.cuda_graph_decode_runner import run_dense_cuda_graph_decode_case
from sglang.test.kits.attention_unittest.runner_modes.split_op_runner import run_dense_split_op_extend_case

import flashgen_sglang

BACKEND = flashgen_sglang.NAME
flashgen_sglang.register()
# The kit lists which of two rules for the length of a window each backend follows; this is FlashAttention-3's.
kit._SWA_DECODE_EXTEND_WINDOW |= {BACKEND}

CASES = (
    *kit.make_dense_cases(BACKEND),
    *kit.make_swa_no_prefix_input_config_cases(BACKEND),
    *kit.make_swa_prefix_input_config_cases(BACKEND),
)
WINDOW_DECODE = dataclasses.replace(
    CASES[-1], name="swa_decode", forward_mode=kit.ForwardMode.DECODE, extend_lens=(), prefix_lens=(2, 4, 9)
)
DECODES = [case for case in (*CASES, WINDOW_DECODE) if case.forward_mode.is_decode()]
EXTENDS = [case for case in CASES if not case.forward_mode.is_decode()]
LAYOUTS = ("shuffled_pages", "interleaved_pages", "contiguous")


class Skipped(unittest.TestCase):
    """What the kit skips a case by, if a backend cannot be created. A case here must not be skipped."""

    def skipTest(self, reason: str) -> Any:
        raise AssertionError(reason)


@pytest.mark.parametrize("case", (*CASES, WINDOW_DECODE), ids=lambda case: case.name)
def test_case(case: Any, device: str) -> None:
    kit.run_dense_attention_case(Skipped(), case, device=device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["mha_extend_ragged_page_boundary", "mha_decode_page_boundary"])
def test_layouts_of_pages(name: str, layout: str, device: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    kit.run_dense_attention_case(Skipped(), case, device=device, loc_layout=layout)


def test_extended_tokens_in_any_slots(device: str) -> None:
    """With pages of one token, the slots of a sequence have no order."""
    case = dataclasses.replace(CASES[0], prefix_lens=(2, 4), extend_lens=(9, 5))
    kit.run_dense_attention_case(Skipped(), case, device=device, loc_layout="non_monotonic_extend")


@pytest.mark.parametrize("case", DECODES, ids=lambda case: case.name)
def test_metadata_of_graphs(case: Any, device: str) -> None:
    """The three calls for the metadata of captured steps, with sequences that pad the batch."""
    run_dense_cuda_graph_decode_case(Skipped(), case, device=device)


@pytest.mark.parametrize("breakable", [False, True], ids=["piecewise", "breakable"])
@pytest.mark.parametrize("case", EXTENDS, ids=lambda case: case.name)
def test_prefill_beside_graphs(case: Any, breakable: bool, device: str) -> None:
    """Prefill whose other operators are captured, with tokens that pad the batch."""
    tokens = case.num_input_tokens + 5
    run_dense_split_op_extend_case(Skipped(), case, breakable=breakable, static_num_tokens=tokens, device=device)
