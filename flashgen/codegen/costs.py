"""The cost of each kernel, as formulas of a call's sizes: FLOPs, and the minimum bytes of memory traffic."""

from __future__ import annotations

from flashgen.codegen.rendered_kernel import Cost
from flashgen.codegen.tiling import ELEMENT_BYTES, padded
from flashgen.language.spec import AttentionSpec

_SCORES = "batch * heads_q * len_q * len_k * (share of tiles visited)"
_QUERIES, _KEYS = "batch * heads_q * len_q", "batch * heads_kv * len_k"
_VARLEN_SIZES = {  # size in a batch of equal lengths -> size in a varlen batch
    _SCORES: "heads_q * (sum of len_q * len_k over the sequences) * (share of tiles visited)",
    _QUERIES: "heads_q * total_q",
    _KEYS: "heads_kv * total_k",
}
_SUM, _STATISTICS = 4, 8  # bytes of a float32; of the LSE and D of a row
_FIXED_POINT = 64  # bytes of a fixed-point sum, whose value does not depend on the order of additions


def forward_cost(spec: AttentionSpec) -> Cost:
    """Returns the cost of the forward kernel, without the reads of tile lists and captures."""
    width = spec.head_dim + spec.value_dim
    rows = f"{ELEMENT_BYTES} * batch * (heads_q * len_q * {width} + heads_kv * len_k * {width}) bytes"
    if spec.is_varlen:
        rows = f"{ELEMENT_BYTES} * (heads_q * total_q * {width} + heads_kv * total_k * {width}) bytes"
    return _in_sizes_of(spec, Cost(f"{2 * width} * {_SCORES}", f"{rows}, at least; + {_SUM} * {_QUERIES} for the LSE"))


def _in_sizes_of(spec: AttentionSpec, cost: Cost) -> Cost:
    """Returns the cost with the sizes of a varlen batch, if the layout of the spec is varlen."""
    if not spec.is_varlen:
        return cost
    flops, hbm = cost.flops, cost.hbm
    for plain, varlen in _VARLEN_SIZES.items():
        flops, hbm = flops.replace(plain, varlen), hbm.replace(plain, varlen)
    return Cost(flops, hbm)


def decode_cost(spec: AttentionSpec, tile_q: int, scheduled: bool = False) -> Cost:
    """Returns the cost of the decode kernel: K and V once per tile of rows; partial outputs written and read.

    Args:
        scheduled: Whether blocks share the keys of all sequences as stream-K work units, so that each block has at most
            two partial outputs.
    """
    width, rows = spec.head_dim + spec.value_dim, "batch * heads_q * len_q"
    keys = f"{(1 if spec.kv_dtype else ELEMENT_BYTES) * width} * batch * heads_kv * len_k * (share of tiles visited)"
    arrays = f"{ELEMENT_BYTES * width} * {rows} + {keys}"
    partials = f"{2 * _SUM * (spec.value_dim + 2)} * splits * {rows} for shares of splits > 1"
    if scheduled:
        partials = (
            f"{4 * _SUM * (spec.value_dim + 2)} * splits * heads_q * len_q for shares of tiles of several columns"
        )
    once = f"K and V are read once for each {tile_q} rows"
    return Cost(f"{2 * width} * {_SCORES}", f"{arrays} bytes; + {_SUM} * {rows} for the LSE; + {partials}; {once}")


def mixed_cost(spec: AttentionSpec, tile_q: int) -> Cost:
    """Returns the cost of the kernel of mixed batches: K and V once per tile of decode rows and once per prefill."""
    width = spec.head_dim + spec.value_dim
    keys = f"{(1 if spec.kv_dtype else ELEMENT_BYTES) * width} * heads_kv * (sum of keys) * (share of tiles visited)"
    rows = f"{ELEMENT_BYTES * width + _SUM} * heads_q * total_q bytes with the LSE"
    partials = f"{4 * _SUM * (spec.value_dim + 2) * tile_q} * splits * groups for shares of tiles of several columns"
    return _in_sizes_of(spec, Cost(f"{2 * width} * {_SCORES}", f"{rows}; + {keys}, at least; + {partials}"))


