"""DTensors: the rows that this rank has of them, and the output as one again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor, Shard

from flashgen.errors import ArgumentError
from flashgen.language.spec import AttentionSpec
from flashgen.torch.tensors import Tensor


def taken_apart(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, group: Any
) -> tuple[Tensor, Tensor, Tensor, Any, Callable[[Tensor], Tensor]]:
    """(q, k, v, group, what makes an output of theirs): of plain tensors as they are.

    DTensors are of one mesh, which is the group, and sharded along the length over all of its dimensions.
    """
    if not any(isinstance(tensor, DTensor) for tensor in (q, k, v)):
        return q, k, v, group, _as_it_is
    if not (isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor)):
        raise ArgumentError("q, k and v: some are DTensors and some are not; make them alike")
    axis, mesh = 2 if spec.layout == "bhsd" else 1, q.device_mesh
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.device_mesh != mesh or any(placement != Shard(axis) for placement in tensor.placements):
            raise ArgumentError(
                f"{name} is a DTensor of {tensor.placements}; shard all three along the length, Shard({axis}), on one "
                "mesh: redistribute(...), or give to_local() of your own"
            )
    if group is not None and group != mesh:
        raise ArgumentError("group: q, k and v are DTensors, whose mesh is the group; leave it out")
    placements = q.placements

    def put_together(out: Tensor) -> Tensor:
        made: Tensor = DTensor.from_local(out, mesh, placements, run_check=False)
        return made

    return q.to_local(), k.to_local(), v.to_local(), mesh, put_together


def _as_it_is(out: Tensor) -> Tensor:
    return out
