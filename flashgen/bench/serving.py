"""Measures batches of a server: `flashgen bench decode --group GROUP`.

"lengths" compares sequences of different lengths with sequences of equal length and as many keys in total. "variants"
compares masks and scores with full attention over as many keys as they visit, and with FlexAttention. "mixed" compares
a prompt and decodes in one launch, and in two, with each of them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from flashgen.attention import compile
from flashgen.bench.decode import DecodeSize, keys_needed, with_cache
from flashgen.bench.flashinfer import Table, paged_attention
from flashgen.bench.peers import flex
from flashgen.language.captures import Tensor
from flashgen.language.functions import len_k, len_q, maximum
from flashgen.language.masks import causal, full, sliding_window, tree
from flashgen.language.modifiers import Mask, trace_mask
from flashgen.language.scores import alibi, softcap
from flashgen.language.spec import AttentionSpec
from flashgen.language.trees import tree_bits
from flashgen.runtime.timing import Run, medians_ms

GROUPS = ("lengths", "variants", "mixed")
PAGE_SIZE = 64
VARIANT_SIZES = (DecodeSize(64, 32, 8, 8192), DecodeSize(4, 32, 8, 32768))
LENGTHS_SIZE = DecodeSize(64, 32, 8, 32768)
PROMPT, MIXED_SIZE = 2048, DecodeSize(64, 32, 8, 8192)
_DOCUMENTS, _TOKENS, _WINDOW, _SEED = 8, 64, 1024, 0


@dataclass(frozen=True)
class ServingRow:
    """A measured case of a group: microseconds, and TB/s of the keys and values that it needs, by implementation.

    `compared` has the ratios that the group compares, by name.
    """

    group: str
    name: str
    target: str
    bytes: int
    microseconds: Mapping[str, float]
    terabytes: Mapping[str, float]
    compared: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def serving_row(
    group: str, name: str, target: str, moved: int, times: Mapping[str, float], compared: Mapping[str, float]
) -> ServingRow:
    """Returns the row of a case from milliseconds by implementation."""
    micros = {contender: 1e3 * time for contender, time in times.items()}
    terabytes = {contender: moved / each / 1e6 for contender, each in micros.items()}
    return ServingRow(group, name, target, moved, micros, terabytes, compared)


def drawn_lengths(batch: int, longest: int) -> list[int]:
    """Returns log-uniform lengths from 1 to `longest`, from a fixed seed."""
    drawn = np.exp(np.random.default_rng(_SEED).uniform(0, np.log(longest), batch))
    return [int(length) for length in np.clip(np.floor(drawn), 1, longest)]


def equal_lengths(lengths: Sequence[int]) -> list[int]:
    """Returns as many lengths with the same sum, equal up to rounding."""
    batch, total = len(lengths), sum(lengths)
    return [total // batch + (number < total % batch) for number in range(batch)]


@dataclass(frozen=True)
class Pages:
    """Keys and values in pages in random order, with the page table and the number of keys of each sequence."""

    k: Any
    v: Any
    page_table: Any
    seqused_k: Any
    lengths: tuple[int, ...]

    @classmethod
    def create(cls, spec: AttentionSpec, lengths: Sequence[int], heads_kv: int, width: int) -> Pages:
        """Creates random pages for sequences of these lengths, with a table of `width` pages per sequence."""
        import torch

        size = spec.page_size or 1
        counts = [-(-length // size) for length in lengths]
        order = np.random.default_rng(_SEED).permutation(sum(counts)).astype(np.int32)
        table = np.zeros((len(lengths), width), np.int32)
        for row, ids in enumerate(np.split(order, np.cumsum(counts)[:-1])):
            table[row, : len(ids)] = ids
        torch.manual_seed(_SEED)
        shape, dtype = (sum(counts), size, heads_kv), getattr(torch, spec.dtype)
        k, v = (torch.randn((*shape, dim), device="cuda", dtype=dtype) for dim in (spec.head_dim, spec.value_dim))
        used = torch.tensor(list(lengths), dtype=torch.int32, device="cuda")
        return cls(k, v, torch.from_numpy(table).cuda(), used, tuple(lengths))

    @property
    def bytes(self) -> int:
        """The bytes of the keys and values of all sequences."""
        heads, dims = self.k.shape[2], self.k.shape[3] + self.v.shape[3]
        return self.k.element_size() * sum(self.lengths) * heads * dims

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call that locate the keys of each sequence."""
        return {"page_table": self.page_table, "seqused_k": self.seqused_k}


