"""Errors of messages, with the rank that is to blame."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flashgen.errors import FlashgenError, PeerError
from flashgen.torch.context_parallel.watch import watch_of


@contextmanager
def naming_the_rank(group: Any) -> Iterator[None]:
    """Inside, messages of a group are begun: where they fail, a PeerError says which rank does not answer.

    Over NCCL messages fail later, on the GPU: torch ends the process after the group's timeout, before which the watch
    has named the rank in the log and in a warning; a call that comes in between raises the PeerError.
    """
    watch = watch_of(group)
    if watch.problem:
        raise PeerError(watch.problem)
    watch.begin()
    try:
        yield
    except FlashgenError:
        raise
    except RuntimeError as error:
        blamed = watch.to_blame()
        if blamed is None:
            raise
        raise PeerError(f"{blamed} (torch says: {str(error).splitlines()[0]})") from error
