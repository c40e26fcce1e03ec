"""Rows of the table of several GPUs, from what their processes measure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.context.ranks import answers_of_ranks

# flashgen's schemes, the first also in a CUDA graph; torch's context_parallel, also with repeated heads of k and v; a
# ring over FlashAttention-2.
CONTENDERS = ("ring", "ring-captured", "all_gather", "ulysses", "torch", "torch-repeated", "FA2-ring")


@dataclass(frozen=True)
class Shape:
    """What is measured: tokens of a GPU and heads of attention, of one sequence.

    window: keys before a query that it sees, None for all (a causal mask). shards: which of the tokens a GPU has. long:
    whether sampled rows are compared with float64.
    """

    tokens: int
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    window: int | None = None
    shards: str = "zigzag"
    long: bool = False

    @property
    def name(self) -> str:
        """Tokens of a GPU, and the window with its shards."""
        return f"{self.tokens}" + (f" window {self.window} {self.shards}" if self.window is not None else "")

    def flops(self, ranks: int, timed: str) -> float:
        """A GPU's share of the FLOPs of scores that count: 4 for each and element, and 2.5 times as many backward."""
        length = self.tokens * ranks
        return self._of(length, timed) / ranks

    def flops_of_one(self, timed: str, length: int) -> float:
        """Of a sequence that one GPU has alone."""
        return self._of(length, timed)

    def ideal_length(self, ranks: int) -> int:
        """Tokens of a sequence that has a GPU's share of the FLOPs, about: so one GPU alone is measured."""
        if self.window is not None:
            return self.tokens
        return round(self.tokens * math.sqrt(ranks) / 128) * 128

    def _of(self, length: int, timed: str) -> float:
        seen = length if self.window is None else min(self.window, length)
        scores = seen * (seen + 1) / 2 + (length - seen) * (seen + 1 if self.window is not None else seen)
        products = 1.0 if timed == "forward" else 3.5
        return 4.0 * scores * self.head_dim * self.heads_q * products


@dataclass(frozen=True)
class ContextRow:
    """Median milliseconds by contender and of one GPU alone, TFLOP/s of a GPU, and speeds of that of one GPU.

    sampled: of a long sequence, the largest relative errors by result. gigabytes: the most memory of a GPU.
    """

    ranks: int
    timed: str
    shape: Shape
    one_ms: float
    milliseconds: Mapping[str, float]
    tflops: Mapping[str, float]
    of_ideal: Mapping[str, float]
    problems: Mapping[str, str]
    sampled: Mapping[str, float]
    gigabytes: float

    @property
    def name(self) -> str:
        """That of the shape."""
        return self.shape.name

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"name": self.name}


def context_rows(
    ranks: int, shapes: Sequence[Shape], contenders: Sequence[str] = CONTENDERS, passes: Sequence[str] = ("forward",)
) -> Iterator[ContextRow]:
    """Measures shapes and passes, "forward" or "both", on so many GPUs of this machine, in one start of processes."""
    asked: list[dict[str, Any]] = [
        {
            "shape": asdict(shape),
            "length_of_one": shape.ideal_length(ranks),
            "timed": timed,
            "contenders": list(contenders),
        }
        for shape in shapes
        for timed in passes
    ]
    for question, answer in zip(asked, answers_of_ranks(ranks, asked), strict=True):
        shape, timed = Shape(**question["shape"]), question["timed"]
        milliseconds, one_ms = answer["milliseconds"], answer["one_ms"]
        share = shape.flops(ranks, timed)
        one = shape.flops_of_one(timed, question["length_of_one"]) / one_ms
        tflops = {name: share / ms / 1e9 for name, ms in milliseconds.items()}
        of_ideal = {name: share / ms / one for name, ms in milliseconds.items()}
        yield ContextRow(
            *(ranks, timed, shape, one_ms, milliseconds, tflops, of_ideal),
            *(answer["problems"], answer["sampled"], answer["gigabytes"]),
        )


def context_summary(rows: Sequence[ContextRow]) -> list[str]:
    """The least share of the ideal, what was left out, and errors of long sequences."""
    said = []
    for timed in dict.fromkeys(row.timed for row in rows):
        best = [max(row.of_ideal.values()) for row in rows if row.timed == timed and row.of_ideal]
        if best:
            said.append(f"{timed}: the best scheme has at least {min(best):.2f} of one GPU's own speed")
    for (name, problem), where in _problems(rows).items():
        rest = f" and {len(where) - 1} more" if len(where) > 1 else ""
        said.append(f"{where[0]}{rest}, {name}: {problem}")
    for row in rows:
        if row.sampled:
            errors = ", ".join(f"{name} {error:.1e}" for name, error in row.sampled.items())
            said.append(f"{row.name} {row.timed}: largest relative errors of sampled rows: {errors}")
    return said


def _problems(rows: Sequence[ContextRow]) -> dict[tuple[str, str], list[str]]:
    """The rows, as they are called, in which a contender could not be measured for the same reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for why in row.problems.items():
            found.setdefault(why, []).append(f"{row.name} {row.timed}")
    return found
