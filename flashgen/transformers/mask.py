"""The mask of a model's forward pass: the function that transformers makes it of, traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from flashgen.errors import UnsupportedError
from flashgen.language import functions as f
from flashgen.language.captures import Scalar
from flashgen.language.captures import Tensor as Captured
from flashgen.language.masks import padding
from flashgen.language.modifiers import Mask, trace_mask
from flashgen.runtime.remembered import Remembered
from flashgen.torch.tensors import Tensor, dtype_of
from flashgen.torch.traced_functions import operand, trace_mask_function
from flashgen.transformers.context import shared, whole_mask

_MOST_KEPT = 256


@dataclass(frozen=True, eq=False)
class ModelMask:
    """A mask of (batch, queries, keys), and the tensors and numbers that it reads.

    `mask` is one object for all forward passes whose mask functions are alike but for what their arrays hold.
    `captures` share no memory with the model: a cache may write to its own between the mask and an attention.
    """

    mask: Mask
    captures: Mapping[str, Any]
    lengths: tuple[int, int]

    ndim = 4

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """That of a mask for any batch and heads: models look at it where `generate` gives them a mask made before."""
        return (1, 1, *self.lengths)

    def contiguous(self) -> ModelMask:
        """Itself: `generate` asks masks for it."""
        return self

    @classmethod
    def __torch_function__(cls, function: Any, *given: Any) -> Any:
        raise _no_tensor(getattr(function, "__name__", str(function)))

    def __getitem__(self, index: Any) -> Any:
        raise _no_tensor("an index")

    def __getattr__(self, name: str) -> Any:
        raise _NoAttribute(str(_no_tensor(f".{name}")))


class _NoAttribute(UnsupportedError, AttributeError):
    """What a mask does not have, as `hasattr` expects it."""


def _no_tensor(asked: str) -> UnsupportedError:
    """The error for a model that computes with its mask."""
    return UnsupportedError(
        f"a model asks for {asked} of its mask, which is a function here and holds no values: use "
        "attn_implementation='eager' or 'sdpa' for it"
    )


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Any = None,
    allow_is_causal_skip: bool = True,
    device: Any = "cpu",
    **rest: Any,
) -> Any:
    """What transformers' models call for their mask; the result comes back to `attention_forward`.

    All values are those of this call. A static cache, for one, gives its length as the offset of the queries, and
    advances it in place before the first attention reads it: so tensors are copied, once for each mask.

    Under torch.compile, where functions cannot be traced by another, None for what is plainly causal, and else the
    booleans that scaled_dot_product_attention would take.
    """
    if isinstance(attention_mask, ModelMask):  # which `generate` made before
        return attention_mask
    if torch.compiler.is_compiling():
        plain = mask_function is causal_mask_function and attention_mask is None and allow_is_causal_skip
        if plain and (q_length == kv_length or (q_length == 1 and not isinstance(q_offset, torch.Tensor))):
            return None
        sizes: Any = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
        made: Any = sdpa_mask
        return made(*sizes, allow_is_causal_skip=False, device=device, **rest)
    captures: dict[str, Any] = {}
    shift = _shift(q_length, kv_length, q_offset, kv_offset, captures)
    how = shared()
    if how is not None:
        whole = whole_mask(attention_mask, q_length, kv_length, how)
        kept = _padding(whole, whole.shape[1], kv_offset, captures)
    else:
        kept = None if attention_mask is None else _padding(attention_mask, kv_length, kv_offset, captures)
    mask, arrays = _traced(mask_function, shift, kept)
    captures |= {name: operand(array, torch.device(device)) for name, array in arrays.items()}
    return ModelMask(mask, _copied(captures), (q_length, kv_length))


def _copied(captures: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers and tensors of a mask, in memory of its own."""
    return {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in captures.items()}


@dataclass(frozen=True)
class _Shift:
    """How indices of a call become the positions that a mask function knows: hashable, and the same for all lengths."""

    ends_meet: bool  # the last query stands on the last key
    q_dtype: str | None  # of the offset of queries, where that is a tensor
    kv_dtype: str | None
    keys_begin_later: bool

    def positions(self, q: Any, k: Any) -> tuple[Any, Any]:
        begin = _offset("kv_offset", self.kv_dtype) if self.keys_begin_later else 0
        if self.ends_meet:
            return q + (f.len_k - f.len_q) + begin, k + begin
        return q + _offset("q_offset", self.q_dtype), k + begin


