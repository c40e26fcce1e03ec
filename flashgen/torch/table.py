"""Specs by key: torch's operators take numbers, texts and tensors, and find the attention of a call by its key."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cached_property, wraps
from typing import Any, NamedTuple, TypeVar

import torch

from flashgen.attention import Attention, compile
from flashgen.errors import ArgumentError
from flashgen.language.operations import BATCH
from flashgen.language.spec import AttentionSpec

Function = TypeVar("Function")
_set_eval_frame: Any = torch._C._dynamo.eval_frame.set_eval_frame


def constant(function: Function) -> Function:
    """Has torch.compile call a function when it traces, and take what it gives for a constant.

    As torch.compiler.assume_constant_result, which imports the whole compiler for it. Its arguments are guarded.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def handle(value: Any) -> Any:
    """What is given to a function marked `constant` for an object: where torch.compile traces, its address.

    Not every torch takes objects for constants; all guard by an object's identity whatever asks for its address.
    """
    return id(value) if torch.compiler.is_compiling() and value is not None else value


def held(value: Any) -> Any:
    """The object of a handle. Whoever is traced holds it meanwhile."""
    return ctypes.cast(value, ctypes.py_object).value if isinstance(value, int) else value


def fixed(number: Any) -> Any:
    """A number that a spec is made of, or None: where torch.compile traces, the value that it has there, guarded.

    With dynamic=True it may trace with a symbol, which is no argument of a function marked `constant`. What stands in a
    set it must know.
    """
    if number is None or not torch.compiler.is_compiling():
        return number
    (known,) = {number}
    return known


def outside_of_graphs(why: str) -> Callable[[Function], Function]:
    """Has torch.compile break its graph before a function and run that as it stands; `why` is what fullgraph=True says.

    As torch.compiler.disable, which imports the whole compiler for it.
    """

    def of(function: Any) -> Any:
        @wraps(function)
        def outside(*given: Any, **named: Any) -> Any:
            before = _set_eval_frame(None)
            try:
                return function(*given, **named)
            finally:
                _set_eval_frame(before)

        outside._torchdynamo_disable = True  # type: ignore[attr-defined]
        outside._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
        return outside

    return of


_EMULATED: ContextVar[bool] = ContextVar("whether CPU tensors run on the emulator", default=False)


@contextmanager
def emulated(on: bool = True) -> Iterator[None]:
    """Inside, CPU tensors run on the emulator, as with emulate=True in each call. For tests, and to learn."""
    token = _EMULATED.set(on)
    try:
        yield
    finally:
        _EMULATED.reset(token)


@constant
def is_emulated(emulate: bool | None) -> bool:
    """Whether a call runs on the emulator; None is what `emulated()` says."""
    return _EMULATED.get() if emulate is None else bool(emulate)


class CaptureInfo(NamedTuple):
    """A capture as the compiler of torch can look at it: plain values."""

    name: str
    dtype: str
    ndim: int
    grad: bool
    kind: str


def call_arguments(spec: AttentionSpec) -> tuple[tuple[CaptureInfo, ...], tuple[CaptureInfo, ...]]:
    """The arrays and the integers that calls of a spec take beside q, k, v and captures: where sequences, pages are."""
    arrays: list[tuple[str, str, int]] = []
    if spec.is_ragged:
        of_keys = () if spec.page_size else ("cu_seqlens_k", "seqused_k")
        arrays += [(name, "int32", 1) for name in ("cu_seqlens_q", *of_keys)]
    if spec.page_size:
        arrays += [("page_table", "int32", 2), ("seqused_k", "int32", 1)]
    if spec.kv_dtype:
        arrays += [("k_scale", "float32", 1), ("v_scale", "float32", 1)]
    integers = ("max_seqlen_q", "max_seqlen_k") if spec.is_ragged else ("num_splits",)
    return (
        tuple(CaptureInfo(name, dtype, ndim, False, dtype[:-2]) for name, dtype, ndim in arrays),
        tuple(CaptureInfo(name, "int32", 0, False, "int") for name in integers),
    )


