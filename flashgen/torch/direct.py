"""Calls of torch's tensors on a GPU, as quick as Python allows: what calls like them have worked out is launched again.

An attention looks at whatever arrays and arguments a call gives it. A call through an operator gives tensors alone:
what these say of themselves is enough to find what calls like it launch, and all checks were made by the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.attention import Attention
from flashgen.attention.call import Call
from flashgen.launch.argument_writer import Addresses
from flashgen.launch.engines import Numbers
from flashgen.runtime.arrays import TORCH
from flashgen.torch.tensors import Tensor

_ALIGNMENT = 16  # bytes
_OUTPUT, _BOTH = (Call({}, {}, None, 0, wanted) for wanted in (("o",), ("o", "lse")))
_GRADIENTS = Call({}, {}, None, 0, ("dq", "dk", "dv"))
_stream = TORCH.stream
NO_NUMBERS: Numbers = {}


def forward(
    attention: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    with_lse: bool,
    into: tuple[Tensor, Tensor] | None = None,
    numbers: Numbers = NO_NUMBERS,
) -> Any:
    """The output, or a pair with the LSE, of a call like one that `learn_forward` was told of; None where none is.

    into: an output and an LSE to write to, if with_lse. numbers: captured ones, as `numbers_of` gives them.
    """
    arrays, call = {"q": q, "k": k, "v": v}, _BOTH if with_lse else _OUTPUT
    if into:
        results = dict(zip(call.wanted, into, strict=True))
        arrays, call = arrays | results, call._replace(results=results)
    known, addresses = _looked_at(arrays, numbers)
    made = attention.forward.again(known, call, _stream(q), addresses, numbers)
    if made is None:
        return None
    return (made["o"], made["lse"]) if with_lse else made["o"]


def learn_forward(
    attention: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    into: tuple[Tensor, Tensor] | None = None,
    numbers: Numbers = NO_NUMBERS,
) -> None:
    """Has `forward` serve calls like one of these tensors and numbers, which an attention took as they are."""
    arrays = {"q": q, "k": k, "v": v, **dict(zip(_BOTH.wanted, into or (), strict=False))}
    attention.forward.know(_looked_at(arrays, numbers)[0], arrays)


Read = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor]
"""What a backward reads: d_out, d_lse, q, k, v, out, lse."""


def backward(
    attention: Attention,
    read: Read,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
    numbers: Numbers = NO_NUMBERS,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The gradients of q, k and v of a call like one that `learn_backward` was told of; None where none is."""
    arrays, call = _of_backward(read), _GRADIENTS
    if into:
        results = dict(zip(call.wanted, into, strict=True))
        arrays, call = arrays | results, call._replace(results=results)
    known, addresses = _looked_at(arrays, numbers)
    made = attention.backward_pass.again(known, call, _stream(read[2]), addresses, numbers)
    return None if made is None else (made["dq"], made["dk"], made["dv"])


def learn_backward(
    attention: Attention,
    read: Read,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
    numbers: Numbers = NO_NUMBERS,
) -> None:
    """Has `backward` serve calls like one of these tensors and numbers, which an attention took as they are."""
    arrays = _of_backward(read) | dict(zip(_GRADIENTS.wanted, into or (), strict=False))
    attention.backward_pass.know(_looked_at(arrays, numbers)[0], arrays)


def numbers_of(attention: Attention, captures: Mapping[str, Any]) -> Numbers:
    """What is given for captures that are all numbers; those of either pass."""
    return attention.forward.numbers(captures)


def _of_backward(read: Read) -> dict[str, Tensor]:
    """The tensors of a backward call as structs name them."""
    d_out, d_lse, q, k, v, out, lse = read
    arrays = {"q": q, "k": k, "v": v, "o": out, "d_o": d_out, "lse": lse}
    if d_lse is not None:
        arrays["d_lse"] = d_lse
    return arrays


def _looked_at(arrays: Mapping[str, Tensor], numbers: Numbers = NO_NUMBERS) -> tuple[tuple[Any, ...], Addresses]:
    """What tensors say of themselves, with how they lie in 16 bytes, and numbers; and their addresses."""
    known: list[Any] = [*arrays, *numbers.values()] if numbers or len(arrays) > 3 else []
    addresses, bits = Addresses(), 0
    for name, tensor in arrays.items():
        addresses[name] = address = tensor.data_ptr()
        bits |= address
        known += tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    known.append(bits % _ALIGNMENT)
    return tuple(known), addresses