def _offset(name: str, dtype: str | None) -> Any:
    """A number of the call, or the one element of a tensor of it."""
    return Captured(name, dtype, 1)[0] if dtype else Scalar(name)


def _shift(q_length: int, kv_length: int, q_offset: Any, kv_offset: Any, captures: dict[str, Any]) -> _Shift:
    in_tensors = isinstance(q_offset, torch.Tensor) or isinstance(kv_offset, torch.Tensor)
    ends_meet = not in_tensors and q_offset - kv_offset == kv_length - q_length
    q_dtype = None if ends_meet else _capture_offset("q_offset", q_offset, captures)
    begins_later = isinstance(kv_offset, torch.Tensor) or kv_offset != 0
    kv_dtype = _capture_offset("kv_offset", kv_offset, captures) if begins_later else None
    return _Shift(ends_meet, q_dtype, kv_dtype, begins_later)


def _capture_offset(name: str, offset: Any, captures: dict[str, Any]) -> str | None:
    """Makes an offset a capture; its dtype where it is a tensor."""
    if not isinstance(offset, torch.Tensor):
        captures[name] = int(offset)
        return None
    if offset.numel() != 1:
        raise UnsupportedError(f"{name} of shape {tuple(offset.shape)}: sequences of a batch share one offset")
    captures[name] = offset.reshape(1)
    return dtype_of(offset)


def _padding(given: Tensor, kv_length: int, kv_offset: int | Tensor, captures: dict[str, Any]) -> str | None:
    """Which kind of padding there is: "right", "left", "any" or None. One look at the device for a forward pass."""
    if given.ndim != 2:
        raise UnsupportedError(f"an attention_mask of shape {tuple(given.shape)}: give (batch, keys), or 4 dimensions")
    begin = int(kv_offset)
    seen = given[:, begin : begin + kv_length].bool()
    if seen.shape[1] < kv_length:
        seen = torch.nn.functional.pad(seen, (0, kv_length - seen.shape[1]))
    counts = seen.sum(-1, dtype=torch.int32)
    ahead = torch.arange(kv_length, device=seen.device) < counts[:, None]
    found = torch.stack([seen.all(), (seen == ahead).all(), (seen == ahead.flip(-1)).all()]).tolist()
    kind = next((name for name, holds in zip((None, "right", "left"), found, strict=True) if holds), "any")
    if kind is not None:
        captures["kept_keys"] = seen if kind == "any" else counts
    return kind


_MASKS: Remembered[Any, Mask] = Remembered(_MOST_KEPT)


def _traced(function: Callable[..., Any], shift: _Shift, kept: str | None) -> tuple[Mask, dict[str, Any]]:
    """The mask of a function as it is now, one object for all calls that trace to the same text, and its arrays."""
    traced = trace_mask_function(_shifted(function, shift))
    text = traced.text

    def build() -> Mask:
        mask = Mask(text.name, text.node(), {})
        return mask if kept is None else mask & _kept_keys(kept)

    return _MASKS.get_or_make((text, kept), build), dict(zip(text.names, traced.arrays, strict=True))


def _shifted(function: Callable[..., Any], shift: _Shift) -> Callable[..., Any]:
    def model_mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return function(b, h, *shift.positions(q, k))

    return model_mask


def _kept_keys(kind: str) -> Mask:
    if kind != "any":
        return padding("kept_keys", side=kind)
    kept = Captured("kept_keys", "bool", 2)
    return trace_mask(lambda b, h, q, k: kept[b, k], "padding('kept_keys')")


def model_score(
    softcap: float | None, added: tuple[str, bool] | None, bias: tuple[str, bool] | None
) -> Callable[..., Any] | None:
    """The score function of a model: capped, then a mask of numbers added, then a bias; None where it has none of it.

    added, bias: dtype and whether a gradient is wanted, of "attn_mask" and "position_bias", of 4 dimensions.
    """
    arrays = [
        Captured(name, told[0], 4, grad=told[1])
        for name, told in (("attn_mask", added), ("position_bias", bias))
        if told is not None
    ]
    if softcap is None and not arrays:
        return None

    def capped_and_biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        if softcap is not None:
            score = f.tanh(score / softcap) * softcap
        for array in arrays:
            score = score + array[b, h, q, k]
        return score

    return capped_and_biased
