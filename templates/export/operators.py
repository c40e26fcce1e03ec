"""Attention as operators of torch, with gradients, and with fake kernels for torch.compile."""

# torch infers the schemas of operators from annotations, which must not be strings: no `from __future__`.
from typing import Any, Callable, Dict, Iterable, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from . import driver
from ._ops import NAMESPACE, add_op_namespace_prefix, ops
from .launches import Prepared
from .specs import SPECS, Spec, has_aligned_rows, spec_of

LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # registrations live as long as this object


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    seed: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    spec: Optional[str] = None,
) -> Any:
    """Returns the attention of q over k and v on an NVIDIA GPU, differentiable, and the LSE with `return_lse`.

    Args:
        q, k, v: tensors of one dtype, with axes in the order of the spec's layout. Rows are contiguous and begin at
            multiples of 16 bytes; other strides are arbitrary. The heads of q are a multiple of those of k and v.
        return_lse: also return the logarithm of the sum of exponentials of each row, float32.
        seed: the seed of the dropout, one int64 on the device of q; None draws it from torch's generator.
        cu_seqlens_q, cu_seqlens_k: the first row of each of the packed sequences of layout "thd", and the number of
            all rows; int32 on the device of q.
        seqused_k: the number of keys of each packed sequence that are used; None for all.
        max_seqlen_q, max_seqlen_k: bounds of the lengths of packed sequences; None for the number of rows.
        spec: the name of the variant in SPECS; None selects the only one that takes such tensors.

    Raises:
        ValueError: tensors do not fit the spec.
        RuntimeError: the tensors are not on an NVIDIA GPU, or on one that the package has no kernels for.
    """
    chosen = spec_of(spec, q, v)
    if seed is None and chosen.dropout:
        seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    given = (q, k, v, chosen.name, seed, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k)
    out, lse = _Attention.apply(*given) if _is_plain(q, k, v) else ops.forward(*given)
    return (out, lse) if return_lse else out


def _is_plain(*tensors: Tensor) -> bool:
    """Whether nothing intercepts operators on these tensors, so that a call saves the time of torch's dispatcher."""
    if torch.compiler.is_compiling() or not all(type(tensor) in _PLAIN_TENSORS for tensor in tensors):
        return False
    return _count_modes() == 0 and _current_transform() is None


# Private functions of torch; without one of them, all calls take the dispatcher.
_PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter}
_count_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_current_transform = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: True)


class _Call(NamedTuple):
    """What calls share whose tensors have the same shapes, strides, dtypes and devices.

    results: (shape, strides, dtype) of each result. prepared: None if there is nothing to compute.
    """

    results: Tuple[Tuple[Tuple[int, ...], Tuple[int, ...], torch.dtype], ...]
    prepared: Optional[Prepared]


_MAX_CALLS = 1024  # in decoding, every call has a new length
_calls: Dict[Any, _Call] = {}
_NUMBERS = {"seed_low": 0, "seed_high": 0, "offset": 0}  # the seed is read from memory


def _described(tensors: Iterable[Optional[Tensor]]) -> Tuple[Any, ...]:
    return tuple([t if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors])


def _run(part: str, spec: str, rows: Dict[str, Tensor], others: Dict[str, Optional[Tensor]], longest: Any) -> Any:
    """Runs a pass, "forward" or "backward". Returns its results.

    rows: the tensors of rows, by their names in argument structs; of the forward q, k and v. others: the other tensors.
    longest: bounds of the lengths of packed sequences.
    """
    key = (part, spec, longest, _described(rows.values()), _described(others.values()))
    call = _calls.get(key)
    if call is None:
        if len(_calls) >= _MAX_CALLS:
            _calls.clear()
        call = _calls[key] = (_prepare_forward if part == "forward" else _prepare_backward)(spec, rows, others, longest)
    device = rows["q"].device
    results = [
        torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in call.results
    ]
    if call.prepared is None:
        return [result.zero_() for result in results]
    addresses = {name: tensor.data_ptr() for name, tensor in rows.items()}
    if any(address % 16 for address in addresses.values()):
        raise ValueError(f"each tensor must begin at a multiple of 16 bytes, and some of {addresses} do not: copy them")
    addresses.update({name: tensor.data_ptr() for name, tensor in others.items() if tensor is not None})
    addresses.update(zip(_RESULTS[part], [result.data_ptr() for result in results]))
    call.prepared.run(addresses, _NUMBERS, device)
    return results


