"""The plan of a call on several ranks: the blocks of scores that each rank computes, and the bytes that it sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from flashgen.analysis.intervals.evaluation import EMPTY, FULL, PARTIAL
from flashgen.errors import ArgumentError
from flashgen.language.masks import full
from flashgen.language.operations import INDICES, KEY, LEN_K, LEN_Q, QUERY
from flashgen.language.spec import AttentionSpec, without_shards
from flashgen.ranks.blocks import Block, Step, joined_ranges
from flashgen.ranks.classes import Rectangle, ScoreMatrix, classify, depends_on_distance_only, trim
from flashgen.ranks.halo import Halo, build_halos
from flashgen.ranks.layout import Layout

SCHEMES = ("ring", "all_gather", "ulysses", "ulysses_ring")
"""What ranks exchange: see `plan_of`."""
_ROUNDED_BYTES, _SUM_BYTES = 2, 4  # bytes per element of gradients of keys and values that are sent


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call that a plan needs in addition to its lengths.

    Attributes:
        batch: sequences.
        heads_q: query heads.
        heads_kv: KV heads.
    """

    batch: int = 1
    heads_q: int = 1
    heads_kv: int = 1


@dataclass(frozen=True, eq=False)
class Plan:
    """One call of a spec on several ranks.

    Rank numbers are those of the scheme.

    Attributes:
        scheme: "ring" or "all_gather". If heads are exchanged first (Ulysses), it is the scheme that runs after that
            exchange, the inner scheme.
        heads: the number of ranks that exchange heads, 1 for no exchange.
        spec: the spec of the call.
        queries: how the queries are sharded.
        keys: how the keys are sharded.
        sizes: the other sizes.
        captures: the captured numbers by name.
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
        """The number of ranks of the inner scheme."""
        return self.queries.ranks

    @cached_property
    def masked(self) -> AttentionSpec:
        """The spec that computes PARTIAL blocks."""
        return replace_fields(self.spec, sharded=True, sink=None)

    @cached_property
    def unmasked(self) -> AttentionSpec:
        """The spec that computes FULL blocks: without a mask, and sharded only if positions matter."""
        plain = replace_fields(self.spec, mask=full(), sink=None)
        return plain.shard() if self._reads(*INDICES, LEN_Q, LEN_K) else plain

    @cached_property
    def _scores(self) -> ScoreMatrix:
        sizes = self.sizes
        lengths = self.queries.length, self.keys.length
        return ScoreMatrix(self.spec.mask.expression, *lengths, sizes.batch, sizes.heads_q * self.heads, self.captures)

    @cached_property
    def _by_distance(self) -> bool:
        return self._can_join_blocks and depends_on_distance_only(self.spec.mask.expression)

    @cached_property
    def _can_join_blocks(self) -> bool:
        """Whether one block may have rows of different positions, because only the mask depends on positions."""
        return not self._reads(QUERY, KEY)

    def _reads(self, *symbols: Any) -> bool:
        """Returns whether the score function reads one of the symbols. Dropout reads all of them."""
        score = self.spec.score
        return bool(self.spec.dropout) or (score is not None and bool(score.expression.free_symbols & set(symbols)))

    def steps(self, rank: int) -> tuple[Step, ...]:
        """Returns the steps of a rank: first with its own keys, then with those of the ranks before it in the ring.

        Args:
            rank: the number of the rank.
        """
        if rank not in self._steps:
            if self.scheme == "all_gather":
                self._steps[rank] = self._all_gather_steps(rank)
            else:
                self._steps[rank] = self.halos[rank].steps(rank) if self.halos else self._ring_steps(rank)
        return self._steps[rank]

    @cached_property
    def halos(self) -> tuple[Halo, ...] | None:
        """The halo of each rank if a halo exchange is all that is needed, as with windows; else None."""
        if self.scheme != "ring" or self.ranks == 1:
            return None
        return build_halos(self._scores, self.queries, self.keys)

    def _ring_steps(self, rank: int) -> tuple[Step, ...]:
        owners = [(rank - distance) % self.ranks for distance in range(self.ranks)]
        steps = []
        for owner in owners:
            blocks = self._blocks(rank, owner)
            read = joined_ranges((block.k, block.k + block.keys) for block in blocks)
            steps.append(Step(owner, blocks, read if owner != rank else ()))
        return tuple(steps)

    def _all_gather_steps(self, rank: int) -> tuple[Step, ...]:
        """Returns one step over all keys in the order of positions."""
        blocks = [
            self._block(index, start, self.queries.chunk, 0, 0, self.keys.length)
            for index, start in enumerate(self.queries.starts(rank))
        ]
        return (Step(rank, tuple(block for block in blocks if block), ()),)

    def _blocks(self, rank: int, owner: int) -> tuple[Block, ...]:
        starts_q, starts_k = self.queries.starts(rank), self.keys.starts(owner)
        chunk_q, chunk_k = self.queries.chunk, self.keys.chunk
        if self._by_distance and self._is_one_block(starts_q, starts_k):
            rows, keys = len(starts_q) * chunk_q, len(starts_k) * chunk_k
            pairs = [trim(self._scores, Rectangle(q, chunk_q, k, chunk_k)) for q in starts_q for k in starts_k]
            unmasked = sum(pair.share * pair.rectangle.rows * pair.rectangle.keys for pair in pairs)
            return (Block(0, rows, 0, keys, starts_q[0], starts_k[0], PARTIAL, unmasked / max(rows * keys, 1)),)
        found = [
            self._block(i, q, chunk_q, j, k, chunk_k) for i, q in enumerate(starts_q) for j, k in enumerate(starts_k)
        ]
        blocks = [block for block in found if block]
        return tuple(_join_full_blocks(blocks) if self._can_join_blocks else blocks)

    def _block(self, i: int, q: int, rows: int, j: int, k: int, keys: int) -> Block | None:
        """Returns the block of the i-th chunk of queries and the j-th of keys, or None if it is empty."""
        (first_q, rows_left, first_k, keys_left), kind, share = trim(self._scores, Rectangle(q, rows, k, keys))
        if kind == EMPTY:
            return None
        row, key = i * rows + first_q - q, j * keys + first_k - k
        return Block(row, rows_left, key, keys_left, first_q, first_k, kind, share)

    def _is_one_block(self, starts_q: tuple[int, ...], starts_k: tuple[int, ...]) -> bool:
        """Returns whether one block, with all chunks moved right after the first, computes what a block per pair does.

        This holds for the two zigzag chunks of a rank under a causal mask: the later chunk sees all of the earlier
        one, whatever its position is.
        """
        chunk_q, chunk_k, seen = self.queries.chunk, self.keys.chunk, set()
        for i, q in enumerate(starts_q):
            for j, k in enumerate(starts_k):
                moved = (starts_q[0] + i * chunk_q, starts_k[0] + j * chunk_k)
                if moved[0] + chunk_q > self.queries.length or moved[1] + chunk_k > self.keys.length:
                    return False
                kind = classify(self._scores, Rectangle(q, chunk_q, k, chunk_k))
                seen.add(kind)
                if moved[0] - moved[1] != q - k:
                    moved_kind = classify(self._scores, Rectangle(moved[0], chunk_q, moved[1], chunk_k))
                    if kind == PARTIAL or kind != moved_kind:
                        return False
        return PARTIAL in seen and len(starts_q) * len(starts_k) > 1

    def kind(self, queries: int, keys: int) -> int:
        """Returns EMPTY, FULL or PARTIAL for the scores of two chunks, numbered in the order of positions.

        Args:
            queries: the number of a chunk of queries.
            keys: the number of a chunk of keys.
        """
        chunk_q, chunk_k = self.queries.chunk, self.keys.chunk
        return classify(self._scores, Rectangle(queries * chunk_q, chunk_q, keys * chunk_k, chunk_k))

    # Communication ----------------------------------------------------------------------------------------------------

    @property
    def _row_elements(self) -> int:
        """The number of elements of a row of keys and of values, over batch and heads."""
        return self.sizes.batch * self.sizes.heads_kv * (self.spec.head_dim + self.spec.value_dim)

    def received(self, step: Step) -> int:
        """Returns the bytes of keys and values that a rank receives for a step.

        Args:
            step: a step of the rank.
        """
        if self.scheme == "all_gather":
            return self.keys.rows * (self.ranks - 1) * self._row_elements * 2
        return step.received * self._row_elements * 2

    def sent(self, rank: int, backward: bool = False) -> tuple[int, ...]:
        """Returns the bytes that a rank sends in each step of a pass, without those of an exchange of heads.

        With a halo exchange or an all-gather there is one number for the whole pass.

        Args:
            rank: the number of the rank.
            backward: whether the pass is the backward.
        """
        return self._all_gather_bytes(backward) if self.scheme == "all_gather" else self._ring_bytes(rank, backward)

    def _all_gather_bytes(self, backward: bool) -> tuple[int, ...]:
        rows = self.keys.rows * (self.ranks - 1)
        return (rows * self._row_elements * (2 + _SUM_BYTES if backward else 2),)

    def _ring_bytes(self, rank: int, backward: bool) -> tuple[int, ...]:
        if self.halos:
            # Received keys and values are kept for the backward. One block computes each gradient and has rounded it.
            halo = self.halos[rank]
            return ((halo.received if backward else halo.sent) * self._row_elements * 2,)
        sent = []
        for distance in range(self.ranks):
            rows = self.steps((rank + distance) % self.ranks)[distance].received * 2
            if backward:
                step = self.steps(rank)[distance]
                rows += step.received * (_SUM_BYTES if step.adds else _ROUNDED_BYTES)
            sent.append(rows * self._row_elements)
        return tuple(sent)

    def exchanged(self, backward: bool = False) -> int:
        """Returns the bytes that each rank sends to exchange heads: q, k, v and the output, or their gradients.

        Args:
            backward: whether the pass is the backward.
        """
        if self.heads == 1:
            return 0
        spec, sizes = self.spec, self.sizes
        rows_q, rows_k = self.queries.rows // self.heads, self.keys.rows // self.heads
        elements_q = rows_q * sizes.heads_q * self.heads * (spec.head_dim + spec.value_dim)
        elements_k = rows_k * sizes.heads_kv * self.heads * (spec.head_dim + spec.value_dim)
        return sizes.batch * (elements_q + elements_k) * 2 * (self.heads - 1) // self.heads

    # Computation ------------------------------------------------------------------------------------------------------

    def work(self, rank: int) -> float:
        """Returns the approximate number of unmasked scores of one head that a rank computes.

        Args:
            rank: the number of the rank.
        """
        return sum(block.work for step in self.steps(rank) for block in step.blocks)

    @property
    def balance(self) -> float:
        """The mean number of scores of a rank divided by that of the busiest rank: 1 is perfectly balanced."""
        counts = [self.work(rank) for rank in range(self.ranks)]
        return sum(counts) / len(counts) / max(counts) if max(counts) else 1.0


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
    """Returns the plan of a call.

    Args:
        spec: the spec of the unsharded call, without layout "thd", pages and 8-bit keys.
        ranks: the number of ranks of the group, including those that exchange heads.
        length: the number of queries of the full sequence.
        length_k: the number of keys of the full sequence; None for `length`.
        scheme: "ring", "all_gather", "ulysses" or "ulysses_ring".
        shards: "zigzag" or "plain".
        heads: for "ulysses_ring", the number of ranks that exchange heads; other schemes ignore it.
        sizes: the batch and heads of the unsharded call; None for a batch of 1 and one head per rank of an exchange.
        captures: known values that the mask reads, as numbers and NumPy arrays. Nothing is assumed about others.

    Raises ArgumentError if lengths, heads and ranks do not fit together.
    """
    if scheme not in SCHEMES:
        raise ArgumentError(f"scheme={scheme!r} must be one of {', '.join(SCHEMES)}")
    if without_shards(spec.layout, spec.page_size) or spec.kv_dtype or spec.sharded:
        raise ArgumentError(f"{spec!r}: give a spec without layout 'thd', pages, 8-bit keys and sharded=True")
    heads = {"ulysses": ranks, "ulysses_ring": heads}.get(scheme, 1)
    if ranks % heads:
        raise ArgumentError(f"ranks={ranks} is not a multiple of the {heads} that exchange heads")
    sizes = sizes or Sizes(heads_q=heads, heads_kv=heads)
    if sizes.heads_kv % heads or sizes.heads_q % heads:
        raise ArgumentError(
            f"scheme={scheme!r}: {sizes.heads_q} heads of q and {sizes.heads_kv} of k and v are not multiples of the "
            f"{heads} ranks that exchange heads: repeat the heads of k and v, or take scheme='ring' or 'all_gather'"
        )
    inner = ranks // heads
    shards = shards if inner > 1 else "plain"  # a single rank has all positions in order
    queries, keys = (Layout(inner, total, shards) for total in (length, length if length_k is None else length_k))
    for layout in (queries, keys):
        if layout.rows % heads:
            raise ArgumentError(f"{layout.rows} rows per rank are not a multiple of the {heads} that exchange heads")
        if spec.dropout and layout.chunk % 32:
            raise ArgumentError(
                f"with dropout, chunks must be multiples of 32 positions; a length of {layout.length} on {inner} "
                f"ranks makes chunks of {layout.chunk}: pad the sequence to a multiple of {32 * layout.chunks}"
            )
    own = replace(sizes, heads_q=sizes.heads_q // heads, heads_kv=sizes.heads_kv // heads)
    inner_scheme = "all_gather" if scheme == "all_gather" else "ring"
    return Plan(spec, inner_scheme, queries, keys, own, heads, captures or {})


def replace_fields(spec: AttentionSpec, **changed: Any) -> AttentionSpec:
    """Returns the spec with some fields changed."""
    names = ("head_dim", "dtype", "value_dim", "scale", "layout", "dropout", "score", "mask", "sink", "sharded")
    return AttentionSpec(**{name: getattr(spec, name) for name in names} | changed)


def _join_full_blocks(blocks: list[Block]) -> list[Block]:
    """Joins FULL blocks that together form a rectangle."""
    for i, one in enumerate(blocks):
        for j, other in enumerate(blocks):
            if i != j and one.kind == other.kind == FULL:
                under = one[2:4] == other[2:4] and one.q + one.rows == other.q
                beside = one[:2] == other[:2] and one.k + one.keys == other.k
                if under or beside:
                    rows, keys = (one.rows + other.rows, one.keys) if under else (one.rows, one.keys + other.keys)
                    rest = [block for n, block in enumerate(blocks) if n not in (i, j)]
                    return _join_full_blocks([*rest, one._replace(rows=rows, keys=keys)])
    return blocks
