"""Messages between the ranks of a group while something is computed: for GPUs, on a stream of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from flashgen.runtime.remembered import Remembered
from flashgen.torch.context_parallel.failures import peer_errors
from flashgen.torch.context_parallel.giving_way import give_way
from flashgen.torch.tensors import Tensor

_STREAMS: Remembered[int, Any] = Remembered()


class Transfers:
    """Posts messages, and has the current stream wait for them. Ranks are those of the group."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._stream = (
            _STREAMS.get_or_make(device.index, lambda: torch.cuda.Stream(device)) if device.type == "cuda" else None
        )
        self.after_this()

    def after_this(self) -> None:
        """Messages posted from here on may read what the current stream has written so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def done(self) -> Any:
        """Something that a message can be made to wait for: all that the current stream was given so far."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], after: Any = None
    ) -> list[Any]:
        """Sends and receives (rank, contiguous tensor), in this order between two ranks; see `wait`."""
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

    def give_way(self, posted: Sequence[Any]) -> None:
        """What the current stream is given from here on starts behind these messages, if there are any."""
        if posted:
            give_way(self._device, streams=2)

    def wait(self, posted: Sequence[Any]) -> None:
        """What the current stream is given from here on comes after these messages."""
        with peer_errors():
            for work in posted:
                work.wait()
