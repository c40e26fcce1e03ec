"""Attention of one sequence that is spread over several GPUs, by torch.distributed.

    from flashgen.torch.context_parallel import attention, positions, shard, unshard

    q, k, v = (shard(tensor, dim=2) for tensor in (q, k, v))        # each rank's rows
    out = attention(spec, q, k, v, scheme="ring")                   # what one GPU gives, of these rows
    whole = unshard(out, dim=2)

Every spec gives on P ranks what it gives on one: masks, scores, captures and dropout are functions of positions in the
whole. What is sent and computed follows from a plan (`flashgen.ranks`), which `flashgen show --ranks` draws.
"""

from flashgen.torch.context_parallel.functional import attention
from flashgen.torch.context_parallel.sharding import positions, shard, unshard

__all__ = ["attention", "positions", "shard", "unshard"]
