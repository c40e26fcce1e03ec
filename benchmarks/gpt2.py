"""GPT-2 in plain torch with an exchangeable attention, for train.py and examples/train_gpt2.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Attend = Callable[[Any, Any, Any], Any]
"""Causal attention of q, k and v, each of shape (batch, heads, length, dim)."""


@dataclass(frozen=True)
class Config:
    """The sizes of GPT-2 124M; `length` is the maximum sequence length."""

    length: int = 1024
    vocabulary: int = 50304  # 50257, padded to a multiple of 128
    layers: int = 12
    heads: int = 12
    width: int = 768


class Block(nn.Module):
    """A transformer block with pre-norm attention and a pre-norm MLP, both residual."""

    def __init__(self, config: Config, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = config.heads, attend
        self.norm_1, self.norm_2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv, self.out = nn.Linear(config.width, 3 * config.width), nn.Linear(config.width, config.width)
        self.up, self.down = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        rows = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = rows.permute(2, 0, 3, 1, 4)  # views: nothing is copied
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """The language model; a call returns the mean cross-entropy of the next tokens."""

    def __init__(self, config: Config, attend: Attend) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = 0.02 / (2 * config.layers) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, tokens: Any, targets: Any) -> Any:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        scores = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(scores.view(-1, self.config.vocabulary), targets.view(-1))


def optimizer_of(model: nn.Module, rate: float = 6e-4) -> torch.optim.Optimizer:
    """Returns AdamW as in reproductions of GPT-2: weight decay on matrices alone, fused on a GPU."""
    fused, decays = next(model.parameters()).is_cuda, (0.1, 0.0)
    groups = [
        {"params": [each for each in model.parameters() if (each.dim() > 1) == bool(decay)], "weight_decay": decay}
        for decay in decays
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)


def rate_of(step: int, steps: int, tokens: int) -> float:
    """Returns the learning rate of a step in a training of `steps` steps with `tokens` tokens each.

    The rate rises linearly over a third of the steps and falls by a cosine to a tenth of its peak. The peak is 6e-4 for
    2^19 tokens per step, as for GPT-3 of this size and reproductions of GPT-2, and is scaled by the square root of the
    batch for fewer tokens (Malladi et al. 2022): 1.5e-4 for 32 x 1024. A rate that is too high for the batch causes
    spikes of the loss, after which two runs with the same attention differ as much as any two runs.
    """
    highest, rising = 6e-4 * min(tokens / 2**19, 1.0) ** 0.5, max(steps // 3, 1)
    if step < rising:
        return highest * (step + 1) / rising
    fallen = (step - rising) / max(steps - rising, 1)
    return highest * (0.55 + 0.45 * math.cos(math.pi * fallen))


class Trainer:
    """Performs training steps: autocast to bfloat16, AdamW, learning rate of `rate_of`, gradients clipped to norm 1.

    Args:
        model: the model whose parameters are trained.
        call: the model, or its version compiled by torch.compile.
        tokens: the number of tokens per step.
        steps: the number of steps of the training.
    """

    def __init__(self, model: nn.Module, call: Callable[..., Any], tokens: int, steps: int) -> None:
        self._model, self._call, self._optimizer = model, call, optimizer_of(model)
        self._tokens, self._steps = tokens, steps

    def __call__(self, tokens: Any, targets: Any, step: int | None = None) -> Any:
        """Performs a step and returns its loss. Without a step number, rate and gradients are left as they are."""
        with torch.autocast(tokens.device.type, torch.bfloat16):
            loss = self._call(tokens, targets)
        loss.backward()
        if step is not None:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            for group in self._optimizer.param_groups:
                group["lr"] = rate_of(step, self._steps, self._tokens)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def text_tokens() -> Any:
    """Returns Python's language reference, which ships with Python, as bytes: about 700,000 tokens."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def batches(batch: int, length: int, seed: int, device: str) -> Callable[[int], tuple[Any, Any]]:
    """Returns a function from a step number to (tokens, next tokens), each (batch, length), reproducible by `seed`."""
    text = text_tokens()

    def of_step(step: int) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(text) - length - 1, (batch,), generator=generator)
        rows = torch.stack([text[start : start + length + 1] for start in starts]).to(device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    return of_step
