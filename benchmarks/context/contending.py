"""What is measured on several GPUs: flashgen's schemes, one GPU alone, and peers; each a run of one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.context.flash_ring import FlashRing
from benchmarks.context.rows import Shape
from flashgen.language.masks import causal, sliding_window
from flashgen.language.spec import AttentionSpec
from flashgen.torch import attention as attention_of_one
from flashgen.torch.context_parallel import attention

Run = Callable[[], Any]
Tensors = tuple[Any, Any, Any, Any]
SCHEMES = ("ring", "all_gather", "ulysses")


def tensors(shape: Shape, tokens: int) -> Tensors:
    """Random q, k, v and dO of a GPU's tokens; each rank has its own."""
    torch.manual_seed(dist.get_rank())
    q, k, v, d_out = (
        torch.randn(1, heads, tokens, shape.head_dim, device="cuda", dtype=torch.bfloat16)
        for heads in (shape.heads_q, shape.heads_kv, shape.heads_kv, shape.heads_q)
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), d_out


def spec_of(shape: Shape) -> AttentionSpec:
    """What the shape is of."""
    mask = causal() if shape.window is None else sliding_window(shape.window)
    return AttentionSpec(shape.head_dim, "bfloat16", mask=mask)


def alone(shape: Shape, timed: str, given: Tensors) -> Run:
    """One GPU, that has a sequence for itself."""
    return _run(partial(attention_of_one, spec_of(shape)), timed, given)


def flashgen(scheme: str) -> Callable[[Shape, str, Tensors], Run]:
    """One of flashgen's schemes."""

    def made(shape: Shape, timed: str, given: Tensors) -> Run:
        call = partial(attention, spec_of(shape), scheme=scheme, shards=shape.shards)
        return _run(call, timed, given)

    return made


class Captured:
    """A ring in a CUDA graph, captured with its messages and replayed: as a program does that calls it in each step."""

    def __init__(self, shape: Shape, timed: str, given: Tensors) -> None:
        run, beside = flashgen("ring")(shape, timed, given), torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # what is made once is made before
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(beside)
        dist.barrier()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            run()

    def __call__(self) -> None:
        self._graph.replay()


def ring_over_flash(shape: Shape, timed: str, given: Tensors) -> Run:
    """A zigzag ring over torch's own FlashAttention-2."""
    if shape.window is not None:
        raise NotImplementedError("torch's FlashAttention-2 operator has no window")
    return _run(FlashRing(dist.group.WORLD), timed, given)


class OfTorch:
    """torch's context_parallel over its FlashAttention-2: calls are made inside of `around`.

    repeated: with the heads of k and v repeated beforehand, for where its ring does not take fewer than those of q.
    """

    def __init__(self, shape: Shape, timed: str, given: Tensors, repeated: bool = False) -> None:
        if shape.window is not None:
            raise NotImplementedError("torch's context_parallel has no window")
        self._mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        self._with_gradients, self._gqa = timed == "both", not repeated
        each = shape.heads_q // shape.heads_kv if repeated else 1
        q, k, v, self._d_out = (tensor.detach() for tensor in given)
        inputs = (q, k.repeat_interleave(each, 1), v.repeat_interleave(each, 1))
        self._inputs = [tensor.clone().requires_grad_(self._with_gradients) for tensor in inputs]
        with self.around():
            self()

    @contextmanager
    def around(self) -> Iterator[None]:
        """What calls are made inside of. It wants something to shard; these inputs are a rank's already."""
        marker = torch.zeros(2 * dist.get_world_size(), device="cuda")
        sharding = context_parallel(self._mesh, buffers=[marker], buffer_seq_dims=[0], no_restore_buffers={marker})
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), sharding:
            yield

    def __call__(self) -> None:
        q, k, v = self._inputs
        with torch.set_grad_enabled(self._with_gradients):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self._gqa)
        if self._with_gradients:
            torch.autograd.grad(out, self._inputs, self._d_out)


CONTENDERS: dict[str, Callable[[Shape, str, Tensors], Run]] = {
    "ring-captured": Captured,
    "torch": OfTorch,
    "torch-repeated": partial(OfTorch, repeated=True),
    "FA2-ring": ring_over_flash,
}


def _run(call: Callable[..., Any], timed: str, given: Tensors) -> Run:
    """One pass of a call: forward, or both."""
    *inputs, d_out = given

    def forward() -> None:
        with torch.no_grad():
            call(*inputs)

    return forward if timed == "forward" else lambda: torch.autograd.grad(call(*inputs), inputs, d_out)
