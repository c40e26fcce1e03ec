"""Tuned plans: the fastest plan for each class of lengths, found by tuning either pass and stored on disk.

A tuned plan is an entry of the kernel cache, next to the kernels. It is written atomically, checked whenever it is
read, listed by `flashgen cache list` and removed by `flashgen cache clear`. Its key holds everything that the
measurement depends on:

- the emitted text of the default kernel, its architecture and NVRTC's version, as in the key of that kernel itself, so
  that another spec, default plan, template or compiler does not match;
- the GPU: its name and its number of multiprocessors;
- the class of the lengths (`LengthClass`).

The default kernel of the backward is its main kernel, with another text in the deterministic mode. For calls that use a
decode kernel, it is that kernel.

The entry also holds the hash of the winning kernel's text, so that it becomes stale if only that text changes.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

from flashgen.build import nvrtc
from flashgen.build.cache import KernelCache, default_cache
from flashgen.build.entries import Artifacts, canonical_json
from flashgen.build.keys import content_key
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import Kernels
from flashgen.codegen.workload import Workload
from flashgen.errors import UnsupportedError
from flashgen.runtime.gpu import Card
from flashgen.strict_json import parse_json

_log = logging.getLogger(__name__)

_PLAN = "plan.json"
_FULL_ROUNDS = 8  # tiles per multiprocessor from which on more heads do not change which plan is fastest
_TILE_Q = 128  # queries of these tiles
_SUBSCRIBERS: WeakSet[Subscriber] = WeakSet()
_SUBSCRIBERS_LOCK = threading.Lock()  # a set must not change while it is iterated over


@dataclass(frozen=True)
class LengthClass:
    """A class of sizes that share a tuned plan.

    len_q, len_k: the powers of 2 nearest to the lengths, by ratio: 16384 stands for 11586 to 23170.
    heads: the power of 2 nearest to heads x batch, clipped to the number that gives each multiprocessor 8 tiles of 128
        queries, because more heads do not change the fastest plan. 0 if the mask is read from lists, because these
        depend on the lengths only.
    group: the power of 2 nearest to the query heads per KV head, in the backward and for decode kernels that read no
        lists; otherwise 1.
    """

    len_q: int
    len_k: int
    heads: int
    group: int = 1

    @classmethod
    def of(cls, workload: Workload, lists: bool, grouped: bool = False) -> LengthClass:
        """Returns the class of a call with at least one score. lists: the mask is read from lists."""
        len_q, len_k = (nearest_power(length) for length in (workload.len_q, workload.len_k))
        group = nearest_power(workload.heads_per_kv) if grouped else 1
        if lists:
            return cls(len_q, len_k, 0, group)
        filling = max(_FULL_ROUNDS * workload.multiprocessors * _TILE_Q // len_q, 1)
        return cls(len_q, len_k, nearest_power(min(workload.heads, filling)), group)

    def __str__(self) -> str:
        heads = (f"-h{self.heads}" if self.heads else "") + (f"-g{self.group}" if self.group > 1 else "")
        return f"q{self.len_q}-k{self.len_k}{heads}"


def nearest_power(number: int) -> int:
    """Returns the power of 2 nearest to a positive number, by ratio."""
    return 1 << round(math.log2(number))


@dataclass(frozen=True)
class TunedPlan:
    """The fastest plan of a tuning, and the hash of the kernel text that was measured."""

    plan: Any
    source_hash: str

    @classmethod
    def of(cls, kernel: RenderedKernel) -> TunedPlan:
        return cls(kernel.plan, source_hash(kernel))

    def describes(self, kernel: RenderedKernel) -> bool:
        """Whether the kernel is the one that was measured."""
        return source_hash(kernel) == self.source_hash

    def kernels(self, render: Callable[[Any], Kernels], role: str) -> Kernels | None:
        """Returns the kernels of the plan; None if this version has no such plan, or emits another text for it.

        render: renders the kernels of a plan. role: of the kernel that was measured.
        """
        try:
            kernels = render(self.plan)
        except UnsupportedError as error:
            _log.info("a tuned plan of an older version: %s", error)
            return None
        if not self.describes(kernels[role]):
            _log.info("a tuned plan of an older version: %s is another kernel now", self.plan)
            return None
        return kernels


def source_hash(kernel: RenderedKernel) -> str:
    return hashlib.sha256(kernel.source.encode()).hexdigest()


class TunedPlans:
    """The stored plans of one default kernel, for any GPU."""

    def __init__(self, default: RenderedKernel, cache: KernelCache | None = None) -> None:
        """cache: holds the entries; None for the default cache of the environment at the time of each access."""
        self._default, self._cache = default, cache

    def for_kernel(self, default: RenderedKernel) -> TunedPlans:
        """Returns the stored plans of another default kernel in the same cache."""
        return TunedPlans(default, self._cache)

    def find(self, card: Card, lengths: LengthClass) -> TunedPlan | None:
        """Returns the stored plan for a GPU and lengths, or None.

        A damaged entry or an unusable cache folder counts as none, with a warning.
        """
        stored = self._kernel_cache().find(self._name(lengths), self._key(card, lengths))
        return None if stored is None else _parse(stored.files.get(_PLAN, b""), type(self._default.plan))

    def store(self, card: Card, lengths: LengthClass, winner: TunedPlan, measured: Mapping[str, Any]) -> Path:
        """Writes a plan and its measurements, replacing an older entry, and returns the entry's folder.

        Raises BuildError if the cache folder cannot be used.
        """
        plan = canonical_json({"plan": asdict(winner.plan), "source": winner.source_hash})
        facts = {
            "name": self._name(lengths),
            "kind": "tuned plan",
            "architecture": self._default.target.architecture,
            "nvrtc": _nvrtc_version(),
            "gpu": asdict(card),
            "lengths": asdict(lengths),
            "measured": dict(measured),
        }
        artifacts = Artifacts({_PLAN: plan}, facts)
        return self._kernel_cache().put(self._name(lengths), self._key(card, lengths), artifacts).path

    def _kernel_cache(self) -> KernelCache:
        return self._cache or default_cache()

    def _name(self, lengths: LengthClass) -> str:
        return f"tuned-{self._default.name}-{lengths}"

    def _key(self, card: Card, lengths: LengthClass) -> str:
        parts = {
            "kernel": self._default.source,
            "architecture": self._default.target.architecture,
            "nvrtc": _nvrtc_version(),
            "gpu": card.name,
            "multiprocessors": str(card.multiprocessors),
            "lengths": str(lengths),
        }
        return content_key("tuned plan", parts)


def _nvrtc_version() -> str:
    """Returns NVRTC's version; "none" without NVRTC, where all kernels are prebuilt and have default plans."""
    return "{}.{}".format(*nvrtc.version()) if nvrtc.is_available() else "none"


class Subscriber(Protocol):
    """A pass that uses tuned plans."""

    def clear_cache(self) -> None:
        """Makes later calls look for tuned plans again."""


def subscribe(subscriber: Subscriber) -> None:
    """Registers a pass, with a weak reference, to have its cache cleared when tuned plans change."""
    with _SUBSCRIBERS_LOCK:
        _SUBSCRIBERS.add(subscriber)


def invalidate_tuned_plans() -> None:
    """Makes every callable of this process look for tuned plans again."""
    with _SUBSCRIBERS_LOCK:
        subscribers = list(_SUBSCRIBERS)
    for subscriber in subscribers:
        subscriber.clear_cache()


def _parse(data: bytes, kind: type[Any]) -> TunedPlan | None:
    """Returns the plan in an entry's file; None if this version cannot read it, which the key should rule out.

    kind: the class of the default plan.
    """
    try:
        fields = parse_json(data)
        return TunedPlan(kind(**fields["plan"]), str(fields["source"]))
    except (ValueError, KeyError, TypeError):
        return None
