"""Models whose attention is torch's own function: encoder layers of torch.nn, and a Llama as torchtitan builds it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

VOCABULARY = 64
# Before torch 2.13, varlen_attn takes fewer heads of keys without being told.
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class Encoder(nn.Module):
    """A language model of nn.TransformerEncoderLayers."""

    def __init__(self, width: int, heads: int, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Any) -> Any:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, tokens.device, self.out.weight.dtype)
        return self.out(self.layers(self.tokens(tokens), mask=mask, is_causal=True))


class _Attention(nn.Module):
    """Grouped heads with rotary positions, by scaled_dot_product_attention, or by varlen_attn over packed sequences."""

    def __init__(self, width: int, heads: int, heads_kv: int, packed: bool) -> None:
        super().__init__()
        self.heads, self.heads_kv, self.dim, self.packed = heads, heads_kv, width // heads, packed
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, heads_kv * self.dim, bias=False) for _ in range(2))

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        q, k = (_rotated(layer(x).view(batch, length, -1, self.dim)) for layer in (self.q, self.k))
        v = self.v(x).view(batch, length, -1, self.dim)
        if self.packed:
            at = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * length
            rows = (each.flatten(0, 1) for each in (q, k, v))
            out = varlen_attn(*rows, at, at, length, length, window_size=(-1, 0), **GROUPED)
        else:
            rows = (each.transpose(1, 2) for each in (q, k, v))
            out = functional.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).transpose(1, 2)
        return self.out(out.reshape(batch, length, -1))


def _rotated(x: Any) -> Any:
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = (torch.arange(x.shape[1], device=x.device)[:, None] * frequencies)[:, None]
    a, b = x.float().split(half, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1).to(x.dtype)


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, heads_kv: int, packed: bool) -> None:
        super().__init__()
        self.attention = _Attention(width, heads, heads_kv, packed)
        self.norm, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm(x))
        y = self.norm_2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, width: int, heads: int, layers: int = 2, packed: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.Sequential(*(_Layer(width, heads, heads // 2, packed) for _ in range(layers)))
        self.norm, self.out = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Any) -> Any:
        return self.out(self.norm(self.layers(self.tokens(tokens))))


def losses(
    build: Callable[[], nn.Module], device: str, steps: int, batch: int, length: int, compiled: bool = False
) -> list[float]:
    """Trains a model in bfloat16 on repeated random tokens, and returns the loss of each step."""
    torch.manual_seed(0)
    model = build().to(device, torch.bfloat16)
    call = torch.compile(model, fullgraph=True) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(VOCABULARY, (batch, length + 1), generator=torch.Generator().manual_seed(1)).to(device)
    found = []
    for _ in range(steps):
        loss = functional.cross_entropy(call(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [float(loss) for loss in found]


def assert_equal_within_noise(ours: list[float], theirs: list[float], exact: list[float]) -> None:
    """Asserts that two trainings differ by no more than torch's own from one with another of its implementations."""
    noise = max(abs(a - b) for a, b in zip(theirs, exact, strict=True))
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    assert apart <= 2 * noise + 2e-3, f"losses differ by {apart:.2e}, and torch's own by {noise:.2e}"
    assert theirs[0] - theirs[-1] > 10 * apart or len(ours) < 20, "the losses hardly fall"
