"""`Attention`: a torch.nn.Module that holds a spec and captured tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashgen.attention import Attention as Compiled
from flashgen.errors import ArgumentError
from flashgen.language.spec import AttentionSpec
from flashgen.torch.functional import attention
from flashgen.torch.table import not_a_spec
from flashgen.torch.tensors import Tensor, check_tensors


class Attention(torch.nn.Module):
    """A module that calls `attention(spec, q, k, v, ...)` with captured tensors of its own.

        layer = Attention(spec, slopes=torch.full((8,), 0.1))
        out = layer(q, k, v)

    Args:
        spec: an AttentionSpec, or the result of `flashgen.compile`.
        emulate, deterministic: defaults of the arguments of `attention`.
        captures: captured tensors of the spec. They become parameters if the spec declares them with grad=True, and
            buffers otherwise, so that they move and are saved with the module.

    `.half()` or `.bfloat16()` rounds captured floats to that dtype. Calls convert them to the dtype that the spec
    declares, and their gradients have the dtype of the parameters.
    """

    def __init__(
        self, spec: Any, *, emulate: bool | None = None, deterministic: bool | None = None, **captures: Tensor
    ) -> None:
        super().__init__()
        self.spec, self.emulate, self.deterministic = spec, emulate, deterministic
        check_tensors(**captures)
        if not isinstance(spec, (AttentionSpec, Compiled)):
            raise not_a_spec(spec)
        captured = (spec if isinstance(spec, AttentionSpec) else spec.spec).captures
        declared = {capture.name: capture for capture in captured}
        self._own = {name: getattr(torch, declared[name].dtype) for name in captures if name in declared}
        for name, tensor in captures.items():
            if name not in declared:
                raise ArgumentError(
                    f"unknown argument {name!r}; the spec captures {', '.join(sorted(declared)) or 'none'}"
                )
            if declared[name].grad:
                self.register_parameter(name, torch.nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)

    def forward(self, q: Tensor, k: Tensor, v: Tensor | None = None, **given: Any) -> Any:
        """Calls `attention`.

        Args:
            q, k, v: tensors in the layout of the spec; v is None with `shared_kv`.
            given: the keyword arguments of `attention`, and the captures that the module does not hold.
        """
        own: Mapping[str, Any] = {name: _as_declared(getattr(self, name), dtype) for name, dtype in self._own.items()}
        options: Any = {"emulate": self.emulate, "deterministic": self.deterministic}
        return attention(self.spec, q, k, v, **{**options, **own, **given})

    def extra_repr(self) -> str:
        return repr(self.spec)


def _as_declared(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts floats to the dtype that the spec declares, as the module may have been converted."""
    return tensor.to(dtype) if tensor.is_floating_point() and dtype.is_floating_point else tensor
