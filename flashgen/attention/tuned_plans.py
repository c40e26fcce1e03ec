"""Tuned plans: which plan calls of some lengths take, the winner of a tuning of either pass, found on disk.

A winner is an entry of the kernel cache, beside the kernels: written whole or not at all, checked whenever it is read,
listed by `flashgen cache list`, removed by `flashgen cache clear`. Its key is made of what the measurement holds for:

- the default kernel's emitted text, its architecture and NVRTC's version, as in the key of that kernel itself: another
  spec, default plan, template or compiler finds nothing of this;
- the GPU: its name and its number of multiprocessors;
- the class of the lengths (`LengthClass`).

The default kernel of the backward is the one that walks queries; its text is another in the deterministic mode. That of
calls that take a decode kernel is that one.

The entry holds the hash of the winner's own text, too: a template that changed for that plan alone makes it stale.
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
_FULL_ROUNDS = 8  # of tiles on each multiprocessor: from so many on, more heads change nothing
_TILE_Q = 128  # of such a tile
_FOLLOWERS: WeakSet[Follower] = WeakSet()
_FOLLOWERS_LOCK = threading.Lock()  # a set that grows cannot be gone through


@dataclass(frozen=True)
class LengthClass:
    """Lengths that share a winner.

    len_q, len_k: the powers of 2 nearest to the lengths, by their ratio: 16384 stands for 11586 to 23170.
    heads: the same of heads x batch; no more than give each multiprocessor 8 tiles of 128 queries, as beyond that more
        of them are more of the same; 0 for all where a mask is read from lists, which know lengths alone.
    group: in the backward, and of decode kernels that read no lists, the same of the query heads that share a head of k
        and v; else 1.
    """

    len_q: int
    len_k: int
    heads: int
    group: int = 1

    @classmethod
    def of(cls, workload: Workload, lists: bool, grouped: bool = False) -> LengthClass:
        """The class of a call with at least one score; `lists`: its mask is read from lists."""
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
    """The power of 2 nearest to a positive number, by their ratio."""
    return 1 << round(math.log2(number))


@dataclass(frozen=True)
class TunedPlan:
    """A winner: the plan, and the hash of the text that was measured."""

    plan: Any
    source_hash: str

    @classmethod
    def of(cls, kernel: RenderedKernel) -> TunedPlan:
        return cls(kernel.plan, source_hash(kernel))

    def describes(self, kernel: RenderedKernel) -> bool:
        """Whether the kernel is the one that was measured."""
        return source_hash(kernel) == self.source_hash

    def kernels(self, render: Callable[[Any], Kernels], role: str) -> Kernels | None:
        """The kernels of the plan; None where this version has no such plan, or another text for it.

        render: gives them. role: of the one that was measured.
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
    """The winners of one default kernel, on any GPU."""

    def __init__(self, default: RenderedKernel, cache: KernelCache | None = None) -> None:
        """cache: where they are kept; None is the one that the environment describes at the moment."""
        self._default, self._cache = default, cache

    def beside(self, default: RenderedKernel) -> TunedPlans:
        """Those of another default kernel, kept in the same place."""
        return TunedPlans(default, self._cache)

    def find(self, card: Card, lengths: LengthClass) -> TunedPlan | None:
        """The winner for a GPU and lengths, or None.

        A damaged one is none, and is said; so is a cache folder that cannot be used.
        """
        stored = self._store().find(self._name(lengths), self._key(card, lengths))
        return None if stored is None else _parsed(stored.files.get(_PLAN, b""), type(self._default.plan))

    def keep(self, card: Card, lengths: LengthClass, winner: TunedPlan, measured: Mapping[str, Any]) -> Path:
        """Writes the winner, in place of an older one, with what was measured; gives the entry's folder.

        BuildError: the cache folder cannot be used.
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
        return self._store().put(self._name(lengths), self._key(card, lengths), Artifacts({_PLAN: plan}, facts)).path

    def _store(self) -> KernelCache:
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
    """Without NVRTC there are prebuilt kernels alone, and those have default plans."""
    return "{}.{}".format(*nvrtc.version()) if nvrtc.is_available() else "none"


class Follower(Protocol):
    """What calls of tuned lengths run winners by."""

    def clear_cache(self) -> None:
        """Calls to come look for tuned plans again."""


def follow(follower: Follower) -> None:
    """From now on it is told when there may be other winners."""
    with _FOLLOWERS_LOCK:
        _FOLLOWERS.add(follower)


def forget_tuned_plans() -> None:
    """Every callable of this process looks for tuned plans again."""
    with _FOLLOWERS_LOCK:
        followers = list(_FOLLOWERS)
    for follower in followers:
        follower.clear_cache()


def _parsed(data: bytes, kind: type[Any]) -> TunedPlan | None:
    """The winner of an entry's file; None where it is not as this version writes it, which its key should rule out.

    kind: of its plan, that of the default one.
    """
    try:
        fields = parse_json(data)
        return TunedPlan(kind(**fields["plan"]), str(fields["source"]))
    except (ValueError, KeyError, TypeError):
        return None
