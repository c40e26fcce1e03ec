"""Models whose sequence is spread over ranks: `context_parallel`, inside of which attention is that of all ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from flashgen.errors import UnsupportedError
from flashgen.torch.table import outside_of_graphs
from flashgen.torch.tensors import Tensor


class Shared(NamedTuple):
    """What `flashgen.torch.context_parallel.attention` is given beside tensors."""

    group: Any
    scheme: str
    shards: str

    def options(self) -> dict[str, Any]:
        return self._asdict()


_LOCK = threading.Lock()
_OPEN = 0  # contexts of all threads
_SHARED: ContextVar[Shared | None] = ContextVar("how the sequences of models are shared", default=None)


@contextmanager
def context_parallel(*, group: Any = None, scheme: str = "ring", shards: str = "zigzag") -> Iterator[None]:
    """Inside, models with attn_implementation="flashgen" are given this rank's rows of their sequences.

        with flashgen.transformers.context_parallel():
            rows = shard(input_ids, dim=1)
            logits = model(rows, position_ids=positions(length)[None], attention_mask=torch.ones_like(rows)).logits

    Every rank calls the model with its rows, as `flashgen.torch.context_parallel.shard` gives them, their positions,
    and their part of an attention_mask, which tells a model that the positions are no packed sequences. There is no
    cache. Gradients of the model's parameters are each rank's share.

    Args: group, scheme and shards as of `flashgen.torch.context_parallel.attention`.
    """
    global _OPEN
    before = _SHARED.set(Shared(group, scheme, shards))
    with _LOCK:
        _OPEN += 1
    try:
        yield
    finally:
        with _LOCK:
            _OPEN -= 1
        _SHARED.reset(before)


def shared() -> Shared | None:
    """How the sequence of the model that runs is shared; None where a rank has all of it.

    torch.compile guards by the number of contexts, so that a graph that was made outside of one is not run inside.
    """
    return _shared() if _OPEN else None


@outside_of_graphs("context_parallel is of the thread that runs")
def _shared() -> Shared | None:
    return _SHARED.get()


def whole_mask(given: Any, q_length: int, kv_length: int, how: Shared) -> Tensor:
    """Which positions of the whole sequence are kept, (batch, positions), of each rank's part."""
    from flashgen.torch.context_parallel import unshard

    if given is None:
        raise UnsupportedError(
            "inside of context_parallel a model needs attention_mask=torch.ones_like(input_ids), this rank's part: "
            "without it transformers takes the ranks' positions for packed sequences"
        )
    if given.ndim != 2 or q_length != kv_length or given.shape[1] != kv_length:
        raise UnsupportedError(
            f"inside of context_parallel an attention_mask of {tuple(given.shape)} for {q_length} queries and "
            f"{kv_length} keys: give (batch, rows) of this rank, and no cache"
        )
    return unshard(given, 1, group=how.group, shards=how.shards)


def refuse(what: Any, name: str) -> None:
    """UnsupportedError for what a layer was given that is not known of other ranks."""
    if what is not None:
        raise UnsupportedError(f"{name} is not supported inside of context_parallel")
