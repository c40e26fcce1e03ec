"""The implementations that are measured on several GPUs, each as a function that runs one pass."""

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
    """Returns random q, k, v and dO of the tokens of a GPU, different on each rank."""
    torch.manual_seed(dist.get_rank())
    q, k, v, d_out = (
        torch.randn(1, heads, tokens, shape.head_dim, device="cuda", dtype=torch.bfloat16)
        for heads in (shape.heads_q, shape.heads_kv, shape.heads_kv, shape.heads_q)
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), d_out


def spec_of(shape: Shape) -> AttentionSpec:
    """Returns the spec of a shape."""
    mask = causal() if shape.window is None else sliding_window(shape.window)
    return AttentionSpec(shape.head_dim, "bfloat16", mask=mask)


def one_gpu(shape: Shape, timed: str, given: Tensors) -> Run:
    """Returns a run of a sequence on one GPU."""
    return _run(partial(attention_of_one, spec_of(shape)), timed, given)


def flashgen(scheme: str) -> Callable[[Shape, str, Tensors], Run]:
    """Returns the function that creates runs of one of flashgen's schemes."""

    def create(shape: Shape, timed: str, given: Tensors) -> Run:
        call = partial(attention, spec_of(shape), scheme=scheme, shards=shape.shards)
        return _run(call, timed, given)

    return create


class Captured:
    """A ring that is captured in a CUDA graph, messages included, and replayed."""

    def __init__(self, shape: Shape, timed: str, given: Tensors) -> None:
        run, beside = flashgen("ring")(shape, timed, given), torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # caches are filled before the capture
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
    """Returns a run of a zigzag ring over torch's FlashAttention-2."""
    if shape.window is not None:
        raise NotImplementedError("torch's FlashAttention-2 operator has no window")
    return _run(FlashRing(dist.group.WORLD), timed, given)


class OfTorch:
    """torch's context_parallel over its FlashAttention-2. Calls must be made inside the context `around`.

    With `repeated`, key and value heads are repeated beforehand, in case its ring does not support fewer than q has.
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
        """Opens the context of calls. It requires a buffer to shard, although the inputs are shards already."""
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


def maximum_of_ranks(value: float) -> float:
    """Returns the maximum of a value over all ranks."""
    every = torch.tensor([value], dtype=torch.float64, device="cuda")
    dist.all_reduce(every, dist.ReduceOp.MAX)
    return float(every)


def _run(call: Callable[..., Any], timed: str, given: Tensors) -> Run:
    """Returns a run of one pass of a call, "forward" or "both"."""
    *inputs, d_out = given

    def forward() -> None:
        with torch.no_grad():
            call(*inputs)

    return forward if timed == "forward" else lambda: torch.autograd.grad(call(*inputs), inputs, d_out)
