"""Calls of flashgen for the layers of a model, which share the launches of a spec."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch

import flashgen as fg
import flashgen.torch
from flashgen.torch.views import CallsOfViews

Sources = Sequence[torch.Tensor]


class Launcher(Protocol):
    """Computes the attention of a spec."""

    def repeat(self, key: Hashable, sources: Sources) -> torch.Tensor | None:
        """Repeats an earlier call with this key and with sources like these. Returns None if there was none."""

    def run(self, key: Hashable, sources: Sources, roles: Mapping[str, int], *qkv: Any, **arrays: Any) -> torch.Tensor:
        """Runs a call; its arguments are views of the sources as in `flashgen.torch.views.CallsOfViews`."""


@lru_cache(maxsize=256)
def launcher(spec: fg.AttentionSpec, device: torch.device) -> Launcher:
    """Returns the launcher of a spec, which the layers of a model share.

    On a GPU it launches kernels on the current stream, and reads nothing on the host. CPU tensors run on the emulator
    inside of `flashgen.torch.emulated()`, and raise an error elsewhere.
    """
    return OnGpu(spec) if device.type == "cuda" else OnCpu(spec)


class OnGpu:
    """The launcher for tensors on a GPU."""

    def __init__(self, spec: fg.AttentionSpec) -> None:
        self._calls = CallsOfViews(fg.compile(spec))

    def repeat(self, key: Hashable, sources: Sources) -> torch.Tensor | None:
        results = self._calls.repeat(key, sources)
        return None if results is None else results[0]

    def run(
        self, key: Hashable, sources: Sources, roles: Mapping[str, int], q: Any, k: Any, v: Any, **arrays: Any
    ) -> torch.Tensor:
        return self._calls.run(key, sources, roles, q, k, v=v, **arrays)


class OnCpu:
    """The launcher for CPU tensors."""

    def __init__(self, spec: fg.AttentionSpec) -> None:
        self._spec = spec

    def repeat(self, key: Hashable, sources: Sources) -> torch.Tensor | None:
        return None

    def run(
        self, key: Hashable, sources: Sources, roles: Mapping[str, int], q: Any, k: Any, v: Any, **arrays: Any
    ) -> torch.Tensor:
        out: torch.Tensor = flashgen.torch.attention(self._spec, q, k, v, **arrays)
        return out
