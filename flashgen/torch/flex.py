"""torch.nn.attention.flex_attention.flex_attention, by its own signature."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from flashgen.errors import ArgumentError
from flashgen.language.closures import SameObject, what_it_reads
from flashgen.language.modifiers import Mask, Score
from flashgen.language.spec import AttentionSpec
from flashgen.torch.block_mask import BlockMask
from flashgen.torch.functional import call, is_deterministic
from flashgen.torch.table import Registered, constant, fixed, handle, held, outside_of_graphs, registered
from flashgen.torch.tensors import Tensor, bound_tensor, check_tensors, dtype_of


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | Score | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
    emulate: bool | None = None,
) -> Any:
    """Attention with a score function and a block mask, as FlexAttention's function of this name gives it.

    Args:
        query: (batch, heads, len_q, dim); key, value: (batch, heads of keys, len_k, dim).
        score_mod: f(score, b, h, q, k) -> score, or None. It may close over tensors; those that require a gradient get
            one. Where torch.compile compiles what makes it, its graph breaks here.
        block_mask: what `flashgen.torch.create_block_mask` made, for these lengths.
        scale: None is 1/sqrt(dim). enable_gqa: each head of key and value is for a group of those of query.
        return_lse: give the natural logarithm of the sums, float32 (batch, heads, len_q), too.
        kernel_options: hints for FlexAttention's Triton kernels, which say nothing to those here.
        return_aux: an AuxRequest of torch's; of it lse is known.
        emulate: run CPU tensors on the emulator.
    """
    if torch.compiler.is_compiling() and _is_made_inside(score_mod):
        given = (query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options)
        return _outside(*given, return_aux=return_aux, emulate=emulate)
    check_tensors(query=query, key=key, value=value)
    if block_mask is not None:
        _check_block_mask(block_mask, query, key)
    if query.ndim == 4 and query.shape[1] != key.shape[1] and not enable_gqa:
        raise ArgumentError(
            f"query has {query.shape[1]} heads and key {key.shape[1]}: say enable_gqa=True where each is for a group"
        )
    if return_aux is not None and not hasattr(return_aux, "lse"):
        raise ArgumentError(f"return_aux={return_aux!r}: give torch's AuxRequest, such as AuxRequest(lse=True)")
    if return_aux is not None and getattr(return_aux, "max_scores", False):
        raise ArgumentError("return_aux: max_scores are not computed; ask for lse alone")
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    sizes = (fixed(query.shape[-1]), fixed(value.shape[-1]), dtype_of(query), fixed(scale))
    entry, bound = _entry(score_mod, handle(block_mask), query.device, emulate, is_deterministic(None), *sizes)
    wants_lse = return_lse or bool(getattr(return_aux, "lse", False))
    made = call(entry, bound, query, key, value, {}, return_lse=wants_lse)
    if return_aux is None:
        return made
    from torch.nn.attention.flex_attention import AuxOutput

    return (made[0], AuxOutput(lse=made[1])) if wants_lse else (made, AuxOutput())


@outside_of_graphs("flashgen traces score_mod, which torch.compile made itself: make it outside of what that compiles")
def _outside(*given: Any, **named: Any) -> Any:
    return flex_attention(*given, **named)


def _is_made_inside(function: Any) -> bool:
    """Whether a function is made by what torch.compile compiles, which knows no closure of it then."""
    if not hasattr(function, "__code__") or not function.__code__.co_freevars:
        return False
    if not hasattr(function, "__closure__"):
        return True
    try:
        _ = function.__closure__
    except AttributeError:  # of which some torch says that it is there
        return True
    return False


def _check_block_mask(block_mask: Any, query: Tensor, key: Tensor) -> None:
    if not isinstance(block_mask, BlockMask):
        raise ArgumentError(
            f"block_mask of type {type(block_mask).__module__}.{type(block_mask).__name__}: make it by "
            "flashgen.torch.create_block_mask, which takes the same arguments"
        )
    (batch, heads), (len_q, len_k) = block_mask.batch_and_heads, block_mask.seq_lengths
    if (len_q, len_k) != (query.shape[-2], key.shape[-2]):
        raise ArgumentError(
            f"block_mask is for {len_q} queries and {len_k} keys; query has {query.shape[-2]} and key {key.shape[-2]}: "
            "create it for these lengths"
        )
    for name, size, given in (("B", batch, query.shape[0]), ("H", heads, query.shape[1])):
        if size not in (1, given):
            raise ArgumentError(f"block_mask was created for {name}={size}; query has {given}: give 1, None or {given}")


@constant
def _entry(
    score_mod: Any, block_mask: Any, device: torch.device, emulate: bool | None, deterministic: bool, *sizes: Any
) -> tuple[Registered, dict[str, Tensor]]:
    """What is registered of a call's spec, and the tensors that its functions close over; of a block mask's handle."""
    spec = flex_spec(score_mod, held(block_mask), *sizes)
    bound = {name: bound_tensor(array, device) for name, array in spec.bound.items()}
    return registered(spec, emulate=emulate, deterministic=deterministic), bound


def flex_spec(score_mod: Any, block_mask: Any, head_dim: int, value_dim: int, dtype: str, scale: Any) -> AttentionSpec:
    """The spec of a call, traced once for what the functions hold and read."""
    read = None if score_mod is None else (SameObject(type(score_mod)), what_it_reads(score_mod))
    mask = None if block_mask is None else block_mask.mask
    return _traced(read, _Unhashed(score_mod), _Unhashed(mask), head_dim, value_dim, dtype, scale)


class _Unhashed:
    """A function beside what it reads, which is what calls are told apart by; a traced mask, by which object it is."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Unhashed):
            return False
        return not isinstance(self.value, Mask) or self.value is other.value

    def __hash__(self) -> int:
        return id(self.value) if isinstance(self.value, Mask) else 0


@lru_cache(maxsize=256)
def _traced(
    _read: Any, score_mod: _Unhashed, mask: _Unhashed, head_dim: int, value_dim: int, dtype: str, scale: Any
) -> AttentionSpec:
    if dtype not in ("float16", "bfloat16"):
        raise ArgumentError(
            f"query is {dtype}; flashgen computes in float16 and bfloat16: convert it, or call under torch.autocast"
        )
    return AttentionSpec(head_dim, dtype, value_dim, scale, score=score_mod.value, mask=mask.value)
