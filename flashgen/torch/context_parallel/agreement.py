"""Checks that all ranks make the same call, once for each kind of call and before anything is sent."""

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
_CHECKED: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def check_same_call(groups: list[Any], call: str, device: torch.device) -> None:
    """Raises ArgumentError that names the ranks with another description of the call. All ranks must run it.

    Its messages are also the first of a group, in which NCCL requires all ranks to take part.
    """
    for group in groups:
        with _LOCK:
            checked = _CHECKED.setdefault(group, set())
        if call not in checked:
            _compare(group, call, device)
            checked.add(call)


def _compare(group: Any, call: str, device: torch.device) -> None:
    digest = int.from_bytes(hashlib.sha256(call.encode()).digest()[:7], "big")
    own = torch.tensor([digest], dtype=torch.int64, device=device)
    digests = all_gather(own, group).flatten().tolist()
    others = [dist.get_global_rank(group, rank) for rank, other in enumerate(digests) if other != digest]
    if others:
        raise ArgumentError(
            f"ranks {', '.join(map(str, others))} make another call than rank {dist.get_rank()}, which makes {call}"
        )
