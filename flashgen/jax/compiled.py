"""Compiled specs for JAX's transformations: hashable, and the same object for the same spec."""

from __future__ import annotations

import json
import threading
from functools import cached_property, partial
from typing import Any

from flashgen.attention import Attention, compile
from flashgen.attention.bound import BoundAttention
from flashgen.attention.gradients import refuse_grad_dtype
from flashgen.attention.varlen import refuse_varlen
from flashgen.errors import ArgumentError
from flashgen.language.bound import Bound
from flashgen.language.operations import BATCH, Capture
from flashgen.language.spec import AttentionSpec


class CompiledSpec:
    """A spec and its attention, which is compiled when the first call runs.

    Attributes: `spec`, without the arrays that its functions closed over; `arrays` and `numbers`, its captures;
    `emulate`.
    """

    def __init__(self, spec: AttentionSpec, attention: Attention | None, **options: Any) -> None:
        refuse_varlen(spec, "flashgen.jax", "give padded batches and padding(lengths), or call what compile(...) gives")
        refuse_grad_dtype(spec, "JAX")
        self.spec, self._attention, self._options = spec, attention, options
        self.emulate = attention.engine.name == "emulator" if attention else bool(options["emulate"])
        self.arrays = tuple(capture for capture in spec.captures if capture.ndim)
        self.numbers = tuple(capture for capture in spec.captures if not capture.ndim)

    @cached_property
    def attention(self) -> Attention:
        return self._attention or compile(self.spec, **self._options)

    @cached_property
    def reads_batch(self) -> bool:
        """Whether the mask or the score function depends on the batch index."""
        expressions = [self.spec.mask.expression, *([self.spec.score.expression] if self.spec.score else [])]
        return any(expression.has(BATCH) for expression in expressions)

    def with_gradients_of(self, names: frozenset[str]) -> CompiledSpec:
        """Returns the same with gradients of some captures alone: the others cost a backward time and memory.

        A compiled attention keeps its kernels and all gradients.
        """
        if self._attention or names == {capture.name for capture in self.differentiated}:
            return self
        declared = json.loads(self.spec.to_json(), object_hook=partial(_with_gradients_of, names))
        return get_compiled(AttentionSpec.from_json(json.dumps(declared)), **self._options)[0]

    @cached_property
    def differentiated(self) -> tuple[Capture, ...]:
        """The captured arrays declared with grad=True."""
        return tuple(capture for capture in self.arrays if capture.grad)


def _with_gradients_of(names: frozenset[str], fields: dict[str, Any]) -> dict[str, Any]:
    """Returns an object of a spec's JSON, with a changed declaration if it is a capture."""
    return fields | {"grad": fields["capture"] in names} if fields.get("grad") else fields


_CACHE: dict[Any, CompiledSpec] = {}
_LOCK = threading.Lock()


def get_compiled(spec: Any, emulate: bool, deterministic: bool) -> tuple[CompiledSpec, Bound]:
    """Returns the cached compiled spec, and the arrays that the functions of `spec` closed over."""
    if isinstance(spec, Attention):
        key: Any = spec
        bound: Bound = spec.bound if isinstance(spec, BoundAttention) else {}
    elif isinstance(spec, AttentionSpec):
        key, bound = (spec, bool(emulate), bool(deterministic)), spec.bound
    else:
        raise ArgumentError(f"spec={spec!r}: give a flashgen.AttentionSpec, or a result of flashgen.compile")
    found = _CACHE.get(key)
    if found is None:
        with _LOCK:
            found = _CACHE.get(key) or _create(key, spec, emulate, deterministic)
    return found, bound


def _create(key: Any, spec: Any, emulate: bool, deterministic: bool) -> CompiledSpec:
    if isinstance(spec, Attention):
        created = CompiledSpec(spec.spec, spec)
    else:
        bare = AttentionSpec.from_json(spec.to_json())  # drops closed-over arrays, which may be tracers of JAX
        created = CompiledSpec(bare, None, emulate=emulate, deterministic=deterministic)
        key = (bare, *key[1:])
    _CACHE[key] = created
    return created
