"""Specs by key: torch's operators take numbers, texts and tensors, and find the attention of a call by its key."""

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
from flashgen.runtime.remembered import Remembered
from flashgen.torch.registered import Registered
from flashgen.torch.variants import is_variant, variant_of

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


@constant
def run_where_graphs_break(function: Any) -> None:
    """Has Dynamo inline a function, but run it as it stands where a graph breaks at its call.

    It runs while Dynamo traces, with the function as a constant.
    """
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


_WARNED: set[str] = set()


def warn_once(message: str) -> None:
    """A FlashgenWarning that a process gives once."""
    if message not in _WARNED:
        _WARNED.add(message)
        warnings.warn(message, FlashgenWarning, stacklevel=2)


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


_MOST_KEPT = 1024
_BY_SPEC: Remembered[Any, Registered] = Remembered(_MOST_KEPT)
_TEXTS: dict[str, tuple[str, dict[str, Any]]] = {}
"""The JSON of each registered spec and how it is compiled, by key: what makes an entry again that is no longer kept."""
_OF_COMPILED: weakref.WeakValueDictionary[str, Registered] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()
_compiled = 0


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


def not_a_spec(value: Any) -> ArgumentError:
    """The error for a spec that is none."""
    return ArgumentError(f"spec={value!r}: give a flashgen.AttentionSpec, or what flashgen.compile made of one")


def registered(
    spec: AttentionSpec | Attention,
    target: str | None = None,
    emulate: bool | None = None,
    deterministic: bool = False,
) -> Registered:
    """The entry of a spec, or of a compiled attention, which keeps its own."""
    if isinstance(spec, Attention):
        found: Registered | None = spec.__dict__.get("_registered")
        return _register_compiled(spec) if found is None else found
    if not isinstance(spec, AttentionSpec):
        raise not_a_spec(spec)
    known = (spec, target, is_emulated(emulate), bool(deterministic))
    return _BY_SPEC.get(known) or _register_spec(*known)


def _register_spec(spec: AttentionSpec, target: str | None, emulate: bool, deterministic: bool) -> Registered:
    # Without the arrays of its functions, which would stay with the entry.
    bare = AttentionSpec.from_json(spec.to_json()) if spec.bound else spec
    options = {"target": target, "emulate": emulate, "deterministic": deterministic}
    text = spec.to_json()
    key = "+".join([spec.name, *(name for name in ("emulate", "deterministic") if options[name])])
    key += f"+{target}" if target else ""
    with _LOCK:
        if _TEXTS.get(key, (text, options)) != (text, options):  # another spec with the same begin of its hash
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
            attention.__dict__["_registered"] = _OF_COMPILED[found.key] = found
    return found


def of_key(key: str) -> Registered:
    """The entry of a key; of traced functions one whose numbers are all operands. ArgumentError for an unknown key."""
    if is_variant(key):
        return variant_of(key).general
    found = _OF_COMPILED.get(key)
    if found is not None:
        return found
    try:
        text, options = _TEXTS[key]
    except KeyError:
        raise ArgumentError(
            f"no spec is registered as {key!r} in this process: call flashgen.torch.register(spec) with the spec of "
            "the program before it runs"
        ) from None
    entry = _OF_KEY.get(key)
    return entry or _OF_KEY.get_or_make(key, lambda: registered(AttentionSpec.from_json(text), **options))


_OF_KEY: Remembered[str, Registered] = Remembered(_MOST_KEPT)


def of_call(
    key: str, integers: Sequence[int], floats: Sequence[float], q: Any, k: Any, arrays: Sequence[Any]
) -> tuple[Registered, Sequence[int], Sequence[float]]:
    """The entry that runs a call of an operator, and those of its numbers that are operands of the kernel."""
    if is_variant(key):
        return variant_of(key).at(integers, floats, q, k, arrays)
    return of_key(key), integers, floats
