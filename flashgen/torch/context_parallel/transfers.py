"""Point-to-point messages that overlap with computation: on GPUs they have a stream of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from flashgen.runtime.caching import Cache
from flashgen.torch.context_parallel.failures import peer_errors
from flashgen.torch.context_parallel.launch_order import launch_after_messages
from flashgen.torch.tensors import Tensor

_STREAMS: Cache[int, Any] = Cache()


class Transfers:
    """Posts messages and makes the current stream wait for them. Ranks are numbered within the group."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._stream = (
            _STREAMS.get_or_make(device.index, lambda: torch.cuda.Stream(device)) if device.type == "cuda" else None
        )
        self.wait_for_current_stream()

    def wait_for_current_stream(self) -> None:
        """Makes later messages wait for all that the current stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def event_of_current_stream(self) -> Any:
        """Returns an event, for `after` of `post`, of all that the current stream has been given; None on CPUs."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], after: Any = None
    ) -> list[Any]:
        """Starts to send and receive (rank, contiguous tensor), in this order per pair of ranks. Returns the works."""
        operations = [
            dist.P2POp(call, tensor, group=self._group, group_peer=rank)
            for call, messages in ((dist.isend, sends), (dist.irecv, receives))
            for rank, tensor in messages
            if tensor.numel()
        ]
        if not operations:
            return []
        with peer_errors():
            if self._stream is None:
                return list(dist.batch_isend_irecv(operations))
            if after is not None:
                self._stream.wait_event(after)
            with torch.cuda.stream(self._stream):
                return list(dist.batch_isend_irecv(operations))

    def launch_after(self, posted: Sequence[Any]) -> None:
        """Makes kernels that are launched next on the current stream start after these messages, if any."""
        if posted:
            launch_after_messages(self._device, streams=2)

    def wait(self, posted: Sequence[Any]) -> None:
        """Makes the current stream wait for these messages."""
        with peer_errors():
            for work in posted:
                work.wait()
