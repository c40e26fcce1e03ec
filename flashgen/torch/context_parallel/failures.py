"""Errors of messages between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flashgen.errors import PeerError


@contextmanager
def peer_errors() -> Iterator[None]:
    """Turns the error with which torch.distributed ends a message into a PeerError that says what to do.

    Messages are posted or waited for inside. gloo raises here, at the latest after the timeout of the process group.
    NCCL raises here only under TORCH_NCCL_BLOCKING_WAIT=1: by default its messages fail on the GPU, and torch's
    watchdog logs the message and ends the process after the same timeout.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        raise PeerError(
            f"a message between ranks failed: {reason}. Another rank has ended, stands still or "
            "makes other calls: look at its last output, then restart all ranks. How long a message is waited for is "
            "the timeout of the process group: init_process_group(timeout=...), new_group(timeout=...)"
        ) from error
