"""The specs of a layer: what SGLang's `RadixAttention` declares, as an `AttentionSpec`."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

import flashgen as fg
from flashgen.errors import UnsupportedError
from flashgen_sglang.launches import Launcher, launcher

FLOAT8 = torch.float8_e4m3fn


def refuse(what: str) -> NoReturn:
    """Raises the error for something that the backend does not compute."""
    raise UnsupportedError(f"{what}: choose another --attention-backend, such as triton or fa3")


class LayerSpecs:
    """The specs of a layer, for what its calls add. Raises an UnsupportedError for a layer that is not supported.

    Args:
        layer: a `RadixAttention`.
        page_size: of the pool.
    """

    def __init__(self, layer: Any, page_size: int) -> None:
        _check(layer)
        window = layer.sliding_window_size
        self._fields: dict[str, Any] = {
            "head_dim": layer.qk_head_dim,
            "value_dim": layer.v_head_dim,
            "scale": float(layer.scaling),
            "score": fg.softcap(float(layer.logit_cap)) if layer.logit_cap else None,
            # A window of SGLang is the number of keys before the query's own.
            "mask": fg.causal() if window is None or window < 0 else fg.sliding_window(int(window), 0),
            "page_size": page_size,
        }
        self._launchers: dict[tuple[Any, ...], Launcher] = {}

    def launcher(
        self,
        layout: str,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        sinks: torch.Tensor | None,
        device: torch.device,
    ) -> Launcher:
        """Returns the launcher of a call.

        layout: "thd" for packed queries, "bshd" for one query of each sequence. dtype, kv_dtype: of the queries and of
        the pool. sinks: a score per query head, or None.
        """
        key = (layout, dtype, kv_dtype, None if sinks is None else sinks.dtype, device)
        found = self._launchers.get(key)
        if found is None:
            spec = fg.AttentionSpec(
                **self._fields,
                layout=layout,
                dtype=_name(dtype),
                kv_dtype=_name(kv_dtype) if kv_dtype == FLOAT8 else None,
                sink=None if sinks is None else fg.Tensor("sinks", _name(sinks.dtype), 1),
            )
            found = self._launchers[key] = launcher(spec, device)
        return found


def _check(layer: Any) -> None:
    if layer.is_cross_attention or layer.attn_type.value != "decoder":
        kind = "cross-attention" if layer.is_cross_attention else f"attention of type {layer.attn_type.value}"
        refuse(f"layer {layer.layer_id} is {kind}, and the backend computes causal self-attention")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        refuse(f"layer {layer.layer_id} caps scores by {layer.logit_capping_method}, and the backend by tanh")
    if layer.pos_encoding_mode != "NONE":
        refuse(f"layer {layer.layer_id} encodes positions within attention ({layer.pos_encoding_mode})")
    if layer.xai_temperature_len > 0:
        refuse(f"layer {layer.layer_id} has a temperature that depends on the position")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