_RESULTS = {"forward": ("o", "lse"), "backward": ("dq", "dk", "dv")}


def _prepare_forward(spec: str, rows: Dict[str, Tensor], others: Dict[str, Optional[Tensor]], longest: Any) -> _Call:
    chosen, (q, k, v) = SPECS[spec], rows.values()
    driver.check_device(q)
    out, lse = _empty_forward(chosen, q, k, v, others)
    prepared = chosen.prepare("forward", {**rows, "o": out}, _batch(others), longest) if lse.numel() else None
    return _Call(tuple((each.shape, each.stride(), each.dtype) for each in (out, lse)), prepared)


def _prepare_backward(spec: str, rows: Dict[str, Tensor], others: Dict[str, Optional[Tensor]], longest: Any) -> _Call:
    chosen, (q, k, v) = SPECS[spec], (rows[name] for name in "qkv")
    driver.check_device(q)
    gradients = _empty_gradients(chosen, q, k, v)
    results = tuple((each.shape, each.stride(), each.dtype) for each in gradients)
    if not others["lse"].numel() or not k.numel():  # type: ignore[union-attr]
        return _Call(results, None)
    return _Call(
        results,
        chosen.prepare("backward", {**rows, **dict(zip(_RESULTS["backward"], gradients))}, _batch(others), longest),
    )


def _batch(others: Dict[str, Optional[Tensor]]) -> Optional[int]:
    """Returns the number of packed sequences."""
    offsets = others["cu_seqlens_q"]
    return None if offsets is None else offsets.numel() - 1


def as_operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers a function as an operator. torch.library.custom_op does the same, but adds to the time of each call."""
    schema = torch.library.infer_schema(function, mutates_args=())
    LIBRARY.define(function.__name__ + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(function.__name__, function, "CompositeExplicitAutograd")
    return function


@as_operator
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: str,
    seed: Optional[Tensor],
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    seqused_k: Optional[Tensor],
    max_seqlen_q: Optional[int],
    max_seqlen_k: Optional[int],
) -> Tuple[Tensor, Tensor]:
    """Returns the output and the LSE."""
    others = _others(seed, cu_seqlens_q, cu_seqlens_k, seqused_k)
    out, lse = _run("forward", spec, {"q": q, "k": k, "v": v}, others, (max_seqlen_q, max_seqlen_k))
    return out, lse


@as_operator
def backward(
    d_out: Tensor,
    d_lse: Optional[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spec: str,
    seed: Optional[Tensor],
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    seqused_k: Optional[Tensor],
    max_seqlen_q: Optional[int],
    max_seqlen_k: Optional[int],
) -> Tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v."""
    d_out = d_out if d_out.dtype == q.dtype else d_out.to(q.dtype)
    d_out = d_out if has_aligned_rows(d_out) and d_out.data_ptr() % 16 == 0 else d_out.contiguous()
    others = {"lse": lse.contiguous(), "d_lse": None if d_lse is None else d_lse.contiguous()}
    others.update(_others(seed, cu_seqlens_q, cu_seqlens_k, seqused_k))
    rows = {"q": q, "k": k, "v": v, "o": out, "d_o": d_out}
    dq, dk, dv = _run("backward", spec, rows, others, (max_seqlen_q, max_seqlen_k))
    return dq, dk, dv


def _others(
    seed: Optional[Tensor],
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    seqused_k: Optional[Tensor],
) -> Dict[str, Optional[Tensor]]:
    """Returns tensors that are not of rows, by their names in argument structs."""
    return {"seed": seed, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}


