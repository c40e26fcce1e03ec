"""`attention`: calls a spec or a compiled attention on tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashgen.attention.bound import BoundAttention
from flashgen.attention.varlen import check_shared_offsets
from flashgen.dtypes import ELEMENTS
from flashgen.errors import ArgumentError
from flashgen.language.spec import AttentionSpec
from flashgen.torch import operators
from flashgen.torch.arguments import all_captures
from flashgen.torch.autocast import cast, dtype_of_autocast
from flashgen.torch.placeholders import TracedCall
from flashgen.torch.table import Registered, constant, handle, is_emulated, object_of, registered
from flashgen.torch.tensors import PLAIN_TENSORS, Tensor, bound_tensor, check_tensors, refuse_gradients
from flashgen.torch.transforms import is_differentiating, is_transforming, outside_transformed, transformed
from flashgen.torch.variants import spec_text, variant_of

_SEEDS = 2**62
_ELEMENTS = {getattr(torch, name): name for name in ELEMENTS}
_PLAIN = frozenset(PLAIN_TENSORS)
_NO_CAPTURES: Any = ([], [], [])
_forward = torch.ops.flashgen.forward  # one name: Dynamo guards each attribute of `torch.ops`
# torch.autograd.Function.apply first looks for torch.func transforms. Callers of these have found that there are none.
_apply = super(torch.autograd.Function, operators.Plain).apply
_apply_with_lse = super(torch.autograd.Function, operators.PlainWithLse).apply


def attention(
    spec: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    emulate: bool | None = None,
    deterministic: bool | None = None,
    **captures: Any,
) -> Any:
    """Computes attention of q over k and v, differentiable in these and in captures declared with grad=True.

    Args:
        spec: an AttentionSpec, which is compiled at its first call and cached; or the result of `flashgen.compile`.
        q, k, v: tensors on a GPU in the layout of the spec, such as (batch, heads, length, dim). Under autocast they
            are converted to the spec's dtype. A tensor is copied if its rows are not contiguous or do not start at
            multiples of 16 bytes.
        seed: the seed of the dropout, 0 <= seed < 2**63; or a tensor with one such int64, on the CPU or on the device
            of q, where kernels read it. None draws a seed from the default generator of q's device: torch.manual_seed
            repeats it, checkpointing recomputes with the same seed, and each replay of a CUDA graph draws a new one.
        return_lse: also return the LSE, float32 (batch, heads, queries), which is differentiable.
        emulate: run CPU tensors on the emulator. None takes the setting of `flashgen.torch.emulated()`.
        deterministic: compute gradients that are bitwise equal from run to run. None takes the setting of
            torch.use_deterministic_algorithms.
        captures: the tensors and numbers that the spec declares. Arrays that the spec's functions closed over may be
            left out. int64 is accepted where int32 was declared, if the values fit. Further arguments depend on the
            spec, as `flashgen.Attention` documents them: cu_seqlens_q, max_seqlen_q and max_seqlen_k for layout "thd",
            with cu_seqlens_k and seqused_k if k and v are packed; page_table and seqused_k for pages; k_scale and
            v_scale for 8-bit keys and values; num_splits for all layouts but "thd".

    Returns:
        The output, with the shape of q but for the last dimension and the dtype that the spec says, or the pair
        (output, LSE).

    Raises:
        ArgumentError: an argument does not fit the spec.
        UnsupportedError: a gradient is required of a call over pages or 8-bit keys, which have no backward.
    """
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        check_tensors(q=q, k=k, v=v)
    entry = entry_of(handle(spec), emulate, is_deterministic(deterministic))
    bound = bound_tensors(spec, q.device) if _holds_arrays(spec) else {}
    return call(entry, bound, q, k, v, captures, seed, return_lse)


def call(
    entry: Registered,
    bound: Mapping[str, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captures: Mapping[str, Any],
    seed: int | Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Calls the attention of an entry. bound: captures that are used where the caller gives none."""
    arrays, integers, floats = _NO_CAPTURES
    if captures or entry.takes_captures:
        arrays, integers, floats = all_captures(entry, captures, bound)
        if entry.keys_optional:
            check_shared_offsets(captures, q, k)
    if entry.cache and torch.is_grad_enabled():
        refuse_gradients(entry, q, k, v, arrays)
    if dtype_of_autocast(q.is_cuda) is not None:
        q, k, v = cast(entry, q, k, v)
    drawn = None if seed is None and not entry.dropout else _seed(entry, seed, q.device)
    return run(entry, q, k, v, arrays, integers, floats, drawn, return_lse)


