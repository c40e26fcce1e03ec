"""Attention as operators of torch, with gradients, and with fake kernels for torch.compile."""

# torch infers the schemas of operators from annotations, which must not be strings: no `from __future__`.
import functools
import operator
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import driver
from ._ops import NAMESPACE, add_op_namespace_prefix, ops
from .launches import Prepared
from .specs import SPECS, Spec, has_aligned_rows, spec_of

Tensors = Dict[str, Optional[Tensor]]

_unwrap_if_dead = torch._C._functorch.unwrap_if_dead


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    captures: Optional[Mapping[str, Any]] = None,
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
        captures: the arrays and numbers that the mask and the score function of the spec read, and its sinks, by name.
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
    arrays, numbers = chosen.split(captures or {})
    _check_derivatives(chosen, q, k, v, arrays)
    others = (seed, cu_seqlens_q, cu_seqlens_k, seqused_k)
    longest = (max_seqlen_q, max_seqlen_k)
    if not _is_plain(q, k, v, *arrays):
        out, lse = ops.forward(q, k, v, chosen.name, arrays, numbers, *others, *longest)
        return (out, lse) if return_lse else out
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or any(each.requires_grad for each in arrays)
    ):
        options = (chosen.name, numbers, longest)
        tensors = (each if each is None else _unwrap_if_dead(each) for each in (q, k, v, *others, *arrays))
        return (_apply_with_lse if return_lse else _apply)(options, *tensors)
    out, lse = _run(_FORWARD, chosen, (q, k, v, *others), arrays, numbers, longest)
    return (out, lse) if return_lse else out


def _check_derivatives(spec: Spec, q: Tensor, k: Tensor, v: Tensor, arrays: Sequence[Tensor]) -> None:
    """Raises RuntimeError for derivatives that the kernels do not compute, which would be missing without an error."""
    tensors = (q, k, v, *arrays) if forward_ad._current_level >= 0 else ()
    if any(forward_ad.unpack_dual(each).tangent is not None for each in tensors):
        raise RuntimeError("attention has no forward-mode derivative: use gradients, such as torch.func.vjp")
    for capture, array in zip(spec.arrays, arrays):
        if array.requires_grad and not capture.grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"capture {capture.name!r} requires a gradient, and {spec.name} declares none: detach it, or declare "
                "it with grad=True and export the spec again"
            )


def _is_plain(*tensors: Tensor) -> bool:
    """Whether nothing intercepts operators on these tensors, so that a call saves the time of torch's dispatcher."""
    if torch.compiler.is_compiling() or not _PLAIN_TENSORS.issuperset(map(type, tensors)):
        return False
    return _count_modes() == 0 and _current_transform() is None


# Private functions of torch; without one of them, all calls take the dispatcher.
_PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter}
_count_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_current_transform = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: True)


class _Call(NamedTuple):
    """The state that calls share if their tensors have the same shapes, strides, dtypes and devices.

    allocators: allocate the results. zeroed: those that kernels add to, or do not write. prepared: None if there is
    nothing to compute.
    """

    allocators: Sequence[Callable[[], Tensor]]
    zeroed: Sequence[int]
    prepared: Optional[Prepared]


class _Given(NamedTuple):
    """The arguments of a call for which nothing is prepared yet.

    rows: the tensors of rows, by their names in argument structs; of the forward q, k and v. others: the other tensors.
    arrays: the captured arrays. longest: bounds of the lengths of packed sequences.
    """

    spec: Spec
    rows: Dict[str, Tensor]
    others: Tensors
    arrays: Sequence[Tensor]
    longest: Tuple[Optional[int], Optional[int]]

    @property
    def sizes(self) -> Dict[str, int]:
        """The sizes of the call, by their names in formulas."""
        offsets = self.others["cu_seqlens_q"]
        batch = None if offsets is None else offsets.numel() - 1
        return self.spec.sizes(self.rows["q"], self.rows["k"], batch, self.longest)


class _Pass(NamedTuple):
    """The names of the tensors of a pass in argument structs, in order; those of captured arrays follow."""

    name: str
    rows: Tuple[str, ...]
    others: Tuple[str, ...]
    results: Tuple[str, ...]

    def order(self, spec: Spec) -> List[str]:
        """Returns the names of all addresses of a call in order."""
        members = [capture.member for capture in spec.arrays]
        learned = [name for each in spec.arrays if each.grad for name in (f"d_{each.member}", _gradient_of(each.name))]
        return [*self.rows, *self.others, *members, *self.results, *(learned if self is _BACKWARD else [])]

    def given(self, spec: Spec, tensors: Sequence[Any], arrays: Sequence[Tensor], longest: Any) -> _Given:
        """Returns the arguments of a call by their names."""
        rows, others = tensors[: len(self.rows)], tensors[len(self.rows) :]
        return _Given(spec, dict(zip(self.rows, rows)), dict(zip(self.others, others)), arrays, longest)


