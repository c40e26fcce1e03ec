"""Calls whose arguments are views of tensors that a server has at hand, such as the pages of a layer's KV cache.

A view takes a few microseconds of the host to create. A repeated call needs only the addresses of its arrays, which
follow from those of the tensors behind them, so it creates no views.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from flashgen.attention import Attention
from flashgen.attention.repeated_calls import RepeatedLaunches
from flashgen.torch.tensors import Tensor


class CallsOfViews:
    """Calls of a compiled attention, without gradients, on views of other tensors.

    Each call has a key and sources. All arguments of the call follow from these: an array is a view of a source, and
    its shape, strides and offset are determined by the key and by the shapes, strides and dtypes of the sources.

        out = calls.repeat(key, sources)
        if out is None:
            out = calls.run(key, sources, {"q": 0, "k": 1, "v": 1}, q, k, v)
    """

    def __init__(self, attention: Attention) -> None:
        self.attention, self._launches = attention, RepeatedLaunches()

    def repeat(self, key: Hashable, sources: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """Repeats a call. Returns its new output in a list, which is empty if the call has `out`; None on a miss."""
        launch = self._launches.find(key, sources)
        return None if launch is None else launch.launch(sources)

    def run(
        self, key: Hashable, sources: Sequence[Tensor], roles: Mapping[str, int], q: Tensor, k: Tensor, **others: Any
    ) -> Tensor:
        """Runs a call, and returns its output. Later calls with this key and with sources like these repeat it.

        roles: the position among the sources of the one that an argument is a view of, by the argument's name.
        others: the other arguments of the attention.
        """
        out: Tensor = self.attention(q, k, **others)
        if len({*map(id, sources)}) < len(sources) or not self._launches.has_room(sources):
            return out
        found = self.attention.repeated_call(q, k, **others)
        if found is None:
            return out
        launch, arrays = found
        positions = {id(array): roles[name] for name, array in {"q": q, "k": k, **others}.items() if name in roles}
        located = [(array, positions.get(id(array))) for array in arrays]
        locations = [
            (position, array.data_ptr() - sources[position].data_ptr())
            for array, position in located
            if position is not None and _is_view(array, sources[position])
        ]
        repeated = launch.with_sources(key, sources, locations) if len(locations) == len(arrays) else None
        if repeated is not None:
            self._launches.add(repeated, sources)
        return out


def _is_view(tensor: Tensor, source: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
