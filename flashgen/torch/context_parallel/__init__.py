"""Context parallelism: attention over one sequence that is sharded over several GPUs, by torch.distributed.

    from flashgen.torch.context_parallel import attention, positions, shard, unshard

    q, k, v = (shard(tensor, dim=2) for tensor in (q, k, v))        # each rank's rows
    out = attention(spec, q, k, v, scheme="ring")                   # the same rows as on one GPU
    whole = unshard(out, dim=2)

Every spec has the same result on P ranks as on one: masks, scores, captures and dropout are functions of positions in
the whole sequence. A plan (`flashgen.ranks`) determines what is sent and computed; `flashgen show --ranks` draws it.
"""

from flashgen.torch.context_parallel.functional import attention
from flashgen.torch.context_parallel.sharding import positions, shard, unshard

__all__ = ["attention", "positions", "shard", "unshard"]
