"""The rows of the table of several GPUs, from the measurements of their processes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.context.ranks import answers_of_ranks

# The schemes of flashgen, "ring" also as a CUDA graph; torch's context_parallel, also with repeated key heads; a ring
# over FlashAttention-2.
CONTENDERS = ("ring", "ring-captured", "all_gather", "ulysses", "torch", "torch-repeated", "FA2-ring")


@dataclass(frozen=True)
class Shape:
    """The sizes of a measured sequence.

    Attributes:
        tokens: tokens per GPU.
        window: the number of earlier keys that a query sees; None for a causal mask.
        shards: the assignment of tokens to GPUs, "zigzag" or "plain".
        long: compare sampled rows with float64.
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
        """The tokens per GPU, and the window with its shards."""
        return f"{self.tokens}" + (f" window {self.window} {self.shards}" if self.window is not None else "")

    def flops(self, ranks: int, timed: str) -> float:
        """Returns the share of each GPU in the FLOPs of the whole sequence."""
        return self.flops_of_one(timed, self.tokens * ranks) / ranks

    def ideal_length(self, ranks: int) -> int:
        """Returns the length of a sequence that has about the FLOPs of one GPU's share, for the reference."""
        if self.window is not None:
            return self.tokens
        return round(self.tokens * math.sqrt(ranks) / 128) * 128

    def flops_of_one(self, timed: str, length: int) -> float:
        """Returns the FLOPs of unmasked scores of a sequence; the backward has 2.5 times those of the forward."""
        seen = length if self.window is None else min(self.window, length)
        scores = seen * (seen + 1) / 2 + (length - seen) * (seen + 1 if self.window is not None else seen)
        products = 1.0 if timed == "forward" else 3.5
        return 4.0 * scores * self.head_dim * self.heads_q * products


@dataclass(frozen=True)
class ContextRow:
    """The measurements of a shape and pass.

    Attributes:
        one_ms: median milliseconds of the reference, one GPU alone.
        milliseconds, tflops: medians, and TFLOP/s per GPU, by implementation.
        of_ideal: the speed relative to the reference, by implementation.
        problems: the errors of implementations that could not be measured.
        sampled: the maximum relative errors of a long sequence, by result.
        gigabytes: peak memory of a GPU.
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
        """The name of the shape."""
        return self.shape.name

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"name": self.name}


def context_rows(
    ranks: int, shapes: Sequence[Shape], contenders: Sequence[str] = CONTENDERS, passes: Sequence[str] = ("forward",)
) -> Iterator[ContextRow]:
    """Measures shapes and passes, "forward" or "both", on `ranks` GPUs of this machine. Starts processes once."""
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
    """Returns lines with the minimum speed relative to one GPU, problems, and errors of long sequences."""
    lines = []
    for timed in dict.fromkeys(row.timed for row in rows):
        best = [max(row.of_ideal.values()) for row in rows if row.timed == timed and row.of_ideal]
        if best:
            lines.append(f"{timed}: the best scheme has at least {min(best):.2f} of one GPU's own speed")
    for (name, problem), where in _problems(rows).items():
        rest = f" and {len(where) - 1} more" if len(where) > 1 else ""
        lines.append(f"{where[0]}{rest}, {name}: {problem}")
    for row in rows:
        if row.sampled:
            errors = ", ".join(f"{name} {error:.1e}" for name, error in row.sampled.items())
            lines.append(f"{row.name} {row.timed}: largest relative errors of sampled rows: {errors}")
    return lines


def _problems(rows: Sequence[ContextRow]) -> dict[tuple[str, str], list[str]]:
    """Returns the names of rows that have the same problem, by (implementation, problem)."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for why in row.problems.items():
            found.setdefault(why, []).append(f"{row.name} {row.timed}")
    return found