def run_traced(traced: TracedCall, q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> Any:
    """Runs an attention whose functions were traced at this call."""
    key, arrays, integers, floats = traced
    operator = _operator(q, k, v, arrays)
    if operator is None:
        entry, integers, floats = variant_of(key).at(integers, floats, q, k, arrays)
        return _run_plain(entry, q, k, v, arrays, integers, floats, None, return_lse)
    out, lse = operator(q, k, v, arrays, key, integers, floats, None)
    return (out, lse) if return_lse else out


@constant
def spec_of_call(dtype: torch.dtype, head_dim: int, value_dim: int, scale: Any, emulate: bool | None) -> str:
    """Returns the other fields of the spec of traced functions; "" for a dtype that kernels do not compute in."""
    element = _ELEMENTS.get(dtype)
    if element is None:
        return ""
    return spec_text(head_dim, value_dim, element, scale, "bhsd", is_emulated(emulate), is_deterministic(None))


def is_deterministic(deterministic: bool | None) -> bool:
    """Whether gradients must be bitwise equal from run to run. None takes the setting of torch."""
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic


def run(
    entry: Registered,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arrays: list[Tensor],
    integers: list[int],
    floats: list[float],
    seed: Tensor | None,
    return_lse: bool,
) -> Any:
    """Runs a call, through the dispatcher only if something may intercept operators."""
    operator = _operator(q, k, v, arrays)
    if operator is None:
        return _run_plain(entry, q, k, v, arrays, integers, floats, seed, return_lse)
    out, lse = operator(q, k, v, arrays, entry.key, integers, floats, seed)
    return (out, lse) if return_lse else out


def _operator(q: Tensor, k: Tensor, v: Tensor, arrays: list[Tensor]) -> Any:
    """Returns the operator that a call must go through; None if it can run without the dispatcher."""
    if torch.compiler.is_compiling():
        return outside_transformed if is_differentiating() else _forward
    if is_transforming():
        return transformed
    if torch._C._len_torch_dispatch_stack() or not _all_plain(q, k, v, arrays):
        check_tensors(q=q, k=k, v=v)
        return _forward
    return None


def _run_plain(
    entry: Registered,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arrays: list[Tensor],
    integers: list[int],
    floats: list[float],
    seed: Tensor | None,
    return_lse: bool,
) -> Any:
    """Runs a call without torch's dispatcher."""
    if torch.is_grad_enabled() and _wants_gradients(q, k, v, arrays):
        apply = _apply_with_lse if return_lse else _apply
        return apply((entry, integers, floats, seed), q, k, v, *arrays)
    return operators.run_forward(entry, q, k, v, arrays, integers, floats, seed, return_lse)


def _all_plain(q: Tensor, k: Tensor, v: Tensor, arrays: list[Tensor]) -> bool:
    """Whether no tensor is of a subclass that intercepts operators, such as a fake or a distributed tensor."""
    if type(q) not in _PLAIN or type(k) not in _PLAIN or type(v) not in _PLAIN:
        return False
    return _PLAIN.issuperset(map(type, arrays))


def _wants_gradients(q: Tensor, k: Tensor, v: Tensor, arrays: list[Tensor]) -> bool:
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    return bool(arrays) and any(each.requires_grad for each in arrays)


def _holds_arrays(spec: Any) -> bool:
    """Whether the functions of a spec or of a compiled attention close over arrays."""
    return isinstance(spec, BoundAttention) or (isinstance(spec, AttentionSpec) and len(spec.bound) > 0)


@constant
def entry_of(spec: Any, emulate: bool | None, deterministic: bool) -> Registered:
    """Returns the entry of a spec or of a compiled attention, given by its handle."""
    return registered(object_of(spec), None, emulate, deterministic)


def bound_tensors(spec: Any, device: torch.device) -> dict[str, Tensor]:
    """Returns the arrays that the functions of a spec or a compiled attention close over, as tensors on a device."""
    return {name: bound_tensor(array, device) for name, array in spec.bound.items()}


def _seed(entry: Registered, seed: Any, device: torch.device) -> Tensor | None:
    """Returns the seed as operators take it. It is drawn on the device of q, as CUDA graph capture requires."""
    if not entry.dropout:
        if seed is not None:
            raise ArgumentError(f"seed={seed!r} is given, and the spec has no dropout: leave it out")
        return None
    if seed is None:
        return torch.randint(_SEEDS, (), dtype=torch.int64, device=device)
    if isinstance(seed, torch.Tensor):
        return seed
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ArgumentError(f"seed={seed!r} must be an integer from 0 to {2**63 - 1}, or a tensor that holds one")
    if torch.compiler.is_compiling():  # torch.compile makes no CUDA graph of a call with a CPU tensor
        return torch.full((), seed, dtype=torch.int64, device=device)
    return torch.tensor(seed, dtype=torch.int64)
