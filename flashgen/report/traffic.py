"""Counts the HBM bytes of a spec's kernels, of standard attention, and of the papers' algorithms (not measured)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from flashgen.analysis.tile_classes import EMPTY, TileMap
from flashgen.codegen.costs import forward_cost
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import Kernels
from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec
from flashgen.reference.traffic import (
    traffic_flash1,
    traffic_flash2,
    traffic_flash_backward,
    traffic_standard,
    traffic_standard_backward,
)
from flashgen.report.sizes import CallSizes

_LSE_BYTES = 4


@dataclass(frozen=True)
class TrafficRow:
    """An algorithm and the bytes that it reads from and writes to HBM.

    times: the bytes of standard attention divided by those of this algorithm. source: the basis of the count.
    """

    name: str
    bytes: int
    times: float
    source: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def forward_traffic(spec: AttentionSpec, target: Target, tiles: TileMap, sizes: CallSizes) -> list[TrafficRow]:
    """Returns rows for standard attention, FlashAttention 1 and 2, and the forward kernel with and without a cache.

    The papers' algorithms skip no tile. Their on-chip memory M is the maximum shared memory of a block of the target,
    in elements.
    """
    dims = (sizes.len_q, sizes.len_k, spec.head_dim, spec.value_dim)
    factor, on_chip = sizes.batch * sizes.heads_q * spec.element.bytes, target.shared_per_block // spec.element.bytes
    rows = [
        ("standard attention", traffic_standard(*dims).total * factor, "FlashAttention, algorithm 0"),
        ("FlashAttention 1", traffic_flash1(*dims, on_chip=on_chip).total * factor, "its algorithm 1"),
        (
            "FlashAttention 2",
            traffic_flash2(*dims, on_chip=on_chip).total * factor,
            "FlashAttention-2, algorithm 1",
        ),
        ("this kernel, nothing cached", _without_cache(spec, tiles, sizes), "its own tiles"),
        ("this kernel, each array once", forward_cost(spec).hbm(sizes.to_work()), "a cache that holds K and V"),
    ]
    return _with_ratios(rows)


def backward_traffic(spec: AttentionSpec, target: Target, kernels: Kernels, sizes: CallSizes) -> list[TrafficRow]:
    """Returns rows for the backward of standard attention, of FlashAttention, and of these kernels.

    Each of these kernels is assumed to read or write each of its arrays once.
    """
    dims = (sizes.len_q, sizes.len_k, spec.head_dim, spec.value_dim)
    factor, on_chip = sizes.batch * sizes.heads_q * spec.element.bytes, target.shared_per_block // spec.element.bytes
    own = sum(hbm_bytes(kernel, sizes) or 0 for kernel in kernels.values())
    rows = [
        ("standard attention", traffic_standard_backward(*dims).total * factor, "FlashAttention, algorithm 3"),
        ("FlashAttention", traffic_flash_backward(*dims, on_chip=on_chip).total * factor, "its algorithm 4"),
        ("these kernels, each array once", own, "a cache that holds what a kernel reads twice"),
    ]
    return _with_ratios(rows)


def flops(kernel: RenderedKernel, sizes: CallSizes, share: float) -> int | None:
    """Returns the FLOPs of a kernel's matrix products, where `share` is the fraction of tiles that are visited.

    Returns None for a kernel whose FLOPs are not counted.
    """
    if kernel.cost is None or kernel.cost.flops is None:
        return None
    return round(kernel.cost.flops(sizes.to_work(share)))


def hbm_bytes(kernel: RenderedKernel, sizes: CallSizes) -> int | None:
    """Returns the bytes that a kernel moves if it reads or writes each array once; None if they depend on captures."""
    if kernel.cost is None:
        return None
    moved = kernel.cost.hbm(sizes.to_work())
    return None if math.isnan(moved) else round(moved)  # only a call determines the elements of a capture


def _without_cache(spec: AttentionSpec, tiles: TileMap, sizes: CallSizes) -> int:
    """Returns the bytes of Q, O and the LSE once, and of the keys and values of each visited tile within len_k."""
    batches, heads = tiles.classes.shape[:2]
    repeats = (sizes.batch if batches == 1 else 1) * (sizes.heads_q if heads == 1 else 1)
    by_column = (tiles.classes != EMPTY).sum(axis=(0, 1, 2))
    keys = sum(
        int(count) * (min((column + 1) * tiles.tile[1], sizes.len_k) - column * tiles.tile[1])
        for column, count in enumerate(by_column)
    )
    rows = sizes.batch * sizes.heads_q * sizes.len_q
    of_rows = rows * (spec.head_dim + spec.value_dim)
    of_keys = spec.kv_element.bytes * keys * repeats * spec.kv_columns
    return spec.element.bytes * of_rows + of_keys + _LSE_BYTES * rows


def _with_ratios(rows: list[tuple[str, int, str]]) -> list[TrafficRow]:
    standard = rows[0][1]
    return [TrafficRow(name, count, standard / count, source) for name, count, source in rows]
