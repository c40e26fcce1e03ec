"""The serving loop: admission, chunked prefill with decoding, growth by pages, eviction, captured decode steps."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as Several
from typing import Any

import torch

from serving.attention import Attention
from serving.llama import Llama
from serving.pages import Pool
from serving.state import Chunk, Request, Sequence, State


class Server:
    """Serves requests with a model and an attention, by greedy decoding.

    slots: sequences that decode together. chunk: prompt tokens that a step processes with them. On a GPU, a step
    without a prompt is a captured graph, which is replayed for all contents of tables and lengths.
    """

    def __init__(
        self, model: Llama, attention: Attention, pool: Pool, slots: int, longest: int, chunk: int, capture: bool
    ) -> None:
        self.model, self.attention, self.pool = model, attention, pool
        self.state = State(slots, longest, pool.page_size, model.device)
        self.chunk, self.capture = chunk, capture
        self.counts: Counter[str] = Counter()
        self._idle = list(range(slots))[::-1]
        self._running: list[Sequence] = []
        self._prompt: Sequence | None = None
        self._graphs: dict[int, Any] = {}
        self._done: dict[int, Any] = {}

    @torch.inference_mode()
    def run(self, requests: Several[Request]) -> dict[int, list[int]]:
        """Returns all tokens of each request, by its number."""
        waiting = deque(requests)
        self._done = {}
        while waiting or self._running or self._prompt:
            if self._prompt is None and waiting and self._fits(waiting[0]):
                self._admit(waiting.popleft())
            self._grow(waiting)
            if self._prompt:
                self._mixed(self._prompt)
            else:
                self._decode()
            self._finish()
        return {number: tokens.tolist() for number, tokens in self._done.items()}

    def _fits(self, request: Request) -> bool:
        """Whether there are a slot and pages for the prompt and a token. Raises ValueError if there can never be."""
        size, end = self.pool.page_size, len(request.tokens) + request.wanted
        if end > self.state.longest:
            raise ValueError(f"request {request.number} has {end} tokens; a slot has room for {self.state.longest}")
        if not self._running and -(-end // size) > self.pool.free:
            raise ValueError(
                f"request {request.number} has {end} tokens; the pool has {self.pool.free} pages of {size}"
            )
        shared = len(self.pool.shared(request.tokens))
        return bool(self._idle) and len(request.tokens) // size + 1 - shared <= self.pool.free

    def _admit(self, request: Request) -> None:
        shared = self.pool.shared(request.tokens)
        self.pool.share(shared)
        fresh = self.pool.take(-(-len(request.tokens) // self.pool.page_size) - len(shared))
        cached, slot = len(shared) * self.pool.page_size, self._idle.pop()
        if shared:
            source = next(each.slot for each in self._running if each.pages[: len(shared)] == shared)
            self.attention.share(cached, source, slot)
        self.counts["admitted"] += 1
        self.counts["shared"] += cached
        self._prompt = Sequence(request, slot, shared + fresh, cached, admitted=self.counts["admitted"])
        self.state.tokens[slot, : len(request.tokens)] = torch.tensor(request.tokens, device=self.model.device)

    def _grow(self, waiting: deque[Request]) -> None:
        """Gives each sequence whose last page is full another one; evicts the youngest sequence if none is free."""
        for sequence in list(self._running):
            while sequence in self._running and sequence.cached == len(sequence.pages) * self.pool.page_size:
                if not self.pool.free:
                    candidates = [*self._running, *([self._prompt] if self._prompt else [])]
                    self._evict(max(candidates, key=lambda each: each.admitted), waiting)
                    continue
                sequence.pages += self.pool.take(1)
                self.state.table[sequence.slot, len(sequence.pages) - 1] = sequence.pages[-1]

    def _evict(self, sequence: Sequence, waiting: deque[Request]) -> None:
        """Releases the pages of a sequence and queues it again, with generated tokens as part of its prompt."""
        request, generated = sequence.request, sequence.generated
        if generated:
            tokens = self.state.tokens[sequence.slot, : sequence.length].tolist()
            request = Request(request.number, tokens, request.wanted - generated)
        waiting.appendleft(request)
        self.counts["evicted"] += 1
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        self.state.clear(sequence.slot)
        self._idle.append(sequence.slot)
        if sequence is self._prompt:
            self._prompt = None
        else:
            self._running.remove(sequence)

    def _finish(self) -> None:
        for sequence in [each for each in self._running if each.generated == each.request.wanted]:
            self._done[sequence.request.number] = self.state.tokens[sequence.slot, : sequence.length].clone()
            self._leave(sequence)

    def _mixed(self, sequence: Sequence) -> None:
        """Runs a step with the next chunk of a prompt and one token of every decoding sequence."""
        chunk = self.state.chunk_of(sequence, self.chunk)
        reach = self._reach()
        last = self._step(reach, chunk)
        self._count_tokens()
        self.counts["prompt"] += chunk.end - chunk.begin
        sequence.cached = chunk.end
        if chunk.end == len(sequence.request.tokens):
            self.state.tokens[sequence.slot, chunk.end] = last
            self.state.activate(sequence, chunk.table)
            self.pool.publish(sequence.request.tokens, sequence.pages)
            sequence.generated, self._prompt = 1, None
            self.counts["generated"] += 1
            self._running.append(sequence)

    def _decode(self) -> None:
        if not self._running:
            return
        reach = self._reach()
        if not self.capture:
            self._step(reach, None)
        elif reach in self._graphs:
            self._graphs[reach].replay()
        else:
            self._graphs[reach] = self._captured(reach)
        self._count_tokens()

    def _captured(self, reach: int) -> Any:
        """Runs a step, which compiles its kernels, and captures the next step."""
        self._step(reach, None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(reach, None)
        return graph

    def _reach(self) -> int:
        longest = max((each.cached for each in self._running), default=0) + 1
        return self.attention.reach(longest)

    def _count_tokens(self) -> None:
        for sequence in self._running:
            sequence.cached += 1
            sequence.generated += 1
        self.counts["generated"] += len(self._running)
        self.counts["steps"] += 1

    def _step(self, reach: int, chunk: Chunk | None) -> Any:
        """Does the device work of a step. Returns the token after the last one of the chunk."""
        state, slots = self.state, self.state.lengths.shape[0]
        decodes = bool(self._running)
        tokens, positions = [], []
        if decodes:
            lengths = state.lengths.long()
            torch.add(state.lengths, 1, out=state.after)
            tokens.append(state.tokens.gather(1, lengths[:, None])[:, 0])
            positions.append(lengths)
        if chunk:
            tokens.append(state.tokens[chunk.slot, chunk.begin : chunk.end])
            positions.append(torch.arange(chunk.begin, chunk.end, device=tokens[0].device))

        step = state.mixture(chunk) if chunk and decodes else None

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            if step:
                return self.attention.mixed(layer, q, k, v, state, chunk, step, reach)
            if chunk:
                return self.attention.prefill(layer, q, k, v, chunk)
            return self.attention.decode(layer, q, k, v, state, reach)

        hidden = self.model.forward(torch.cat(tokens), torch.cat(positions), attend)
        if decodes:
            self._write(self.model.logits(hidden[:slots]).argmax(-1))
        return self.model.logits(hidden[-1:]).argmax() if chunk else None

    def _write(self, tokens: Any) -> None:
        """Appends a token to the tokens of each slot."""
        state = self.state
        column = torch.where(state.active > 0, state.lengths + 1, state.longest).long()
        state.tokens.scatter_(1, column[:, None], tokens[:, None])
        state.lengths.add_(state.active)
