"""Compares attention over one sequence on several GPUs, and its gradients, with the results of one GPU.

    python examples/context_parallel.py                       # on all GPUs of this machine, at least 2
    python examples/context_parallel.py --emulate --ranks 2   # on the CPU, by flashgen's emulator and gloo
    torchrun --nproc-per-node 4 examples/context_parallel.py  # started by torchrun

The variant combines a causal mask, packed documents, a learned slope per head, and dropout.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile

try:
    import torch
    import torch.distributed as dist
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    raise SystemExit(f"error: this example needs torch ({error}): pip install 'flashgen[torch]'") from None

import flashgen as fg
from flashgen.torch import attention as single_attention
from flashgen.torch.context_parallel import attention, shard, unshard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulate", action="store_true", help="run on the CPU with flashgen's emulator")
    parser.add_argument("--ranks", type=int, default=0, help="number of ranks; 0 is the number of GPUs")
    parser.add_argument("--scheme", default="ring", choices=["ring", "all_gather", "ulysses"])
    options = parser.parse_args()
    if "RANK" not in os.environ:
        start(options.ranks or (2 if options.emulate else torch.cuda.device_count()), options.emulate)
        return
    rank = int(os.environ["RANK"])
    if not options.emulate:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    dist.init_process_group("gloo" if options.emulate else "nccl", init_method=os.environ.get("RENDEZVOUS", "env://"),
                            rank=rank, world_size=int(os.environ["WORLD_SIZE"]))  # fmt: skip
    compare(options.emulate, options.scheme)
    dist.destroy_process_group()


def compare(emulate: bool, scheme: str) -> None:
    """Computes the same on one rank and on all ranks. Raises SystemExit if they differ by more than rounding."""
    slopes = fg.Tensor("slopes", "float32", 1, grad=True)
    ids = fg.Tensor("ids", "int32", 1)
    spec = fg.AttentionSpec(
        *(32, "bfloat16"),
        mask=lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q),
        score=lambda score, b, h, q, k: score - slopes[h] * (q - k) / 64.0,
        dropout=0.1,
    )
    device, length = ("cpu", 128) if emulate else ("cuda", 8192)
    length *= dist.get_world_size()
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(1, 4, length, 32, dtype=torch.bfloat16, device=device) for _ in range(4))
    captures = {
        "ids": (torch.arange(length, device=device) * 5 // length).int(),
        "slopes": torch.rand(4, device=device),
    }

    def gradients(call, select):
        inputs = [select(x).requires_grad_() for x in (q, k, v)] + [captures["slopes"].clone().requires_grad_()]
        given = {**captures, "slopes": inputs[3]}
        out = call(spec, *inputs[:3], seed=7, emulate=emulate, **given)
        return [out.detach(), *torch.autograd.grad(out, inputs, select(d_out))]

    one = gradients(single_attention, lambda x: x.clone())
    local = gradients(lambda *args, **options: attention(*args, scheme=scheme, **options), lambda x: shard(x, dim=2))
    several = [unshard(x, dim=2) for x in local[:4]] + local[4:]  # gradients of captures are summed over the ranks
    errors = [
        float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in zip(several, one, strict=True)
    ]
    if dist.get_rank() == 0:
        named = ", ".join(
            f"{name} {error:.1e}" for name, error in zip(("out", "dq", "dk", "dv", "dslopes"), errors, strict=True)
        )
        print(f"{scheme} on {dist.get_world_size()} ranks, {length} tokens, relative to one rank: {named}")
    if max(errors) > 5e-2:
        raise SystemExit("error: the difference exceeds the rounding of bfloat16")


def start(ranks: int, emulate: bool) -> None:
    """Starts one process of this program per rank."""
    if not emulate and not torch.cuda.is_available():
        raise SystemExit("error: there is no GPU that torch can use; try --emulate")
    if ranks < 2 or (not emulate and ranks > torch.cuda.device_count()):
        raise SystemExit(f"error: {ranks} ranks, and torch sees {torch.cuda.device_count()} GPUs; try --emulate")
    with tempfile.TemporaryDirectory() as folder:
        shared = os.environ | {"WORLD_SIZE": str(ranks), "RENDEZVOUS": f"file://{folder}/ranks"}
        started = [
            subprocess.Popen([sys.executable, *sys.argv], env=shared | {"RANK": str(rank)}) for rank in range(ranks)
        ]
        ends = [process.wait() for process in started]
        if any(ends):
            raise SystemExit("error: a rank has failed")


if __name__ == "__main__":
    try:
        main()
    except fg.errors.FlashgenError as error:
        raise SystemExit(f"error: {error}") from None
