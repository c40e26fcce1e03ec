"""`attention`: calls a spec or a compiled attention on tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeAlias

import torch

from flashgen.attention.bound import BoundAttention
from flashgen.attention.varlen import check_shared_offsets
from flashgen.dtypes import ELEMENTS
from flashgen.errors import ArgumentError
from flashgen.language.modifiers import Mask, Score
from flashgen.language.spec import AttentionSpec
from flashgen.torch import operators
from flashgen.torch.arguments import all_captures
from flashgen.torch.autocast import cast, dtype_of_autocast
from flashgen.torch.call_keys import call_key
from flashgen.torch.placeholders import TracedCall
from flashgen.torch.table import Registered, constant, handle, is_emulated, object_of, registered
from flashgen.torch.tensors import (
    PLAIN_TENSORS,
    Tensor,
    bound_tensor,
    check_tensors,
    distinct_operands,
    dtype_of,
    refuse_gradients,
    values_of_call,
)
from flashgen.torch.traced_functions import trace_functions
from flashgen.torch.transforms import is_differentiating, outside_transformed, transformed
from flashgen.torch.variants import CALLS, spec_text, variant_of

Fields: TypeAlias = tuple[torch.dtype, int, int, float | None, bool | None, torch.Size, torch.Size]
"""The five arguments of `spec_of_call`, and the shapes of query and key."""
SEEDS = 2**62
"""Seeds of dropout are drawn from the numbers below this one."""
_ELEMENTS = {getattr(torch, name): name for name in ELEMENTS}
_PLAIN = frozenset(PLAIN_TENSORS)
_NO_CAPTURES: Any = ([], [], [])
_peek_interpreter = torch._C._functorch.peek_interpreter_stack
_forward = torch.ops.flashgen.forward  # one name: Dynamo guards each attribute of `torch.ops`
# torch.autograd.Function.apply first looks for torch.func transforms. Callers of these have found that there are none.
_apply = super(torch.autograd.Function, operators.Plain).apply
_apply_with_lse = super(torch.autograd.Function, operators.PlainWithLse).apply


def attention(
    spec: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
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
            multiples of 16 bytes. For a spec with `shared_kv` there is no v: `attention(spec, q, kv)`.
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
    entry = entry_of(handle(spec), emulate, is_deterministic(deterministic))
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        check_tensors(q=q, k=k)
        v = values_of_call(entry, k, v)
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
    """Runs an attention whose functions were traced under torch.compile."""
    key, arrays, integers, floats = traced
    out, lse = _operator_in_graph()(q, k, v, arrays, key, integers, floats, None)
    return (out, lse) if return_lse else out


def run_functions(
    score_mod: Any, mask_mod: Any, fields: Fields, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, is_plain: bool
) -> Any:
    """Traces the functions of a call without torch.compile, and runs its attention.

    is_plain: whether q, k and v are dense tensors, not of a subclass.
    """
    score, mask = trace_functions(score_mod, mask_mod)
    numbers = score.numbers + mask.numbers
    arrays, slots, captures_plain = distinct_operands(score.arrays + mask.arrays, q.device)
    score_name = score_mod.name if isinstance(score_mod, Score) else "score_mod"
    mask_name = mask_mod.name if isinstance(mask_mod, Mask) else "mask_mod"
    operator = _operator(q, k, v, is_plain and captures_plain)
    settings = (is_emulated(fields[4]), is_deterministic(None))
    call = (score_name, score.text, mask_name, mask.text, slots, numbers, fields, settings)
    chosen = CALLS.get(call) if operator is None else None
    if chosen is None:
        key = call_key(score, score_name, mask, mask_name, slots, spec_of_call(*fields[:5]) or refuse_dtype(q))
        if operator is not None:
            out, lse = operator(q, k, v, arrays, key, *_by_kind(numbers), None)
            return (out, lse) if return_lse else out
        chosen = CALLS.get_or_make(call, lambda: variant_of(key).choose(*_by_kind(numbers), q, k))
    entry, integers, floats = chosen.with_lengths(arrays)
    return _run_plain(entry, q, k, v, arrays, integers, floats, None, return_lse)


def _by_kind(numbers: tuple[Any, ...]) -> tuple[list[int], list[float]]:
    """Returns the integers and the floats among the numbers of a trace."""
    integers = [number for number in numbers if not isinstance(number, float)]
    return integers, [number for number in numbers if isinstance(number, float)]


@constant
def spec_of_call(dtype: torch.dtype, head_dim: int, value_dim: int, scale: float | None, emulate: bool | None) -> str:
    """Returns the part of the key that does not depend on functions; "" for a dtype that kernels do not compute in."""
    element = _ELEMENTS.get(dtype)
    if element is None:
        return ""
    return spec_text(head_dim, value_dim, element, scale, "bhsd", is_emulated(emulate), is_deterministic(None))


def refuse_dtype(query: Tensor) -> NoReturn:
    """Raises ArgumentError for a query of another dtype than kernels compute in."""
    raise ArgumentError(
        f"query is {dtype_of(query)}; flashgen computes in float16 and bfloat16: convert it, or call under "
        "torch.autocast"
    )


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
    if torch.compiler.is_compiling():
        operator = _operator_in_graph()
    else:
        is_plain = type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN
        operator = _operator(q, k, v, is_plain and _PLAIN.issuperset(map(type, arrays)))
    if operator is None:
        return _run_plain(entry, q, k, v, arrays, integers, floats, seed, return_lse)
    out, lse = operator(q, k, v, arrays, entry.key, integers, floats, seed)
    return (out, lse) if return_lse else out


def _operator_in_graph() -> Any:
    """Returns the operator of a call under torch.compile."""
    return outside_transformed if is_differentiating() else _forward


def _operator(q: Tensor, k: Tensor, v: Tensor, is_plain: bool) -> Any:
    """Returns the operator that a call without torch.compile must go through, or None if nothing intercepts operators.

    is_plain: whether no tensor of the call is of a subclass, such as a distributed tensor, which intercepts them.
    """
    if _peek_interpreter() is not None:  # a transform of torch.func
        return transformed
    if torch._C._len_torch_dispatch_stack() or not is_plain:
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
        return torch.randint(SEEDS, (), dtype=torch.int64, device=device)
    if isinstance(seed, torch.Tensor):
        return seed
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ArgumentError(f"seed={seed!r} must be an integer from 0 to {2**63 - 1}, or a tensor that holds one")
    if torch.compiler.is_compiling():  # torch.compile makes no CUDA graph of a call with a CPU tensor
        return torch.full((), seed, dtype=torch.int64, device=device)
    return torch.tensor(seed, dtype=torch.int64)
