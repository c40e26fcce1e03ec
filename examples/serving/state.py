"""The state of a server's sequences on the host, and on the device, where captured steps read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Request:
    """A prompt and the number of tokens to generate."""

    number: int
    tokens: list[int]
    wanted: int


@dataclass
class Sequence:
    """A request that has a slot. cached: keys in the cache. generated: number of generated tokens."""

    request: Request
    slot: int
    pages: list[int]
    cached: int = 0
    generated: int = 0
    admitted: int = field(default=0)

    @property
    def length(self) -> int:
        """The number of tokens, prompt and generated."""
        return len(self.request.tokens) + self.generated


@dataclass(frozen=True)
class Chunk:
    """Tokens begin to end of the prompt in a slot.

    table: int32 (1, pages). before, after: (1,), number of cached keys before and after the chunk.
    """

    slot: int
    begin: int
    end: int
    table: Any
    before: Any
    after: Any


@dataclass(frozen=True)
class Mixture:
    """The sequences of a mixed step: one token of every slot, followed by a chunk of a prompt.

    begins: int32 (slots + 2,), where sequences begin among the tokens. table: int32 (slots + 1, pages). after: (slots +
    1,), number of keys including this step's. tables (tokens, pages) and positions (tokens,): where the key of each
    token is cached.
    """

    begins: Any
    table: Any
    after: Any
    tables: Any
    positions: Any


class State:
    """The slots on the device.

    tokens: int64 (slots, longest + 1), of each sequence; idle slots write to the last column. lengths: int32 (slots,),
    cached keys. after: the same including this step's. active: int32 (slots,), 1 or 0. table: int32 (slots, pages), -1
    where there is no page, so that idle slots write nothing.
    """

    def __init__(self, slots: int, longest: int, page_size: int, device: str) -> None:
        self.longest, self.device = longest, device
        self.tokens = torch.zeros(slots, longest + 1, dtype=torch.int64, device=device)
        self.lengths, self.active, self.after = (torch.zeros(slots, dtype=torch.int32, device=device) for _ in range(3))
        self.table = torch.full((slots, -(-longest // page_size)), -1, dtype=torch.int32, device=device)

    def chunk_of(self, sequence: Sequence, limit: int) -> Chunk:
        """Returns the next tokens of a prompt, at most `limit`."""
        begin = sequence.cached
        end = min(begin + limit, len(sequence.request.tokens))
        row = torch.full((1, self.table.shape[1]), -1, dtype=torch.int32)
        row[0, : len(sequence.pages)] = torch.tensor(sequence.pages, dtype=torch.int32)
        before, after = (torch.tensor([each], dtype=torch.int32).to(self.device) for each in (begin, end))
        return Chunk(sequence.slot, begin, end, row.to(self.device), before, after)

    def mixture(self, chunk: Chunk) -> Mixture:
        """Returns the sequences of a step with a chunk."""
        slots, count = self.lengths.shape[0], chunk.end - chunk.begin
        begins = torch.arange(slots + 2, dtype=torch.int32, device=self.device)
        begins[-1] = slots + count
        positions = torch.arange(chunk.begin, chunk.end, dtype=torch.int32, device=self.device)
        return Mixture(
            begins,
            torch.cat((self.table, chunk.table)),
            torch.cat((self.after, chunk.after)),
            torch.cat((self.table, chunk.table.expand(count, -1))),
            torch.cat((self.lengths, positions)),
        )

    def activate(self, sequence: Sequence, table: Any) -> None:
        """Adds a sequence with a cached prompt to the decode steps."""
        self.table[sequence.slot] = table[0]
        self.lengths[sequence.slot] = sequence.cached
        self.active[sequence.slot] = 1

    def clear(self, slot: int) -> None:
        """Marks a slot as idle."""
        self.table[slot] = -1
        self.lengths[slot] = 0
        self.active[slot] = 0
