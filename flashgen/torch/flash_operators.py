"""torch's flash-attention operators, computed by flashgen: functions with the schemas of aten.

`register_sdpa` registers them. A call that flashgen does not compute raises one of `REFUSALS`, whose message is the
reason; torch's own kernel then computes it. `is_causal` is aligned to the bottom right, as in these operators. (torch's
function scaled_dot_product_attention, which is aligned to the top left, uses them for equal lengths alone.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from flashgen.dtypes import ELEMENTS
from flashgen.errors import ArgumentError, LaunchError, SpecError, UnsupportedError
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.arrays import TORCH
from flashgen.torch.arguments import named_captures
from flashgen.torch.direct import Repeats, as_separate_objects
from flashgen.torch.fitting import checked_dropout
from flashgen.torch.functional import SEEDS
from flashgen.torch.operators import run_backward, run_forward
from flashgen.torch.table import Registered, registered
from flashgen.torch.tensors import Tensor, check_call
from flashgen.torch.varlen import window_mask

REFUSALS = (ArgumentError, SpecError, UnsupportedError)
"""The errors of calls that flashgen does not compute."""


def scaled_dot_product_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """Computes aten::_scaled_dot_product_flash_attention, of tensors (batch, heads, length, dim).

    Returns:
        (out, lse, None, None, len_q, len_k, rng_state, unused, debug_mask), where out has the shape of the query with
        the columns of the value, and lse is float32 (batch, heads, len_q). The two None are cum_seq_q and cum_seq_k of
        the schema. debug_mask has no elements.

    Raises:
        ArgumentError, SpecError, UnsupportedError: flashgen does not compute the call.
        LaunchError: return_debug_mask is given with dropout; see `_refuse`.
    """
    options = dropout_p, is_causal, return_debug_mask, scale, torch._C._get_deterministic_algorithms()
    found = _SDPA_FORWARDS.launch(options, (query, key, value))
    if found is not None:
        (out, lse), (len_q, len_k, make_state, make_unused, no_debug_mask) = found
        return out, lse, None, None, len_q, len_k, make_state(), make_unused(), no_debug_mask
    if return_debug_mask:
        _refuse(dropout_p, return_debug_mask=True)
    entry = _entry_of(query, value, "bhsd", None, dropout_p, -1, 0 if is_causal else -1, scale)
    out, lse, *auxiliary = _forward(entry, query, key, value)
    lengths = query.shape[2], key.shape[2]
    _remember(_SDPA_FORWARDS, options, entry, (query, key, value), *lengths)
    return out, lse, None, None, *lengths, *auxiliary


def scaled_dot_product_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Any:
    """Computes aten::_scaled_dot_product_flash_attention_backward.

    grad_out, out: as the output of the forward. logsumexp: float32 (batch, heads, len_q). philox_seed: rng_state of the
    forward, read with dropout only. cum_seq_q, cum_seq_k, max_q, max_k and philox_offset are not read.

    Returns:
        The gradients of query, key and value, with their shapes.

    Raises:
        ArgumentError, SpecError, UnsupportedError: flashgen does not compute the call.
        LaunchError: flashgen does not compute the backward of a forward with dropout that it computed; see `_backward`.
    """
    options = dropout_p, is_causal, scale, torch._C._get_deterministic_algorithms()
    tensors = query, key, value, out, grad_out, logsumexp
    found = _SDPA_BACKWARDS.launch(options, tensors)
    if found is not None:
        return tuple(found[0])
    entry = _entry_of(query, value, "bhsd", None, dropout_p, -1, 0 if is_causal else -1, scale)
    gradients = _backward(entry, grad_out, query, key, value, out, logsumexp, (), philox_seed)
    _remember(_SDPA_BACKWARDS, options, entry, tensors)
    return gradients


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    **others: Any,
) -> Any:
    """Computes aten::_flash_attention_forward, of tensors (batch, length, heads, dim), packed sequences or pages.

    Args:
        cum_seq_q, cum_seq_k: offsets of packed sequences, int32 (sequences + 1), of tensors (total, heads, dim).
        max_q: read only with a block table; see `_entry_and_arrays`. max_k is not read.
        others: block_table, num_splits and further keywords of `_entry_and_arrays`. A call with any of them, even None,
            is not repeated as an earlier one.

    Returns:
        (out, lse, rng_state, unused, debug_mask), where lse is float32 (batch, heads, len_q), or (heads, total_q) of
        packed sequences. debug_mask has no elements.

    Raises:
        ArgumentError, SpecError, UnsupportedError: flashgen does not compute the call.
        LaunchError: an argument is refused with dropout; see `_refuse`.
    """
    flags, window = (dropout_p, is_causal, return_debug_mask), (window_size_left, window_size_right)
    sequences = cum_seq_q, cum_seq_k, seqused_k
    found = None if others else repeat_flash_forward(query, key, value, sequences, flags, scale, window)
    if found is not None:
        return found
    given: dict[str, Any] = {"scale": scale, "window_size_left": window[0], "window_size_right": window[1], **others}
    places = cum_seq_q, cum_seq_k, max_q
    entry, arrays, bounds = _entry_and_arrays(query, key, value, *places, *flags, seqused_k=seqused_k, **given)
    results = _forward(entry, query, key, value, arrays, bounds)
    if not others:
        options, tensors = _flash_key((query, key, value), sequences, flags, scale, window)
        _remember(_FLASH_FORWARDS, options, entry, tensors)
    return results


def repeat_flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: tuple[Tensor | None, Tensor | None, Tensor | None],
    flags: tuple[float, bool, bool],
    scale: float | None,
    window: tuple[Any, ...],
) -> tuple[Tensor, ...] | None:
    """Returns the results of `flash_forward` if it has had a call like this one; None otherwise.

    sequences: cum_seq_q, cum_seq_k, seqused_k. flags: dropout_p, is_causal, return_debug_mask. window: window_size_left
    and window_size_right. The device of the tensors must be the current one.
    """
    found = _FLASH_FORWARDS.launch(*_flash_key((query, key, value), sequences, flags, scale, window))
    if found is None:
        return None
    (out, lse), (make_state, make_unused, no_debug_mask) = found
    return out, lse, make_state(), make_unused(), no_debug_mask


def flash_forward_into(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *flags: Any,
    **options: Any,
) -> Any:
    """Computes aten::_flash_attention_forward_no_dropout_inplace, which writes to `out`. Returns the LSE.

    flags: dropout_p, is_causal, return_debug_mask. options: the keyword arguments of `_entry_and_arrays`. The other
    arguments, the shape of the LSE and the errors are as for `flash_forward`; dropout raises ArgumentError.
    """
    entry, arrays, bounds = _entry_and_arrays(query, key, value, cum_seq_q, cum_seq_k, max_q, *flags, **options)
    if entry.dropout:
        raise ArgumentError("dropout_p is given to an operator without dropout")
    if query.is_cuda:
        lse = query.new_empty(entry.spec.batch_layout.lse_shape(tuple(query.shape)), dtype=torch.float32)
        named = named_captures(entry, arrays, bounds, ())
        entry.on(query.get_device())(query, key, value, return_lse=True, out=(out, lse), **named)
        return lse
    made, lse = run_forward(entry, query, key, value, arrays, bounds, (), None)
    out.copy_(made)
    return lse


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:
    """Computes aten::_flash_attention_backward, of tensors as for `flash_forward`.

    grad_out, out: as the output of the forward. logsumexp: the LSE of the forward. rng_state: that of the forward, read
    with dropout only. max_q, max_k and unused are not read.

    Returns:
        The gradients of query, key and value, with their shapes.

    Raises:
        ArgumentError, SpecError, UnsupportedError: flashgen does not compute the call.
        LaunchError: flashgen does not compute the backward of a forward with dropout that it computed; see `_backward`.
    """
    read, sequences = (query, key, value, out, grad_out, logsumexp), (cum_seq_q, cum_seq_k)
    flags, window = (dropout_p, is_causal), (window_size_left, window_size_right)
    found = repeat_flash_backward(read, sequences, flags, scale, window)
    if found is not None:
        return found
    layout = "bshd" if cum_seq_q is None else "thd"
    entry = _entry_of(query, value, layout, None, dropout_p, *_window(is_causal, *window), scale)
    arrays = _sequences(cum_seq_q, cum_seq_k, None)
    gradients = _backward(entry, grad_out, query, key, value, out, logsumexp, arrays, rng_state)
    options, tensors = _flash_key(read, sequences, flags, scale, window)
    _remember(_FLASH_BACKWARDS, options, entry, tensors)
    return gradients


def repeat_flash_backward(
    read: tuple[Tensor, ...],
    sequences: tuple[Tensor | None, Tensor | None],
    flags: tuple[float, bool],
    scale: float | None,
    window: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns the gradients of `flash_backward` if it has had a call like this one; None otherwise.

    read: query, key, value, out, grad_out, logsumexp. The other arguments are as for `repeat_flash_forward`.
    """
    found = _FLASH_BACKWARDS.launch(*_flash_key(read, sequences, flags, scale, window))
    return None if found is None else (found[0][0], found[0][1], found[0][2])


