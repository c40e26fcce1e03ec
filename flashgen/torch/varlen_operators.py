"""The operators behind torch's varlen_attn, for calls that repeat a launch of torch's flash operators.

They are custom operators in Python, which call torch's flash operators through the dispatcher again. With flashgen in
place of these, a repeated call needs neither the Python code of the custom operators nor the second dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch

from flashgen.torch.flash_operators import repeat_flash_backward, repeat_flash_forward
from flashgen.torch.tensors import Tensor


def repeat_varlen_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
    *others: Any,
) -> tuple[Tensor, ...] | None:
    """Computes torch_attn::_varlen_attn if torch's flash operator has had a call like this one; otherwise None.

    others: further arguments, up to the last that has not its default value: a flag (enable_gqa, which changes nothing
    here), or what a repeated call does not have, such as seqused_k and another backend.
    """
    if any(each is not True for each in others):
        return None
    flags, window = (0.0, is_causal, False), (-1, -1) if window_size is None else tuple(window_size)
    found = repeat_flash_forward(query, key, value, (cu_seq_q, cu_seq_k, None), flags, scale, window)
    return None if found is None else found[:3]  # the state of random numbers is not read, as there is no dropout


def repeat_varlen_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Computes torch_attn::_varlen_attn_backward if torch's flash operator has had such a call; otherwise None."""
    window = (-1, -1) if window_size is None else tuple(window_size)
    read = (query, key, value, out, grad_out, lse)
    return repeat_flash_backward(read, (cu_seq_q, cu_seq_k), (0.0, is_causal), scale, window)


def varlen_operators() -> dict[str, Callable[..., Any]]:
    """Returns the functions of this module by the names of their operators, if this version of torch has these."""
    from torch.nn.attention import varlen  # noqa: F401, defines the operators

    functions: dict[str, Callable[..., Any]] = {
        "_varlen_attn": repeat_varlen_forward,
        "_varlen_attn_backward": repeat_varlen_backward,
    }
    return {f"torch_attn::{name}": function for name, function in functions.items() if _fits(name, function)}


def _fits(name: str, function: Callable[..., Any]) -> bool:
    """Whether torch's operator of this name has the arguments of a function, and after them no unknown flag."""
    if not hasattr(torch.ops.torch_attn, name):
        return False
    arguments = getattr(torch.ops.torch_attn, name).default._schema.arguments
    taken = [parameter for parameter in signature(function).parameters if parameter != "others"]
    given, others = [each.name for each in arguments[: len(taken)]], arguments[len(taken) :]
    flags = {each.name for each in others if str(each.type) == "bool"}
    return given == taken and (flags <= {"enable_gqa"} if "others" in signature(function).parameters else not others)
