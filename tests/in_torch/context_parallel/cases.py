"""Cases that the ranks of a pool run. Each function runs on all ranks at once and returns what JSON can hold."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import flashgen as fg
from flashgen import reference
from flashgen.errors import FlashgenError, PeerError
from flashgen.ranks import Sizes, plan_of
from flashgen.torch import attention as attention_of_one
from flashgen.torch.context_parallel import attention, positions, shard, unshard
from flashgen.torch.tensors import to_array

slopes = fg.Tensor("slopes", "float32", 1, grad=True)
bias = fg.Tensor("bias", "float32", 1, grad=True)
MASKED = {
    "full": fg.full(),
    "causal": fg.causal(),
    "window": fg.sliding_window(40),
    "both_sides": fg.sliding_window(30, 20),
    "prefix": fg.prefix_lm(50),
    "documents": fg.document("ids") & fg.causal(),
    "lengths": fg.padding("lengths"),
    "of_heads": fg.trace_mask(lambda b, h, q, k: (k <= q) & ((q - k) % (h + 1) == 0)),
}


def spec_of(name: str, dim: int, dtype: str) -> fg.AttentionSpec:
    """Returns a variant by name: a mask, or one of those with more."""
    more: dict[str, Any] = {
        "alibi": {"mask": fg.causal(), "score": fg.alibi(4)},
        "learned": {"mask": fg.causal(), "score": lambda s, b, h, q, k: s + slopes[h] * (q - k) / 64.0 + bias[k % 8]},
        "sinks": {"mask": fg.causal(), "sink": fg.Tensor("sinks", "float32", 1, grad=True)},
        "dropped": {"mask": fg.sliding_window(70), "dropout": 0.2},
        "all_of_it": {"mask": fg.causal(), "score": fg.softcap(20)(fg.alibi("weights")), "dropout": 0.1},
        "bshd": {"mask": fg.causal(), "layout": "bshd"},
        "wide_values": {"mask": fg.causal(), "value_dim": dim + 16},
        "near": {
            "mask": fg.sliding_window(30, 20),
            "layout": "bshd",
            "value_dim": dim + 16,
            "score": lambda s, b, h, q, k: s + slopes[h] * (q - k) / 64.0 + bias[k % 8],
            "sink": fg.Tensor("sinks", "float32", 1, grad=True),
        },
        "parts": {"mask": fg.trace_mask(lambda b, h, q, k: (abs(q - k) < 90) & (q % 1024 < 600))},
    }.get(name) or {"mask": MASKED[name]}
    return fg.AttentionSpec(dim, dtype, **more)


SPECS = [*MASKED, "near", "parts", "alibi", "learned", "sinks", "dropped", "all_of_it", "bshd", "wide_values"]


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def on_gpu() -> bool:
    return device().type == "cuda"


class Problem:
    """A call over the full sequence, equal on every rank, with the reference's results. Small on the CPU."""

    def __init__(self, name: str, cross: bool = False, scale: int = 1, batch: int = 2) -> None:
        self._made_of = (name, cross, scale, batch)
        generator = torch.Generator().manual_seed(5)
        dim, heads, heads_kv = (64, 8, 4) if on_gpu() else (32, 4, 4 if dist.get_world_size() == 4 else 2)
        self.length = (512 if on_gpu() else 256) * scale
        self.spec = spec_of(name, dim, "bfloat16")
        length_k = self.length * 2 if cross else self.length

        def normal(*shape: int) -> Any:
            return torch.randn(*shape, generator=generator)

        axes = (lambda h, s, d: (batch, h, s, d)) if self.spec.layout == "bhsd" else (lambda h, s, d: (batch, s, h, d))
        sizes = [(heads, self.length, dim), (heads_kv, length_k, dim), (heads_kv, length_k, self.spec.value_dim)]
        self.qkv = [normal(*axes(*size)).bfloat16().to(device()) for size in sizes]
        self.d_out = normal(*axes(heads, self.length, self.spec.value_dim)).bfloat16().to(device())
        self.d_lse = normal(batch, heads, self.length).to(device())
        every = {
            "slopes": normal(heads) / 8,
            "bias": normal(8) / 4,
            "sinks": normal(heads),
            "weights": torch.rand(heads, generator=generator) / 8,
            "ids": (torch.arange(self.length) // 37).int(),
            "lengths": torch.tensor([self.length, self.length // 2 + 3], dtype=torch.int32),
        }
        names = [capture.name for capture in self.spec.captures]
        self.captures = {name: every[name].to(device()) for name in names}
        self.learned = [capture.name for capture in self.spec.captures if capture.grad]
        self.options: dict[str, Any] = {"seed": 1234} if self.spec.dropout else {}
        self.axis = 2 if self.spec.layout == "bhsd" else 1

    def wants(self) -> dict[str, Any]:
        """The captures, the learned ones as leaves."""
        return {n: x.detach().clone().requires_grad_() if n in self.learned else x for n, x in self.captures.items()}

    def on_host(self) -> tuple[list[Any], dict[str, Any]]:
        arrays = [to_array(tensor.cpu()).astype(np.float64) for tensor in self.qkv]
        return arrays, {name: tensor.cpu().numpy() for name, tensor in self.captures.items()} | self.options

    @property
    def expected(self) -> dict[str, Any]:
        """By name: the reference, its low-precision result, and the effect of rounding the output."""
        return _expected(*self._made_of)

    def oracle(self) -> dict[str, Any]:
        """Computes what `expected` returns, which takes longer than the call itself."""
        arrays, captures = self.on_host()
        out, lse = reference.attention(self.spec, *arrays, return_lse=True, **captures)
        low = reference.low_precision(self.spec, *arrays, **captures)
        d_out, d_lse = to_array(self.d_out.cpu()).astype(np.float64), self.d_lse.cpu().numpy()
        found = [
            function(self.spec, *arrays, d_out, d_lse=d_lse, **captures)
            for function in (
                *(reference.backward, reference.low_precision_backward, reference.backward_of_rounded_output),
            )
        ]
        made = {"out": (out, low), "lse": (lse,)}
        for index, name in enumerate(("dq", "dk", "dv")):
            made[name] = tuple(each[index] for each in found)
        return made | {name: tuple(each.captures[name] for each in found) for name in self.learned}


@functools.cache
def _expected(*made_of: Any) -> dict[str, Any]:
    """Returns the reference's results, computed once for all schemes and shards of a call."""
    return Problem(*made_of).oracle()


def judge(problem: Problem, got: dict[str, Any]) -> list[str]:
    """Returns the violations of the numerics rule by results of the full sequence."""
    expected, wrong = problem.expected, []
    arrays = {name: to_array(tensor.cpu()).astype(np.float64) for name, tensor in got.items()}
    lse = {"lse": arrays.pop("lse"), "ref_lse": expected["lse"][0]}
    for name, array in arrays.items():
        right, low, *given = expected[name]
        verdict = reference.judge(
            array, right, low, given=given[0] if given else None, **(lse if name == "out" else {})
        )
        wrong += [] if verdict.ok else [f"{name}: {verdict}"]
    return wrong


def group_of(scheme: str) -> Any:
    """Returns a value of the argument `group`."""
    if scheme != "ulysses_ring":
        return None
    ranks = dist.get_world_size()
    return init_device_mesh(device().type, (ranks // 2, 2), mesh_dim_names=("ring", "heads"))


def cut_by(shards: str, length: int, mesh: Any) -> tuple[Any, Any, Any]:
    """Returns (the argument `shards`, a function that selects this rank's rows, one that joins all ranks')."""
    if shards != "random":
        group = mesh
        return (
            shards,
            lambda tensor, dim: shard(tensor, dim, group=group, shards=shards),
            lambda tensor, dim: unshard(tensor, dim, group=group, shards=shards),
        )
    order = torch.randperm(length, generator=torch.Generator().manual_seed(3)).to(device())
    rows = length // dist.get_world_size()
    own = order[dist.get_rank() * rows :][:rows].contiguous()

    def together(tensor: Any, dim: int) -> Any:
        whole = unshard(tensor, dim, shards="plain")
        return whole.index_select(dim, torch.argsort(order))

    return own, lambda tensor, dim: tensor.index_select(dim, own), together


def results(
    problem: Problem, scheme: str, shards: str, held: Any = torch.Tensor.contiguous, **options: Any
) -> dict[str, Any]:
    """Returns outputs and gradients of the full sequence, joined from shards that are `held` in some order."""
    group, axis = group_of(scheme), problem.axis
    given, cut, together = cut_by(shards, problem.length, group)
    if problem.qkv[1].shape[axis] != problem.length:
        _, cut_k, together_k = cut_by(shards, problem.qkv[1].shape[axis], group)
    else:
        cut_k, together_k = cut, together
    cuts, joins = (cut, cut_k, cut_k), (together, together_k, together_k)
    q, k, v = (held(c(x, axis)).requires_grad_() for c, x in zip(cuts, problem.qkv, strict=True))
    captures = problem.wants()
    how: dict[str, Any] = {"group": group, "scheme": scheme, "shards": given, "emulate": not on_gpu()}
    out, lse = attention(problem.spec, q, k, v, return_lse=True, **(how | problem.options | captures | options))
    inputs = [q, k, v, *(captures[name] for name in problem.learned)]
    made = torch.autograd.grad([out, lse], inputs, [cut(problem.d_out, axis), cut(problem.d_lse, 2)])
    whole = {"out": together(out.detach(), axis), "lse": together(lse.detach(), 2)}
    for name, gradient, join in zip(("dq", "dk", "dv"), made, joins, strict=False):
        whole[name] = join(gradient, axis)
    return whole | dict(zip(problem.learned, made[3:], strict=True))


def acceptance(spec: str, scheme: str, shards: str = "zigzag", cross: bool = False, scale: int = 1) -> list[str]:
    """Checks the full sequence by the numerics rule on the first rank; all ranks have the same."""
    problem = Problem(spec, cross, scale)
    got = results(problem, scheme, shards)
    return judge(problem, got) if dist.get_rank() == 0 else []


def boundaries(spec: str, shards: str, scheme: str = "ring") -> list[str]:
    """Windows over much longer chunks: a neighbour's keys meet only few rows."""
    ring = dist.get_world_size() // (2 if scheme == "ulysses_ring" else 1)
    problem = Problem(spec, scale=8 if ring > 2 else 4, batch=1)
    assert plan_of(problem.spec, ring, problem.length, shards=shards).halos
    got = results(problem, scheme, shards)
    return judge(problem, got) if dist.get_rank() == 0 else []


def turned(shards: str) -> list[str]:
    """Rows of q, k and v that are not contiguous, as in a transposed tensor."""

    def held(x: Any) -> Any:
        return x.transpose(2, 3).contiguous().transpose(2, 3)

    problem = Problem("learned", scale=2)
    assert held(problem.qkv[0]).stride(-1) != 1
    got = results(problem, "ring", shards, held=held)
    return judge(problem, got) if dist.get_rank() == 0 else []


def deterministic(scheme: str, spec: str = "learned", shards: str = "zigzag", scale: int = 1) -> bool:
    """Returns whether two runs have the same bits."""
    problem = Problem(spec, scale=scale)
    first, second = (results(problem, scheme, shards, deterministic=True) for _ in range(2))
    return all(torch.equal(first[name], second[name]) for name in first)


def again_and_again(spec: str) -> bool:
    """Returns whether back-to-back calls, with messages of the previous one in flight, have the bits of the first."""
    problem = Problem(spec, scale=8)
    q, k, v = (shard(x, 2).requires_grad_() for x in problem.qkv)
    d_out, first = shard(problem.d_out, 2), None
    for _ in range(20):
        out = attention(problem.spec, q, k, v, deterministic=True, emulate=not on_gpu())
        made = [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)]
        first = first or [tensor.clone() for tensor in made]
        if not all(torch.equal(one, other) for one, other in zip(made, first, strict=True)):
            return False
    return True


def captured(spec: str, shards: str) -> bool:
    """Returns whether a captured call, forward and backward, equals a call for each of the tensors written there."""
    problem = Problem(spec, scale=8, batch=1)
    q, k, v = (shard(x, 2, shards=shards).requires_grad_() for x in problem.qkv)
    d_out = shard(problem.d_out, 2, shards=shards)

    def run() -> list[Any]:
        out = attention(problem.spec, q, k, v, shards=shards, deterministic=True)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)]

    beside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(beside)
    dist.barrier()
    with torch.cuda.graph(graph):
        made = run()
    same = True
    for _ in range(3):
        with torch.no_grad():
            for tensor in (q, k, v, d_out):
                tensor.normal_()
        graph.replay()
        got = [tensor.clone() for tensor in made]
        same = same and all(torch.equal(one, other) for one, other in zip(got, run(), strict=True))
    return same


def one_rank_fails(how: str, rank: int, timeout: float, scheme: str, during: str) -> str:
    """Returns the error of this rank if another one dies or hangs during a pass, in a group with a timeout.

    A rank that hangs continues after the others have their errors, so that the processes can run other cases.
    """
    problem = Problem("causal")
    q, k, v = (shard(x, 2).requires_grad_() for x in problem.qkv)
    d_out, options = shard(problem.d_out, 2), {"scheme": scheme, "emulate": not on_gpu()}
    attention(problem.spec, q, k, v, **options).backward(d_out)  # compiles, which may exceed the timeout
    group, error = dist.new_group(timeout=timedelta(seconds=timeout)), ""
    dist.barrier()
    out = attention(problem.spec, q, k, v, group=group, **options) if during == "backward" else None
    if dist.get_rank() == rank and how == "dies":
        os._exit(3)
    if dist.get_rank() != rank:
        try:
            (attention(problem.spec, q, k, v, group=group, **options) if out is None else out).backward(d_out)
            if on_gpu():
                torch.cuda.synchronize()
        except PeerError as caught:
            error = str(caught)
    if how == "stands still":
        dist.barrier()
    return error


def drops_the_same() -> bool:
    """Returns whether all ranks drop the same elements as one rank, bit for bit, by values that identify their keys."""
    problem = Problem("dropped")
    q, k, v = problem.qkv
    spec = fg.AttentionSpec(problem.spec.head_dim, "bfloat16", dropout=0.5)
    v = torch.zeros_like(v)
    v[..., 0], v[..., 1] = 1, torch.arange(v.shape[2], device=v.device) % 2
    one = attention_of_one(spec, q * 0, k, v, seed=77, emulate=not on_gpu())
    ok = True
    for scheme in ("ring", "all_gather"):
        mine = attention(spec, *(shard(x, 2) for x in (q * 0, k, v)), seed=77, scheme=scheme, emulate=not on_gpu())
        # Equal weights: the first column counts the keys that are kept, the second the odd ones among them.
        ok = ok and bool((unshard(mine, 2)[..., :2].float() - one[..., :2].float()).abs().max() <= 2**-7)
    return ok


def shares_of_captures() -> list[str]:
    """Without reduce_captures each rank has its own contribution; their sum is the gradient."""
    problem = Problem("learned")
    got = results(problem, "ring", "zigzag", reduce_captures=False)
    for name in problem.learned:
        dist.all_reduce(got[name])
    return judge(problem, got) if dist.get_rank() == 0 else []


def roundtrip(shards: str) -> bool:
    """`unshard` inverts `shard`, `positions` are those of the rows, and gradients are those of the rows."""
    length = 16 * dist.get_world_size()
    whole = torch.arange(length * 3, dtype=torch.float32, device=device()).view(length, 3).requires_grad_()
    own = shard(whole, 0, shards=shards)
    rows = positions(length, shards=shards, device=device())
    assert torch.equal(own, whole[rows])
    back = unshard(own, 0, shards=shards)
    assert torch.equal(back, whole)
    (gradient,) = torch.autograd.grad(back.square().sum(), whole)
    wanted = torch.zeros_like(whole)
    wanted[rows] = 2 * whole[rows]
    return torch.equal(gradient, wanted)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts the bytes that this rank passes to torch's collectives."""
    sent = {"bytes": 0}
    saved = {name: getattr(dist, name) for name in ("batch_isend_irecv", "all_gather_into_tensor")}
    saved |= {name: getattr(dist, name) for name in ("reduce_scatter_tensor", "all_to_all_single")}
    ranks = dist.get_world_size()

    def messages(operations: Any) -> Any:
        sent["bytes"] += sum(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return saved["batch_isend_irecv"](operations)

    def to_each(output: Any, given: Any, of: Any = None, to: Any = None, **named: Any) -> Any:
        own = given.nbytes // ranks if to is None else to[dist.get_rank()] * given[:1].nbytes
        sent["bytes"] += given.nbytes - own
        return saved["all_to_all_single"](output, given, of, to, **named)

    def counting(name: str, of: Any) -> Any:
        def call(output: Any, given: Any, *more: Any, **named: Any) -> Any:
            if given.numel() > 1:  # not the check that calls agree
                sent["bytes"] += of(given.nbytes)
            return saved[name](output, given, *more, **named)

        return call

    dist.batch_isend_irecv = messages
    dist.all_gather_into_tensor = counting("all_gather_into_tensor", lambda size: size * (ranks - 1))
    dist.reduce_scatter_tensor = counting("reduce_scatter_tensor", lambda size: size * (ranks - 1) // ranks)
    dist.all_to_all_single = to_each
    try:
        yield sent
    finally:
        for name, function in saved.items():
            setattr(dist, name, function)


def bytes_are_those_of_the_plan(spec: str, scheme: str, shards: str, scale: int = 1) -> list[int]:
    """Returns [counted, planned] bytes of the forward and of the backward."""
    problem = Problem(spec, scale=scale)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sizes = Sizes(2, problem.qkv[0].shape[1], problem.qkv[1].shape[1])
    plan = plan_of(problem.spec, ranks, problem.length, scheme=scheme, shards=shards, sizes=sizes)
    inner = 0 if scheme == "ulysses" else rank
    q, k, v = (shard(x, 2, shards=shards).requires_grad_() for x in problem.qkv)
    with counted() as forward:
        out = attention(
            *(problem.spec, q, k, v), scheme=scheme, shards=shards, emulate=not on_gpu(), **problem.captures
        )
    with counted() as backward:
        out.backward(shard(problem.d_out, 2, shards=shards))
    return [
        *(forward["bytes"], sum(plan.sent(inner)) + plan.exchanged()),
        *(backward["bytes"], sum(plan.sent(inner, backward=True)) + plan.exchanged(backward=True)),
    ]


def distributed_tensors() -> list[str]:
    """DTensors that are sharded along the length give DTensors; their mesh is the group."""
    problem = Problem("causal")
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    q, k, v = (DTensor.from_local(shard(x, 2, shards="plain"), mesh, [Shard(2)]) for x in problem.qkv)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = attention(problem.spec, q, k, v, shards="plain", return_lse=True, emulate=not on_gpu())
    assert isinstance(out, DTensor)
    d_out = DTensor.from_local(shard(problem.d_out, 2, shards="plain"), mesh, [Shard(2)])
    d_lse = shard(problem.d_lse, 2, shards="plain")
    made = torch.autograd.grad([out, lse], (q, k, v), [d_out, d_lse])
    got = {"out": out.full_tensor().detach(), "lse": unshard(lse.detach(), 2, shards="plain")}
    got |= {name: gradient.full_tensor() for name, gradient in zip(("dq", "dk", "dv"), made, strict=True)}
    return judge(problem, got) if dist.get_rank() == 0 else []


class Layer(torch.nn.Module):
    """An attention layer over a sharded sequence, of x (batch, rows, width)."""

    def __init__(self, spec: fg.AttentionSpec, width: int, heads: int, **how: Any) -> None:
        super().__init__()
        self.qkv, self.spec, self.heads, self.how = torch.nn.Linear(width, 3 * width), spec, heads, how

    def forward(self, x: Any) -> Any:
        batch, rows, width = x.shape
        q, k, v = self.qkv(x).view(batch, rows, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        out = self.how["call"](self.spec, q, k, v, emulate=not on_gpu())
        return out.transpose(1, 2).reshape(batch, rows, width)


def trained(kind: str) -> float:
    """Returns the largest relative difference of a layer's gradients, with a sharded sequence, under DDP or FSDP2."""
    spec, length = fg.AttentionSpec(32, "bfloat16", mask=fg.causal()), 64 * dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(1, length, 64, device=device())
    torch.manual_seed(1)
    whole = Layer(spec, 64, 2, call=attention_of_one).to(device())
    torch.manual_seed(1)
    mine: Any = Layer(spec, 64, 2, call=attention).to(device())
    if kind == "ddp":
        mine = torch.nn.parallel.DistributedDataParallel(mine)
    elif kind == "fsdp":
        mine = fully_shard(mine, mesh=init_device_mesh(device().type, (dist.get_world_size(),)))
    elif kind == "compile":
        mine = torch.compile(mine, backend="aot_eager")
    found = []
    for model, given in ((whole, x), (mine, shard(x, 1))):
        with torch.autocast(device().type, torch.bfloat16):
            model(given).float().square().sum().backward()
        gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
        found.append(gradients)
    if kind == "compile":
        for gradient in found[1]:
            dist.all_reduce(gradient, dist.ReduceOp.AVG if on_gpu() else dist.ReduceOp.SUM)
    sums = dist.get_world_size() if kind != "compile" or on_gpu() else 1  # DDP and FSDP average gradients
    return max(float((mean * sums - right).abs().max() / right.abs().max()) for right, mean in zip(*found, strict=True))


def refused(how: dict[str, Any]) -> str:
    """Returns the error of a call that does not fit."""
    problem = Problem("causal")
    rows = how.pop("rows", None)
    rank = dist.get_rank()
    if how.pop("differs", False) and rank == 1:
        how["deterministic"] = True
    q, k, v = (shard(x, 2) for x in problem.qkv)
    if rows:
        q, k, v = (x[:, :, :rows] for x in (q, k, v))
    if how.get("shards") == "twice":
        how["shards"] = torch.arange(q.shape[2], device=device())
    if how.get("group") == "mesh":
        how["group"] = init_device_mesh(device().type, (dist.get_world_size(), 1), mesh_dim_names=("a", "b"))
    if how.pop("listed", False):
        q = q.tolist()
    declared = how.pop("declared", None)
    spec = fg.AttentionSpec(32, "bfloat16", **declared) if declared else problem.spec
    try:
        attention(spec, q, k, v, emulate=not on_gpu(), **how)
    except FlashgenError as error:
        return str(error)
    return "nothing was said"


@contextmanager
def halos_counted() -> Iterator[list[Any]]:
    """Records the plans of calls with halos."""
    from flashgen.torch.context_parallel import halos

    found, forward = [], halos.forward

    def counting(plan: Any, *rest: Any) -> Any:
        found.append(plan)
        return forward(plan, *rest)

    halos.forward = counting
    try:
        yield found
    finally:
        halos.forward = forward


def models(name: str, scheme: str, shards: str, padded: bool, rows: int = 32) -> dict[str, float]:
    """Compares a model of transformers over a sharded sequence with one rank.

    Returns the largest relative errors, and how many of its two layers had halos.
    """
    import transformers

    import flashgen.transformers

    flashgen.transformers.register(emulate=not on_gpu())
    length = rows * dist.get_world_size()
    sizes: dict[str, Any] = {"vocab_size": 99, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"hidden_size": 128, "intermediate_size": 64, "num_key_value_heads": 4, "max_position_embeddings": length}
    sizes |= {"pad_token_id": 0, "attn_implementation": "flashgen"}
    sizes |= {"sliding_window": 20} if name != "Llama" else {}
    sizes |= {"head_dim": 32} if name == "Gemma2" else {}
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes)).to(device())
    tokens = torch.randint(3, 99, (2, length), generator=torch.Generator().manual_seed(1)).to(device())
    kept = torch.ones_like(tokens)
    if padded:
        kept[1, length - 21 :] = 0
    found = []
    for cut in (lambda x: x, lambda x: shard(x, 1, shards=shards)):
        model.zero_grad()
        given = {"input_ids": cut(tokens), "attention_mask": cut(kept)}
        mine = given["input_ids"].shape != tokens.shape
        if mine:
            given["position_ids"] = positions(length, shards=shards, device=device())[None]
        context = flashgen.transformers.context_parallel(scheme=scheme, shards=shards) if mine else nullcontext()
        with context, halos_counted() as halos, torch.autocast(device().type, torch.bfloat16):
            logits = model(**given, use_cache=False).logits.float()
            (logits * given["attention_mask"][..., None]).square().sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        if mine:
            for gradient in gradients:
                dist.all_reduce(gradient)
            logits = unshard(logits.detach(), 1, shards=shards)
        found.append([logits.detach() * kept[..., None], *gradients])
    errors = [float((got - right).abs().max() / right.abs().max()) for right, got in zip(*found, strict=True)]
    return {"logits": errors[0], "gradients": max(errors[1:]), "halos": len(halos)}


def _plain_forward(q: Any, k: Any, v: Any, _dropout: float, is_causal: bool) -> tuple[Any, Any]:
    """Emulates torch's FlashAttention-2 operator, which CPUs lack, in float32."""
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q.float() @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).to(q.dtype), scores.logsumexp(-1)


def _plain_backward(d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *more: Any) -> tuple[Any, ...]:
    """Emulates its backward, for an output and an LSE over more keys than these."""
    is_causal, group = more[5], q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    weights = (q.float() @ wide_k.mT * scale - lse[..., None]).exp()
    if is_causal:
        weights = weights.tril()
    d_scores = weights * (d_out.float() @ wide_v.mT - (d_out.float() * out.float()).sum(-1, keepdim=True))
    made = (d_scores @ wide_k * scale, d_scores.mT @ q.float() * scale, weights.mT @ d_out.float())
    of_groups = [x.unflatten(1, (-1, group)).sum(2).to(q.dtype) for x in made[1:]]
    return made[0].to(q.dtype), *of_groups


def ring_over_flash() -> list[str]:
    """Checks the baseline ring over FA2, which uses torch's operators on GPUs."""
    from benchmarks.context import flash_ring

    if not on_gpu():
        flash_ring._FORWARD, flash_ring._BACKWARD = _plain_forward, _plain_backward
    problem = Problem("causal")
    q, k, v = (shard(x, 2).contiguous().requires_grad_() for x in problem.qkv)
    out = flash_ring.FlashRing(dist.group.WORLD)(q, k, v)
    made = torch.autograd.grad(out, (q, k, v), shard(problem.d_out, 2).contiguous())
    got = {"out": out.detach()} | dict(zip(("dq", "dk", "dv"), made, strict=True))
    one = [x.detach().requires_grad_() for x in problem.qkv]
    wanted = attention_of_one(problem.spec, *one, emulate=not on_gpu())
    right = torch.autograd.grad(wanted, one, problem.d_out)
    errors = {
        name: float((unshard(mine, 2).float() - whole.float()).abs().max() / whole.float().abs().max())
        for (name, mine), whole in zip(got.items(), (wanted.detach(), *right), strict=True)
    }
    return [f"{name} is off by {error:.1e}" for name, error in errors.items() if error > 2e-2]
