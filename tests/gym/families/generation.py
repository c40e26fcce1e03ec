"""Block diffusion, and trees of tokens: decoding of several drafts at once, and training on several continuations."""

from __future__ import annotations

from typing import Any

import numpy as np

import flashgen.language as fg
from families.entry import Captures, Entry, nowhere
from flashgen.verify import Shape

HALF = fg.Scalar("half", "int32")
PREFIX, NODES = fg.Scalar("prefix", "int32"), fg.Scalar("nodes", "int32")
ANCESTOR = fg.Tensor("ancestor", "bool", 2)


def block_diffusion(block: int) -> fg.Mask:
    """Noised tokens 0..half, then the clean ones: a noised block sees itself and the clean blocks before it."""

    def block_diffusion(b: Any, h: Any, q: Any, k: Any) -> Any:
        noised_q, noised_k = q < HALF, k < HALF
        block_q, block_k = q % HALF // block, k % HALF // block
        itself = (block_q == block_k) & (noised_q == noised_k)
        context = (block_q > block_k) & noised_q & ~noised_k
        return itself | context | ((block_q >= block_k) & ~noised_q & ~noised_k)

    return fg.trace_mask(block_diffusion, f"block_diffusion({block})")


def halves(shape: Shape, random: np.random.Generator) -> Captures:
    return {"half": max(shape.len_q, shape.len_k) // 2}


def diffused(shape: Shape, captures: Captures, block: int) -> np.ndarray:
    """Computed per block of queries; positions beyond both halves count as clean and start again, as in the formula."""
    allowed, half = nowhere(shape), captures["half"]
    for start in range(0, half, block):
        end = min(start + block, half)
        allowed[start:end, start:end] = True
        allowed[start:end, half : half + start] = True
        allowed[half + start : half + end, half : half + end] = True
    for q in range(shape.len_q):
        for k in range(0 if q >= 2 * half else 2 * half, shape.len_k):
            noised_q, noised_k = q < half, k < half
            block_q, block_k = q % half // block, k % half // block
            if noised_q and noised_k:
                allowed[q, k] = block_q == block_k
            elif noised_q:
                allowed[q, k] = block_q > block_k
            else:
                allowed[q, k] = not noised_k and block_q >= block_k
    return allowed


def tree_decoding(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Queries are the nodes of a tree of drafts; each sees the prompt, itself and its ancestors."""
    node = ANCESTOR[q, fg.clamp(k - PREFIX, 0, NODES - 1)]
    return (k < PREFIX) | ((k >= PREFIX) & (k < PREFIX + NODES) & node)


def tree_of_guesses(shape: Shape, random: np.random.Generator) -> Captures:
    nodes = min(shape.len_q, max(1, shape.len_k * 2 // 3))
    ancestor = np.zeros((shape.len_q, nodes), bool)
    for node in range(nodes):
        if node:
            ancestor[node] = ancestor[random.integers(max(0, node - 9), node)]
        ancestor[node, node] = True
    return {"prefix": shape.len_k - nodes, "nodes": nodes, "ancestor": ancestor}


def guessed(shape: Shape, captures: Captures) -> np.ndarray:
    allowed, prefix, nodes = nowhere(shape), captures["prefix"], captures["nodes"]
    allowed[:, :prefix] = True
    allowed[:, prefix : prefix + nodes] = captures["ancestor"]
    return allowed


def tree_training(prefix: int, branch: int) -> fg.Mask:
    """Branches of one length over one prefix: each sees the prefix and, causally, itself."""

    def tree_training(b: Any, h: Any, q: Any, k: Any) -> Any:
        own = (q // branch == (k - prefix) // branch) & ((k - prefix) % branch <= q % branch)
        return (k < prefix) | ((k >= prefix) & own)

    return fg.trace_mask(tree_training, f"tree_training({prefix}, {branch})")


def branches(shape: Shape, prefix: int, branch: int) -> np.ndarray:
    allowed = nowhere(shape)
    allowed[:, :prefix] = True
    for start in range(0, shape.len_q, branch):
        for q in range(start, min(start + branch, shape.len_q)):
            allowed[q, prefix + start : prefix + q + 1] = True
    return allowed


def entries(length: int) -> tuple[Entry, ...]:
    block, prefix, branch = length // 20, length // 3, length // 7
    return (
        Entry(
            "block_diffusion",
            block_diffusion(block),
            captures=halves,
            allowed=lambda s, c: diffused(s, c, block),
        ),
        Entry("tree_decoding", fg.trace_mask(tree_decoding), captures=tree_of_guesses, allowed=guessed),
        Entry("tree_training", tree_training(prefix, branch), allowed=lambda s, c: branches(s, prefix, branch)),
    )
