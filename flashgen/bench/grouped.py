"""Measures grouped-query attention: equal FLOPs with fewer heads of k and v: `flashgen bench gqa`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashgen.attention import compile
from flashgen.bench.cases import TOKENS, Case, Timed, inputs
from flashgen.bench.ours import ours
from flashgen.bench.peers import peer
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.timing import Run, medians_ms

HEADS = 32
HEADS_KV = (32, 8, 1)


@dataclass(frozen=True)
class GroupedRow:
    """The measurement of a number of heads of k and v: median milliseconds and TFLOP/s by implementation.

    `target` is the architecture of the kernels of flashgen. `of_first` is the speed of each implementation relative to
    its own speed with the first number of heads of k and v.
    """

    spec: str
    target: str
    timed: Timed
    length: int
    batch: int
    heads: int
    heads_kv: int
    milliseconds: Mapping[str, float]
    tflops: Mapping[str, float]
    of_first: Mapping[str, float]

    @property
    def name(self) -> str:
        """The kind and the numbers of heads, for example "GQA 32:8"."""
        kind = {self.heads: "MHA", 1: "MQA"}.get(self.heads_kv, "GQA")
        return f"{kind} {self.heads}:{self.heads_kv}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"name": self.name}


def grouped_rows(
    specs: Sequence[AttentionSpec],
    lengths: Sequence[int],
    heads_kv: Sequence[int] = HEADS_KV,
    heads: int = HEADS,
    peers: Sequence[str] = (),
    timed: Timed = "forward",
    target: str | None = None,
) -> Iterator[GroupedRow]:
    """Measures the specs at the lengths, with 16384 tokens per batch and interleaved numbers of heads of k and v.

    The numbers in `heads_kv` must divide `heads`. `target` is that of `flashgen.compile`.
    """
    for spec in specs:
        for length in lengths:
            sizes = [Case(spec, length, max(TOKENS // length, 1), heads, number) for number in heads_kv]
            yield from _measure(sizes, peers, timed, target)


def _measure(cases: Sequence[Case], peers: Sequence[str], timed: Timed, target: str | None) -> Iterator[GroupedRow]:
    spec = cases[0].spec
    attention = compile(spec, target)
    runs: dict[str, Run] = {}
    for case in cases:
        arrays = inputs(case)
        contenders = {"flashgen": ours(attention, timed, arrays)} | {
            name: peer(name, spec, timed, arrays) for name in peers
        }
        runs |= {_key(name, case): run for name, run in contenders.items() if run is not None}
    times = medians_ms(runs)
    times_by_case = [
        {name: times[_key(name, case)] for name in ("flashgen", *peers) if _key(name, case) in times} for case in cases
    ]
    for case, milliseconds in zip(cases, times_by_case, strict=True):
        yield row(case, timed, attention.target.name, milliseconds, times_by_case[0])


def _key(contender: str, case: Case) -> str:
    return f"{contender} {case.heads_kv}"


def row(
    case: Case, timed: Timed, target: str, milliseconds: Mapping[str, float], first: Mapping[str, float]
) -> GroupedRow:
    """Returns the row of a case; `first` has the milliseconds with the first number of heads of k and v."""
    heads_kv = case.heads_kv or case.heads
    tflops = {name: case.flops(timed) / time / 1e9 for name, time in milliseconds.items()}
    of_first = {name: first[name] / time for name, time in milliseconds.items() if name in first}
    return GroupedRow(
        case.spec.name, target, timed, case.length, case.batch, case.heads, heads_kv, milliseconds, tflops, of_first
    )
