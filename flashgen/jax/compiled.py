"""Compiled specs as JAX's transformations keep them: hashable, and the same object for the same spec."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any

from flashgen.attention import Attention, compile
from flashgen.attention.bound import BoundAttention
from flashgen.attention.ragged import refuse_ragged
from flashgen.errors import ArgumentError
from flashgen.language.bound import Bound
from flashgen.language.operations import BATCH, Capture
from flashgen.language.spec import AttentionSpec


class Compiled:
    """A spec and its attention, compiled when a call of it first runs.

    Attributes: `spec`, without arrays that its functions closed over; `arrays` and `numbers`, its captures; `emulate`.
    """

    def __init__(self, spec: AttentionSpec, attention: Attention | None, **options: Any) -> None:
        refuse_ragged(spec, "flashgen.jax", "give padded batches and padding(lengths), or call what compile(...) gives")
        self.spec, self._given, self._options = spec, attention, options
        self.emulate = attention.engine.name == "emulator" if attention else bool(options["emulate"])
        self.arrays = tuple(capture for capture in spec.captures if capture.ndim)
        self.numbers = tuple(capture for capture in spec.captures if not capture.ndim)

    @cached_property
    def attention(self) -> Attention:
        return self._given or compile(self.spec, **self._options)

    @cached_property
    def reads_batch(self) -> bool:
        """Whether sequences of a batch differ in their mask or their scores."""
        expressions = [self.spec.mask.expression, *([self.spec.score.expression] if self.spec.score else [])]
        return any(expression.has(BATCH) for expression in expressions)

    @cached_property
    def learned(self) -> tuple[Capture, ...]:
        """The captured arrays that have a gradient."""
        return tuple(capture for capture in self.arrays if capture.grad)


_KNOWN: dict[Any, Compiled] = {}
_LOCK = threading.Lock()


def compiled(spec: Any, emulate: bool, deterministic: bool) -> tuple[Compiled, Bound]:
    """What is compiled of a spec, remembered, and the arrays that its functions closed over."""
    if isinstance(spec, Attention):
        key: Any = spec
        bound: Bound = spec.bound if isinstance(spec, BoundAttention) else {}
    elif isinstance(spec, AttentionSpec):
        key, bound = (spec, bool(emulate), bool(deterministic)), spec.bound
    else:
        raise ArgumentError(f"spec={spec!r}: give a flashgen.AttentionSpec, or what flashgen.compile made of one")
    found = _KNOWN.get(key)
    if found is None:
        with _LOCK:
            found = _KNOWN.get(key) or _made(key, spec, emulate, deterministic)
    return found, bound


def _made(key: Any, spec: Any, emulate: bool, deterministic: bool) -> Compiled:
    if isinstance(spec, Attention):
        made = Compiled(spec.spec, spec)
    else:
        bare = AttentionSpec.from_json(spec.to_json())  # arrays of functions, tracers among them, would stay for ever
        made = Compiled(bare, None, emulate=emulate, deterministic=deterministic)
        key = (bare, *key[1:])
    _KNOWN[key] = made
    return made