class Registered:
    """A spec, and how it is compiled: what a key stands for. Compiled for each GPU that a call is on, once.

    Attributes: `key`; `spec`, without arrays that its functions closed over, which calls give; `arrays`, `integers` and
    `floats`, in the order in which operators take them: its captures by kind, and behind them `own_arrays` and
    `own_integers`, a call's arguments that are no captures, of which all integers may be left out;
    `takes_captures`, whether a call must give any; `says_less`, whether it may leave out where its keys are, too;
    `cache`, what of the spec makes k and v a cache, which has no gradient, or None; `is_direct`, whether q, k and v on
    a GPU are all that a call takes; `reads_batch`, whether sequences of a batch differ.
    """

    def __init__(self, key: str, spec: AttentionSpec, compiled: Attention | None, **options: Any) -> None:
        self.key, self.spec, self._compiled, self._options = key, spec, compiled, options
        self.emulate = compiled.engine.name == "emulator" if compiled else bool(options.get("emulate"))
        told = [CaptureInfo(each.name, each.dtype, each.ndim, each.grad, each.kind) for each in spec.captures]
        self.own_arrays, self.own_integers = call_arguments(spec)
        self.arrays = (*(each for each in told if each.ndim), *self.own_arrays)
        self.integers = (*(each for each in told if not each.ndim and each.kind == "int"), *self.own_integers)
        self.floats = tuple(each for each in told if not each.ndim and each.kind == "float")
        self.takes_captures = bool(told or self.own_arrays)
        self.dtype, self.dropout = getattr(torch, spec.dtype), bool(spec.dropout)
        self.is_direct = not (self.emulate or self.takes_captures or self.dropout)
        self.says_less = spec.is_ragged and not spec.page_size
        pages = f"page_size={spec.page_size}" if spec.page_size else None
        self.cache = pages or (f"kv_dtype={spec.kv_dtype!r}" if spec.kv_dtype else None)
        self._by_device: dict[int | None, Attention] = {}

    @cached_property
    def reads_batch(self) -> bool:
        expressions = [self.spec.mask.expression, *([self.spec.score.expression] if self.spec.score else [])]
        return any(expression.has(BATCH) for expression in expressions)

    @cached_property
    def learned(self) -> tuple[CaptureInfo, ...]:
        """The captures that have a gradient, in the order of the operators' arrays."""
        return tuple(capture for capture in self.arrays if capture.grad)

    def on(self, device: int | None) -> Attention:
        """The attention of a call on a GPU, by its number, or on the emulator."""
        found = self._by_device.get(device)
        if found is None:
            with nullcontext() if device is None else torch.cuda.device(device):  # whose target it is compiled for
                found = self._compiled or compile(self.spec, **self._options)
            self._by_device[device] = found
        return found


_TABLE: dict[str, Registered] = {}
_BY_SPEC: dict[Any, Registered] = {}
_LOCK = threading.Lock()


def register(
    spec: AttentionSpec | Attention,
    *,
    target: str | None = None,
    emulate: bool | None = None,
    deterministic: bool = False,
) -> str:
    """The key by which torch's operators know a spec in this process.

    Calls register specs by themselves. A program that torch.export saved names keys: register its specs in the process
    that loads it. A compiled attention's key is of this process alone.
    """
    return registered(spec, target=target, emulate=emulate, deterministic=deterministic).key


def no_spec(value: Any) -> ArgumentError:
    """What is said of a spec that is none."""
    return ArgumentError(f"spec={value!r}: give a flashgen.AttentionSpec, or what flashgen.compile made of one")


def registered(
    spec: AttentionSpec | Attention,
    target: str | None = None,
    emulate: bool | None = None,
    deterministic: bool = False,
) -> Registered:
    """What `register` puts into the table."""
    if isinstance(spec, AttentionSpec):
        known: Any = (spec, target, is_emulated(emulate), bool(deterministic))
    elif isinstance(spec, Attention):
        known = spec
    else:
        raise no_spec(spec)
    found = _BY_SPEC.get(known)
    if found is None:
        with _LOCK:
            found = _BY_SPEC.get(known) or _added(known)
    return found


def _added(known: Any) -> Registered:
    if isinstance(known, Attention):
        made = Registered(f"{known.spec.name}#{len(_TABLE)}", known.spec, known)
    else:
        spec, target, emulate, deterministic = known
        # Without the arrays of its functions, which would stay for ever; one that has none is found by its identity.
        bare = AttentionSpec.from_json(spec.to_json()) if spec.bound else spec
        options = {"target": target, "emulate": emulate, "deterministic": deterministic}
        key = "+".join([spec.name, *(name for name in ("emulate", "deterministic") if options[name])])
        key += f"+{target}" if target else ""
        if key in _TABLE:  # another spec with the same begin of its hash
            key += f"+{hashlib.sha256(spec.to_json().encode()).hexdigest()}"
        made, known = Registered(key, bare, None, **options), (bare, *known[1:])
    _TABLE[made.key] = _BY_SPEC[known] = made
    return made


def of_key(key: str) -> Registered:
    """What a key stands for; ArgumentError for one that this process has not registered."""
    try:
        return _TABLE[key]
    except KeyError:
        raise ArgumentError(
            f"no spec is registered as {key!r} in this process: call flashgen.torch.register(spec) with the spec of "
            "the program before it runs"
        ) from None
