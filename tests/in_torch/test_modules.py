"""Modules that hold attentions, as models copy, save and convert them."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import torch

import flashgen as fg
from flashgen.errors import UnsupportedError
from flashgen.torch import Attention

SLOPES = fg.Tensor("slopes", "float32", 1, grad=True)
OFFSETS = fg.Tensor("offsets", "float32", 1)
IDS = fg.Tensor("ids", "int32", 1)
SPEC = fg.AttentionSpec(
    32,
    "bfloat16",
    mask=lambda b, h, q, k: IDS[q] == IDS[k],
    score=lambda s, b, h, q, k: s + SLOPES[h] * (q - k) + OFFSETS[h],
)


def layer(spec: Any = SPEC) -> Attention:
    ids = torch.arange(40, dtype=torch.int32) // 13
    return Attention(spec, slopes=torch.tensor([0.1, -0.3]), offsets=torch.tensor([0.7, 1.3]), ids=ids)


def test_modules_are_copied_and_saved(qkv: Any) -> None:
    for spec in (SPEC, fg.compile(SPEC, emulate=True)):
        first = layer(spec)
        expected = first(*qkv)
        saved = io.BytesIO()
        torch.save(first, saved)
        saved.seek(0)
        copies = [copy.deepcopy(first), torch.load(saved, weights_only=False)]
        with torch.no_grad():
            first.slopes.zero_()
        assert not torch.equal(first(*qkv), expected)
        for each in copies:
            assert torch.equal(each(*qkv), expected)


def test_copies_read_their_own_parameters(qkv: Any) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = self.table = torch.nn.Parameter(torch.tensor([0.1, -0.3]))
            spec = fg.AttentionSpec(32, "bfloat16", score=lambda s, b, h, q, k: s + table[h] * (q - k))
            self.attention = Attention(fg.compile(spec, emulate=True))

        def forward(self, *rows: Any) -> Any:
            return self.attention(*rows)

    first = Layer()
    second, expected = copy.deepcopy(first), first(*qkv)
    with torch.no_grad():
        first.table.zero_()
    assert torch.equal(second(*qkv), expected)
    second(*qkv).float().square().sum().backward()
    assert second.table.grad is not None and second.table.grad.any() and first.table.grad is None
    with pytest.raises(UnsupportedError, match="its functions close over table"):
        torch.save(first.attention, io.BytesIO())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_converted_modules_have_captures_as_declared(qkv: Any, dtype: torch.dtype) -> None:
    converted, rounded = layer().to(dtype), layer()
    for name in ("slopes", "offsets"):
        getattr(rounded, name).data = getattr(rounded, name).data.to(dtype).float()
    out, expected = converted(*qkv), rounded(*qkv)
    assert torch.equal(out, expected)
    d_out = torch.randn_like(out)
    (own,), (wide,) = (torch.autograd.grad(y, [x.slopes], d_out) for y, x in ((out, converted), (expected, rounded)))
    assert own.dtype == dtype
    torch.testing.assert_close(own.float(), wide, rtol=2e-2, atol=1e-2)
