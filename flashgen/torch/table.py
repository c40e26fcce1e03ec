"""The table of registered specs. Operators of torch take a string key, and find the spec of a call by it."""

from __future__ import annotations

import ctypes
import hashlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

import torch

from flashgen.attention import Attention
from flashgen.attention.bound import unbound
from flashgen.errors import ArgumentError, FlashgenWarning
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.caching import Cache
from flashgen.torch.registered import Registered
from flashgen.torch.variants import CALLS, is_variant, variant_of

Function = TypeVar("Function")
set_eval_frame: Any = torch._C._dynamo.eval_frame.set_eval_frame
"""Sets the callback that compiles the frames of Python that run next, None for no compilation. Returns the former."""


def constant(function: Function) -> Function:
    """Makes torch.compile call a function while it traces and treat the result as a constant. Arguments are guarded.

    It does what torch.compiler.assume_constant_result does, which imports the whole compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def handle(value: Any) -> Any:
    """Returns an argument that stands for an object in a call of a `constant` function: its address under tracing.

    Not every version of torch accepts objects as constants. All of them guard on the identity of an object when its
    address is taken.
    """
    return id(value) if torch.compiler.is_compiling() and value is not None else value


def object_of(value: Any) -> Any:
    """Returns the object of a handle. The traced function keeps it alive."""
    return ctypes.cast(value, ctypes.py_object).value if isinstance(value, int) else value


def fixed(number: Any) -> Any:
    """Returns a number of a spec, or None. Under torch.compile, it is specialised to its value, with a guard."""
    return specialized(number) if torch.compiler.is_compiling() else number


def specialized(number: Any) -> Any:
    """Returns a number or None, for code that Dynamo traces: specialised to its value, with a guard.

    With dynamic=True, Dynamo may trace with a symbol, which a `constant` function cannot take. An element of a set must
    be hashed, so that Dynamo specialises it.
    """
    (value,) = {number}
    return value


def outside_of_graphs(why: str) -> Callable[[Function], Function]:
    """Returns a decorator that makes torch.compile break its graph before a function and run the function eagerly.

    It does what torch.compiler.disable does, which imports the whole compiler. why: the reason that torch shows for
    fullgraph=True.
    """

    def decorate(function: Any) -> Any:
        @wraps(function)
        def outside(*given: Any, **named: Any) -> Any:
            before = set_eval_frame(None)
            try:
                return function(*given, **named)
            finally:
                set_eval_frame(before)

        outside._torchdynamo_disable = True  # type: ignore[attr-defined]
        outside._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
        return outside

    return decorate


@constant
def run_where_graphs_break(function: Any) -> None:
    """Makes Dynamo inline a function, but run it eagerly if the graph breaks at its call. Runs while Dynamo traces."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


_WARNED: set[str] = set()


def warn_once(message: str) -> None:
    """Gives a FlashgenWarning once per process."""
    if message not in _WARNED:
        _WARNED.add(message)
        warnings.warn(message, FlashgenWarning, stacklevel=2)


_EMULATED: ContextVar[bool] = ContextVar("whether CPU tensors run on the emulator", default=False)


@contextmanager
def emulated(on: bool = True) -> Iterator[None]:
    """A context in which CPU tensors run on the emulator, as with emulate=True in each call.

    Args:
        on: whether to use the emulator.
    """
    token = _EMULATED.set(on)
    try:
        yield
    finally:
        _EMULATED.reset(token)


@constant
def is_emulated(emulate: bool | None) -> bool:
    """Whether a call runs on the emulator. None takes the setting of `emulated()`."""
    return _EMULATED.get() if emulate is None else bool(emulate)


_MAX_ENTRIES = 1024
_BY_SPEC: Cache[Any, Registered] = Cache(_MAX_ENTRIES)
_TEXTS: dict[str, tuple[str, dict[str, Any]]] = {}
"""The JSON and the options of each registered spec by key, from which an evicted entry is created again."""
_COMPILED: weakref.WeakValueDictionary[str, Registered] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()
_compiled = 0


