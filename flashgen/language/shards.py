"""Sharded specs: part of the queries against part of the keys, with masks, scores and dropout at global positions.

If a sequence is distributed over several GPUs, each kernel gets a part of the queries and a part of the keys. A sharded
spec (`AttentionSpec.shard`) reads their positions as numbers of the call, so that one kernel serves every part:

    shard_b, shard_h, shard_q, shard_k   offsets that are added to b, h, q and k
    whole_q, whole_k                     the global lengths, in place of len_q and len_k

These numbers are captures like other integers, so everything that is proven for captured numbers holds for them, and
closed forms stay closed forms. In addition, calls check that a shard lies within the global lengths.
"""

from __future__ import annotations

import sympy

from flashgen.language import operations as ops
from flashgen.language.expression_json import SHARD_B, SHARD_H, SHARD_K, SHARD_NUMBERS, SHARD_Q, WHOLE_K, WHOLE_Q
from flashgen.language.modifiers import Mask, Score
from flashgen.language.operations import Capture

BLOCK_Q, BLOCK_K = 16, 32
"""Multiples that shard_q and shard_k must be under dropout: one call of the random generator serves such a block."""

_GLOBAL_VALUES = {
    **{
        index: ops.Add(index, offset)
        for index, offset in zip(ops.INDICES, (SHARD_B, SHARD_H, SHARD_Q, SHARD_K), strict=True)
    },
    ops.LEN_Q: WHOLE_Q,
    ops.LEN_K: WHOLE_K,
}


def to_global(expression: sympy.Basic) -> sympy.Basic:
    """Returns the expression at global positions. One that reads them already, from JSON, is returned as it is."""
    if expression.atoms(Capture) & set(SHARD_NUMBERS.values()):
        return expression
    return expression.xreplace(_GLOBAL_VALUES)


def shard_mask(mask: Mask) -> Mask:
    """Returns the sharded mask, under the same name."""
    return Mask(mask.name, to_global(mask.expression), mask.bound)


def shard_score(score: Score) -> Score:
    """Returns the sharded score function, under the same name."""
    return Score(score.name, to_global(score.expression), score.bound)
