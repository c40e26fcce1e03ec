"""Whether all ranks make the same call: looked at once for each kind of call, before anything is sent."""

from __future__ import annotations

import hashlib
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist

from flashgen.errors import ArgumentError
from flashgen.torch.context_parallel.collectives import all_gather

_LOCK = threading.Lock()
_AGREED: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def agree(groups: list[Any], what: str, device: torch.device) -> None:
    """ArgumentError that names the ranks where calls are not the same text; the same ranks ask at the same time.

    The first messages of a group, too: NCCL wants all of its ranks in them.
    """
    for group in groups:
        with _LOCK:
            known = _AGREED.setdefault(group, set())
        if what not in known:
            _compare(group, what, device)
            known.add(what)


def _compare(group: Any, what: str, device: torch.device) -> None:
    digest = int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "big")
    own = torch.tensor([digest], dtype=torch.int64, device=device)
    every = all_gather(own, group).flatten().tolist()
    others = [dist.get_global_rank(group, rank) for rank, their in enumerate(every) if their != digest]
    if others:
        raise ArgumentError(
            f"ranks {', '.join(map(str, others))} make another call than rank {dist.get_rank()}, which makes {what}"
        )
