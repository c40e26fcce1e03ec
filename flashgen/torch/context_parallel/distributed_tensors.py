"""DTensors as inputs: their local rows, and the output as a DTensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor, Shard

from flashgen.errors import ArgumentError
from flashgen.language.spec import AttentionSpec
from flashgen.torch.tensors import Tensor


def local_tensors(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, group: Any
) -> tuple[Tensor, Tensor, Tensor, Any, Callable[[Tensor], Tensor]]:
    """Returns local q, k and v, the group, and a function that wraps an output. Plain tensors are not changed.

    DTensors must have one mesh, which becomes the group, and be sharded along the length over all its dimensions.
    """
    if not any(isinstance(tensor, DTensor) for tensor in (q, k, v)):
        return q, k, v, group, _unchanged
    if not (isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor)):
        raise ArgumentError("q, k and v: some are DTensors and some are not; give all or none as DTensors")
    axis, mesh = spec.batch_layout.rows_axis, q.device_mesh
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.device_mesh != mesh or any(placement != Shard(axis) for placement in tensor.placements):
            raise ArgumentError(
                f"{name} is a DTensor of {tensor.placements}; shard all three along the length, Shard({axis}), on one "
                "mesh: call redistribute(...), or give to_local()"
            )
    if group is not None and group != mesh:
        raise ArgumentError("group: q, k and v are DTensors, whose mesh is the group; leave it out")
    placements = q.placements

    def wrap(out: Tensor) -> Tensor:
        wrapped: Tensor = DTensor.from_local(out, mesh, placements, run_check=False)
        return wrapped

    return q.to_local(), k.to_local(), v.to_local(), mesh, wrap


def _unchanged(out: Tensor) -> Tensor:
    return out