def register(
    spec: AttentionSpec | Attention,
    *,
    target: str | None = None,
    emulate: bool | None = None,
    deterministic: bool = False,
) -> str:
    """Registers a spec for torch's operators in this process and returns its key.

    Calls register their specs themselves. A program that torch.export saved contains keys: register its specs in the
    process that loads it. The key of a compiled attention is valid in its own process only.

    Args:
        spec: an AttentionSpec, or the result of `flashgen.compile`.
        target: the GPU architecture, such as "sm_90a"; None is that of the GPU of a call.
        emulate: run CPU tensors on the emulator. None takes the setting of `flashgen.torch.emulated()`.
        deterministic: compute gradients that are bitwise equal from run to run.
    """
    return registered(spec, target=target, emulate=emulate, deterministic=deterministic).key


def not_a_spec(value: Any) -> ArgumentError:
    """Returns the error for a value that is not a spec."""
    return ArgumentError(f"spec={value!r}: give a flashgen.AttentionSpec, or what flashgen.compile made of one")


def registered(
    spec: AttentionSpec | Attention,
    target: str | None = None,
    emulate: bool | None = None,
    deterministic: bool = False,
) -> Registered:
    """Returns the entry of a spec, or of a compiled attention, which keeps its own entry."""
    if isinstance(spec, Attention):
        found: Registered | None = spec.__dict__.get("_registered")
        return _register_compiled(spec) if found is None else found
    if not isinstance(spec, AttentionSpec):
        raise not_a_spec(spec)
    key = (spec, target, is_emulated(emulate), bool(deterministic))
    return _BY_SPEC.get(key) or _register_spec(*key)


def _register_spec(spec: AttentionSpec, target: str | None, emulate: bool, deterministic: bool) -> Registered:
    # The entry must not keep the arrays of the spec's functions alive.
    bare = AttentionSpec.from_json(spec.to_json()) if spec.bound else spec
    options = {"target": target, "emulate": emulate, "deterministic": deterministic}
    text = spec.to_json()
    key = "+".join([spec.name, *(name for name in ("emulate", "deterministic") if options[name])])
    key += f"+{target}" if target else ""
    with _LOCK:
        if _TEXTS.get(key, (text, options)) != (text, options):  # another spec whose hash begins with the same digits
            key += f"+{hashlib.sha256(text.encode()).hexdigest()}"
        _TEXTS[key] = (text, options)
    return _BY_SPEC.get_or_make((bare, target, emulate, deterministic), lambda: Registered(key, bare, None, **options))


def _register_compiled(attention: Attention) -> Registered:
    global _compiled
    with _LOCK:
        found: Registered | None = attention.__dict__.get("_registered")
        if found is None:
            _compiled += 1
            plain = unbound(attention)
            found = Registered(f"{attention.spec.name}#{_compiled}", plain.spec, plain)
            attention.__dict__["_registered"] = _COMPILED[found.key] = found
    return found


def entry_of_key(key: str) -> Registered:
    """Returns the entry of a key. For traced functions all numbers are operands. Raises ArgumentError if unknown."""
    if is_variant(key):
        return variant_of(key).general
    found = _COMPILED.get(key)
    if found is not None:
        return found
    try:
        text, options = _TEXTS[key]
    except KeyError:
        raise ArgumentError(
            f"no spec is registered as {key!r} in this process: call flashgen.torch.register(spec) with the spec of "
            "the program before it runs"
        ) from None
    entry = _BY_KEY.get(key)
    return entry or _BY_KEY.get_or_make(key, lambda: registered(AttentionSpec.from_json(text), **options))


_BY_KEY: Cache[str, Registered] = Cache(_MAX_ENTRIES)


def entry_of_call(
    key: str, integers: Sequence[int], floats: Sequence[float], q: Any, k: Any, arrays: Sequence[Any]
) -> tuple[Registered, Sequence[int], Sequence[float]]:
    """Returns the entry for a call of an operator, and the numbers that are operands of its kernel."""
    if is_variant(key):
        call = (key, q.shape, k.shape, *integers, *floats)
        chosen = CALLS.get(call)
        if chosen is None:
            chosen = CALLS.get_or_make(call, lambda: variant_of(key).choose(integers, floats, q, k))
        return chosen.with_lengths(arrays)
    return entry_of_key(key), integers, floats
