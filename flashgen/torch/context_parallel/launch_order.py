"""Delays compute kernels until the message kernels that were launched on another stream just before have started.

The persistent CTAs of attention occupy all multiprocessors until they end. If they start first, NCCL's kernel starts
after them, so that communication does not overlap and other ranks wait. A stream notices an event that it waits for
after one or two microseconds. Small kernels on the current stream bridge this time.
"""

from __future__ import annotations

import torch


def launch_after_messages(device: torch.device, streams: int = 1) -> None:
    """Makes kernels that are launched next on the current stream start after a message.

    streams: the number of streams that wait for one another before the message starts. NCCL's own stream waits for the
    stream on which the message was posted.
    """
    if device.type == "cuda":
        for _ in range(streams):
            torch.ones(1, device=device)