def _gradient_of(capture: str) -> str:
    return f"gradient of {capture}"


_OPTIONAL = ("seed", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
_FORWARD = _Pass("forward", ("q", "k", "v"), _OPTIONAL, ("o", "lse"))
_BACKWARD = _Pass("backward", ("q", "k", "v", "o", "d_o"), (*_OPTIONAL, "lse", "d_lse"), ("dq", "dk", "dv"))
_MAX_OFFSETS = 65536
_MAX_CALLS = 1024  # in decoding, every call has a new length
_calls: Dict[Any, _Call] = {}
_SEED = {"seed_low": 0, "seed_high": 0, "offset": 0}  # the seed is read from memory


def _run(
    part: _Pass,
    spec: Spec,
    tensors: Tuple[Any, ...],
    arrays: Sequence[Tensor],
    numbers: Sequence[float],
    longest: Tuple[Optional[int], Optional[int]],
) -> List[Tensor]:
    """Runs a pass, and returns its results. tensors: in the order of the pass, None for those that are absent."""
    seed = tensors[len(part.rows)]
    if seed is not None or spec.dropout:
        _check_seed(spec, tensors[0], seed)
    tensors = (*tensors, *arrays)
    described = [None if t is None else (t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors]
    key = (part.name, spec.name, longest, *described)
    call = _calls.get(key)
    if call is None:
        if len(_calls) >= _MAX_CALLS:
            _calls.clear()
        given = part.given(spec, tensors, arrays, longest)
        call = _calls[key] = (_prepare_forward if part is _FORWARD else _prepare_backward)(given)
    with driver.on(tensors[0].device):
        results = [allocate() for allocate in call.allocators]
        for position in call.zeroed:
            results[position].zero_()
        if call.prepared is not None:
            addresses = [0 if t is None else t.data_ptr() for t in tensors]
            if functools.reduce(operator.or_, addresses[: len(part.rows)]) % 16:
                raise ValueError(f"each of {part.rows} must begin at a multiple of 16 bytes: copy those that do not")
            addresses += [result.data_ptr() for result in results[: len(part.results)]]
            for gradient in results[len(part.results) :]:
                addresses += [gradient.data_ptr()] * 2  # which has two names
            call.prepared.run(addresses, _numbers(spec, arrays, numbers) if arrays or numbers else _SEED)
    return results


def _numbers(spec: Spec, arrays: Sequence[Tensor], numbers: Sequence[float]) -> Dict[str, float]:
    """Returns the captured numbers of a call by name, after a check: they are not in the key of calls."""
    spec.check_numbers(arrays, numbers)
    by_name = {each.member: int(number) if each.is_integer else number for each, number in zip(spec.numbers, numbers)}
    return {**_SEED, **by_name}


def _prepare_forward(given: _Given) -> _Call:
    spec, rows = given.spec, given.rows
    driver.check_device(rows["q"])
    results = _empty_forward(given)
    arrays, order = {**rows, "o": results[0]}, _FORWARD.order(spec)
    prepared = spec.prepare("forward", given.sizes, arrays, given.arrays, order) if results[1].numel() else None
    return _Call(_allocators(results), (), prepared)


def _allocators(results: Sequence[Tensor]) -> Sequence[Callable[[], Tensor]]:
    """Returns functions that allocate tensors like these."""
    return [driver.allocator(tuple(each.shape), each.stride(), each.dtype, each.device) for each in results]


def _prepare_backward(given: _Given) -> _Call:
    spec, rows = given.spec, given.rows
    driver.check_device(rows["q"])
    gradients = _empty_gradients(spec, rows["q"], rows["k"], rows["v"], given.arrays)
    results = _allocators(gradients)
    empty = not given.others["lse"].numel()  # type: ignore[union-attr]
    if empty or not (rows["k"].numel() or any(capture.sink for capture in spec.arrays)):
        return _Call(results, range(len(results)), None)
    own = dict(zip(("dq", "dk", "dv"), gradients))
    prepared = spec.prepare("backward", given.sizes, {**rows, **own}, given.arrays, _BACKWARD.order(spec))
    learned = [capture for capture in spec.arrays if capture.grad]
    zeroed = [3 + n for n, capture in enumerate(learned) if _gradient_of(capture.name) not in prepared.pointers]
    return _Call(results, zeroed, prepared)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: str,
    arrays: List[Tensor],
    numbers: List[float],
    seed: Optional[Tensor],
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    seqused_k: Optional[Tensor],
    max_seqlen_q: Optional[int],
    max_seqlen_k: Optional[int],
) -> Tuple[Tensor, Tensor]:
    """Returns the output and the LSE."""
    tensors = (q, k, v, seed, cu_seqlens_q, cu_seqlens_k, seqused_k)
    out, lse = _run(_FORWARD, SPECS[spec], tensors, arrays, numbers, (max_seqlen_q, max_seqlen_k))
    return out, lse


def backward(
    d_out: Tensor,
    d_lse: Optional[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spec: str,
    arrays: List[Tensor],
    numbers: List[float],
    seed: Optional[Tensor],
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    seqused_k: Optional[Tensor],
    max_seqlen_q: Optional[int],
    max_seqlen_k: Optional[int],
) -> List[Tensor]:
    """Returns the gradients of q, k, v, and of each captured array that has one."""
    d_out = d_out if d_out.dtype == q.dtype else d_out.to(q.dtype)
    if not (d_out.is_contiguous() or has_aligned_rows(d_out)) or d_out.data_ptr() % 16:
        d_out = d_out.contiguous()
    tensors = (q, k, v, out, d_out, seed, cu_seqlens_q, cu_seqlens_k, seqused_k)
    tensors += (lse.contiguous(), None if d_lse is None else d_lse.contiguous())
    return _run(_BACKWARD, SPECS[spec], tensors, arrays, numbers, (max_seqlen_q, max_seqlen_k))


def _check_sequences(spec: Spec, q: Tensor, others: Tensors) -> None:
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
        if not 1 <= offsets.numel() <= _MAX_OFFSETS:  # type: ignore[union-attr]
            raise ValueError(f"cu_seqlens_q has {length} elements: give from 1 to {_MAX_OFFSETS}")
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
    if seed is not None and not isinstance(seed, Tensor):
        raise ValueError(f"seed is {seed!r}: give a tensor of one int64 on {q.device}")
    if seed is not None and (seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != q.device):
        raise ValueError(f"seed is {seed.dtype} {tuple(seed.shape)} on {seed.device}: give one int64 on {q.device}")


def _dense_like(tensor: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns an empty dense tensor with other columns, and with the axes of rows in the memory order of `tensor`."""
    outer = range(tensor.dim() - 1)
    order = sorted(outer, key=tensor.stride, reverse=True)
    empty = tensor.new_empty([*(tensor.shape[axis] for axis in order), columns], dtype=dtype)
    return empty.permute([*(order.index(axis) for axis in outer), tensor.dim() - 1])


def _empty_forward(given: _Given) -> Tuple[Tensor, Tensor]:
    """Checks a call, and returns its results without their values."""
    spec, (q, k, v) = given.spec, given.rows.values()
    spec.check(q, k, v)
    _check_sequences(spec, q, given.others)
    _check_seed(spec, q, given.others["seed"])
    spec.check_arrays(q, given.sizes, given.arrays)
    return _dense_like(q, spec.value_dim, spec.out_dtype), q.new_empty(spec.lse_shape(q), dtype=torch.float32)


def _empty_gradients(spec: Spec, q: Tensor, k: Tensor, v: Tensor, arrays: Sequence[Tensor]) -> List[Tensor]:
    learned = [torch.empty_like(array, memory_format=torch.contiguous_format) for array in _learned(spec, arrays)]
    return [*(_dense_like(each, each.shape[-1], spec.grad_dtype) for each in (q, k, v)), *learned]


def _learned(spec: Spec, arrays: Sequence[Tensor]) -> List[Tensor]:
    """Returns those of the captured arrays that have a gradient."""
    return [array for capture, array in zip(spec.arrays, arrays) if capture.grad]


def _fake_forward(
    q: Any, k: Any, v: Any, spec: Any, arrays: Any, numbers: Any, seed: Any, cu_seqlens_q: Any, cu_seqlens_k: Any,
    seqused_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
) -> Any:  # fmt: skip
    tensors = (q, k, v, seed, cu_seqlens_q, cu_seqlens_k, seqused_k)
    return _empty_forward(_FORWARD.given(SPECS[spec], tensors, arrays, (max_seqlen_q, max_seqlen_k)))


def _fake_backward(
    d_out: Any, d_lse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, spec: Any, arrays: Any, *rest: Any
) -> Any:
    return _empty_gradients(SPECS[spec], q, k, v, arrays)


def _save(ctx: Any, options: Any, tensors: Sequence[Optional[Tensor]], output: Any) -> None:
    """Saves what the backward needs. options: the spec, its numbers and the bounds. tensors: in the order of a call."""
    ctx.options = options
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *tensors)


def _gradients(ctx: Any, d_out: Optional[Tensor], d_lse: Optional[Tensor], run: Callable[..., Any]) -> Any:
    """Returns the gradients of q, k, v, and a list of those of the captured arrays."""
    spec, numbers, longest = ctx.options
    out, lse, q, k, v, seed, cu_seqlens_q, cu_seqlens_k, seqused_k, *arrays = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    others = (seed, cu_seqlens_q, cu_seqlens_k, seqused_k)
    dq, dk, dv, *rest = run(d_out, d_lse, q, k, v, out, lse, spec, arrays, numbers, *others, *longest)
    learned = iter(rest)
    return dq, dk, dv, [next(learned) if capture.grad else None for capture in SPECS[spec].arrays]


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, spec, arrays, numbers, seed, cu_seqlens_q, cu_seqlens_k, seqused_k, *longest = inputs
    _save(ctx, (spec, numbers, longest), (q, k, v, seed, cu_seqlens_q, cu_seqlens_k, seqused_k, *arrays), output)


def _differentiate(ctx: Any, d_out: Optional[Tensor], d_lse: Optional[Tensor]) -> Any:
    *gradients, of_arrays = _gradients(ctx, d_out, d_lse, ops.backward)
    # torch treats an empty list as one of tensors, with a list of gradients, and a list of numbers as one argument.
    return (*gradients, None, of_arrays, None if ctx.options[1] else [], *[None] * 6)


def _no_second_derivative(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError("attention has no second derivative: take gradients of it once")


def _register() -> torch.library.Library:
    """Registers the operators. torch.library.custom_op does the same, but adds to the time of each call."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for function, fake, differentiate, options in (
        (forward, _fake_forward, _differentiate, {"setup_context": _setup_context}),
        (backward, _fake_backward, _no_second_derivative, {}),
    ):
        name = add_op_namespace_prefix(function.__name__)
        schema = torch.library.infer_schema(function, mutates_args=())
        library.define(function.__name__ + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(function.__name__, function, "CompositeExplicitAutograd")
        torch.library.register_fake(name, fake, lib=library)
        torch.library.register_autograd(name, differentiate, lib=library, **options)
    return library


if not hasattr(ops, "forward"):  # a copy of this package, imported under another name, may have registered them
    LIBRARY = _register()  # registrations live as long as this object


class _Attention(torch.autograd.Function):
    """The operators with their gradients, without torch's dispatcher. Its result is the output."""

    @staticmethod
    def forward(ctx: Any, options: Any, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> Any:
        """options: the spec, its numbers and the bounds. tensors: the seed, offsets and captured arrays."""
        return _run_and_save(ctx, options, q, k, v, *tensors)[0]

    @staticmethod
    def backward(ctx: Any, d_out: Optional[Tensor], d_lse: Optional[Tensor] = None) -> Any:
        run = ops.backward if torch.is_grad_enabled() else backward
        *gradients, of_arrays = _gradients(ctx, d_out, d_lse, run)
        return (None, *gradients, *[None] * len(_OPTIONAL), *of_arrays)


class _AttentionWithLse(_Attention):
    """`_Attention` with the LSE as a second result."""

    @staticmethod
    def forward(ctx: Any, options: Any, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> Any:
        return _run_and_save(ctx, options, q, k, v, *tensors)


def _run_and_save(ctx: Any, options: Any, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> Tuple[Tensor, Tensor]:
    spec, numbers, longest = options
    others, arrays = tensors[: len(_OPTIONAL)], tensors[len(_OPTIONAL) :]
    out, lse = _run(_FORWARD, SPECS[spec], (q, k, v, *others), arrays, numbers, longest)
    _save(ctx, options, (q, k, v, *tensors), (out, lse))
    return out, lse


# `apply` without what it does for transforms of torch.func, which `attention` leaves to the dispatcher. It also unwraps
# tensors of transforms that have ended, which `attention` does itself.
_apply = super(torch.autograd.Function, _Attention).apply
_apply_with_lse = super(torch.autograd.Function, _AttentionWithLse).apply
