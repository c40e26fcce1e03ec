"""Calls of flashgen that write into the tensor which vLLM gives for the output."""

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
    """Computes the attention of a spec and writes it to `out`."""

    def repeat(self, key: Hashable, sources: Sources) -> bool:
        """Repeats an earlier call, and returns whether there was one with this key and with sources like these."""

    def run(
        self, key: Hashable, sources: Sources, roles: Mapping[str, int], q: Any, k: Any, v: Any, out: Any, **arrays: Any
    ) -> None:
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

    def repeat(self, key: Hashable, sources: Sources) -> bool:
        return self._calls.repeat(key, sources) is not None

    def run(
        self, key: Hashable, sources: Sources, roles: Mapping[str, int], q: Any, k: Any, v: Any, out: Any, **arrays: Any
    ) -> None:
        self._calls.run(key, sources, roles, q, k, v=v, out=out, **arrays)


class OnCpu:
    """The launcher for CPU tensors."""

    def __init__(self, spec: fg.AttentionSpec) -> None:
        self._spec = spec

    def repeat(self, key: Hashable, sources: Sources) -> bool:
        return False

    def run(
        self, key: Hashable, sources: Sources, roles: Mapping[str, int], q: Any, k: Any, v: Any, out: Any, **arrays: Any
    ) -> None:
        out.copy_(flashgen.torch.attention(self._spec, q, k, v, **arrays))
