"""The attention function of a layer, with the interface of transformers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from flashgen.dtypes import ELEMENTS
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.language.captures import Tensor as Captured
from flashgen.language.masks import causal, sliding_window
from flashgen.language.modifiers import Mask
from flashgen.language.spec import AttentionSpec
from flashgen.torch import varlen_attention
from flashgen.torch.functional import call, is_deterministic
from flashgen.torch.table import Registered, constant, fixed, registered
from flashgen.torch.tensors import Tensor, check_mask, dtype_of, values_of_call
from flashgen.transformers.context import current_context, refuse_under_context_parallel
from flashgen.transformers.mask import ModelMask, model_score

_REFUSED = {
    "cache": "continuous batching (a paged cache)",
    "head_mask": "head_mask",
    "layer_head_mask": "layer_head_mask",
    "block_table": "paged keys (block_table)",
    "block_indices": "a choice of blocks of keys for each query (block_indices, as of MiniMax-M3)",
}


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    emulate: bool | None = None,
    deterministic: bool | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Returns the output (batch, queries, heads, dim) of query, key and value (batch, heads, length, dim).

    The second result, the attention weights, is always None.

    attention_mask: a result of `attention_mask` of mask.py, or a 4-dimensional tensor of booleans or numbers. If it is
    None, `is_causal` or the attribute of the module determines the mask. s_aux: sinks, (heads,).
    indices: the keys that each query attends to, (batch, queries, selected), as far as attention_mask allows them.
    If `value` is the same object as `key`, as in DeepSeek-V4, the kernels load each tile once for both.
    Raises UnsupportedError that names an unsupported feature.
    """
    _refuse(rest)
    context = current_context()
    shares_kv = value is key and context is None
    query, key, value = _cast_under_autocast(query, key, value)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if indices is not None:
        attention_mask = _with_selected_keys(attention_mask, indices, key.shape[2])
    if rest.get("cu_seq_lens_q") is not None:
        refuse_under_context_parallel(context, "packed sequences by cu_seq_lens")
        _check_packed(attention_mask, position_bias)
        options = {"dropout_p": dropout, "softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
        options |= {"emulate": emulate, "deterministic": deterministic}
        return _packed(query, key, value, rest, is_causal, sliding_window, options), None
    captures: dict[str, Any] = {}
    bias = None if position_bias is None else _capture_4d(position_bias, "position_bias", captures)
    mask, added = _mask_operands(attention_mask, (query.shape[2], key.shape[2]), captures)
    window = None if attention_mask is not None else sliding_window
    causal = is_causal and attention_mask is None
    run_options = (emulate, is_deterministic(deterministic))
    sizes = (fixed(query.shape[-1]), fixed(value.shape[-1]), dtype_of(query), fixed(scaling), fixed(dropout), shares_kv)
    sinks = None if s_aux is None else (dtype_of(s_aux), s_aux.requires_grad)
    captures |= {} if s_aux is None else {"s_aux": s_aux}
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if context is not None:
        refuse_under_context_parallel(added, "an attention mask of 4 dimensions")
        refuse_under_context_parallel(bias, "position_bias")
        spec = _spec(mask, causal, window, softcap, None, None, sinks, *sizes)
        return _context_parallel_output(spec, q, k, v, captures, context.options(), *run_options), None
    entry = _entry(run_options, mask, causal, window, softcap, added, bias, sinks, *sizes)
    return call(entry, {}, q, k, values_of_call(entry, k, None) if shares_kv else v, captures), None


def _cast_under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) for tensor in tensors)


def _with_selected_keys(attention_mask: Any, indices: Tensor, keys: int) -> Tensor:
    """Returns a mask of 4 dimensions that also excludes the keys that are not among the indices of a query."""
    if not isinstance(attention_mask, torch.Tensor):
        raise UnsupportedError("indices of selected keys (indices) without an attention_mask of 4 dimensions")
    selected = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    selected = selected.scatter(-1, indices.long(), True)[:, None]
    if attention_mask.dtype == torch.bool:
        return attention_mask & selected
    return attention_mask.masked_fill(~selected, torch.finfo(attention_mask.dtype).min)


def _mask_operands(
    attention_mask: Any, lengths: tuple[int, int], captures: dict[str, Any]
) -> tuple[Mask | None, tuple[str, bool] | None]:
    """Returns the traced mask, and the dtype and requires_grad of a mask tensor; adds their tensors to `captures`."""
    if isinstance(attention_mask, ModelMask):
        if attention_mask.lengths != lengths:
            raise ArgumentError(
                f"the mask is for {attention_mask.lengths} queries and keys, and the layer has {lengths}"
            )
        captures |= attention_mask.captures
        return attention_mask.mask, None
    if attention_mask is None:
        return None, None
    attention_mask = attention_mask[..., : lengths[1]]
    added = _capture_4d(attention_mask, "attn_mask", captures)
    check_mask(attention_mask)
    return None, added


