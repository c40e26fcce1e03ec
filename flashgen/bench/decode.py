"""Measures decoding, few queries over many keys, in TB/s of K and V: `flashgen bench decode`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from flashgen.analysis.closed_forms.tile_ranges import evaluate_range, key_range
from flashgen.attention import compile
from flashgen.bench.cases import Arrays, has_heads_first, random_arrays
from flashgen.bench.flashinfer import paged_attention
from flashgen.bench.latent_peers import LATENT_PEERS, latent_peer
from flashgen.bench.peers import peer
from flashgen.codegen.costs import WorkSizes, product_flops
from flashgen.codegen.hopper.decode_plans import HopperDecodePlan
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.mma_sync.decode_plans import DecodePlan
from flashgen.language.kv_records import KvRecord
from flashgen.language.masks import causal
from flashgen.language.operations import BATCH
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.timing import Run, medians_ms

PEERS = ("cuDNN", "FA2", "Flex", "FlashInfer", "FlashMLA")
PEER_PAGE = 64  # keys of a page of FlashInfer and FlashMLA


@dataclass(frozen=True)
class DecodeSize:
    """The sizes of a call: sequences, heads of q, heads of k and v, keys, queries."""

    batch: int
    heads: int
    heads_kv: int
    len_k: int
    len_q: int = 1

    def __str__(self) -> str:
        return f"{self.batch}, {self.heads}:{self.heads_kv}, {self.len_k}" + (
            f", {self.len_q} queries" if self.len_q > 1 else ""
        )


SIZES = (
    DecodeSize(1, 32, 8, 131072),
    DecodeSize(4, 32, 8, 32768),
    DecodeSize(16, 32, 8, 8192),
    DecodeSize(64, 32, 8, 8192),
    DecodeSize(128, 32, 8, 2048),
    DecodeSize(16, 32, 32, 8192),
    DecodeSize(16, 64, 8, 8192, 4),
    DecodeSize(1, 32, 8, 8192),
    DecodeSize(1, 32, 8, 1024),
)
LATENT_SIZES = (
    DecodeSize(64, 128, 1, 4096),
    DecodeSize(16, 128, 1, 32768),
    DecodeSize(1, 128, 1, 131072),
    DecodeSize(64, 64, 1, 8192),
    DecodeSize(64, 16, 1, 8192),
    DecodeSize(32, 128, 1, 8192, 2),
)
"""Sizes of latent attention, where all query heads share one head of keys."""
PROMPT_SIZES = (DecodeSize(1, 32, 8, 8192, 512), DecodeSize(1, 32, 8, 8192, 2048))
"""Sizes of prompts over a cache of 8-bit keys, beside the same over 16-bit keys."""
AnyPlan = DecodePlan | HopperDecodePlan | HopperPlan


@dataclass(frozen=True)
class DecodeRow:
    """A measured size: microseconds, TB/s of the keys and values that the mask needs, and TFLOP/s, by implementation.

    Implementations are "flashgen", "pages of N", and the peers of PEERS, where FlashInfer and FlashMLA read pages of
    64. If the spec has a kv_dtype, peers read 16-bit keys and values, and so do "16 bits" and "pages of N, 16 bits",
    which are flashgen. `plan` is that of flashgen's kernel.
    """

    spec: str
    target: str
    size: DecodeSize
    plan: str
    bytes: int
    microseconds: Mapping[str, float]
    terabytes: Mapping[str, float]
    tflops: Mapping[str, float]

    def ratio(self, contender: str = "flashgen") -> float | None:
        """Returns the speed of an implementation relative to the fastest peer; None if either was not measured."""
        best = min((self.microseconds[name] for name in PEERS if name in self.microseconds), default=None)
        own = self.microseconds.get(contender)
        return best / own if best is not None and own is not None else None

    def of_16_bits(self, contender: str = "flashgen") -> float | None:
        """Returns the speed of flashgen relative to itself with 16-bit keys; None if one was not measured."""
        wide = self.microseconds.get("16 bits" if contender == "flashgen" else f"{contender}, 16 bits")
        own = self.microseconds.get(contender)
        return wide / own if wide is not None and own is not None else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"size": str(self.size), "ratio": self.ratio()}


def decode_rows(
    specs: Sequence[AttentionSpec],
    sizes: Sequence[DecodeSize] = SIZES,
    peers: Sequence[str] = PEERS,
    page_sizes: Sequence[int] = (),
    target: str | None = None,
    splits: Sequence[int] = (),
    plans: Sequence[AnyPlan] = (),
) -> Iterator[DecodeRow]:
    """Measures specs without captures at the sizes, over contiguous keys and over pages, in interleaved runs.

    Additional `splits` and `plans` are measured alone, each with the default of the other, and in all combinations.
    """
    for spec in specs:
        for size in sizes:
            yield measure_decode(spec, size, peers, page_sizes, target, splits, plans)


def own_choices(splits: Sequence[int], plans: Sequence[AnyPlan]) -> dict[str, tuple[int | None, AnyPlan | None]]:
    """Returns the choices of splits and plans to measure in addition, as (splits, plan) by name."""
    chosen: dict[str, tuple[int | None, AnyPlan | None]] = {f"{count} splits": (count, None) for count in splits}
    for plan in plans:
        name = plan_name(plan)
        of_splits = splits if plan.splits_keys else ()
        chosen |= {name: (None, plan)} | {f"{name}, {count} splits": (count, plan) for count in of_splits}
    return chosen


def plan_name(plan: AnyPlan) -> str:
    """Returns the numbers of a plan, from which `plan_of_numbers` creates it."""
    return "x".join(map(str, plan.numbers))


def plan_of_numbers(numbers: Sequence[int]) -> AnyPlan | None:
    """Returns the plan of these numbers, or None.

    Two are keys and stages of Hopper's decode kernel. Three are consumer warpgroups, keys and stages of Hopper's
    forward kernel; with a fourth number, which is 2, its warpgroups take turns. Five are rows, keys, warps, stages and
    CTAs per multiprocessor of the decode kernel of mma.sync. A sixth is how many of its warps share tiles.
    """
    match numbers:
        case (tile_k, stages):
            return HopperDecodePlan(tile_k, stages)
        case (consumers, tile_k, stages):
            return HopperPlan(consumers, tile_k, stages)
        case (consumers, tile_k, stages, 2):
            return HopperPlan(consumers, tile_k, stages, takes_turns=True)
        case (rows, keys, warps, stages, blocks, *split) if len(split) <= 1:
            return DecodePlan(rows, keys, warps, stages, blocks, False, *split)
    return None


def measure_decode(
    spec: AttentionSpec,
    size: DecodeSize,
    peers: Sequence[str],
    page_sizes: Sequence[int],
    target: str | None = None,
    splits: Sequence[int] = (),
    plans: Sequence[AnyPlan] = (),
) -> DecodeRow:
    """Times one size. With a kv_dtype, flashgen is also timed as "16 bits", with keys of the dtype of the spec.

    A spec with a `kv_record` is timed over pages of its page_size, as are its "16 bits".
    """
    attention, plain = compile(spec, target), with_cache(spec)
    arrays = _arrays(plain, size)
    if spec.kv_record:
        runs = _runs_of_records(spec, plain, size, arrays, target, own_choices(splits, plans))
    else:
        runs = _runs_of_keys(spec, plain, attention, arrays, target)
        for page_size in page_sizes:
            runs[f"pages of {page_size}"] = paged(spec, size, page_size, arrays, target)
            if spec.kv_dtype:
                runs[f"pages of {page_size}, 16 bits"] = paged(plain, size, page_size, arrays, target)
        for name, (num_splits, given) in own_choices(splits, plans).items():
            runs[name] = _own_choice(compile(spec, target, plan=given), spec, arrays, num_splits)
    beside = {name: _peer(name, plain, size, arrays) for name in peers}
    runs |= {name: run for name, run in beside.items() if run is not None}
    times = medians_ms(runs)
    plan = attention.plan_for(size.len_q, size.len_k, size.batch, size.heads, size.heads_kv)
    return row(spec, size, attention.target.name, str(plan), times)


def _runs_of_keys(
    spec: AttentionSpec, plain: AttentionSpec, attention: Any, arrays: Arrays, target: str | None
) -> dict[str, Run]:
    """Returns the runs of flashgen over contiguous keys."""
    q, k, v, _ = arrays
    if not spec.kv_dtype:
        return {"flashgen": lambda: attention(q, k, v)}
    wide = compile(plain, target)
    return {"flashgen": narrow(spec, attention, q, (k, v)), "16 bits": lambda: wide(q, k, v)}


def _runs_of_records(
    spec: AttentionSpec,
    plain: AttentionSpec,
    size: DecodeSize,
    arrays: Arrays,
    target: str | None,
    choices: Mapping[str, tuple[int | None, AnyPlan | None]],
) -> dict[str, Run]:
    """Returns the runs of flashgen over pages of records, and over pages of 16-bit keys."""
    page_size = spec.page_size or 1
    runs = {"flashgen": paged(spec, size, page_size, arrays, target)}
    runs["16 bits"] = paged(plain, size, page_size, arrays, target)
    for name, (num_splits, plan) in choices.items():
        scheduled = plan and plan.with_schedule(size.batch > 1 and num_splits is None)
        runs[name] = paged(spec, size, page_size, arrays, target, scheduled, num_splits)
    return runs


def _own_choice(attention: Any, spec: AttentionSpec, arrays: Arrays, num_splits: int | None) -> Run:
    q, k, v, _ = arrays
    if spec.kv_dtype:
        return narrow(spec, attention, q, (k, v), num_splits=num_splits)
    return lambda: attention(q, k, v, num_splits=num_splits)


def row(spec: AttentionSpec, size: DecodeSize, target: str, plan: str, milliseconds: Mapping[str, float]) -> DecodeRow:
    """Returns the row of a size from milliseconds by implementation."""
    moved, of_16_bits = bytes_needed(spec, size), bytes_needed(with_cache(spec), size)
    terabytes = {  # peers read 16 bits per element for every spec
        name: (of_16_bits if name in PEERS or name.endswith("16 bits") else moved) / time / 1e9
        for name, time in milliseconds.items()
    }
    micros = {name: 1e3 * time for name, time in milliseconds.items()}
    tflops = {name: flops_needed(spec, size) / time / 1e9 for name, time in milliseconds.items()}
    return DecodeRow(spec.name, target, size, plan, moved, micros, terabytes, tflops)


def bytes_needed(spec: AttentionSpec, size: DecodeSize) -> int:
    """Returns the bytes of the keys and values that the mask needs."""
    keys = keys_needed(spec, size) * size.batch * size.heads_kv
    return keys * spec.kv_columns * spec.kv_element.bytes


def flops_needed(spec: AttentionSpec, size: DecodeSize) -> float:
    """Returns the FLOPs of the products of all queries with the keys that any of them needs."""
    sizes = (size.batch, size.heads, size.heads_kv, size.len_q, keys_needed(spec, size))
    work = WorkSizes(*sizes, pairs=size.batch * size.len_q * keys_needed(spec, size))
    return float(product_flops(spec, "forward", work))


def keys_needed(spec: AttentionSpec, size: DecodeSize) -> int:
    """Returns the number of keys that any query of a sequence needs; all keys if that depends on a call."""
    ranges = key_range(spec.mask.expression)
    if ranges is None or ranges.captures or ranges.depends_on(BATCH):
        return size.len_k
    begin, end, _, _ = evaluate_range(ranges, 0, size.len_q - 1, size.len_q, size.len_k)
    return int(np.maximum(end - begin, 0))


def _arrays(spec: AttentionSpec, size: DecodeSize) -> Arrays:
    sides = (
        (size.heads, size.len_q, spec.head_dim),
        (size.heads_kv, size.len_k, spec.head_dim),
        (size.heads_kv, size.len_k, spec.value_dim),
        (size.heads, size.len_q, spec.value_dim),
    )
    axes = [(size.batch, *side) for side in sides]
    shapes = [spec.batch_layout.from_bhsd(each) for each in axes]
    if spec.shared_kv:
        q, k, d_out = random_arrays([shapes[0], shapes[1], shapes[3]], spec.dtype, seed=0)
        return q, k, None, d_out
    q, k, v, d_out = random_arrays(shapes, spec.dtype, seed=0)
    return q, k, v, d_out


def paged(
    spec: AttentionSpec,
    size: DecodeSize,
    page_size: int,
    arrays: Arrays,
    target: str | None = None,
    plan: AnyPlan | None = None,
    num_splits: int | None = None,
) -> Run:
    """Returns a run over pages in random order, with as many keys as `arrays` has, but other values."""
    paged = with_cache(spec, page_size, spec.kv_dtype)
    attention, pages = compile(paged, target, plan=plan), size.batch * -(-size.len_k // page_size)
    k, v = _pages(spec, size, pages, page_size)
    table, lengths = _page_table(pages, size)
    q = arrays[0]
    like = k if hasattr(k, "data_ptr") else None
    page_table, seqused_k = _on_device(table, like), _on_device(lengths, like)
    where = {"page_table": page_table, "seqused_k": seqused_k, "num_splits": num_splits}
    if spec.kv_record:
        k = random_records(spec.kv_record, k)
    if spec.scales_kv:
        return narrow(spec, attention, q, (k, v), **where)
    return lambda: attention(q, k, v, **where)


def random_records(record: KvRecord, pages: Any) -> Any:
    """Returns as many records as these pages of 16-bit keys have, of random numbers and with scales of 2^-7."""
    import torch

    def part(columns: int, value: Any) -> Any:
        return value.view(torch.uint8).reshape(*pages.shape[:3], columns)

    scaled, plain = record.scaled_columns, 2 * record.plain_columns
    numbers = torch.randint(0, 120, (*pages.shape[:3], scaled), dtype=torch.uint8, device=pages.device)
    scales = torch.full((*pages.shape[:3], record.groups), 2.0**-7, device=pages.device)
    parts = (numbers, part(4 * record.groups, scales), part(plain, pages[..., scaled:].contiguous()))
    return torch.cat(parts, dim=-1)


def _pages(spec: AttentionSpec, size: DecodeSize, pages: int, page_size: int) -> tuple[Any, Any]:
    """Returns random pages of keys and of values; None for those of values where V is a part of K."""
    dims = (spec.head_dim,) if spec.shared_kv else (spec.head_dim, spec.value_dim)
    k, *v = random_arrays([(pages, page_size, size.heads_kv, dim) for dim in dims], spec.dtype, seed=1)
    return k, v[0] if v else None


def narrow(spec: AttentionSpec, attention: Any, q: Any, keys: tuple[Any, Any], **where: Any) -> Run:
    """Returns a run over the keys and values of these tensors in 8 bits, so that scores are about the same."""
    import torch

    scale = torch.full((1,), 1 / 16, device="cuda")
    k, v = ((array * 16).clamp(-127, 127).to(getattr(torch, str(spec.kv_dtype))) for array in keys)
    return lambda: attention(q, k, v, k_scale=scale, v_scale=scale, **where)


def with_cache(spec: AttentionSpec, page_size: int | None = None, kv_dtype: str | None = None) -> AttentionSpec:
    """Returns the spec with another page size and dtype of keys and values."""
    names = ("head_dim", "dtype", "value_dim", "scale", "layout", "dropout", "score", "mask", "out_dtype", "shared_kv")
    return AttentionSpec(**{name: getattr(spec, name) for name in names}, page_size=page_size, kv_dtype=kv_dtype)


def _page_table(pages: int, size: DecodeSize) -> tuple[Any, Any]:
    """Returns a table of pages in random order, and the number of keys of each sequence."""
    order = np.random.default_rng(2).permutation(pages).astype(np.int32)
    return order.reshape(size.batch, -1), np.full(size.batch, size.len_k, np.int32)


def _on_device(array: Any, like: Any) -> Any:
    """Copies a NumPy array to the GPU, as a torch tensor if `like` is a tensor, else as a CuPy array."""
    if like is not None:
        import torch

        return torch.from_numpy(array).to(like.device)
    import cupy

    return cupy.asarray(array)


def _peer(name: str, spec: AttentionSpec, size: DecodeSize, arrays: Arrays) -> Run | None:
    """Returns a run of a peer, or None. For one query, the peers of torch get no mask in place of a causal mask."""
    if spec.shared_kv:
        return latent(name, spec, size, arrays)
    if name == "FlashInfer":
        return flashinfer(spec, size, arrays)
    if name == "FlashMLA":
        return None
    if size.len_q == 1 and spec.mask.expression == causal().expression:
        spec = replace(spec, mask=AttentionSpec(8).mask)
    return peer(name, spec, "forward", arrays)


def flashinfer(spec: AttentionSpec, size: DecodeSize, arrays: Arrays) -> Run | None:
    """Returns a run of FlashInfer over pages of 64 keys; None if it is missing or does not support the spec."""
    if not has_heads_first(spec):
        return None
    each = -(-size.len_k // PEER_PAGE)
    table, _ = _page_table(size.batch * each, size)
    k, v = _pages(spec, size, table.size, PEER_PAGE)
    begins = [each * number for number in range(size.batch + 1)]
    last = [size.len_k - (each - 1) * PEER_PAGE] * size.batch
    return paged_attention(spec, [arrays[0]], k, v, (begins, table.ravel(), last))


def latent(name: str, spec: AttentionSpec, size: DecodeSize, arrays: Arrays) -> Run | None:
    """Returns a run of a peer where V is a part of K, over pages of 64 keys, or None."""
    if name not in LATENT_PEERS or not hasattr(arrays[0], "data_ptr"):
        return None
    table, lengths = _page_table(size.batch * -(-size.len_k // PEER_PAGE), size)
    pages, _ = _pages(spec, size, table.size, PEER_PAGE)
    return latent_peer(name, spec, arrays[0], pages, _on_device(table, pages), _on_device(lengths, pages))
