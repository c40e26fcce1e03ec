"""The mask of a model's forward pass, traced from the mask function that transformers builds for the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from flashgen.errors import UnsupportedError
from flashgen.language import functions as f
from flashgen.language.captures import Scalar
from flashgen.language.captures import Tensor as Captured
from flashgen.language.masks import padding
from flashgen.language.modifiers import Mask, trace_mask
from flashgen.runtime.caching import Cache
from flashgen.torch.tensors import Tensor, dtype_of, operands
from flashgen.torch.traced_functions import trace_mask_function
from flashgen.transformers.context import current_context, full_mask

_MAX_CACHED_MASKS = 256
_ALL = slice(None)


@dataclass(frozen=True, eq=False)
class ModelMask:
    """A mask of (batch, queries, keys), and the tensors and numbers that it reads.

    `mask` is the same object for all forward passes whose mask functions differ only in the values of their arrays.
    `captures` share no memory with the model, because a cache may modify its tensors before the attention runs.
    """

    mask: Mask
    captures: Mapping[str, Any]
    lengths: tuple[int, int]

    ndim = 4

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of a mask for any batch and heads. Models read it when `generate` passes them an existing mask."""
        return (1, 1, *self.lengths)

    def contiguous(self) -> ModelMask:
        """Returns itself, because `generate` calls this method on masks."""
        return self

    @classmethod
    def __torch_function__(cls, function: Any, *given: Any) -> Any:
        raise _not_a_tensor(getattr(function, "__name__", str(function)))

    def __getitem__(self, index: Any) -> ModelMask:
        """Returns the mask of the last queries, `mask[:, :, begin:, :]`; other indices raise UnsupportedError.

        Gemma 4 computes only the queries with requested logits in its last layers, which attend to K and V of others.
        """
        rows = index[2] if isinstance(index, tuple) and len(index) == 4 else None
        if not isinstance(rows, slice) or index != (_ALL, _ALL, slice(rows.start, None), _ALL):
            raise _not_a_tensor("an index")
        length, keys = self.lengths
        begin = rows.indices(length)[0]
        captures = dict(self.captures)
        if "q_offset" in captures:
            captures["q_offset"] = captures["q_offset"] + begin
        return ModelMask(self.mask, captures, (length - begin, keys))

    def __getattr__(self, name: str) -> Any:
        raise _NoAttribute(str(_not_a_tensor(f".{name}")))


class _NoAttribute(UnsupportedError, AttributeError):
    """The error for a missing attribute of a mask; `hasattr` requires an AttributeError."""