def _context_parallel_output(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captures: dict[str, Any],
    context: dict[str, Any],
    emulate: bool | None,
    deterministic: bool,
) -> Tensor:
    """Returns the output of this rank's rows."""
    from flashgen.torch.context_parallel import attention

    out: Tensor = attention(spec, q, k, v, emulate=emulate, deterministic=deterministic, **context, **captures)
    return out


def _refuse(rest: dict[str, Any]) -> None:
    for name, what in _REFUSED.items():
        if rest.get(name) is not None:
            raise UnsupportedError(f"{what} is not supported by attn_implementation='flashgen': use another for it")
    if rest.get("output_attentions"):
        raise UnsupportedError(
            "output_attentions=True: attn_implementation='flashgen' does not compute weights; use 'eager' for them"
        )


def _capture_4d(tensor: Any, name: str, captures: dict[str, Any]) -> tuple[str, bool]:
    """Adds a tensor of 4 dimensions to the captures. Returns its dtype and whether it requires a gradient."""
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 4:
        raise UnsupportedError(
            f"{name} of {tuple(getattr(tensor, 'shape', ()))}: attn_implementation='flashgen' takes (batch, heads, "
            "queries, keys), or traces the model's mask function"
        )
    captures[name] = tensor
    return dtype_of(tensor), tensor.requires_grad


def _check_packed(attention_mask: Any, position_bias: Any) -> None:
    """Raises UnsupportedError for masks and biases: packed sequences can only be causal, windowed or full."""
    padded = isinstance(attention_mask, ModelMask) and "kept_keys" in attention_mask.captures
    if padded or isinstance(attention_mask, torch.Tensor):
        raise UnsupportedError(
            "cu_seq_lens with an attention_mask: give only one of them for packed sequences, without padding"
        )
    if position_bias is not None:
        raise UnsupportedError("cu_seq_lens with a position_bias: give sequences as rows of a batch")


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rest: dict[str, Any],
    is_causal: bool,
    window: int | None,
    options: dict[str, Any],
) -> Tensor:
    """Computes attention of sequences that are packed into one batch row. rest: their offsets, cu_seq_lens_q and _k."""
    if query.shape[0] != 1:
        raise UnsupportedError(f"cu_seq_lens with a batch of {query.shape[0]}: packed sequences are one row")
    left = -1 if window is None else window - 1
    right = 0 if is_causal else left
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    starts_q, starts_k = rest["cu_seq_lens_q"], rest["cu_seq_lens_k"]
    out: Tensor = varlen_attention(q, k, v, starts_q, starts_k, window_size=(left, right), **options)
    return out[None]


@constant
def _entry(options: tuple[bool | None, bool], *key: Any) -> Registered:
    return registered(_spec(*key), emulate=options[0], deterministic=options[1])


@lru_cache(maxsize=1024)
def _spec(
    mask: Mask | None,
    is_causal: bool,
    window: int | None,
    softcap: float | None,
    added: tuple[str, bool] | None,
    bias: tuple[str, bool] | None,
    sinks: tuple[str, bool] | None,
    head_dim: int,
    value_dim: int,
    dtype: str,
    scaling: float | None,
    dropout: float,
    shared_kv: bool,
) -> AttentionSpec:
    if dtype not in ELEMENTS:
        raise ArgumentError(
            f"the model is of {dtype}; attn_implementation='flashgen' computes in float16 and bfloat16: load it with "
            "dtype='bfloat16', or run it under torch.autocast"
        )
    spec_mask: Any = mask
    if mask is None and is_causal:
        spec_mask = causal() if window is None else sliding_window(window - 1)
    elif mask is None and window is not None:
        spec_mask = sliding_window(window, window)
    if added is not None and added[0] == "bool":
        booleans = Captured("attn_mask", "bool", 4)
        spec_mask, added = (lambda b, h, q, k: booleans[b, h, q, k]), None
    score = model_score(softcap, added, bias)
    sink = Captured("s_aux", sinks[0], 1, grad=sinks[1]) if sinks else None
    rest: Any = {"sink": sink, "shared_kv": shared_kv}
    return AttentionSpec(head_dim, dtype, value_dim, scaling, "bshd", dropout, score, spec_mask, **rest)
