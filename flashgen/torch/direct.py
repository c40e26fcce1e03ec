"""Calls of torch's tensors on a GPU, as quick as Python allows: what calls like them have worked out is launched again.

An attention looks at whatever arrays and arguments a call gives it. A call through an operator gives tensors alone:
what these say of themselves is enough to find what calls like it launch, and all checks were made by the first of them.
Which calls are like the last few torch itself tells, sooner than Python can ask each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch

from flashgen.attention import Attention
from flashgen.attention.call import Call
from flashgen.attention.call_pass import Pass
from flashgen.attention.replay import Replay
from flashgen.launch.argument_writer import Addresses
from flashgen.launch.engines import Numbers
from flashgen.runtime.arrays import TORCH
from flashgen.torch.tensors import Tensor

_ALIGNMENT = 16  # bytes
_OUTPUT, _BOTH = (Call({}, {}, None, 0, wanted) for wanted in (("o",), ("o", "lse")))
_GRADIENTS = Call({}, {}, None, 0, ("dq", "dk", "dv"))
# The tensors of a call as structs name them: what it reads, and with results that are given to be written.
_READ = ("q", "k", "v")
_READ_BACK = ("d_o", "q", "k", "v", "o", "lse")
_READ_BACK_WITH_LSE = (*_READ_BACK, "d_lse")
_WITH_RESULTS = {
    _READ: (*_READ, *_BOTH.wanted),
    _READ_BACK: (*_READ_BACK, *_GRADIENTS.wanted),
    _READ_BACK_WITH_LSE: (*_READ_BACK_WITH_LSE, *_GRADIENTS.wanted),
}
_stream = TORCH.stream
_address = torch.Tensor.data_ptr
NO_NUMBERS: Numbers = {}
Names = tuple[str, ...]
Tensors = tuple[Tensor, ...]


class _Kind(NamedTuple):
    """What is said of a call beside what its tensors say: their names, what is wanted, how they lie, and numbers."""

    names: Names
    call: Call
    misaligned: int
    numbers: Numbers


class _Likeness(NamedTuple):
    """What tells that a call is like another one, and what these share; `fits` is asked of its tensors."""

    kind: _Kind
    fits: Callable[..., bool]
    shared: Any
    replay: Replay | None


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
    made = _again(attention.forward, *_of_forward(q, k, v, into), _BOTH if with_lse else _OUTPUT, into, numbers)
    if made is None:
        return None
    return tuple(made) if with_lse else made[0]


def learn_forward(
    attention: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    into: tuple[Tensor, Tensor] | None = None,
    numbers: Numbers = NO_NUMBERS,
) -> None:
    """Has `forward` serve calls like one of these tensors and numbers, which an attention took as they are."""
    _learn(attention.forward, *_of_forward(q, k, v, into), numbers)


Read = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor]
"""What a backward reads: d_out, d_lse, q, k, v, out, lse."""


def backward(
    attention: Attention,
    read: Read,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
    numbers: Numbers = NO_NUMBERS,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The gradients of q, k and v of a call like one that `learn_backward` was told of; None where none is."""
    made = _again(attention.backward_pass, *_of_backward(read, into), _GRADIENTS, into, numbers)
    return None if made is None else (made[0], made[1], made[2])


def learn_backward(
    attention: Attention,
    read: Read,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
    numbers: Numbers = NO_NUMBERS,
) -> None:
    """Has `backward` serve calls like one of these tensors and numbers, which an attention took as they are."""
    _learn(attention.backward_pass, *_of_backward(read, into), numbers)


def numbers_of(attention: Attention, captures: Mapping[str, Any]) -> Numbers:
    """What is given for captures that are all numbers; those of either pass."""
    return attention.forward.numbers(captures)


def _of_forward(q: Tensor, k: Tensor, v: Tensor, into: tuple[Tensor, Tensor] | None) -> tuple[Names, Tensors]:
    return (_WITH_RESULTS[_READ], (q, k, v, *into)) if into else (_READ, (q, k, v))


def _of_backward(read: Read, into: tuple[Tensor, Tensor, Tensor] | None) -> tuple[Names, Tensors]:
    d_out, d_lse, q, k, v, out, lse = read
    names: Names = _READ_BACK
    tensors: Tensors = (d_out, q, k, v, out, lse)
    if d_lse is not None:
        names, tensors = _READ_BACK_WITH_LSE, (*tensors, d_lse)
    return (_WITH_RESULTS[names], (*tensors, *into)) if into else (names, tensors)


def _again(
    of: Pass[Any], names: Names, tensors: Tensors, call: Call, into: Tensors | None, numbers: Numbers
) -> Sequence[Tensor] | None:
    """The results of a call like one that is known; None where none is."""
    addresses = [*map(_address, tensors)]
    kind = _Kind(names, call, reduce(or_, addresses) % _ALIGNMENT, numbers)
    for each in of.likenesses:
        if each.kind == kind and each.fits(*tensors):
            shared, replay = each.shared, each.replay
            break
    else:
        before = of.forgotten
        shared = of.known(_said(names, tensors, kind.misaligned, numbers))
        if shared is None:
            return None
        replay = _keep(of, kind, tensors, shared, before)
    if replay:
        return replay(addresses, _stream(tensors[0]), numbers)
    if into:
        call = call._replace(results=dict(zip(call.wanted, into, strict=True)))
    made = of.again(shared, call, _stream(tensors[0]), Addresses(zip(names, addresses, strict=True)), numbers)
    return None if made is None else [made[name] for name in call.wanted]


def _learn(of: Pass[Any], names: Names, tensors: Tensors, numbers: Numbers) -> None:
    """Has `_again` serve calls like this one."""
    misaligned = reduce(or_, map(_address, tensors)) % _ALIGNMENT
    of.know(_said(names, tensors, misaligned, numbers), dict(zip(names, tensors, strict=True)))


def _keep(of: Pass[Any], kind: _Kind, tensors: Tensors, shared: Any, before: int) -> Replay | None:
    """Has torch tell which calls are like this one; what launches them again, if they do no more than launch.

    It is told by what compiled graphs guard their inputs with, which is not documented. A torch without it is asked for
    all that each tensor says of itself, in every call.
    """
    guards = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)
    if guards is None:
        return None
    sizes = [list(tensor.shape) for tensor in tensors]
    strides = [list(tensor.stride()) for tensor in tensors]
    fits = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    gives_results = kind.names not in _WITH_RESULTS
    replay = None if gives_results else of.replay(shared, kind.names, kind.call.wanted, _address)
    of.keep(_Likeness(kind, fits, shared, replay), before)
    return replay


def _said(names: Names, tensors: Tensors, misaligned: int, numbers: Numbers) -> tuple[Any, ...]:
    """What decides what a call shares with others: all that its tensors say of themselves, and captured numbers."""
    known: list[Any] = [names, misaligned, *numbers.values()]
    for tensor in tensors:
        known += tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return tuple(known)