def _not_a_tensor(operation: str) -> UnsupportedError:
    """Returns the error for a model that computes with its mask."""
    return UnsupportedError(
        f"a model uses {operation} of its mask, which is a function here and has no values: use "
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
    """Returns the mask of a forward pass, for `attention_forward`. Models of transformers call this function.

    Tensors are copied once per mask, so that their values are those at the time of this call. For example, a static
    cache passes its length tensor as the offset of the queries and increments it in place before the first attention.

    Under torch.compile the mask function cannot be traced. The result is then None for a plain causal mask, and
    otherwise the boolean tensor for scaled_dot_product_attention.

    A model that computes with the values of its mask gets the tensor of attn_implementation="eager".
    """
    if isinstance(attention_mask, ModelMask):  # created earlier by `generate`
        return attention_mask
    arguments: Any = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    dense_mask: Any = eager_mask
    if _needs_dense_mask(rest.get("config")):
        return dense_mask(*arguments, device=device, **rest)
    if torch.compiler.is_compiling():
        plain = mask_function is causal_mask_function and attention_mask is None and allow_is_causal_skip
        if plain and (q_length == kv_length or (q_length == 1 and not isinstance(q_offset, torch.Tensor))):
            return None
        dense_mask = sdpa_mask
        return dense_mask(*arguments, allow_is_causal_skip=False, device=device, **rest)
    captures: dict[str, Any] = {}
    shift = _shift(q_length, kv_length, q_offset, kv_offset, captures)
    context = current_context()
    if context is not None:
        full = full_mask(attention_mask, q_length, kv_length, context)
        padding_kind = _padding(full, full.shape[1], kv_offset, captures)
    else:
        padding_kind = None if attention_mask is None else _padding(attention_mask, kv_length, kv_offset, captures)
    mask, arrays = _traced_mask(mask_function, shift, padding_kind)
    captures |= zip(arrays, operands([*arrays.values()], torch.device(device)), strict=True)
    return ModelMask(mask, _copy_captures(captures), (q_length, kv_length))


def _needs_dense_mask(config: Any) -> bool:
    """Returns whether a model computes with the values of its mask.

    An indexer selects the keys of a query among those that the mask allows; Doge combines the mask with learned scores.
    """
    if getattr(config, "model_type", None) == "doge" or getattr(config, "index_topk", None) is not None:
        return True
    return "indexed_attention" in (getattr(config, "layer_types", None) or ())


def _copy_captures(captures: Mapping[str, Any]) -> dict[str, Any]:
    """Copies the tensors among the captures of a mask."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in captures.items()}


@dataclass(frozen=True)
class _Shift:
    """The offsets from indices of a call to positions of a mask function. It is hashable and independent of lengths."""

    ends_align: bool  # the last query and the last key have the same position
    q_dtype: str | None  # dtype of the offset of queries if it is a tensor
    kv_dtype: str | None  # dtype of the offset of keys if it is a tensor
    shifts_keys: bool  # the offset of keys is not 0

    def positions(self, q: Any, k: Any) -> tuple[Any, Any]:
        begin = _offset("kv_offset", self.kv_dtype) if self.shifts_keys else 0
        if self.ends_align:
            return q + (f.len_k - f.len_q) + begin, k + begin
        return q + _offset("q_offset", self.q_dtype), k + begin


def _offset(name: str, dtype: str | None) -> Any:
    """Returns a captured number, or the one element of a captured tensor."""
    return Captured(name, dtype, 1)[0] if dtype else Scalar(name)


def _shift(q_length: int, kv_length: int, q_offset: Any, kv_offset: Any, captures: dict[str, Any]) -> _Shift:
    in_tensors = isinstance(q_offset, torch.Tensor) or isinstance(kv_offset, torch.Tensor)
    ends_align = not in_tensors and q_offset - kv_offset == kv_length - q_length
    q_dtype = None if ends_align else _capture_offset("q_offset", q_offset, captures)
    shifts_keys = isinstance(kv_offset, torch.Tensor) or kv_offset != 0
    kv_dtype = _capture_offset("kv_offset", kv_offset, captures) if shifts_keys else None
    return _Shift(ends_align, q_dtype, kv_dtype, shifts_keys)


def _capture_offset(name: str, offset: Any, captures: dict[str, Any]) -> str | None:
    """Adds an offset to the captures. Returns its dtype if it is a tensor, else None."""
    if not isinstance(offset, torch.Tensor):
        captures[name] = int(offset)
        return None
    if offset.numel() != 1:
        raise UnsupportedError(f"{name} of shape {tuple(offset.shape)}: sequences of a batch share one offset")
    captures[name] = offset.reshape(1)
    return dtype_of(offset)


def _padding(given: Tensor, kv_length: int, kv_offset: int | Tensor, captures: dict[str, Any]) -> str | None:
    """Returns the kind of padding: "right", "left", "any" or None. Synchronizes with the device once per forward pass.

    Adds "kept_keys" to the captures: the number of keys of each sequence, or for "any" a boolean for each key.
    """
    if given.ndim != 2:
        raise UnsupportedError(f"an attention_mask of shape {tuple(given.shape)}: give (batch, keys), or 4 dimensions")
    begin = int(kv_offset)
    kept = given[:, begin : begin + kv_length].bool()
    if kept.shape[1] < kv_length:
        kept = torch.nn.functional.pad(kept, (0, kv_length - kept.shape[1]))
    counts = kept.sum(-1, dtype=torch.int32)
    prefix = torch.arange(kv_length, device=kept.device) < counts[:, None]
    matches = torch.stack([kept.all(), (kept == prefix).all(), (kept == prefix.flip(-1)).all()]).tolist()
    kind = next((name for name, matched in zip((None, "right", "left"), matches, strict=True) if matched), "any")
    if kind is not None:
        captures["kept_keys"] = kept if kind == "any" else counts
    return kind


_MASKS: Cache[Any, Mask] = Cache(_MAX_CACHED_MASKS)


def _traced_mask(function: Callable[..., Any], shift: _Shift, padding_kind: str | None) -> tuple[Mask, dict[str, Any]]:
    """Traces a mask function. Returns the mask, the same object for all calls with equal traces, and its arrays."""
    traced = trace_mask_function(_shifted(function, shift))
    text = traced.text

    def build() -> Mask:
        mask = Mask(text.name, text.node(), {})
        return mask if padding_kind is None else mask & _padding_mask(padding_kind)

    return _MASKS.get_or_make((text, padding_kind), build), dict(zip(text.names, traced.arrays, strict=True))


def _shifted(function: Callable[..., Any], shift: _Shift) -> Callable[..., Any]:
    def model_mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return function(b, h, *shift.positions(q, k))

    return model_mask


def _padding_mask(kind: str) -> Mask:
    if kind != "any":
        return padding("kept_keys", side=kind)
    kept = Captured("kept_keys", "bool", 2)
    return trace_mask(lambda b, h, q, k: kept[b, k], "padding('kept_keys')")


def model_score(
    softcap: float | None, added: tuple[str, bool] | None, bias: tuple[str, bool] | None
) -> Callable[..., Any] | None:
    """Returns the score function of a model: softcap, then an additive mask, then a bias; None if it has none of them.

    added, bias: the dtype of "attn_mask" and "position_bias", of 4 dimensions, and whether they require a gradient.
    """
    arrays = [
        Captured(name, operand_type[0], 4, grad=operand_type[1])
        for name, operand_type in (("attn_mask", added), ("position_bias", bias))
        if operand_type is not None
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
