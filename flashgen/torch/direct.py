"""The fast path of calls with tensors of torch on a GPU, which keeps the host time of a repeated call low.

An attention checks all arrays and arguments of a call, and caches its prepared launches by the properties of the arrays
(`Pass.lookup`). A call of an operator that hits that cache is launched without further checks. For the last few calls
torch compares these properties itself, which is faster than reading them in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from flashgen.attention import Attention
from flashgen.attention.call import Call
from flashgen.attention.call_pass import Pass
from flashgen.attention.replay import Replay
from flashgen.launch.argument_writer import Addresses
from flashgen.launch.engines import ScalarArguments
from flashgen.runtime.arrays import TORCH
from flashgen.torch.tensors import Tensor

_ALIGNMENT = 16  # bytes
_MAX_REPEATS = 8  # a lookup compares a call with each of them
_OUTPUT, _BOTH = (Call({}, {}, None, 0, wanted) for wanted in (("o",), ("o", "lse")))
_GRADIENTS, _SHARED_GRADIENTS = (Call({}, {}, None, 0, wanted) for wanted in (("dq", "dk", "dv"), ("dq", "dk")))
# The names of a call's tensors in argument structs: the inputs, and inputs with given results.
_READ = ("q", "k", "v")
_READ_BACK = ("q", "k", "v", "o", "d_o", "lse")
_READ_BACK_WITH_LSE = (*_READ_BACK, "d_lse")
# Those where V is a part of K, which have no variants with given results.
_READ_SHARED = ("q", "k")
_READ_BACK_SHARED = ("q", "k", "o", "d_o", "lse")
_READ_BACK_SHARED_WITH_LSE = (*_READ_BACK_SHARED, "d_lse")
_WITH_RESULTS = {
    _READ: (*_READ, *_BOTH.wanted),
    _READ_BACK: (*_READ_BACK, *_GRADIENTS.wanted),
    _READ_BACK_WITH_LSE: (*_READ_BACK_WITH_LSE, *_GRADIENTS.wanted),
}
_SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")  # of a varlen batch: after the inputs, and before d_lse
_stream = TORCH.stream
_address = torch.Tensor.data_ptr
NO_NUMBERS: ScalarArguments = {}
Names = tuple[str, ...]
Tensors = tuple[Tensor, ...]


class _Kind(NamedTuple):
    """What identifies a call beside its tensors: their names, the results, and numbers."""

    names: Names
    call: Call
    numbers: ScalarArguments


class _RecentLaunch(NamedTuple):
    """A recent launch: a call repeats it if it has the `kind` and `fits` accepts its tensors."""

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
    numbers: ScalarArguments = NO_NUMBERS,
    sequences: Sequence[Tensor] = (),
) -> Any:
    """Returns the output, or a pair with the LSE, if the launch cache has a call like this one.

    None on a miss, or if another device is current.

    into: an output and an LSE to write to, only with with_lse. numbers: captured numbers, by `numbers_of`. sequences:
    cu_seqlens_q, cu_seqlens_k and perhaps seqused_k of a varlen batch, for calls without `into`.
    """
    call = _BOTH if with_lse else _OUTPUT
    names, tensors = _forward_tensors(q, k, v, into)
    if sequences:
        names, tensors = names + _SEQUENCES[: len(sequences)], (*tensors, *as_separate_objects(sequences))
    results = _replay(attention.forward, names, tensors, call, into, numbers)
    if results is None:
        return None
    return tuple(results) if with_lse else results[0]


Read = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor]
"""The inputs of a backward: d_out, d_lse, q, k, v, out, lse."""


def backward(
    attention: Attention,
    read: Read,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
    numbers: ScalarArguments = NO_NUMBERS,
    sequences: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns the gradients of q, k and v if the launch cache has a call like this one.

    None on a miss, or if another device is current. sequences: as for `forward`.
    """
    names, tensors = _backward_tensors(read, into, sequences)
    results = _replay(attention.backward_pass, names, tensors, _GRADIENTS, into, numbers)
    return None if results is None else (results[0], results[1], results[2])


def forward_of_shared(attention: Attention, q: Tensor, kv: Tensor, with_lse: bool) -> Any:
    """Returns what `forward` returns, where V is a part of K."""
    results = _replay(attention.forward, _READ_SHARED, (q, kv), _BOTH if with_lse else _OUTPUT, None, NO_NUMBERS)
    if results is None:
        return None
    return tuple(results) if with_lse else results[0]


def backward_of_shared(
    attention: Attention, d_out: Tensor, d_lse: Tensor | None, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor
) -> Sequence[Tensor] | None:
    """Returns the gradients of q and kv where V is a part of K, if the launch cache has a call like this one."""
    names: Names = _READ_BACK_SHARED
    tensors: Tensors = (q, kv, out, d_out, lse)
    if d_lse is not None:
        names, tensors = _READ_BACK_SHARED_WITH_LSE, (*tensors, d_lse)
    return _replay(attention.backward_pass, names, tensors, _SHARED_GRADIENTS, None, NO_NUMBERS)


def numbers_of(attention: Attention, captures: Mapping[str, Any]) -> ScalarArguments:
    """Returns the captured numbers as kernels of both passes take them. All captures must be numbers."""
    return attention.forward.numbers(captures)


def _forward_tensors(q: Tensor, k: Tensor, v: Tensor, into: tuple[Tensor, Tensor] | None) -> tuple[Names, Tensors]:
    return (_WITH_RESULTS[_READ], (q, k, v, *into)) if into else (_READ, (q, k, v))


