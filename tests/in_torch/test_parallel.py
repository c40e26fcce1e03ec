"""Data parallel training, replicated and sharded, in one separate process."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

PROGRAM = """
import sys, tempfile
import torch
import torch.distributed as dist
import flashgen as fg
from flashgen.torch import Attention

slopes = fg.Tensor("slopes", "float32", 1, grad=True)
spec = fg.AttentionSpec(32, "bfloat16", mask=fg.causal(), score=lambda s, b, h, q, k: s + slopes[h] * (q - k))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(64, 192)
        self.attention = Attention(spec, emulate=True, slopes=torch.zeros(2))

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 32).permute(2, 0, 3, 1, 4)
        return self.attention(q, k, v)

def gradients(model):
    with torch.autocast("cpu", torch.bfloat16):
        model(x).float().square().sum().backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]

torch.manual_seed(0)
x = torch.randn(2, 24, 64)
torch.manual_seed(1)
expected = gradients(Model())
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    torch.manual_seed(1)
    model = Model()
    if sys.argv[1] == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    for got, wanted in zip(gradients(model), expected, strict=True):
        assert wanted.any()
        torch.testing.assert_close(got, wanted, atol=2e-2 * float(wanted.abs().max()), rtol=0)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_equal_those_of_one_process(kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, kind], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