def _flash_key(
    read: tuple[Tensor, ...],
    sequences: tuple[Tensor | None, ...],
    flags: tuple[Any, ...],
    scale: float | None,
    window: tuple[Any, ...],
) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """Returns the options and the tensors of a call of a flash operator, as `Repeats` takes them."""
    given = [each for each in sequences if each is not None]
    is_missing = [each is None for each in sequences]
    options = flags, scale, window, is_missing, torch._C._get_deterministic_algorithms()
    # A tensor that is given twice becomes two objects, because torch's guards refuse repeated ones.
    return options, (*read, *as_separate_objects(given))


OPERATORS = {
    "_scaled_dot_product_flash_attention": scaled_dot_product_forward,
    "_scaled_dot_product_flash_attention_backward": scaled_dot_product_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_into,
    "_flash_attention_backward": flash_backward,
}
"""The functions of this module by the names of the operators in aten."""


_SDPA_FORWARDS, _FLASH_FORWARDS = Repeats(), Repeats()
_SDPA_BACKWARDS, _FLASH_BACKWARDS = Repeats(backward=True), Repeats(backward=True)


def _remember(repeats: Repeats, options: tuple[Any, ...], entry: Registered, tensors: Any, *lengths: int) -> None:
    """Remembers the launch of a call if `entry.is_direct` and `direct` has replayed it from the launch cache.

    No call with dropout, captures, pages, another dtype of the output or on the emulator is direct.

    lengths: values that a hit returns with the results.
    """
    if entry.is_direct:
        q = tensors[0]
        kept = (*lengths, *_auxiliary(q.dtype, q.device))
        repeats.remember(options, tensors, entry.on(q.get_device()), kept)


