"""What a server knows of its sequences: on the host, and on the device where a captured step reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens are wanted behind it."""

    number: int
    tokens: list[int]
    wanted: int


@dataclass
class Sequence:
    """A request that has a slot. cached: keys in the cache. made: tokens that were made of `wanted`."""

    request: Request
    slot: int
    pages: list[int]
    cached: int = 0
    made: int = 0
    admitted: int = field(default=0)

    @property
    def length(self) -> int:
        """Tokens that it has, prompt and made."""
        return len(self.request.tokens) + self.made


@dataclass(frozen=True)
class Chunk:
    """Tokens begin to end of the prompt in a slot: int32 table (1, pages), keys before it and after it (1,)."""

    slot: int
    begin: int
    end: int
    table: Any
    before: Any
    after: Any


@dataclass(frozen=True)
class Mixture:
    """Tokens of a step: one of every slot, and behind them a chunk of a prompt, each of which is a sequence.

    begins: int32 (slots + 2,), where sequences begin among the tokens. table: int32 (slots + 1, pages), and after:
    (slots + 1,), keys with this step's. tables (tokens, pages) and places (tokens,): where each token's key is kept.
    """

    begins: Any
    table: Any
    after: Any
    tables: Any
    places: Any


class State:
    """The slots on the device.

    tokens: int64 (slots, longest + 1), of each sequence; what idle slots make goes into the last column. lengths: int32
    (slots,), keys in the cache, and after: with this step's. active: int32 (slots,), 1 or 0. table: int32 (slots,
    pages), -1 where there is no page, so that idle slots write nowhere.
    """

    def __init__(self, slots: int, longest: int, page_size: int, device: str) -> None:
        self.longest, self.device = longest, device
        self.tokens = torch.zeros(slots, longest + 1, dtype=torch.int64, device=device)
        self.lengths, self.active, self.after = (torch.zeros(slots, dtype=torch.int32, device=device) for _ in range(3))
        self.table = torch.full((slots, -(-longest // page_size)), -1, dtype=torch.int32, device=device)

    def chunk_of(self, sequence: Sequence, most: int) -> Chunk:
        """The next tokens of a prompt."""
        begin = sequence.cached
        end = min(begin + most, len(sequence.request.tokens))
        row = torch.full((1, self.table.shape[1]), -1, dtype=torch.int32)
        row[0, : len(sequence.pages)] = torch.tensor(sequence.pages, dtype=torch.int32)
        before, after = (torch.tensor([each], dtype=torch.int32).to(self.device) for each in (begin, end))
        return Chunk(sequence.slot, begin, end, row.to(self.device), before, after)

    def mixture(self, chunk: Chunk) -> Mixture:
        """This step's token of every slot, and a chunk."""
        slots, count = self.lengths.shape[0], chunk.end - chunk.begin
        begins = torch.arange(slots + 2, dtype=torch.int32, device=self.device)
        begins[-1] = slots + count
        places = torch.arange(chunk.begin, chunk.end, dtype=torch.int32, device=self.device)
        return Mixture(
            begins,
            torch.cat((self.table, chunk.table)),
            torch.cat((self.after, chunk.after)),
            torch.cat((self.table, chunk.table.expand(count, -1))),
            torch.cat((self.lengths, places)),
        )

    def activate(self, sequence: Sequence, table: Any) -> None:
        """Lets a sequence whose prompt is in the cache take part in decode steps."""
        self.table[sequence.slot] = table[0]
        self.lengths[sequence.slot] = sequence.cached
        self.active[sequence.slot] = 1

    def clear(self, slot: int) -> None:
        """Makes a slot idle."""
        self.table[slot] = -1
        self.lengths[slot] = 0
        self.active[slot] = 0
