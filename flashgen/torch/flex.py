"""torch.nn.attention.flex_attention.flex_attention, by its own signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashgen.errors import ArgumentError
from flashgen.language.modifiers import Score
from flashgen.torch.autocast import converted
from flashgen.torch.block_mask import BlockMask
from flashgen.torch.fitting import cut_heads, of_one_batch, padded_heads, scale_of_call
from flashgen.torch.functional import is_deterministic, run_traced
from flashgen.torch.table import fixed, is_emulated, outside_of_graphs, run_where_graphs_break, warn_once
from flashgen.torch.tensors import Tensor, check_tensors, dtype_of
from flashgen.torch.traced_functions import trace_call
from flashgen.torch.variants import spec_text


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | Score | None = None,
    block_mask: BlockMask | None = None,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
    emulate: bool | None = None,
) -> Any:
    """Attention with a score function and a block mask, as FlexAttention's function of this name gives it.

    Args:
        query: (batch, heads, len_q, dim); key, value: (batch or 1, heads of keys, len_k, dim). A dim that is no
            multiple of 8 is padded, which costs a copy.
        score_mod: f(score, b, h, q, k) -> score, or None. It may close over tensors; those that require a gradient get
            one. It is traced at each call, also by torch.compile, so that what it reads is what it holds then.
        block_mask: what `flashgen.torch.create_block_mask` made, for these lengths.
        scale: None is 1/sqrt(dim); a tensor of one number is read when kernels run.
        enable_gqa: each head of key and value is for a group of those of query.
        return_lse: give the natural logarithm of the sums, float32 (batch, heads, len_q), too.
        kernel_options: hints for FlexAttention's Triton kernels, which are ignored with a warning.
        return_aux: an AuxRequest of torch's; of it lse is known.
        emulate: run CPU tensors on the emulator.
    """
    check_tensors(query=query, key=key, value=value)
    of_query, of_key, of_value = query.shape, key.shape, value.shape  # each look at a shape costs a call time
    if not len(of_query) == len(of_key) == len(of_value) == 4:
        _refuse_shapes(query=of_query, key=of_key, value=of_value)
    if block_mask is not None:
        _check_block_mask(block_mask, of_query, of_key)
    if of_query[1] != of_key[1] and not enable_gqa:
        raise ArgumentError(
            f"query has {of_query[1]} heads and key {of_key[1]}: say enable_gqa=True where each is for a group"
        )
    _check_options(kernel_options, return_lse, return_aux)
    query, key, value = converted(query, key, value)
    element = dtype_of(query)
    if element not in ("float16", "bfloat16"):
        raise ArgumentError(
            f"query is {element}; flashgen computes in float16 and bfloat16: convert it, or call under torch.autocast"
        )
    if not of_query[0] == of_key[0] == of_value[0]:
        key, value = of_one_batch(query, key, value)
    if isinstance(scale, torch.Tensor):
        score_mod, scale = _scaled(score_mod, scale_of_call("scale", scale, query)), 1.0
    head_dim, value_dim = of_query[3], of_value[3]
    padded = bool(head_dim % 8 or of_key[3] % 8 or value_dim % 8)
    if padded:
        query, key, value, _, _, own_scale = padded_heads(query, key, value)
        scale = own_scale if scale is None else scale
        head_dim, padded_value_dim = query.shape[3], value.shape[3]
    spec = spec_text(
        fixed(head_dim), fixed(padded_value_dim if padded else value_dim), element, fixed(scale), "bhsd",
        is_emulated(emulate), is_deterministic(None),
    )  # fmt: skip
    mask_mod = None if block_mask is None else block_mask.function
    wants_lse = return_lse or bool(getattr(return_aux, "lse", False))
    compiles = torch.compiler.is_compiling()
    if compiles:
        run_where_graphs_break(_attend)
    made = _attend(score_mod, mask_mod, spec, query, key, value, wants_lse, compiles)
    if padded:
        made = (cut_heads(made[0], value_dim), made[1]) if wants_lse else cut_heads(made, value_dim)
    if return_aux is None:
        return made
    from torch.nn.attention.flex_attention import AuxOutput

    return (made[0], AuxOutput(lse=made[1])) if wants_lse else (made, AuxOutput())


def _scaled(score_mod: Callable[..., Any] | Score | None, scale: Tensor) -> Callable[..., Any]:
    """The score function behind a scale that a tensor holds."""

    def scaled(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        score = score * scale[0]
        return score if score_mod is None else score_mod(score, b, h, q, k)

    return scaled


def _attend(
    score_mod: Any, mask_mod: Any, spec: str, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, compiles: bool
) -> Any:
    """Traces the functions and runs the call.

    compiles: whether the caller is compiled. Where this is not, the graph broke at the call, and it runs as it stands.
    """
    if compiles and not torch.compiler.is_compiling():
        return _attend_where_graphs_break(score_mod, mask_mod, spec, q, k, v, return_lse)
    return run_traced(trace_call(score_mod, mask_mod, spec, q.device), q, k, v, return_lse)


@outside_of_graphs("flashgen traces score_mod and mask_mod")
def _attend_where_graphs_break(
    score_mod: Any, mask_mod: Any, spec: str, q: Tensor, k: Tensor, v: Tensor, return_lse: bool
) -> Any:
    warn_once(
        "torch.compile breaks its graph at flashgen.torch.flex_attention: score_mod or mask_mod depends on the values "
        "of tensors (if, .item()), or does what Dynamo cannot trace. The result is right; for one graph write where(), "
        "and operate on tensors"
    )
    return run_traced(trace_call(score_mod, mask_mod, spec, q.device), q, k, v, return_lse)


_BACKENDS = ("AUTO", "TRITON", "TRITON_DECODE", "FLASH")


def _check_options(kernel_options: Any, return_lse: bool, return_aux: Any) -> None:
    """ArgumentError for what FlexAttention refuses, and for what is not computed."""
    if return_aux is not None and return_lse:
        raise ArgumentError("return_lse=True and return_aux are both given: give return_aux=AuxRequest(lse=True) alone")
    if return_aux is not None and not hasattr(return_aux, "lse"):
        raise ArgumentError(f"return_aux={return_aux!r}: give torch's AuxRequest, such as AuxRequest(lse=True)")
    if return_aux is not None and getattr(return_aux, "max_scores", False):
        raise ArgumentError("return_aux: max_scores are not computed; ask for lse alone")
    if not kernel_options:
        return
    if kernel_options.get("BACKEND", "AUTO") not in _BACKENDS:
        raise ArgumentError(f"kernel_options: BACKEND={kernel_options['BACKEND']!r} is none of {', '.join(_BACKENDS)}")
    if not torch.compiler.is_compiling():
        warn_once("kernel_options are for FlexAttention's Triton kernels, and are ignored by those of flashgen")


def _refuse_shapes(**shapes: torch.Size) -> None:
    for name, shape in shapes.items():
        if len(shape) != 4:
            raise ArgumentError(f"{name} has shape {tuple(shape)}: give (batch, heads, length, dim)")


def _check_block_mask(block_mask: Any, of_query: torch.Size, of_key: torch.Size) -> None:
    if not isinstance(block_mask, BlockMask):
        raise ArgumentError(
            f"block_mask of type {type(block_mask).__module__}.{type(block_mask).__name__}: make it by "
            "flashgen.torch.create_block_mask, which takes the same arguments"
        )
    (batch, heads), (len_q, len_k) = block_mask.batch_and_heads, block_mask.seq_lengths
    if len_q != of_query[2] or len_k != of_key[2]:
        raise ArgumentError(
            f"block_mask is for {len_q} queries and {len_k} keys; query has {of_query[2]} and key {of_key[2]}: "
            "create it for these lengths"
        )
    for name, size, given in (("B", batch, of_query[0]), ("H", heads, of_query[1])):
        if size != 1 and size != given:
            raise ArgumentError(f"block_mask was created for {name}={size}; query has {given}: give 1, None or {given}")
