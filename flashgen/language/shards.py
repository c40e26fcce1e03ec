"""A shard of a call: some rows of q over some of k, with masks, scores and dropout that see positions in the whole.

Where a sequence is spread over several GPUs, a kernel is given a part of its queries and a part of its keys. A sharded
spec (`AttentionSpec.shard`) reads where these stand as numbers of the call, so that one kernel serves every part:

    shard_b, shard_h, shard_q, shard_k   what is added to b, h, q and k
    whole_q, whole_k                     what len_q and len_k are

They are captures like any other integers, so that everything that is proven of captured numbers holds, and closed forms
stay closed forms; of their values more is known, which calls check: a shard lies within the whole.
"""

from __future__ import annotations

import sympy

from flashgen.language import operations as ops
from flashgen.language.expression_json import PLACES, SHARD_B, SHARD_H, SHARD_K, SHARD_Q, WHOLE_K, WHOLE_Q
from flashgen.language.modifiers import Mask, Score
from flashgen.language.operations import Capture

BLOCK_Q, BLOCK_K = 16, 32
"""What shard_q and shard_k are multiples of under dropout, whose generator serves as many queries and keys at once."""

_IN_THE_WHOLE = {
    **{
        index: ops.Add(index, place)
        for index, place in zip(ops.INDICES, (SHARD_B, SHARD_H, SHARD_Q, SHARD_K), strict=True)
    },
    ops.LEN_Q: WHOLE_Q,
    ops.LEN_K: WHOLE_K,
}


def in_the_whole(expression: sympy.Basic) -> sympy.Basic:
    """The expression at positions of the whole; one that reads such already, as a sharded spec's JSON has it, stays."""
    if expression.atoms(Capture) & set(PLACES.values()):
        return expression
    return expression.xreplace(_IN_THE_WHOLE)


def mask_of_shard(mask: Mask) -> Mask:
    """The mask of a shard, under the same name."""
    return Mask(mask.name, in_the_whole(mask.expression), mask.bound)


def score_of_shard(score: Score) -> Score:
    """The score function of a shard, under the same name."""
    return Score(score.name, in_the_whole(score.expression), score.bound)