def _forward(
    entry: Registered, q: Tensor, k: Tensor, v: Tensor, arrays: Sequence[Tensor] = (), bounds: Sequence[int] = ()
) -> tuple[Tensor, ...]:
    """Returns the output, the LSE, and the auxiliary results of aten: rng_state, an unused one, the debug mask.

    rng_state holds two numbers from torch's generator, which are drawn on the device. The first is the seed of
    flashgen's dropout; without dropout neither is set.
    """
    make_state, make_unused, no_debug_mask = _auxiliary(q.dtype, q.device)
    if entry.dropout:
        drawn = torch.randint(SEEDS, (2,), dtype=torch.int64, device=q.device)
        out, lse = run_forward(entry, q, k, v, arrays, bounds, (), drawn[0])
        return out, lse, drawn.view(torch.uint64), make_unused(), no_debug_mask
    out, lse = run_forward(entry, q, k, v, arrays, bounds, (), None)
    return out, lse, make_state(), make_unused(), no_debug_mask


def _backward(
    entry: Registered,
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    arrays: Sequence[Tensor],
    state: Tensor,
) -> tuple[Tensor, ...]:
    """Returns the gradients of q, k and v. Raises LaunchError for a refused call with dropout."""
    seed = state.view(torch.int64)[0] if entry.dropout else None
    try:
        return tuple(run_backward(entry, d_out, None, q, k, v, out, lse, arrays, (), (), seed))
    except REFUSALS as error:
        if seed is None:
            raise
        # A call that check_call refuses was refused in the forward too. torch's kernel computed that forward, and may
        # compute its backward.
        check_call(entry, q, k, v, arrays, seed)
        message = "the backward of a forward with flashgen's dropout, which torch's own kernel would not repeat"
        raise LaunchError(f"{message}: {error}") from error


@lru_cache(maxsize=64)
def _auxiliary(dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], Tensor], Callable[[], Tensor], Tensor]:
    """Returns functions that allocate rng_state and the unused result, and the debug mask, which has no elements.

    The device must be the current one when they are called. All calls share the debug mask.
    """
    if device.type == "cuda":
        make_state, make_unused = (TORCH.maker(shape, "uint64", device.index) for shape in ((2,), ()))
    else:
        make_state, make_unused = (partial(torch.empty, shape, dtype=torch.uint64) for shape in ((2,), ()))
    return make_state, make_unused, torch.empty(0, dtype=dtype, device=device)