def _check_sequences(spec: Spec, q: Tensor, others: Dict[str, Optional[Tensor]]) -> None:
    """Raises ValueError if a packed batch lacks its offsets, or another batch has some."""
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"):
        tensor = others[name]
        if tensor is None:
            if spec.is_varlen and name != "seqused_k":
                raise ValueError(f"{name} is missing: {spec.name} takes packed sequences, give int32 (sequences + 1,)")
            continue
        if not spec.is_varlen:
            raise ValueError(f"{name}: {spec.name} takes no packed sequences; leave it out")
        offsets = others["cu_seqlens_q"]
        length = offsets.numel() - (name == "seqused_k")  # type: ignore[union-attr]
        if tensor.dtype != torch.int32 or tuple(tensor.shape) != (length,) or tensor.device != q.device:
            given = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            raise ValueError(f"{name} is {given}: give int32 ({length},) on {q.device}")
        if length > 1 and tensor.stride(0) != 1:
            raise ValueError(f"{name} has stride {tensor.stride(0)}: give a contiguous tensor")


def _check_seed(spec: Spec, q: Tensor, seed: Optional[Tensor]) -> None:
    if (seed is None) == bool(spec.dropout):
        raise ValueError(
            f"{spec.name} has dropout {spec.dropout:g}: {'give a seed' if seed is None else 'leave out seed'}"
        )
    if seed is not None and (seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != q.device):
        raise ValueError(f"seed is {seed.dtype} {tuple(seed.shape)} on {seed.device}: give one int64 on {q.device}")


def _dense_like(tensor: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns an empty dense tensor with other columns, and with the axes of rows in the memory order of `tensor`."""
    outer = range(tensor.dim() - 1)
    order = sorted(outer, key=lambda axis: -tensor.stride(axis))
    empty = tensor.new_empty([*(tensor.shape[axis] for axis in order), columns], dtype=dtype)
    return empty.permute([*(order.index(axis) for axis in outer), tensor.dim() - 1])


def _empty_forward(
    spec: Spec, q: Tensor, k: Tensor, v: Tensor, others: Dict[str, Optional[Tensor]]
) -> Tuple[Tensor, Tensor]:
    """Checks a call, and returns its results without their values."""
    spec.check(q, k, v)
    _check_sequences(spec, q, others)
    _check_seed(spec, q, others["seed"])
    return _dense_like(q, spec.value_dim, spec.out_dtype), q.new_empty(spec.lse_shape(q), dtype=torch.float32)


def _empty_gradients(spec: Spec, q: Tensor, k: Tensor, v: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    dtype = spec.grad_dtype
    return _dense_like(q, q.shape[-1], dtype), _dense_like(k, k.shape[-1], dtype), _dense_like(v, v.shape[-1], dtype)


@torch.library.register_fake(add_op_namespace_prefix("forward"), lib=LIBRARY)
def _(
    q: Any, k: Any, v: Any, spec: Any, seed: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_k: Any, *longest: Any
) -> Any:
    return _empty_forward(SPECS[spec], q, k, v, _others(seed, cu_seqlens_q, cu_seqlens_k, seqused_k))


@torch.library.register_fake(add_op_namespace_prefix("backward"), lib=LIBRARY)
def _(d_out: Any, d_lse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, spec: Any, *rest: Any) -> Any:
    return _empty_gradients(SPECS[spec], q, k, v)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.spec, seed, cu_seqlens_q, cu_seqlens_k, seqused_k, *ctx.longest = inputs
    ctx.is_plain = False
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, seed, cu_seqlens_q, cu_seqlens_k, seqused_k)


def _differentiate(ctx: Any, d_out: Optional[Tensor], d_lse: Optional[Tensor]) -> Any:
    q, k, v, out, lse, *others = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    run = backward if ctx.is_plain and not torch.is_grad_enabled() else ops.backward
    return (*run(d_out, d_lse, q, k, v, out, lse, ctx.spec, *others, *ctx.longest), *[None] * 7)


def _no_second_derivative(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError("attention has no second derivative: take gradients of it once")


for name, function, options in (
    ("forward", _differentiate, {"setup_context": _save}),
    ("backward", _no_second_derivative, {}),
):
    torch.library.register_autograd(add_op_namespace_prefix(name), function, lib=LIBRARY, **options)


class _Attention(torch.autograd.Function):
    """The operators with their gradients, without torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = forward(*inputs)
        _save(ctx, inputs, output)
        ctx.is_plain = True
        return output

    backward = staticmethod(_differentiate)