def as_separate_objects(sequences: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the arrays of a varlen batch, with a second object for cu_seqlens_k if it is the object cu_seqlens_q.

    torch's guards refuse an object that is given twice.
    """
    if len(sequences) > 1 and sequences[0] is sequences[1]:
        return (sequences[0], sequences[1].detach(), *sequences[2:])
    return sequences


def _backward_tensors(
    read: Read, into: tuple[Tensor, Tensor, Tensor] | None, sequences: Sequence[Tensor]
) -> tuple[Names, Tensors]:
    d_out, d_lse, q, k, v, out, lse = read
    names: Names = _READ_BACK
    tensors: Tensors = (q, k, v, out, d_out, lse)
    if sequences:
        names, tensors = names + _SEQUENCES[: len(sequences)], (*tensors, *as_separate_objects(sequences))
        return (names, tensors) if d_lse is None else ((*names, "d_lse"), (*tensors, d_lse))
    if d_lse is not None:
        names, tensors = _READ_BACK_WITH_LSE, (*tensors, d_lse)
    return (_WITH_RESULTS[names], (*tensors, *into)) if into else (names, tensors)


def _replay(
    pass_: Pass[Any],
    names: Names,
    tensors: Tensors,
    call: Call,
    into: Tensors | None,
    numbers: ScalarArguments,
) -> Sequence[Tensor] | None:
    """Returns the results of a call that hits the launch cache; None on a miss or on another device.

    Also None if a tensor is misaligned, because which tensors may be is a matter of each of them.
    """
    addresses = [*map(_address, tensors)]
    if reduce(or_, addresses) % _ALIGNMENT:
        return None
    kind = _Kind(names, call, numbers)
    for each in pass_.recent_launches:
        if each.kind == kind and each.fits(*tensors):
            shared, replay = each.shared, each.replay
            break
    else:
        generation = pass_.generation
        shared = pass_.lookup(dict(zip(names, tensors, strict=True)), numbers)
        if shared is None:
            return None
        replay = _remember(pass_, kind, tensors, shared, generation, has_given_results=bool(into))
    if replay:
        return replay(addresses, _stream(tensors[0]), numbers)
    if into:
        call = call._replace(results=dict(zip(call.wanted, into, strict=True)))
    named = Addresses(zip(names, addresses, strict=True))
    results = pass_.launch_prepared(shared, call, _stream(tensors[0]), named, numbers)
    return None if results is None else [results[name] for name in call.wanted]


def _remember(
    pass_: Pass[Any], kind: _Kind, tensors: Tensors, shared: Any, generation: int, has_given_results: bool
) -> Replay | None:
    """Lets torch recognise calls like this one. Returns a replay of its launches, or None if it does more than launch.

    If torch cannot recognise them, each call looks its arrays up in the launch cache.
    """
    assert TORCH.recogniser, "torch's library has one"
    fits = TORCH.recogniser(tensors)
    if fits is None:
        return None
    replay = None if has_given_results else pass_.create_replay(shared, kind.names, kind.call.wanted, _address)
    pass_.remember_launch(_RecentLaunch(kind, fits, shared, replay), generation)
    return replay


class _Repeat(NamedTuple):
    """A launch that a call repeats if it has equal `options`, `fits` accepts its tensors, and no cache was cleared."""

    options: tuple[Any, ...]
    fits: Callable[..., bool]
    replay: Replay
    pass_: Pass[Any]
    generation: int
    kept: Any


class Repeats:
    """The last launches of an operator with registered specs, found without the spec of a call.

    A model calls an operator with the same arguments beside the tensors in each layer. A hit takes half of the time of
    `forward` and of what chooses the spec.
    """

    def __init__(self, backward: bool = False) -> None:
        self._read: Names = _READ_BACK if backward else _READ
        self._call = _GRADIENTS if backward else _BOTH
        self._recent: tuple[_Repeat, ...] = ()

    def launch(self, options: tuple[Any, ...], tensors: Tensors) -> tuple[list[Tensor], Any] | None:
        """Repeats a launch. Returns its results and what was kept with it; None on a miss.

        options: what a call depends on beside the tensors, and their number. The device of the tensors must be the
        current one.
        """
        for each in self._recent:
            if each.options == options and each.fits(*tensors):
                addresses = [*map(_address, tensors)]
                is_stale = each.pass_.generation != each.generation
                if is_stale or reduce(or_, addresses) % _ALIGNMENT or forward_ad._current_level >= 0:
                    return None
                return each.replay.launch(addresses, _stream(tensors[0]), NO_NUMBERS), each.kept
        return None

    def remember(self, options: tuple[Any, ...], tensors: Tensors, attention: Attention, kept: Any = None) -> None:
        """Remembers the launch of a call, if `forward` or `backward` has replayed it.

        tensors: those of `launch`. kept: any value, which `launch` returns.
        """
        pass_: Pass[Any] = attention.forward if self._call is _BOTH else attention.backward_pass
        generation = pass_.generation
        kind = _Kind(self._read + _SEQUENCES[: len(tensors) - len(self._read)], self._call, NO_NUMBERS)
        for each in pass_.recent_launches:
            if each.replay and each.kind == kind and each.fits(*tensors):
                repeat = _Repeat(options, each.fits, each.replay, pass_, generation, kept)
                # A stale or misaligned call comes here again and again: its entry replaces the earlier one.
                others = [old for old in self._recent if old.options != options or old.fits is not each.fits]
                self._recent = (repeat, *others[: _MAX_REPEATS - 1])
                return
