"""Blocks selected at the call: a few per block of queries, with their own sizes, or at random."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import flashgen.language as fg
from families.entry import Captures, Entry
from flashgen.verify import CaptureMaker, Shape

CHOICES = 4
TOPK, SIZES = fg.Tensor("topk", "int32", 4), fg.Tensor("sizes", "int32", 1)
SPARSE_BLOCK = 32


def variable_blocks(block: int) -> fg.Mask:
    """Each block of queries selects some blocks of keys, of which only the first sizes[...] keys exist."""

    def variable_blocks(b: Any, h: Any, q: Any, k: Any) -> Any:
        of_query, of_key = q // block, k // block
        chosen = [TOPK[b, h, of_query, choice] == of_key for choice in range(CHOICES)]
        return functools.reduce(lambda one, other: one | other, chosen) & (k % block < SIZES[of_key])

    return fg.trace_mask(variable_blocks, f"variable_blocks({block})")


def choices(block: int) -> CaptureMaker:
    def choose(shape: Shape, random: np.random.Generator) -> Captures:
        of_queries, of_keys = -(-shape.len_q // block), -(-shape.len_k // block)
        several = random.permuted(
            np.broadcast_to(np.arange(of_keys, dtype=np.int32), (shape.batch, shape.heads_q, of_queries, of_keys)),
            axis=-1,
        )
        sizes = random.integers(block // 2, block + 1, of_keys, dtype=np.int32)
        return {"topk": several[..., :CHOICES].copy(), "sizes": sizes}

    return choose


def chosen(shape: Shape, captures: Captures, block: int) -> np.ndarray:
    allowed = np.zeros((shape.batch, shape.heads_q, shape.len_q, shape.len_k), bool)
    for (b, h, of_query, _), of_key in np.ndenumerate(captures["topk"]):
        first = of_key * block
        rows = slice(of_query * block, (of_query + 1) * block)
        allowed[b, h, rows, first : first + captures["sizes"][of_key]] = True
    return allowed


def random_layout(share: float, block: int) -> CaptureMaker:
    def layout(shape: Shape, random: np.random.Generator) -> Captures:
        blocks = (-(-shape.len_q // block), -(-shape.len_k // block))
        return {"layout": random.random((shape.heads_q, *blocks)) < share}

    return layout


def laid_out(shape: Shape, captures: Captures, block: int) -> np.ndarray:
    whole = np.repeat(np.repeat(captures["layout"], block, axis=1), block, axis=2)
    return whole[:, : shape.len_q, : shape.len_k]


def entries(length: int) -> tuple[Entry, ...]:
    block = length // 13
    sparse = fg.block_sparse(fg.Tensor("layout", "bool", 3), SPARSE_BLOCK, SPARSE_BLOCK)
    return (
        Entry(
            "variable_blocks",
            variable_blocks(block),
            captures=choices(block),
            allowed=lambda s, c: chosen(s, c, block),
        ),
        *(
            Entry(
                f"block_sparse_{percent}",
                sparse,
                captures=random_layout(percent / 100, SPARSE_BLOCK),
                allowed=lambda s, c: laid_out(s, c, SPARSE_BLOCK),
            )
            for percent in (10, 25, 50)
        ),
    )
