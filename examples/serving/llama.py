"""Llama with random weights, except its attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    """The shape of a model."""

    layers: int
    hidden: int
    heads: int
    heads_kv: int
    dim: int
    inner: int
    vocabulary: int


SIZES = {
    "tiny": Size(2, 64, 4, 2, 32, 128, 96),
    "1b": Size(16, 2048, 32, 8, 64, 8192, 128256),  # Llama 3.2 1B
    "8b": Size(32, 4096, 32, 8, 128, 14336, 128256),  # Llama 3.1 8B
}

Attend = Callable[[int, Any, Any, Any], Any]
"""(layer, q, k, v) -> output; all (tokens, heads, dim)."""


class Llama:
    """Weights, and a forward pass over tokens of any sequences, each with its position."""

    def __init__(self, size: Size, dtype: torch.dtype, device: str) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        torch.manual_seed(0)
        heads = (size.heads + 2 * size.heads_kv) * size.dim
        shapes = {
            "qkv": (heads, size.hidden),
            "out": (size.hidden, size.heads * size.dim),
            "up": (2 * size.inner, size.hidden),
            "down": (size.hidden, size.inner),
        }
        self.layers = [{name: self._random(*shape) for name, shape in shapes.items()} for _ in range(size.layers)]
        self.embedding, self.head = (self._random(size.vocabulary, size.hidden) for _ in range(2))
        self.norm = torch.ones(size.hidden, dtype=dtype, device=device)
        exponents = torch.arange(0, size.dim, 2, device=device) / size.dim
        self.frequencies = 500_000.0**-exponents

    def _random(self, *shape: int) -> Any:
        return torch.randn(*shape, dtype=self.dtype, device=self.device) * shape[-1] ** -0.5

    def to(self, dtype: torch.dtype) -> Llama:
        """Returns the model with its weights converted to another dtype."""
        other = object.__new__(Llama)
        other.__dict__.update(self.__dict__, dtype=dtype)
        other.layers = [{name: weight.to(dtype) for name, weight in layer.items()} for layer in self.layers]
        other.embedding, other.head, other.norm = (x.to(dtype) for x in (self.embedding, self.head, self.norm))
        return other

    def forward(self, tokens: Any, positions: Any, attend: Attend) -> Any:
        """Returns the hidden states (tokens, hidden) after the last layer, the input of `logits`."""
        size, count = self.size, tokens.shape[0]
        angles = positions[:, None].float() * self.frequencies
        rotation = (angles.cos()[:, None].to(self.dtype), angles.sin()[:, None].to(self.dtype))
        x = functional.embedding(tokens, self.embedding) * size.hidden**0.5
        for number, layer in enumerate(self.layers):
            heads = functional.linear(self._normed(x), layer["qkv"]).view(count, -1, size.dim)
            q, k, v = heads.split((size.heads, size.heads_kv, size.heads_kv), dim=1)
            rows = attend(number, _rotated(q, rotation), _rotated(k, rotation), v)
            x = x + functional.linear(rows.reshape(count, -1), layer["out"])
            gate, up = functional.linear(self._normed(x), layer["up"]).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, layer["down"])
        return self._normed(x)

    def logits(self, hidden: Any) -> Any:
        """Returns the scores of next tokens, (tokens, vocabulary)."""
        return functional.linear(hidden, self.head)

    def _normed(self, x: Any) -> Any:
        return functional.rms_norm(x, (self.size.hidden,), self.norm, 1e-5)


def _rotated(x: Any, rotation: tuple[Any, Any]) -> Any:
    """Rotary embedding: rotates pairs (i, i + dim/2) of each head by the angles of the token's position."""
    (first, second), (cos, sin) = x.chunk(2, dim=-1), rotation
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
