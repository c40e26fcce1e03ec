"""Rows of the speed table: a case, and the TFLOP/s of flashgen and of each peer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashgen.attention import compile
from flashgen.bench.cases import Arrays, Case, Timed, case, inputs
from flashgen.bench.ours import ours
from flashgen.bench.peers import SDPA_BACKENDS, Run, flex, sdpa
from flashgen.bench.timing import median_ms
from flashgen.language.operations import BATCH, HEAD
from flashgen.language.spec import AttentionSpec


@dataclass(frozen=True)
class Row:
    """A measured case: median milliseconds and TFLOP/s by contender.

    They are "flashgen", the peers "FA2", "cuDNN", "Flex", and "deterministic", which is flashgen's own such backward.
    """

    spec: str
    timed: Timed
    length: int
    batch: int
    heads: int
    milliseconds: Mapping[str, float]
    tflops: Mapping[str, float]

    def ratio(self, peer: str) -> float | None:
        """How many times as fast as the peer flashgen is."""
        return self.milliseconds[peer] / self.milliseconds["flashgen"] if peer in self.milliseconds else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def speed_rows(
    specs: Sequence[AttentionSpec],
    lengths: Sequence[int],
    peers: Sequence[str] = ("FA2", "cuDNN", "Flex"),
    timed: Timed = "forward",
    deterministic: bool = False,
) -> Iterator[Row]:
    """Measures the specs at the lengths, each beside the peers that can do it, one case after the other.

    deterministic: measure the deterministic backward too, beside the default one.
    """
    for spec in specs:
        for length in lengths:
            yield measure(case(spec, length), peers, timed, deterministic)


def measure(case: Case, peers: Sequence[str], timed: Timed = "forward", deterministic: bool = False) -> Row:
    """Times one case."""
    spec, arrays = case.spec, inputs(case)
    runs = {"flashgen": ours(compile(spec), timed, arrays)}
    if deterministic and timed != "forward":
        runs["deterministic"] = ours(compile(spec, deterministic=True), timed, arrays)
    for peer in peers:
        run = _peer(peer, spec, timed, arrays)
        if run is not None:
            runs[peer] = run
    times = {name: median_ms(run) for name, run in runs.items()}
    tflops = {name: case.flops(timed) / time / 1e9 for name, time in times.items()}
    return Row(spec.name, timed, case.length, case.batch, case.heads, times, tflops)


def _peer(name: str, spec: AttentionSpec, timed: Timed, arrays: Arrays) -> Run | None:
    if name != "Flex":
        return sdpa(spec, SDPA_BACKENDS[name], timed, arrays)
    reads_place = spec.mask.expression.has(BATCH, HEAD)  # too many positions to hold at once
    found = flex(spec, timed, arrays, time_mask=reads_place)
    return found.run if found else None


def environment() -> dict[str, str]:
    """The card and the versions that a measurement holds for."""
    import cupy

    from flashgen.build import nvrtc

    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    found = {
        "gpu": device["name"].decode(),
        "driver": str(cupy.cuda.runtime.driverGetVersion()),
        "nvrtc": ".".join(map(str, nvrtc.version())),
        "cupy": cupy.__version__,
    }
    try:
        import torch
    except ImportError:
        return found
    return found | {"torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version())}
