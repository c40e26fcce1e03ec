"""Who computes which blocks of the scores, and what is sent to whom, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from flashgen.analysis.intervals.evaluation import EMPTY, FULL, PARTIAL
from flashgen.errors import ArgumentError
from flashgen.language.masks import full
from flashgen.language.operations import INDICES, KEY, LEN_K, LEN_Q, QUERY
from flashgen.language.spec import AttentionSpec
from flashgen.ranks.blocks import Block, Step, joined_ranges
from flashgen.ranks.classes import Rectangle, Whole, class_of, found_in, is_of_distances
from flashgen.ranks.halo import Halo, halos_of
from flashgen.ranks.layout import Layout

SCHEMES = ("ring", "all_gather", "ulysses", "ulysses_ring")
"""What ranks exchange: see `plan_of`."""
_ROUNDED, _SUMS = 2, 4  # bytes of an element of gradients of keys and values on their way


@dataclass(frozen=True)
class Sizes:
    """What a plan needs to know of a call beside its lengths."""

    batch: int = 1
    heads_q: int = 1
    heads_kv: int = 1


@dataclass(frozen=True, eq=False)
class Plan:
    """One call of a spec on several ranks.

    scheme: "ring" or "all_gather", of what stands behind an exchange of heads if there is one. heads: into how many
    groups of heads such an exchange splits them. Ranks are those of the inner scheme.
    """

    spec: AttentionSpec
    scheme: str
    queries: Layout
    keys: Layout
    sizes: Sizes
    heads: int = 1
    captures: Mapping[str, Any] = field(default_factory=dict)
    _steps: dict[int, tuple[Step, ...]] = field(default_factory=dict, repr=False)

    @property
    def ranks(self) -> int:
        """Of the inner scheme."""
        return self.queries.ranks

    @cached_property
    def masked(self) -> AttentionSpec:
        """What computes blocks that the mask cuts."""
        return replace_fields(self.spec, sharded=True, sink=None)

    @cached_property
    def unmasked(self) -> AttentionSpec:
        """What computes blocks that the mask leaves whole: without mask code, and at positions only if they count."""
        plain = replace_fields(self.spec, mask=full(), sink=None)
        return plain.shard() if self._reads(*INDICES, LEN_Q, LEN_K) else plain

    @cached_property
    def _whole(self) -> Whole:
        sizes = self.sizes
        lengths = self.queries.length, self.keys.length
        return Whole(self.spec.mask.expression, *lengths, sizes.batch, sizes.heads_q * self.heads, self.captures)

    @cached_property
    def _by_distance(self) -> bool:
        return self._joins and is_of_distances(self.spec.mask.expression)

    @cached_property
    def _joins(self) -> bool:
        """Whether rows of different places may stand in one block: nothing but the mask depends on where."""
        return not self._reads(QUERY, KEY)

    def _reads(self, *symbols: Any) -> bool:
        """Whether the score function reads one of the symbols, or dropout all of them."""
        score = self.spec.score
        return bool(self.spec.dropout) or (score is not None and bool(score.expression.free_symbols & set(symbols)))

    def steps(self, rank: int) -> tuple[Step, ...]:
        """What a rank does: first with its own keys, then with those of others, in a ring of the ranks before it."""
        if rank not in self._steps:
            if self.scheme == "all_gather":
                self._steps[rank] = self._gathered(rank)
            else:
                self._steps[rank] = self.halos[rank].steps(rank) if self.halos else self._ring(rank)
        return self._steps[rank]

    @cached_property
    def halos(self) -> tuple[Halo, ...] | None:
        """What each rank needs of those beside it, where that is all that is sent, as with windows; else None."""
        if self.scheme != "ring" or self.ranks == 1:
            return None
        return halos_of(self._whole, self.queries, self.keys)

    def _ring(self, rank: int) -> tuple[Step, ...]:
        owners = [(rank - distance) % self.ranks for distance in range(self.ranks)]
        made = []
        for owner in owners:
            blocks = self._blocks(rank, owner)
            read = joined_ranges((block.k, block.k + block.keys) for block in blocks)
            made.append(Step(owner, blocks, read if owner != rank else ()))
        return tuple(made)

    def _gathered(self, rank: int) -> tuple[Step, ...]:
        """All keys in the order of positions, at once."""
        blocks = [
            self._block(index, start, self.queries.chunk, 0, 0, self.keys.length)
            for index, start in enumerate(self.queries.starts(rank))
        ]
        return (Step(rank, tuple(block for block in blocks if block), ()),)

    def _blocks(self, rank: int, owner: int) -> tuple[Block, ...]:
        starts_q, starts_k = self.queries.starts(rank), self.keys.starts(owner)
        chunk_q, chunk_k = self.queries.chunk, self.keys.chunk
        if self._by_distance and self._is_one(starts_q, starts_k):
            rows, keys = len(starts_q) * chunk_q, len(starts_k) * chunk_k
            pairs = [found_in(self._whole, Rectangle(q, chunk_q, k, chunk_k)) for q in starts_q for k in starts_k]
            share = sum(each.share * each.rectangle.rows * each.rectangle.keys for each in pairs) / max(rows * keys, 1)
            return (Block(0, rows, 0, keys, starts_q[0], starts_k[0], PARTIAL, share),)
        found = [
            self._block(i, q, chunk_q, j, k, chunk_k) for i, q in enumerate(starts_q) for j, k in enumerate(starts_k)
        ]
        blocks = [block for block in found if block]
        return tuple(_joined(blocks) if self._joins else blocks)

    def _block(self, i: int, q: int, rows: int, j: int, k: int, keys: int) -> Block | None:
        """The block of the i-th chunk of queries and the j-th of keys; None where there is nothing to compute."""
        (first_q, rows_left, first_k, keys_left), kind, share = found_in(self._whole, Rectangle(q, rows, k, keys))
        if kind == EMPTY:
            return None
        row, key = i * rows + first_q - q, j * keys + first_k - k
        return Block(row, rows_left, key, keys_left, first_q, first_k, kind, share)

    def _is_one(self, starts_q: tuple[int, ...], starts_k: tuple[int, ...]) -> bool:
        """Whether chunks give together what they give alone, if all were behind the first: so one call serves them.

        That is so for zigzag's two chunks of a rank under a causal mask: the later one sees all of the earlier one
        wherever it stands.
        """
        chunk_q, chunk_k, seen = self.queries.chunk, self.keys.chunk, set()
        for i, q in enumerate(starts_q):
            for j, k in enumerate(starts_k):
                moved = (starts_q[0] + i * chunk_q, starts_k[0] + j * chunk_k)
                if moved[0] + chunk_q > self.queries.length or moved[1] + chunk_k > self.keys.length:
                    return False
                kind = class_of(self._whole, Rectangle(q, chunk_q, k, chunk_k))
                seen.add(kind)
                if moved[0] - moved[1] != q - k:
                    there = class_of(self._whole, Rectangle(moved[0], chunk_q, moved[1], chunk_k))
                    if kind == PARTIAL or kind != there:
                        return False
        return PARTIAL in seen and len(starts_q) * len(starts_k) > 1

    def kind(self, queries: int, keys: int) -> int:
        """EMPTY, FULL or PARTIAL: of the scores of two chunks, by their numbers in the order of positions."""
        chunk_q, chunk_k = self.queries.chunk, self.keys.chunk
        return class_of(self._whole, Rectangle(queries * chunk_q, chunk_q, keys * chunk_k, chunk_k))

    # What is moved ----------------------------------------------------------------------------------------------------

    @property
    def _row_elements(self) -> int:
        """Of a row of keys and of values, over batch and heads."""
        return self.sizes.batch * self.sizes.heads_kv * (self.spec.head_dim + self.spec.value_dim)

    def received(self, step: Step) -> int:
        """Bytes of keys and values that a rank receives for a step."""
        if self.scheme == "all_gather":
            return self.keys.rows * (self.ranks - 1) * self._row_elements * 2
        return step.received * self._row_elements * 2

    def sent(self, rank: int, backward: bool = False) -> tuple[int, ...]:
        """Bytes that a rank sends in each step of a pass, or at once, beside those of an exchange of heads."""
        return self._gathered_bytes(backward) if self.scheme == "all_gather" else self._ring_bytes(rank, backward)

    def _gathered_bytes(self, backward: bool) -> tuple[int, ...]:
        rows = self.keys.rows * (self.ranks - 1)
        return (rows * self._row_elements * (2 + _SUMS if backward else 2),)

    def _ring_bytes(self, rank: int, backward: bool) -> tuple[int, ...]:
        if self.halos:
            # Keys and values stay between the passes, and each of their gradients is of one block, which rounded it.
            halo = self.halos[rank]
            return ((halo.received if backward else halo.sent) * self._row_elements * 2,)
        sent = []
        for distance in range(self.ranks):
            rows = self.steps((rank + distance) % self.ranks)[distance].received * 2
            if backward:
                step = self.steps(rank)[distance]
                rows += step.received * (_SUMS if step.adds else _ROUNDED)
            sent.append(rows * self._row_elements)
        return tuple(sent)

    def exchanged(self, backward: bool = False) -> int:
        """Bytes that each rank sends where heads are exchanged: q, k and v there, the output back, or gradients."""
        if self.heads == 1:
            return 0
        spec, sizes = self.spec, self.sizes
        rows_q, rows_k = self.queries.rows // self.heads, self.keys.rows // self.heads
        of_q = rows_q * sizes.heads_q * self.heads * (spec.head_dim + spec.value_dim)
        of_k = rows_k * sizes.heads_kv * self.heads * (spec.head_dim + spec.value_dim)
        return sizes.batch * (of_q + of_k) * 2 * (self.heads - 1) // self.heads

    # Work -------------------------------------------------------------------------------------------------------------

    def work(self, rank: int) -> float:
        """About how many scores of a head a rank computes that count."""
        return sum(block.work for step in self.steps(rank) for block in step.blocks)

    @property
    def balance(self) -> float:
        """What ranks compute at the mean, of what the busiest one does: 1 is the best."""
        works = [self.work(rank) for rank in range(self.ranks)]
        return sum(works) / len(works) / max(works) if max(works) else 1.0


def plan_of(
    spec: AttentionSpec,
    ranks: int,
    length: int,
    length_k: int | None = None,
    *,
    scheme: str = "ring",
    shards: str = "zigzag",
    heads: int = 1,
    sizes: Sizes | None = None,
    captures: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan of a call.

    Args:
        spec: what is computed; not of layout "thd", and neither of pages nor of 8-bit keys.
        ranks: of the group, with those among whom heads are exchanged.
        length: queries of the whole sequence; length_k: keys, None for as many.
        scheme: "ring", "all_gather", "ulysses" or "ulysses_ring".
        shards: "zigzag" or "plain".
        heads: of "ulysses_ring", how many ranks exchange heads; the others are set by the scheme.
        sizes: batch and heads of a call of the group; None is one of each.
        captures: numbers and arrays of NumPy that the mask reads, where they are known: of others nothing is assumed.

    Raises ArgumentError where lengths, heads and ranks do not fit together.
    """
    if scheme not in SCHEMES:
        raise ArgumentError(f"scheme={scheme!r} must be one of {', '.join(SCHEMES)}")
    if spec.is_ragged or spec.of_cache or spec.sharded:
        raise ArgumentError(f"{spec!r}: give a spec of whole sequences, without pages, 8-bit keys and sharded=True")
    heads = {"ulysses": ranks, "ulysses_ring": heads}.get(scheme, 1)
    if ranks % heads:
        raise ArgumentError(f"ranks={ranks} is no multiple of the {heads} that exchange heads")
    sizes = sizes or Sizes(heads_q=heads, heads_kv=heads)
    if sizes.heads_kv % heads or sizes.heads_q % heads:
        raise ArgumentError(
            f"scheme={scheme!r}: {sizes.heads_q} heads of q and {sizes.heads_kv} of k and v are no multiples of the "
            f"{heads} ranks that exchange heads: repeat the heads of k and v, or take scheme='ring' or 'all_gather'"
        )
    inner = ranks // heads
    shards = shards if inner > 1 else "plain"  # a rank that has all positions has them in their order
    queries, keys = (Layout(inner, whole, shards) for whole in (length, length if length_k is None else length_k))
    for layout in (queries, keys):
        if layout.rows % heads:
            raise ArgumentError(f"{layout.rows} rows of {inner} ranks are no multiple of the {heads} that share them")
        if spec.dropout and layout.chunk % 32:
            raise ArgumentError(
                f"with dropout chunks are of whole blocks of 32 positions; a length of {layout.length} on {inner} "
                f"ranks makes chunks of {layout.chunk}: pad the sequence to a multiple of {32 * layout.chunks}"
            )
    own = replace(sizes, heads_q=sizes.heads_q // heads, heads_kv=sizes.heads_kv // heads)
    inner_scheme = "all_gather" if scheme == "all_gather" else "ring"
    return Plan(spec, inner_scheme, queries, keys, own, heads, captures or {})


def replace_fields(spec: AttentionSpec, **changed: Any) -> AttentionSpec:
    """The spec with other fields."""
    names = ("head_dim", "dtype", "value_dim", "scale", "layout", "dropout", "score", "mask", "sink", "sharded")
    return AttentionSpec(**{name: getattr(spec, name) for name in names} | changed)


def _joined(blocks: list[Block]) -> list[Block]:
    """The blocks, full ones that make up a rectangle joined."""
    for i, one in enumerate(blocks):
        for j, other in enumerate(blocks):
            if i != j and one.kind == other.kind == FULL:
                under = one[2:4] == other[2:4] and one.q + one.rows == other.q
                beside = one[:2] == other[:2] and one.k + one.keys == other.k
                if under or beside:
                    rows, keys = (one.rows + other.rows, one.keys) if under else (one.rows, one.keys + other.keys)
                    rest = [block for n, block in enumerate(blocks) if n not in (i, j)]
                    return _joined([*rest, one._replace(rows=rows, keys=keys)])
    return blocks
