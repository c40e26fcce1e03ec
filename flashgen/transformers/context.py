"""Context parallelism for models: inside `context_parallel`, attention covers the rows of all ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from flashgen.errors import UnsupportedError
from flashgen.torch.table import outside_of_graphs
from flashgen.torch.tensors import Tensor


class ContextParallel(NamedTuple):
    """The arguments of `flashgen.torch.context_parallel.attention` other than tensors."""

    group: Any
    scheme: str
    shards: str

    def options(self) -> dict[str, Any]:
        return self._asdict()


_LOCK = threading.Lock()
_ACTIVE_CONTEXTS = 0  # number of active contexts in all threads
_CONTEXT: ContextVar[ContextParallel | None] = ContextVar("the context parallelism of models", default=None)


@contextmanager
def context_parallel(*, group: Any = None, scheme: str = "ring", shards: str = "zigzag") -> Iterator[None]:
    """Makes models with attn_implementation="flashgen" expect only this rank's rows of their sequences.

        with flashgen.transformers.context_parallel():
            rows = shard(input_ids, dim=1)
            logits = model(rows, position_ids=positions(length)[None], attention_mask=torch.ones_like(rows)).logits

    Every rank calls the model with its rows, as returned by `flashgen.torch.context_parallel.shard`, with their
    positions, and with its shard of an attention_mask. The mask is needed because a model without one takes the
    positions for those of packed sequences. A KV cache is not supported. The gradients of the model's parameters are
    each rank's contribution; their sum over the ranks is the full gradient.

    Args:
        group, scheme, shards: as in `flashgen.torch.context_parallel.attention`.
    """
    global _ACTIVE_CONTEXTS
    before = _CONTEXT.set(ContextParallel(group, scheme, shards))
    with _LOCK:
        _ACTIVE_CONTEXTS += 1
    try:
        yield
    finally:
        with _LOCK:
            _ACTIVE_CONTEXTS -= 1
        _CONTEXT.reset(before)


def current_context() -> ContextParallel | None:
    """Returns the active context, or None outside of `context_parallel`.

    torch.compile guards on the number of active contexts, so that a graph compiled outside of a context does not run
    inside one.
    """
    return _context_of_thread() if _ACTIVE_CONTEXTS else None


@outside_of_graphs("context_parallel is specific to a thread")
def _context_of_thread() -> ContextParallel | None:
    return _CONTEXT.get()


def full_mask(given: Any, q_length: int, kv_length: int, context: ContextParallel) -> Tensor:
    """Gathers the shards of an attention_mask from all ranks into a mask of the full sequence, (batch, positions)."""
    from flashgen.torch.context_parallel import unshard

    if given is None:
        raise UnsupportedError(
            "inside of context_parallel a model needs attention_mask=torch.ones_like(input_ids), this rank's shard: "
            "without it transformers treats the positions of a rank as packed sequences"
        )
    if given.ndim != 2 or q_length != kv_length or given.shape[1] != kv_length:
        raise UnsupportedError(
            f"inside of context_parallel an attention_mask of {tuple(given.shape)} for {q_length} queries and "
            f"{kv_length} keys: give (batch, rows) of this rank, and no cache"
        )
    return unshard(given, 1, group=context.group, shards=context.shards)


def refuse_under_context_parallel(what: Any, name: str) -> None:
    """Raises UnsupportedError for an argument of a layer that context parallelism does not support."""
    if what is not None:
        raise UnsupportedError(f"{name} is not supported inside of context_parallel")