def prefill_cost(spec: AttentionSpec) -> Cost:
    """Returns the cost of the kernel for only the prefills of mixed batches."""
    width = spec.head_dim + spec.value_dim
    flops = f"{2 * width} * heads_q * (sum of len_q * len_k over the prompts) * (share of tiles visited)"
    rows = f"{ELEMENT_BYTES * width + _SUM} * heads_q * (queries of prompts) bytes with the LSE"
    return Cost(flops, f"{rows}; + {ELEMENT_BYTES * width} * heads_kv * (keys of prompts), at least")


def backward_cost(
    part: str,
    spec: AttentionSpec,
    dq_apart: bool = False,
    exact_sums: bool = False,
    columns: int = 0,
    finishes: bool = False,
) -> Cost:
    """Returns the cost of a backward kernel.

    Args:
        part: Role of the kernel: "preprocess", "dkdv", "dq", "postprocess", "postprocess_dk",
            "postprocess_dv", "sink", or "d_<name>" for a capture.
        dq_apart: Whether a kernel of its own computes dQ, so that dQ is not accumulated in memory.
        exact_sums: Whether gradients of captures are summed in fixed point.
        columns: Columns of a row of the accumulator; 0 means head_dim, padded.
        finishes: Whether the kernel converts its accumulator to dQ itself.
    """
    return _in_sizes_of(spec, _backward_cost(part, spec, dq_apart, exact_sums, columns, finishes))


def _backward_cost(
    part: str, spec: AttentionSpec, dq_apart: bool, exact_sums: bool, columns: int, finishes: bool
) -> Cost:
    head, value = spec.head_dim, spec.value_dim
    read = ELEMENT_BYTES * (head + value)  # bytes of a row of Q and dO, or of K and V
    sums = (
        0 if dq_apart else 2 * _SUM * (columns or padded(head))
    )  # bytes read and written for a row of the dQ accumulator
    if part == "preprocess":  # it zeroes the accumulator
        hbm = f"{2 * ELEMENT_BYTES * value + _SUM + _STATISTICS + sums // 2} * {_QUERIES}"
        return Cost(f"{2 * value} * {_QUERIES}", hbm)
    if part == "dkdv":  # QK, dV, dP, dK, and dQ without a kernel of its own
        products = (2 if dq_apart else 3) * head + 2 * value
        converted = ELEMENT_BYTES * head if finishes else 0
        hbm = f"{read + _STATISTICS + sums + converted} * {_QUERIES} + {2 * read} * {_KEYS}"
        return Cost(f"{2 * products} * {_SCORES}", hbm)
    if part == "dq":  # QK, dP, dQ
        hbm = f"{read + _STATISTICS + ELEMENT_BYTES * head} * {_QUERIES} + {read} * {_KEYS}"
        return Cost(f"{2 * (2 * head + value)} * {_SCORES}", hbm)
    if part == "postprocess":
        return Cost(f"{head} * {_QUERIES}", f"{_SUM * (columns or padded(head)) + ELEMENT_BYTES * head} * {_QUERIES}")
    if part in ("postprocess_dk", "postprocess_dv"):
        dim = head if part == "postprocess_dk" else value
        return Cost(f"{dim} * {_KEYS}", f"{_SUM * columns + ELEMENT_BYTES * dim} * {_KEYS}")
    if part == "sink":
        return Cost(f"2 * {_QUERIES}", f"{_STATISTICS} * {_QUERIES}")
    (capture,) = (capture for capture in spec.captures if part == f"d_{capture.name}")
    each = (_FIXED_POINT if exact_sums else _SUM) + (_SUM if capture.dtype == "float32" else ELEMENT_BYTES)
    return Cost("none", f"{each} * elements of {capture.name}")
