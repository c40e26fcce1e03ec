"""Launches of mixed batches in a release, as formulas of the sizes of calls."""

from __future__ import annotations

from dataclasses import replace

import flashgen as fg
from flashgen.codegen.sizes import Sizes
from flashgen.codegen.stages import forward_kernels
from flashgen.codegen.targets import TARGETS
from flashgen.release.launch_facts import launch_facts

SPEC = fg.AttentionSpec(128, "bfloat16", layout="thd", mask=fg.causal(), page_size=16)


def test_a_launch_depends_on_tokens_and_sequences() -> None:
    kernels = forward_kernels(SPEC, TARGETS["sm_90"])
    facts, kernel = launch_facts(kernels, SPEC)["forward"], kernels["forward"]
    assert facts["grid"] == {"x": "total_q / 64 * heads_q + splits * heads_kv", "y": "1", "z": "1"}
    members = {member["name"]: member for member in facts["arguments"]}
    assert members["k"]["meaning"] == "pages of keys, (pages, 16, heads_kv, 128)"
    assert members["q"]["meaning"] == "queries, (total_q, heads_q, 128)"
    assert members["prompts"]["value"] == "total_q / 64 * heads_q"
    assert all(member["meaning"] for member in members.values())
    sizes = Sizes(64, 32, 8, 2048, 8192, multiprocessors=132, splits=33, total_q=2111)
    assert kernel.grid(sizes) == (32 * 32 + 33 * 8, 1, 1)
    assert kernel.values(sizes)["first_prefill_tiles"] == 198


def test_launches_of_two_kernels() -> None:
    kernels = forward_kernels(SPEC, TARGETS["sm_90a"])
    facts = launch_facts(kernels, SPEC)
    prompts, few = facts["forward"], facts["few"]
    assert prompts["grid"]["x"] == "min(min(len_q / 64, 1) * (total_q / 64) * heads_q, multiprocessors)"
    assert few["grid"]["x"] == "splits * heads_kv"
    assert [map["sizes"] for map in prompts["maps"]] == [
        ["128", "256", "heads_q", "total_q + 1"],
        ["64", "8", "(heads_kv - 1) * k_head_panels + 2", "2", "pages"],
        ["64", "8", "(heads_kv - 1) * v_head_panels + 2", "2", "pages"],
        ["128", "256", "heads_q", "total_q + 1"],
    ]
    assert [map.get("rows_before", 0) for map in prompts["maps"]] == [256, 0, 0, 256]
    for part in facts.values():
        assert all(member["meaning"] for member in part["arguments"])
    sizes = Sizes(64, 32, 8, 2048, 8192, multiprocessors=132, splits=33, total_q=2111)
    assert kernels["forward"].grid(sizes) == (132, 1, 1) and kernels["few"].grid(sizes) == (33 * 8, 1, 1)
    single = Sizes(64, 32, 8, 1, 8192, multiprocessors=132, splits=33, total_q=64)
    assert kernels["forward"].grid(single) == (0, 1, 1), "no sequence can be a prompt, and nothing is launched"


def test_8_bit_keys_have_no_prompt_blocks() -> None:
    spec = replace(SPEC, kv_dtype="int8")
    facts = launch_facts(forward_kernels(spec, TARGETS["sm_80"]), spec)["forward"]
    assert facts["grid"] == {"x": "splits * heads_kv", "y": "1", "z": "1"}
