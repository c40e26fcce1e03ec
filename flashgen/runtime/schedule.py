"""The order in which the emulator runs threads, and the time at which asynchronous copies complete.

A GPU could behave in each of these ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flashgen.errors import LaunchError

Order = Literal["in_order", "reverse", "random", "greedy_warp"]
Copies = Literal["early", "late", "random"]

# The indices are the values of Order (ready_queue.h) and CopyPolicy (async_copies.h) in templates/emulator.
ORDERS: tuple[Order, ...] = ("in_order", "reverse", "random", "greedy_warp")
COPIES: tuple[Copies, ...] = ("early", "late", "random")


@dataclass(frozen=True)
class Schedule:
    """One way to run a grid.

    Attributes:
        order: which ready thread runs next. "in_order" is round-robin; "reverse" takes the newest and starts from the
            last thread and block; "random" takes any; "greedy_warp" stays in a warp as long as possible, so that warps
            drift apart.
        copies: when cp.async, TMA and wgmma take effect. "early" is at the issue; "late" is at the wait for it (for TMA
            and wgmma, when no thread can proceed without it); "random" is in between.
        seed: the seed of all random choices; the same seed repeats a run.
        workers: the number of operating-system threads that run the blocks; sanitized modes use one.
    """

    order: Order = "in_order"
    copies: Copies = "late"
    seed: int = 0
    workers: int = 1

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise LaunchError(f"schedule order must be one of {', '.join(ORDERS)}, got {self.order!r}")
        if self.copies not in COPIES:
            raise LaunchError(f"schedule copies must be one of {', '.join(COPIES)}, got {self.copies!r}")
        if not 0 <= self.seed < 2**64:
            raise LaunchError(f"schedule seed must be from 0 to 2**64 - 1, got {self.seed}")
        if not 1 <= self.workers <= 1024:
            raise LaunchError(f"schedule workers must be from 1 to 1024, got {self.workers}")

    @property
    def order_index(self) -> int:
        return ORDERS.index(self.order)

    @property
    def copies_index(self) -> int:
        return COPIES.index(self.copies)

    def __str__(self) -> str:
        return f"{self.order}, copies {self.copies}, seed {self.seed}"


def schedules(count: int) -> Iterator[Schedule]:
    """Yields `count` schedules, those that find most bugs first: all orders and copy policies, then random ones."""
    firsts = (("in_order", "late"), ("greedy_warp", "random"), ("reverse", "early"), ("random", "late"))
    rest = [(order, copies) for order in ORDERS for copies in COPIES if (order, copies) not in firsts]
    for number, (order, copies) in enumerate([*firsts, *rest][:count]):
        yield Schedule(order, copies, seed=number)  # type: ignore[arg-type]  # the tuple's literals widen to str
    for number in range(len(ORDERS) * len(COPIES), count):
        yield Schedule("greedy_warp" if number % 2 else "random", "random", seed=number)
