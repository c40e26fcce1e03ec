"""What each kernel costs, as formulas of a call's sizes: FLOPs, and the bytes that it must move."""

from __future__ import annotations

from flashgen.codegen.rendered_kernel import Cost
from flashgen.codegen.tiling import ELEMENT_BYTES, padded
from flashgen.language.spec import AttentionSpec

_SCORES = "batch * heads_q * len_q * len_k * (share of tiles visited)"
_QUERIES, _KEYS = "batch * heads_q * len_q", "batch * heads_kv * len_k"
_RAGGED = {  # the same of a ragged batch
    _SCORES: "heads_q * (sum of len_q * len_k over the sequences) * (share of tiles visited)",
    _QUERIES: "heads_q * total_q",
    _KEYS: "heads_kv * total_k",
}
_SUM, _STATISTICS = 4, 8  # bytes of a float32, of a row's LSE and D
_FIXED_POINT = 64  # bytes of a sum of a capture's gradient where the order of additions must not matter


def forward_cost(spec: AttentionSpec) -> Cost:
    """The cost of the kernel that attends, without lists and captures."""
    width = spec.head_dim + spec.value_dim
    rows = f"{ELEMENT_BYTES} * batch * (heads_q * len_q * {width} + heads_kv * len_k * {width}) bytes"
    if spec.is_ragged:
        rows = f"{ELEMENT_BYTES} * (heads_q * total_q * {width} + heads_kv * total_k * {width}) bytes"
    return _of(spec, Cost(f"{2 * width} * {_SCORES}", f"{rows}, at least; + {_SUM} * {_QUERIES} for the LSE"))


def _of(spec: AttentionSpec, cost: Cost) -> Cost:
    """A cost in the sizes that calls of the spec have."""
    if not spec.is_ragged:
        return cost
    flops, hbm = cost.flops, cost.hbm
    for plain, ragged in _RAGGED.items():
        flops, hbm = flops.replace(plain, ragged), hbm.replace(plain, ragged)
    return Cost(flops, hbm)


def decode_cost(spec: AttentionSpec, tile_q: int, scheduled: bool = False) -> Cost:
    """The cost of the kernel that decodes: K and V once for each tile of rows; its splits' shares, written and read.

    scheduled: of columns that share all sequences, each of which has two shares at most.
    """
    width, rows = spec.head_dim + spec.value_dim, "batch * heads_q * len_q"
    keys = f"{(1 if spec.kv_dtype else ELEMENT_BYTES) * width} * batch * heads_kv * len_k * (share of tiles visited)"
    arrays = f"{ELEMENT_BYTES * width} * {rows} + {keys}"
    shares = f"{2 * _SUM * (spec.value_dim + 2)} * splits * {rows} for shares of splits > 1"
    if scheduled:
        shares = f"{4 * _SUM * (spec.value_dim + 2)} * splits * heads_q * len_q for shares of tiles of several columns"
    once = f"K and V are read once for each {tile_q} rows"
    return Cost(f"{2 * width} * {_SCORES}", f"{arrays} bytes; + {_SUM} * {rows} for the LSE; + {shares}; {once}")


def mixed_cost(spec: AttentionSpec, tile_q: int) -> Cost:
    """The cost of the kernel of mixed batches: K and V once a tile of rows of few queries, and once for a prompt."""
    width = spec.head_dim + spec.value_dim
    keys = f"{(1 if spec.kv_dtype else ELEMENT_BYTES) * width} * heads_kv * (sum of keys) * (share of tiles visited)"
    rows = f"{ELEMENT_BYTES * width + _SUM} * heads_q * total_q bytes with the LSE"
    shares = f"{4 * _SUM * (spec.value_dim + 2) * tile_q} * splits * groups for shares of tiles of several columns"
    return _of(spec, Cost(f"{2 * width} * {_SCORES}", f"{rows}; + {keys}, at least; + {shares}"))


def prompts_cost(spec: AttentionSpec) -> Cost:
    """The cost of a kernel that has the prompts of mixed batches alone."""
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
    """The cost of a kernel by its part: prepare, keys, queries, finish, finish_dk or _dv, sink, d_<name> of a capture.

    dq_apart: dQ is made by a kernel of its own, so that it is not summed. exact_sums: gradients of captures are summed
    exactly. columns: of a row of the sums of dQ, where a plan takes others than all do. finishes: the kernel turns its
    sums into dQ itself.
    """
    return _of(spec, _backward_cost(part, spec, dq_apart, exact_sums, columns, finishes))


def _backward_cost(
    part: str, spec: AttentionSpec, dq_apart: bool, exact_sums: bool, columns: int, finishes: bool
) -> Cost:
    head, value = spec.head_dim, spec.value_dim
    read = ELEMENT_BYTES * (head + value)  # of a row of Q and dO, or of K and V
    sums = 0 if dq_apart else 2 * _SUM * (columns or padded(head))  # of a row of dQ, read and written
    if part == "prepare":  # which zeroes the sums
        hbm = f"{2 * ELEMENT_BYTES * value + _SUM + _STATISTICS + sums // 2} * {_QUERIES}"
        return Cost(f"{2 * value} * {_QUERIES}", hbm)
    if part == "keys":  # QK, dV, dP, dK, and dQ where it is not a kernel of its own
        products = (2 if dq_apart else 3) * head + 2 * value
        made = ELEMENT_BYTES * head if finishes else 0
        hbm = f"{read + _STATISTICS + sums + made} * {_QUERIES} + {2 * read} * {_KEYS}"
        return Cost(f"{2 * products} * {_SCORES}", hbm)
    if part == "queries":  # QK, dP, dQ
        hbm = f"{read + _STATISTICS + ELEMENT_BYTES * head} * {_QUERIES} + {read} * {_KEYS}"
        return Cost(f"{2 * (2 * head + value)} * {_SCORES}", hbm)
    if part == "finish":
        return Cost(f"{head} * {_QUERIES}", f"{_SUM * (columns or padded(head)) + ELEMENT_BYTES * head} * {_QUERIES}")
    if part in ("finish_dk", "finish_dv"):
        dim = head if part == "finish_dk" else value
        return Cost(f"{dim} * {_KEYS}", f"{_SUM * columns + ELEMENT_BYTES * dim} * {_KEYS}")
    if part == "sink":
        return Cost(f"2 * {_QUERIES}", f"{_STATISTICS} * {_QUERIES}")
    (capture,) = (capture for capture in spec.captures if part == f"d_{capture.name}")
    each = (_FIXED_POINT if exact_sums else _SUM) + (_SUM if capture.dtype == "float32" else ELEMENT_BYTES)
    return Cost("none", f"{each} * elements of {capture.name}")
