"""Assigns times to the events of a recorded launch with a model of the duration of each step.

The emulator records what each warp did, in order, and what it waited for, but it has no clock. The model replays the
record: a step begins when its warp has reached it, the events that it waits for have happened, and the unit that it
needs is free. The order of the steps and the dependencies between warps are therefore those of the emulated launch,
and the duration of a step follows from the rate of its unit, as given by the vendor. Arithmetic other than matrix
products and exponentials (masks, maxima, sums, conversions) takes no time in the model.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from flashgen.codegen.padding import WARP
from flashgen.codegen.targets import Target
from flashgen.errors import LaunchError
from flashgen.runtime.timeline import Array, Did

Kind = Literal["copy", "product", "exponentials", "wait", "store"]

_COPY_LATENCY, _COPY_BYTES = 600, 64  # latency in cycles; bytes per cycle and multiprocessor, from the L2
_ISSUE = 2  # cycles to start a copy


@dataclass(frozen=True)
class Span:
    """An activity of a warp or of one of its units from `begin` to `end`, in cycles of the model.

    asynchronous: whether the warp continued during it. line: the line of the kernel's source, or 0 if unknown.
    """

    warp: int
    kind: Kind
    begin: float
    end: float
    line: int
    text: str
    asynchronous: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Warp:
    number: int
    steps: deque[Any]
    clock: float = 0.0
    exponentials: int = 0
    copies: list[float] = field(default_factory=list)  # the times at which the committed groups have arrived
    products: list[float] = field(default_factory=list)
    open_copies: float = 0.0
    open_products: float = 0.0
    reached: dict[int, int] = field(default_factory=dict)  # barrier -> the index of the use that the warp waits for


class Replay:
    """Assigns times to the events of one launch. `spans` are in the order in which they were assigned."""

    def __init__(self, events: Array, target: Target, barriers: Mapping[int, str]) -> None:
        self.target, self.barriers = target, barriers
        self.spans: list[Span] = []
        self._warps = {int(warp): _Warp(int(warp), deque()) for warp in sorted(set(events["warp"].tolist()))}
        for event in events:
            self._warps[int(event["warp"])].steps.append(event)
        arrivals = events[(events["did"] == Did.ARRIVE) | (events["did"] == Did.LOAD)]
        self._missing = Counter(zip(arrivals["object"].tolist(), arrivals["phase"].tolist(), strict=True))
        self._phase_at: dict[tuple[int, int], float] = {}
        self._reaches: Counter[int] = Counter()
        self._openings: dict[tuple[int, int], tuple[int, float]] = {}  # warps yet to arrive; time of the last arrival
        self._tensor, self._special = [0.0] * target.partitions, [0.0] * target.partitions
        self._copies = 0.0

    def run(self) -> list[Span]:
        """Returns all spans. At each step, the ready warp with the smallest clock goes on.

        Raises LaunchError if the record is incomplete.
        """
        while waiting := [warp for warp in self._warps.values() if warp.steps]:
            ready = [warp for warp in waiting if self._can_go_on(warp)]
            if not ready:
                raise LaunchError("the record is not complete: every warp waits for an event that is not recorded")
            self._step(min(ready, key=lambda warp: (warp.clock, warp.number)))
        return self.spans

    def _can_go_on(self, warp: _Warp) -> bool:
        event = warp.steps[0]
        if event["did"] == Did.AWAIT_PHASE:
            return self._missing[int(event["object"]), int(event["phase"])] == 0
        if event["did"] == Did.LEAVE:
            number = int(event["object"])
            return self._openings[number, warp.reached[number]][0] == 0
        return True

    def _step(self, warp: _Warp) -> None:
        event = warp.steps.popleft()
        self._exponentiate(warp, event)
        getattr(self, f"_{Did(int(event['did'])).name.lower()}")(warp, event)

    def _exponentiate(self, warp: _Warp, event: Any) -> None:
        count = int(event["exponentials"]) - warp.exponentials
        if not count:
            return
        warp.exponentials += count
        target, unit = self.target, warp.number % self.target.partitions
        begin = max(warp.clock, self._special[unit])
        cycles = count * target.threads_per_warp * target.partitions / target.exponentials_per_cycle
        warp.clock = self._special[unit] = begin + cycles
        self._add(warp, "exponentials", begin, warp.clock, 0, f"{count} exponentials a lane")

    def _copy(self, warp: _Warp, event: Any) -> None:
        amount = int(event["amount"])
        begin, warp.clock = warp.clock, warp.clock + amount / 16 * _ISSUE
        self._copies = max(self._copies, begin) + amount * WARP / _COPY_BYTES
        warp.open_copies = max(warp.open_copies, self._copies + _COPY_LATENCY)
        self._add(warp, "copy", begin, warp.clock, event["line"], f"starts copies of {amount * WARP} bytes")
        landed = self._copies + _COPY_LATENCY
        self._add(warp, "copy", begin, landed, event["line"], f"{amount * WARP} bytes on their way", True)

    def _commit_copies(self, warp: _Warp, event: Any) -> None:
        warp.copies.append(warp.open_copies)

    def _await_copies(self, warp: _Warp, event: Any) -> None:
        due = warp.copies[: len(warp.copies) - int(event["amount"])]
        self._wait(warp, max(due, default=0.0), event, "waits for its copies")

    def _load(self, warp: _Warp, event: Any) -> None:
        begin, amount = warp.clock, int(event["amount"])
        warp.clock += _ISSUE
        self._copies = max(self._copies, begin) + amount / _COPY_BYTES
        landed = self._copies + _COPY_LATENCY
        self._add(warp, "copy", begin, warp.clock, event["line"], f"starts a TMA load of {amount} bytes")
        self._add(warp, "copy", begin, landed, event["line"], f"{amount} bytes on their way", True)
        self._contribute(event, landed)

    def _store(self, warp: _Warp, event: Any) -> None:
        begin, warp.clock = warp.clock, warp.clock + _ISSUE
        text = f"starts a TMA store of {int(event['amount'])} bytes"
        self._add(warp, "store", begin, warp.clock, event["line"], text)

    def _multiply(self, warp: _Warp, event: Any) -> None:
        amount = int(event["amount"])
        begin, warp.clock = self._product(warp, amount * 16 * 8 * 16)
        self._add(warp, "product", begin, warp.clock, event["line"], f"{amount} mma of 16 × 8 × 16")

    def _multiply_async(self, warp: _Warp, event: Any) -> None:
        columns = int(event["amount"])
        issued = warp.clock
        warp.clock += _ISSUE
        begin, end = self._product(warp, columns * 16 * 16)  # each warp computes 16 of the 64 rows
        warp.open_products = max(warp.open_products, end)
        self._add(warp, "product", issued, warp.clock, event["line"], f"starts wgmma, {columns} columns in all")
        self._add(warp, "product", begin, end, event["line"], f"wgmma, {columns} columns in all", True)

    def _product(self, warp: _Warp, multiply_adds: int) -> tuple[float, float]:
        unit = warp.number % self.target.partitions
        begin = max(warp.clock, self._tensor[unit])
        self._tensor[unit] = begin + multiply_adds / self.target.tensor_multiply_adds
        return begin, self._tensor[unit]

    def _commit_products(self, warp: _Warp, event: Any) -> None:
        warp.products.append(warp.open_products)

    def _await_products(self, warp: _Warp, event: Any) -> None:
        due = warp.products[: len(warp.products) - int(event["amount"])]
        self._wait(warp, max(due, default=0.0), event, "waits for its products")

    def _arrive(self, warp: _Warp, event: Any) -> None:
        self._contribute(event, warp.clock)

    def _contribute(self, event: Any, at: float) -> None:
        phase = int(event["object"]), int(event["phase"])
        self._missing[phase] -= 1
        self._phase_at[phase] = max(self._phase_at.get(phase, 0.0), at)

    def _await_phase(self, warp: _Warp, event: Any) -> None:
        at = self._phase_at.get((int(event["object"]), int(event["phase"])), 0.0)
        offset = int(event["object"])
        self._wait(warp, at, event, f"waits for {self.barriers.get(offset, f'the mbarrier at byte {offset}')}")

    def _reach(self, warp: _Warp, event: Any) -> None:
        number, needed = int(event["object"]), -(-int(event["amount"]) // WARP)
        opening = self._reaches[number] // needed
        self._reaches[number] += 1
        warp.reached[number] = opening
        missing, at = self._openings.get((number, opening), (needed, 0.0))
        self._openings[number, opening] = (missing - 1, max(at, warp.clock))

    def _leave(self, warp: _Warp, event: Any) -> None:
        number = int(event["object"])
        name = f"barrier {number}" if number else "__syncthreads"
        self._wait(warp, self._openings[number, warp.reached[number]][1], event, f"waits at {name}")

    def _wait(self, warp: _Warp, until: float, event: Any, text: str) -> None:
        if until > warp.clock:
            self._add(warp, "wait", warp.clock, until, event["line"], text)
            warp.clock = until

    def _add(
        self, warp: _Warp, kind: Kind, begin: float, end: float, line: Any, text: str, asynchronous: bool = False
    ) -> None:
        self.spans.append(Span(warp.number, kind, begin, end, int(line), text, asynchronous))


def replayed(events: Array, target: Target, barriers: Mapping[int, str] | None = None) -> list[Span]:
    """Returns the spans of a launch's events at the rates of a target.

    barriers: the names of mbarriers by their byte offsets in shared memory.
    """
    return Replay(events, target, barriers or {}).run()
