"""Calls of flashgen that write into the tensor which vLLM gives for the output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import flashgen as fg
import flashgen.torch


def launcher(spec: fg.AttentionSpec, device: torch.device) -> Callable[..., None]:
    """Returns a function of (q, k, v, out, **arrays) that computes the attention of a spec and writes it to `out`.

    On a GPU it launches kernels on the current stream, and reads nothing on the host. CPU tensors run on the emulator
    inside of `flashgen.torch.emulated()`, and raise an error elsewhere.
    """
    return _on_gpu(spec) if device.type == "cuda" else _on_cpu(spec)


def _on_gpu(spec: fg.AttentionSpec) -> Callable[..., None]:
    attention = fg.compile(spec)

    def launch(q: Any, k: Any, v: Any, out: Any, **arrays: Any) -> None:
        attention(q, k, v, out=out, **arrays)

    return launch


def _on_cpu(spec: fg.AttentionSpec) -> Callable[..., None]:
    def launch(q: Any, k: Any, v: Any, out: Any, **arrays: Any) -> None:
        out.copy_(flashgen.torch.attention(spec, q, k, v, **arrays))

    return launch
