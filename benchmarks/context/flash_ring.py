"""A baseline: a hand-written zigzag ring over the FlashAttention-2 operators of torch.

Each step calls the operator once. The first step attends to the keys of the own rank with a causal mask. For keys of
earlier ranks, all queries attend to the first half of the keys; for keys of later ranks, the second half of the queries
attends to all keys. Partial outputs are merged in float32 after each step. Ring attention is from Liu et al. 2023; the
zigzag order is that of the training of Llama 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward


class FlashRing:
    """Causal attention of q, k, v (batch, heads, rows, dim), whose rows are the two zigzag chunks of a rank."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        return _Ring.apply(self, q, k, v)

    def rotate(self, *tensors: Any) -> tuple[list[Any], list[Any]]:
        """Sends tensors to the next rank. Returns buffers for those of the previous rank, and the pending requests."""
        there = [torch.empty_like(tensor) for tensor in tensors]
        to, of = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        operations = [dist.P2POp(dist.isend, tensor, group=self.group, group_peer=to) for tensor in tensors]
        operations += [dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=of) for tensor in there]
        return there, list(dist.batch_isend_irecv(operations))

    def halves(self, step: int, rows: int) -> tuple[slice, slice]:
        """Returns the queries and the keys of a step after the first."""
        half = rows // 2
        return (slice(0, rows), slice(0, half)) if step <= self.rank else (slice(half, rows), slice(0, rows))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: FlashRing, q: Any, k: Any, v: Any) -> Any:
        rows, keys = q.shape[2], (k, v)
        total, states = torch.empty(()), torch.empty(())
        for step in range(ring.ranks):
            if step + 1 < ring.ranks:
                coming, waiting = ring.rotate(*keys)
            of_q, of_k = ring.halves(step, rows) if step else (slice(0, rows), slice(0, rows))
            out, lse, *_ = _FORWARD(q[:, :, of_q], keys[0][:, :, of_k], keys[1][:, :, of_k], 0.0, step == 0)
            if step == 0:
                total, states = out.float(), lse.clone()
            else:
                part, state = total[:, :, of_q], states[:, :, of_q]
                part -= torch.sigmoid(lse - state)[..., None] * (part - out)
                state -= torch.nn.functional.logsigmoid(state - lse)
            if step + 1 < ring.ranks:
                for work in waiting:
                    work.wait()
                keys = (coming[0], coming[1])
        out = total.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, states)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Any) -> Any:
        ring, (q, k, v, out, states) = ctx.ring, ctx.saved_tensors
        rows, keys = q.shape[2], (k, v)
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        sums = [torch.zeros(tensor.shape, dtype=torch.float32, device=q.device) for tensor in (k, v)]
        none = torch.zeros((), dtype=torch.int64, device=q.device)
        returning: list[Any] = []
        for step in range(ring.ranks):
            if step + 1 < ring.ranks:
                coming, waiting = ring.rotate(*keys)
            of_q, of_k = ring.halves(step, rows) if step else (slice(0, rows), slice(0, rows))
            made = _BACKWARD(
                *(d_out[:, :, of_q], q[:, :, of_q], keys[0][:, :, of_k], keys[1][:, :, of_k], out[:, :, of_q]),
                *(states[:, :, of_q].contiguous(), None, None, of_q.stop - of_q.start, of_k.stop - of_k.start),
                *(0.0, step == 0, none, none),
            )
            dq[:, :, of_q] += made[0]
            for work in returning:
                work.wait()
            for total, gradient in zip(sums, made[1:], strict=True):
                total[:, :, of_k] += gradient
            sums, returning = ring.rotate(*sums)
            if step + 1 < ring.ranks:
                for work in waiting:
                    work.wait()
                keys = (coming[0], coming[1])
        for work in returning:
            work.wait()
        return None, dq.to(q.dtype), sums[0].to(k.dtype), sums[1].to(v.dtype)