def queries(spec: AttentionSpec, batch: int, heads: int, tokens: int = 1) -> Any:
    """Returns random queries of a batch."""
    import torch

    torch.manual_seed(1)
    return torch.randn((batch, heads, tokens, spec.head_dim), device="cuda", dtype=getattr(torch, spec.dtype))


# ---- lengths


def lengths_rows(
    spec: AttentionSpec, size: DecodeSize = LENGTHS_SIZE, peers: Sequence[str] = (), target: str | None = None
) -> Iterator[ServingRow]:
    """Measures sequences of equal lengths, and of lengths from 1 to size.len_k with as many keys in total.

    With "flashgen", each block derives its work units from the lengths. "scheduled" reads a schedule that was created
    before the call. "N splits" divides every sequence into N splits. `compared` is the bandwidth relative to that of
    equal lengths.
    """
    paged, drawn = with_cache(spec, PAGE_SIZE), drawn_lengths(size.batch, size.len_k)
    attention, q = compile(paged, target), queries(spec, size.batch, size.heads)
    equal_bandwidths: Mapping[str, float] = {}
    for name, lengths in (("equal", equal_lengths(drawn)), ("1 to " + str(size.len_k), drawn)):
        pages = Pages.create(paged, lengths, size.heads_kv, -(-size.len_k // PAGE_SIZE))
        runs = _paged_runs(attention, q, pages, size)
        if "FlashInfer" in peers and (run := paged_attention(spec, [q], pages.k, pages.v, _csr(pages))):
            runs["FlashInfer"] = run
        row = serving_row("lengths", name, attention.target.name, pages.bytes, medians_ms(runs), {})
        equal_bandwidths = equal_bandwidths or row.terabytes
        yield replace(
            row, compared={contender: each / equal_bandwidths[contender] for contender, each in row.terabytes.items()}
        )


def _paged_runs(attention: Any, q: Any, pages: Pages, size: DecodeSize) -> dict[str, Run]:
    heads = {"heads": size.heads, "heads_kv": size.heads_kv}
    schedule = attention.decode_schedule(**pages.arguments, **heads)
    run: Callable[..., Run] = lambda **how: lambda: attention(q, pages.k, pages.v, **pages.arguments, **how)
    splits = {f"{many} splits": run(num_splits=many) for many in (1, 8)}
    return {"flashgen": run(), "scheduled": run(decode_schedule=schedule), **splits}


def _csr(pages: Pages) -> Table:
    """Returns the page table of FlashInfer."""
    counts = [-(-length // PAGE_SIZE) for length in pages.lengths]
    table = pages.page_table.cpu().numpy()
    indices = [int(page) for row, count in zip(table, counts, strict=True) for page in row[:count]]
    last = [length - (count - 1) * PAGE_SIZE for length, count in zip(pages.lengths, counts, strict=True)]
    return [0, *np.cumsum(counts).tolist()], indices, last


# ---- variants


@dataclass(frozen=True)
class ServingVariant:
    """A mask and a score for a number of queries.

    Attributes:
        options: arguments of the spec.
        captures: returns the captures at a size.
        visited: returns the number of visited keys per sequence at a size; None derives it from the mask.
        flex: the mask for FlexAttention if it differs, since torch does not clamp indices.
    """

    name: str
    options: Mapping[str, Any]
    len_q: int = 1
    captures: Callable[[DecodeSize], dict[str, Any]] = lambda size: {}
    visited: Callable[[DecodeSize], int] | None = None
    flex: Mask | None = None


def same_document(ids: Tensor) -> Mask:
    """Returns a mask by document ids of keys, for queries that stand at the end of their sequence."""

    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ids[b, q + (len_k - len_q)] == ids[b, k]

    return trace_mask(same, "same_document")


def tree_within(bits: Tensor) -> Mask:
    """Returns the mask of `tree` with indices that stay inside of the array for keys before the draft."""

    def kept(b: Any, h: Any, q: Any, k: Any) -> Any:
        token = k - (len_k - len_q)
        drafted = maximum(token, 0)
        return (token < 0) | ((bits[b, q, drafted >> 5] >> (drafted & 31)) & 1 != 0)

    return trace_mask(kept, "tree_within")


def serving_variants() -> tuple[ServingVariant, ...]:
    """Returns the measured variants, full attention first."""
    documents, bits = Tensor("ids", "int32", 2), Tensor("bits", "int32", 3)
    return (
        ServingVariant("full", {}),
        ServingVariant(f"window {_WINDOW}", {"mask": sliding_window(_WINDOW - 1)}),
        ServingVariant("softcap", {"score": softcap(30.0)}),
        ServingVariant("ALiBi", {"score": alibi(32), "mask": causal()}),
        ServingVariant("documents", {"mask": same_document(documents)}, 1, _documents, _document_length),
        ServingVariant("tree", {"mask": tree(bits)}, _TOKENS, _bits, flex=tree_within(bits)),
    )


def _documents(size: DecodeSize) -> dict[str, Any]:
    import torch

    ids = torch.arange(size.len_k, device="cuda", dtype=torch.int32) // _document_length(size)
    return {"ids": ids.expand(size.batch, -1).contiguous()}


def _document_length(size: DecodeSize) -> int:
    return -(-size.len_k // _DOCUMENTS)


def _bits(size: DecodeSize) -> dict[str, Any]:
    import torch

    parents = np.random.default_rng(_SEED).integers(-1, np.arange(_TOKENS), (size.batch, _TOKENS))
    return {"bits": torch.from_numpy(tree_bits(parents)).cuda()}


def variant_rows(
    spec: AttentionSpec,
    sizes: Sequence[DecodeSize] = VARIANT_SIZES,
    peers: Sequence[str] = (),
    target: str | None = None,
    only: Sequence[str] = (),
) -> Iterator[ServingRow]:
    """Measures variants over contiguous keys; "plain" is full attention over as many keys as the variant visits.

    `compared` has the bandwidth of flashgen relative to "plain", and its speed relative to "Flex".
    """
    for size in sizes:
        for variant in serving_variants():
            if not only or variant.name in only:
                yield _measure_variant(spec, variant, replace(size, len_q=variant.len_q), peers, target)


def _measure_variant(
    spec: AttentionSpec, variant: ServingVariant, size: DecodeSize, peers: Sequence[str], target: str | None
) -> ServingRow:
    import torch

    own = AttentionSpec(spec.head_dim, spec.dtype, **variant.options)
    plain = AttentionSpec(spec.head_dim, spec.dtype, mask=full())
    visited = variant.visited(size) if variant.visited else keys_needed(own, size)
    torch.manual_seed(_SEED)
    dtype, shape = getattr(torch, spec.dtype), (size.batch, size.heads_kv, size.len_k, spec.head_dim)
    k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    q, captures = queries(spec, size.batch, size.heads, size.len_q), variant.captures(size)
    fewer = [array[:, :, :visited].contiguous() for array in (k, v)]
    attention, full_attention = compile(own, target), compile(plain, target)
    lists = _lists(attention, size, captures)
    runs: dict[str, Run] = {
        "flashgen": lambda: attention(q, k, v, **captures, **lists),
        "plain": lambda: full_attention(q, *fewer),
    }
    for_flex = AttentionSpec(spec.head_dim, spec.dtype, mask=variant.flex) if variant.flex is not None else own
    if "Flex" in peers and (found := flex(for_flex, "forward", (q, k, v, q), captures, time_mask=False)):
        runs["Flex"] = found.run
    times = medians_ms(runs)
    moved = spec.element.bytes * visited * size.batch * size.heads_kv * 2 * spec.head_dim
    compared = {f"of {other}": times[other] / times["flashgen"] for other in ("plain", "Flex") if other in times}
    return serving_row("variants", f"{variant.name}: {size}", attention.target.name, moved, times, compared)


def _lists(attention: Any, size: DecodeSize, captures: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tile lists of a mask without a closed form, created once, as a server does for all layers."""
    if len(attention.kernels) == 1:
        return {}
    return {"tile_lists": attention.tile_lists(size.len_q, size.len_k, size.batch, size.heads, **captures)}


# ---- mixed batches


def mixed_rows(
    spec: AttentionSpec, size: DecodeSize = MIXED_SIZE, peers: Sequence[str] = (), target: str | None = None
) -> Iterator[ServingRow]:
    """Measures the last 2048 queries of a prompt and single queries of all other sequences, alone and together.

    "one launch" is a varlen batch over pages, "both" are two calls in sequence, and "contiguous" is the prompt alone
    over contiguous keys. `compared` has the times of "one launch" and "both" relative to the sum of the decodes alone
    and the faster prompt alone. FlashInfer uses one launch.
    """
    masked = replace(spec, mask=causal())
    paged = with_cache(masked, PAGE_SIZE)
    attention = compile(paged, target)
    pages = Pages.create(paged, [size.len_k] * size.batch, size.heads_kv, -(-size.len_k // PAGE_SIZE))
    q_prompt, q = queries(spec, 1, size.heads, PROMPT), queries(spec, size.batch - 1, size.heads)
    prompt_pages = {name: array[:1] for name, array in pages.arguments.items()}
    decode_pages = {name: array[1:] for name, array in pages.arguments.items()}

    def prompt() -> Any:
        return attention(q_prompt, pages.k, pages.v, **prompt_pages)

    def decodes() -> Any:
        return attention(q, pages.k, pages.v, **decode_pages)

    runs: dict[str, Run] = {"one launch": one_launch(paged, q_prompt, q, pages, target), "prompt": prompt}
    runs |= {"contiguous": contiguous(masked, q_prompt, pages, target), "decodes": decodes}
    runs["both"] = lambda: (prompt(), decodes())
    if "FlashInfer" in peers and (run := paged_attention(masked, [q_prompt, q], pages.k, pages.v, _csr(pages))):
        runs["FlashInfer"] = run
    times = medians_ms(runs)
    alone = min(times["prompt"], times["contiguous"]) + times["decodes"]
    compared = {f"{name}, of the sum": times[name] / alone for name in _TOGETHER}
    name = f"{PROMPT} queries over {size.len_k}, and {size.batch - 1} x 1"
    yield serving_row("mixed", name, attention.target.name, pages.bytes, times, compared)


def one_launch(spec: AttentionSpec, q_prompt: Any, q: Any, pages: Pages, target: str | None = None) -> Run:
    """Returns a run of the varlen batch over pages whose first sequence is the prompt."""
    import torch

    varlen = compile(replace(spec, layout="thd"), target)
    tokens = torch.cat([each.transpose(1, 2).flatten(0, 1) for each in (q_prompt, q)])
    ends = [0, *range(PROMPT, PROMPT + len(q) + 1)]
    begins = torch.tensor(ends, dtype=torch.int32, device=tokens.device)
    return lambda: varlen(tokens, pages.k, pages.v, cu_seqlens_q=begins, **pages.arguments)


def contiguous(spec: AttentionSpec, q_prompt: Any, pages: Pages, target: str | None = None) -> Run:
    """Returns a run of the prompt over contiguous keys with the values of the first sequence."""
    attention, table = compile(spec, target), pages.page_table[0].long()
    k, v = (array[table].flatten(0, 1).transpose(0, 1)[None].contiguous() for array in (pages.k, pages.v))
    return lambda: attention(q_prompt, k, v)


# ---- groups


_TOGETHER = ("one launch", "both")


CONTENDERS: Mapping[str, Sequence[str]] = {
    "lengths": ("flashgen", "scheduled", "1 splits", "8 splits", "FlashInfer"),
    "variants": ("flashgen", "plain", "Flex"),
    "mixed": ("one launch", "prompt", "contiguous", "decodes", "both", "FlashInfer"),
}
COMPARED: Mapping[str, Sequence[str]] = {
    "lengths": ("flashgen", "scheduled", "FlashInfer"),
    "variants": ("of plain", "of Flex"),
    "mixed": tuple(f"{name}, of the sum" for name in _TOGETHER),
}


def serving_rows(
    group: str,
    spec: AttentionSpec,
    sizes: Sequence[DecodeSize] = (),
    peers: Sequence[str] = (),
    target: str | None = None,
    only: Sequence[str] = (),
) -> Iterator[ServingRow]:
    """Measures a group, at its default sizes if none are given. `only` selects variants."""
    if group == "variants":
        yield from variant_rows(spec, sizes or VARIANT_SIZES, peers, target, only)
        return
    measure, size = (lengths_rows, LENGTHS_SIZE) if group == "lengths" else (mixed_rows, MIXED_SIZE)
    for each in sizes or (size,):
        yield from measure(spec, each, peers, target)
