"""Kernels that start behind those of messages, which were given to another stream just before.

Attention's blocks stay on a multiprocessor as long as there is work, one on each. Where they come first, NCCL's kernel
begins when they end: nothing travels meanwhile, and the ranks that it sends to wait. A stream takes a microsecond or
two to see that what it waits for has happened; so long small kernels keep the current one.
"""

from __future__ import annotations

import torch


def give_way(device: torch.device, streams: int = 1) -> None:
    """Has what the current stream is given from here on start behind a message.

    streams: how many wait in turn before it begins; NCCL's own waits for the one that the message was posted on.
    """
    if device.type == "cuda":
        for _ in range(streams):
            torch.ones(1, device=device)
