"""attention-gym's mask and score functions, unchanged; skipped unless installed: `pip install attn_gym`.

Compared with attention in plain torch on the CPU, and with compiled FlexAttention on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")
pytest.importorskip("attn_gym.masks", reason="attention-gym is not installed: pip install attn_gym")

import torch
import torch.nn.attention.flex_attention as torchs
from attn_gym import masks, mods

import flashgen.torch as ours
import plain

BATCH, HEADS, DIM = 2, 2, 64


class Case(NamedTuple):
    """How to create a function on a device.

    It says whether it is a score function, for which lengths it is made, and whether it takes single elements, which
    plain torch must know.
    """

    make: Callable[[str], Any]
    of_scores: bool = False
    len_q: int = 96
    len_k: int = 96
    of_elements: bool = False
    flex_compiles: bool = (
        True  # FlexAttention's kernel needs it with torch 2.11; otherwise it runs there without torch.compile
    )


def offsets(device: str) -> Any:
    return torch.tensor([0, 20, 51, 96], device=device)


def graphs(device: str) -> Any:
    """Rings of 96 nodes with a chord, one per sequence."""
    nodes = torch.arange(96, device=device)
    adjacency = torch.zeros(BATCH, 96, 96, dtype=torch.bool, device=device)
    adjacency[:, nodes, (nodes + 1) % 96] = adjacency[:, (nodes + 1) % 96, nodes] = True
    for number in range(BATCH):
        adjacency[number, number, 48] = adjacency[number, 48, number] = True
    return adjacency


def spatial_bias(device: str) -> Any:
    distances = mods.shortest_path_distances(graphs(device), 5)
    return mods.generate_graphormer_spatial_bias(torch.randn(HEADS, 7, device=device), distances)


def edge_bias(device: str) -> Any:
    kinds = torch.randint(0, 4, (BATCH, 96, 96), device=device)
    paths = mods.shortest_path_edge_types(graphs(device), kinds, 3)
    return mods.generate_graphormer_edge_bias(torch.randn(HEADS, 3, 4, device=device), *paths)


def mla(device: str) -> Any:
    rows = [torch.randn(BATCH, heads, 96, 8, device=device, dtype=torch.bfloat16) for heads in (HEADS, 1)]
    return mods.generate_mla_rope_score_mod(*rows, HEADS, 0.1)


def tree(device: str) -> Any:
    parents = [-1, 0, 1, 1, 3, 3, 0, 2]
    return masks.generate_jetspec_tree_causal_mask_mod(24, masks.build_tree_ancestor_matrix(parents, device=device))


def flamingo(device: str) -> Any:
    intervals = torch.tensor([[0, 40], [10, 40], [40, 64]], dtype=torch.int32, device=device)
    return masks.generate_vision_cross_attention_mask_mod(intervals, 16)


def anywhere(make: Callable[..., Any], *given: Any) -> Callable[[str], Any]:
    """Returns a function that needs no array."""
    return lambda _device: make(*given)


def of_offsets(make: Callable[..., Any], *before: Any) -> Callable[[str], Any]:
    return lambda device: make(*before, offsets(device))


CASES: dict[str, Case] = {
    "causal": Case(lambda _device: masks.causal_mask),
    "sliding window": Case(anywhere(masks.generate_sliding_window, 17)),
    "dilated window": Case(anywhere(masks.generate_dilated_sliding_window, 24, 3)),
    "global window": Case(lambda d: masks.generate_global_sliding_window(9, torch.arange(96, device=d) % 31 == 0)),
    "prefix": Case(anywhere(masks.generate_prefix_lm_mask, 30)),
    "documents": Case(of_offsets(masks.generate_doc_mask_mod, masks.causal_mask)),
    "packed documents": Case(of_offsets(masks.generate_packed_causal_doc_mask_mod)),
    "batched": Case(anywhere(masks.batchify_mask_mod, masks.causal_mask, 32)),
    "block diffusion": Case(anywhere(masks.generate_block_diffusion_mask, 48, 8)),
    "flamingo": Case(flamingo, len_q=64, len_k=48, of_elements=True),
    "shared prefix": Case(
        lambda d: masks.generate_shared_prefix_mask_mod(offsets(d), torch.tensor([0, 0, 2], device=d))
    ),
    "tree": Case(tree, len_q=8, len_k=32),
    "drafts": Case(anywhere(masks.generate_jetspec_training_mask_mod, 40, 8), len_q=56, len_k=96),
    "neighbourhood": Case(anywhere(masks.generate_natten, 8, 12, 3, 5)),
    "tiled neighbourhood": Case(anywhere(masks.generate_tiled_natten, 8, 8, 3, 3, 4, 4), len_q=64, len_k=64),
    "neighbourhood along a curve": Case(anywhere(masks.generate_morton_natten, 8, 8, 3, 3), len_q=64, len_k=64),
    "sliding tiles": Case(anywhere(masks.generate_sta_mask_mod_2d, (8, 12), (4, 8), (4, 4))),
    "sliding tiles of a film": Case(anywhere(masks.generate_sta_mask_mod_3d, (4, 4, 6), (2, 2, 4), (2, 2, 2))),
    "spatial heads": Case(anywhere(masks.generate_spatial_head_mask_mod, 6, 6, 15, 2, True, 4)),
    "temporal heads": Case(anywhere(masks.generate_temporal_head_mask_mod, 6, 6, 15, 2)),
    "ALiBi": Case(anywhere(mods.generate_alibi_bias, HEADS), of_scores=True),
    "soft cap": Case(anywhere(mods.generate_tanh_softcap, 20), of_scores=True),
    "soft cap, approximate": Case(anywhere(mods.generate_tanh_softcap, 20, True), of_scores=True),
    "activation": Case(anywhere(mods.generate_activation_score_mod, torch.relu), of_scores=True),
    "sandwich": Case(lambda d: mods.generate_sandwich_bias(HEADS, 96, device=d), of_scores=True),
    "Graphormer's distances": Case(spatial_bias, of_scores=True),
    "Graphormer's edges": Case(edge_bias, of_scores=True, flex_compiles=False),
    "MLA's rotary parts": Case(mla, of_scores=True, of_elements=True, flex_compiles=False),
}


def rows(case: Case, device: str) -> list[Any]:
    lengths = (case.len_q, case.len_k, case.len_k)
    shapes = [(BATCH, HEADS, length, DIM) for length in lengths]
    return [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def result(module: Any, call: Any, function: Any, case: Case, qkv: list[Any]) -> Any:
    if case.of_scores:
        return call(*qkv, score_mod=function)
    sizes = (BATCH, HEADS, case.len_q, case.len_k, str(qkv[0].device))
    return call(*qkv, block_mask=module.create_block_mask(function, *sizes))


@pytest.mark.parametrize("name", CASES)
def test_on_the_emulator(name: str) -> None:
    case = CASES[name]
    function, qkv = case.make("cpu"), rows(case, "cpu")
    out = result(ours, ours.flex_attention, function, case, qkv)
    if case.of_elements:
        function = torch.vmap(torch.vmap(torch.vmap(torch.vmap(function))))
    expected, _ = plain.attention(*qkv, **{"score" if case.of_scores else "mask": function})
    plain.assert_close(out, expected)
    plain.assert_gradients(out, expected, qkv)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_against_flex_attention(name: str) -> None:
    case = CASES[name]
    torch.compiler.reset()
    function, qkv = case.make("cuda"), rows(case, "cuda")
    d_out, results = torch.randn_like(qkv[0]), []
    with ours.emulated(False):
        theirs = torch.compile(torchs.flex_attention) if case.flex_compiles else torchs.flex_attention
        for module, call in ((ours, ours.flex_attention), (torchs, theirs)):
            out = result(module, call, function, case, qkv)
            results.append((out, *torch.autograd.grad(out, qkv, d_out)))
    for got, wanted in zip(*results, strict=True):
        plain.assert_close(got, wanted.double())