def _entry_and_arrays(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    max_q: int,
    dropout: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    **others: Any,
) -> tuple[Registered, Sequence[Tensor], Sequence[int]]:
    """Returns the entry of a call, its arrays beside q, k and v, and the bounds of the lengths of its sequences.

    The bounds are (max_seqlen_q, max_seqlen_k) with -1 for unknown, or () if both are. Kernels take the lengths from
    the arrays; max_q = 1 of a call over pages is passed on, as fewer work units then suffice.

    Args:
        others: alibi_slopes, and what later versions of torch add. They must be None.

    Raises:
        ArgumentError: flashgen does not take the arguments.
        LaunchError: they are refused with dropout; see `_refuse`.
    """
    _refuse(dropout, return_debug_mask=return_debug_mask, **{name: value is not None for name, value in others.items()})
    window = _window(is_causal, window_size_left, window_size_right)
    layout = "bshd" if starts_q is None else "thd"
    if block_table is None:
        _refuse(dropout, num_splits=bool(num_splits) and starts_q is None)
        entry = _entry_of(q, v, layout, None, dropout, *window, scale)
        return entry, _sequences(starts_q, starts_k, seqused_k), ()
    # num_splits cannot be given with a block table: the kernels choose the splits from seqused_k, on the device.
    _refuse(0.0, num_splits=bool(num_splits), dropout_p=bool(dropout))
    if starts_q is None or seqused_k is None:
        raise ArgumentError("block_table is given without cum_seq_q or seqused_k")
    entry = _entry_of(q, v, layout, k.shape[1], 0.0, *window, scale)
    return entry, [starts_q, block_table, seqused_k], (1, -1) if max_q == 1 else ()


def _refuse(dropout: float, **given: bool) -> None:
    """Raises ArgumentError if an argument is given that flashgen does not take.

    With dropout it is a LaunchError: torch's own kernel would compute the forward. flashgen would compute the backward,
    because it does not see the argument there, and would drop other probabilities.
    """
    for name, is_given in given.items():
        if is_given and dropout:
            raise LaunchError(
                f"{name} with dropout_p={dropout} is not supported while flashgen is active: leave out one of them, or "
                "call torch.nn.attention.restore_flash_attention_impl() before"
            )
        if is_given:
            raise ArgumentError(f"{name} is given, which flashgen does not take here")


def _window(is_causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    """Returns the bounds of the window around a query's position, -1 for none."""
    return (
        -1 if left is None or left < 0 else left,
        0 if is_causal else -1 if right is None or right < 0 else right,
    )


def _sequences(starts_q: Tensor | None, starts_k: Tensor | None, used_k: Tensor | None) -> Sequence[Tensor]:
    """Returns the arrays that locate packed sequences, in the order of `Registered.arrays`."""
    if starts_q is starts_k is used_k is None:
        return ()
    if starts_q is None or starts_k is None:
        raise ArgumentError("cum_seq_q or cum_seq_k is missing")
    return [starts_q, starts_k] if used_k is None else [starts_q, starts_k, used_k]


def _entry_of(
    q: Tensor,
    v: Tensor,
    layout: str,
    page_size: int | None,
    dropout: float,
    left: int,
    right: int,
    scale: float | None,
) -> Registered:
    """Returns the entry of a call. CPU tensors run on the emulator, which only tests give."""
    settings = torch.are_deterministic_algorithms_enabled(), not q.is_cuda
    return _entry(q.shape[-1], v.shape[-1], q.dtype, layout, page_size, dropout, left, right, scale, *settings)


@lru_cache(maxsize=1024)
def _entry(
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    layout: str,
    page_size: int | None,
    dropout: float,
    left: int,
    right: int,
    scale: float | None,
    deterministic: bool,
    emulate: bool,
) -> Registered:
    name = str(dtype).removeprefix("torch.")
    if name not in ELEMENTS:
        raise ArgumentError(f"query is {name}; flashgen computes in float16 and bfloat16")
    if dropout and checked_dropout("dropout_p", dropout) == 1:
        raise ArgumentError("dropout_p=1: all outputs are zero")
    mask = window_mask(left, right)
    spec = AttentionSpec(head_dim, name, value_dim, scale, layout, dropout, mask=mask, page_size=page_size)
    return registered(spec, emulate=emulate, deterministic=deterministic)
