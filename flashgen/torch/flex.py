"""`flex_attention`, with the signature of torch.nn.attention.flex_attention.flex_attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashgen.errors import ArgumentError
from flashgen.language.modifiers import Mask, Score
from flashgen.torch.autocast import dtype_of_autocast
from flashgen.torch.block_mask import BlockMask
from flashgen.torch.fitting import cut_heads, expand_batch, padded_heads, scale_of_call
from flashgen.torch.functional import Fields, refuse_dtype, run_functions, run_traced, spec_of_call
from flashgen.torch.placeholders import Recording
from flashgen.torch.table import outside_of_graphs, run_where_graphs_break, specialized, warn_once
from flashgen.torch.tensors import Tensor, are_plain, check_tensors


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
    """Computes attention with a score function and a block mask, as FlexAttention's function of the same name.

    Args:
        query: float16 or bfloat16 (batch, heads, len_q, dim).
        key, value: (batch or 1, heads of keys, len_k, dim). A dim that is not a multiple of 8 is padded by a copy.
        score_mod: f(score, b, h, q, k) -> score, or None. It may close over tensors, and gradients flow to those that
            require one. It is traced at each call, also under torch.compile, and reads the values of that moment.
        block_mask: the result of `flashgen.torch.create_block_mask` for these lengths.
        scale: the factor of the scores; None is 1/sqrt(dim). A tensor with one number is read when kernels run.
        enable_gqa: allow fewer heads of key and value than of query, each shared by a group of query heads.
        return_lse: also return the LSE of the scores, float32 (batch, heads, len_q).
        kernel_options: hints for FlexAttention's Triton kernels. They are ignored with a warning.
        return_aux: torch's AuxRequest, of which `lse` is supported.
        emulate: run CPU tensors on the emulator. None takes the setting of `flashgen.torch.emulated()`.

    Returns:
        The output; the pair (output, LSE) with return_lse; the pair (output, AuxOutput) with return_aux.

    Raises:
        ArgumentError: shapes, dtypes or options do not fit or are not supported.
        SpecError: score_mod or the mask function cannot be traced.
    """
    if not (is_plain := are_plain(query, key, value)):
        check_tensors(query=query, key=key, value=value)
    q_shape, k_shape, v_shape = query.shape, key.shape, value.shape  # read once: it takes host time
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        _refuse_shapes(query=q_shape, key=k_shape, value=v_shape)
    mask_mod = None if block_mask is None else _mask_function(block_mask, q_shape, k_shape)
    if q_shape[1] != k_shape[1] and not enable_gqa:
        raise ArgumentError(
            f"query has {q_shape[1]} heads and key {k_shape[1]}: give enable_gqa=True if each head of key is for a "
            "group of query heads"
        )
    if kernel_options or return_aux is not None:
        _check_options(kernel_options, return_lse, return_aux)
    if (dtype := dtype_of_autocast(query.is_cuda)) is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if not q_shape[0] == k_shape[0] == v_shape[0]:
        key, value = expand_batch(query, key, value)
    if isinstance(scale, torch.Tensor):
        score_mod, scale = _scaled(score_mod, scale_of_call("scale", scale, query)), 1.0
    head_dim = q_shape[3]
    value_dim = spec_value_dim = v_shape[3]
    padded = head_dim % 8 or k_shape[3] % 8 or value_dim % 8
    if padded:
        query, key, value, _, _, own_scale = padded_heads(query, key, value)
        scale = own_scale if scale is None else scale
        head_dim, spec_value_dim = query.shape[3], value.shape[3]
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    if torch.compiler.is_compiling():
        run_where_graphs_break(_attend_in_graph)
        sizes = (specialized(head_dim), specialized(spec_value_dim), specialized(scale))
        fields = (query.dtype, *sizes, emulate, q_shape, k_shape)
        results = _attend_in_graph(score_mod, mask_mod, fields, query, key, value, wants_lse, is_plain)
    else:
        scale = None if scale is None else float(scale)
        fields = (query.dtype, head_dim, spec_value_dim, scale, emulate, q_shape, k_shape)
        results = run_functions(score_mod, mask_mod, fields, query, key, value, wants_lse, is_plain)
    if padded:
        results = (cut_heads(results[0], value_dim), results[1]) if wants_lse else cut_heads(results, value_dim)
    if return_aux is None:
        return results
    from torch.nn.attention.flex_attention import AuxOutput

    return (results[0], AuxOutput(lse=results[1])) if wants_lse else (results, AuxOutput())


def _mask_function(block_mask: BlockMask, q_shape: torch.Size, k_shape: torch.Size) -> Callable[..., Any] | Mask:
    """Returns the mask function of a block mask for these shapes. Raises ArgumentError for torch's own block masks."""
    if not isinstance(block_mask, BlockMask):
        raise ArgumentError(
            f"block_mask of type {type(block_mask).__module__}.{type(block_mask).__name__}: make it by "
            "flashgen.torch.create_block_mask, which takes the same arguments"
        )
    return block_mask.function_for(q_shape, k_shape)


def _scaled(score_mod: Callable[..., Any] | Score | None, scale: Tensor) -> Callable[..., Any]:
    """Returns a score function that multiplies by a scale in a tensor before it applies `score_mod`."""

    def scaled(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        score = score * scale[0]
        return score if score_mod is None else score_mod(score, b, h, q, k)

    return scaled


def _attend_in_graph(
    score_mod: Any, mask_mod: Any, fields: Fields, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, is_plain: bool
) -> Any:
    """Does what `run_functions` does, under torch.compile. If it runs eagerly, the graph broke at its call."""
    if not torch.compiler.is_compiling():
        return _attend_where_graphs_break(score_mod, mask_mod, fields, q, k, v, return_lse, is_plain)
    spec = spec_of_call(*fields[:5]) or refuse_dtype(q)
    traced = Recording().trace_call(score_mod, mask_mod, spec, q.device)
    return run_traced(traced, q, k, v, return_lse)


@outside_of_graphs("flashgen traces score_mod and mask_mod")
def _attend_where_graphs_break(*call: Any) -> Any:
    warn_once(
        "torch.compile breaks its graph at flashgen.torch.flex_attention: score_mod or mask_mod depends on the values "
        "of tensors (if, .item()), or does what Dynamo cannot trace. The result is right; for one graph write where(), "
        "and operate on tensors"
    )
    return run_functions(*call)


_BACKENDS = ("AUTO", "TRITON", "TRITON_DECODE", "FLASH")


def _check_options(kernel_options: Any, return_lse: bool, return_aux: Any) -> None:
    """Raises ArgumentError for options that FlexAttention refuses or that are not supported. Warns of ignored ones."""
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
