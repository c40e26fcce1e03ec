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
from flashgen.runtime.arrays import TORCH
from flashgen.torch.tensors import Tensor

_ALIGNMENT = 16  # bytes
_OUTPUT, _BOTH = (Call({}, {}, None, 0, wanted) for wanted in (("o",), ("o", "lse")))
_GRADIENTS = Call({}, {}, None, 0, ("dq", "dk", "dv"))
_stream = TORCH.stream


def forward(attention: Attention, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> Any:
    """The output, or a pair with the LSE, of a call like one that `learn_forward` was told of; None where none is."""
    known, addresses = _looked_at({"q": q, "k": k, "v": v})
    made = attention.forward.again(known, _BOTH if with_lse else _OUTPUT, _stream(q), addresses)
    if made is None:
        return None
    return (made["o"], made["lse"]) if with_lse else made["o"]


def learn_forward(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Has `forward` serve calls like one of these tensors, which an attention took as they are."""
    arrays = {"q": q, "k": k, "v": v}
    attention.forward.know(_looked_at(arrays)[0], arrays)


def backward(
    attention: Attention, d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The gradients of q, k and v of a call like one that `learn_backward` was told of; None where none is."""
    known, addresses = _looked_at(_of_backward(d_out, d_lse, q, k, v, out, lse))
    made = attention.backward_pass.again(known, _GRADIENTS, _stream(q), addresses)
    return None if made is None else (made["dq"], made["dk"], made["dv"])


def learn_backward(
    attention: Attention, d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Has `backward` serve calls like one of these tensors, which an attention took as they are."""
    arrays = _of_backward(d_out, d_lse, q, k, v, out, lse)
    attention.backward_pass.know(_looked_at(arrays)[0], arrays)


def _of_backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> dict[str, Tensor]:
    """The tensors of a backward call as structs name them."""
    arrays = {"q": q, "k": k, "v": v, "o": out, "d_o": d_out, "lse": lse}
    if d_lse is not None:
        arrays["d_lse"] = d_lse
    return arrays


def _looked_at(arrays: Mapping[str, Tensor]) -> tuple[tuple[Any, ...], Addresses]:
    """What tensors say of themselves, with how they lie in 16 bytes; and their addresses."""
    known: list[Any] = []
    addresses, bits = Addresses(), 0
    for name, tensor in arrays.items():
        addresses[name] = address = tensor.data_ptr()
        bits |= address
        known += tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    known.append(bits % _ALIGNMENT)
    return tuple(known), addresses
