"""Rows of the forward table: a case, and the TFLOP/s of flashgen and of each peer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashgen.attention import compile
from flashgen.bench.cases import Case, case, inputs
from flashgen.bench.peers import SDPA_BACKENDS, Run, flex, sdpa
from flashgen.bench.timing import median_ms
from flashgen.language.spec import AttentionSpec


@dataclass(frozen=True)
class Row:
    """A measured case: median milliseconds and TFLOP/s by contender ("flashgen", "FA2", "cuDNN", "Flex")."""

    spec: str
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


def forward_rows(
    specs: Sequence[AttentionSpec], lengths: Sequence[int], peers: Sequence[str] = ("FA2", "cuDNN", "Flex")
) -> Iterator[Row]:
    """Measures the specs at the lengths, each beside the peers that can do it, one case after the other."""
    for spec in specs:
        for length in lengths:
            yield measure(case(spec, length), peers)


def measure(case: Case, peers: Sequence[str]) -> Row:
    """Times one case."""
    q, k, v = inputs(case)
    attention = compile(case.spec)
    options: dict[str, Any] = {"seed": 1} if case.spec.dropout else {}
    runs = {"flashgen": lambda: attention(q, k, v, **options)}
    for peer in peers:
        run = _peer(peer, case.spec, q, k, v)
        if run is not None:
            runs[peer] = run
    times = {name: median_ms(run) for name, run in runs.items()}
    tflops = {name: case.flops / time / 1e9 for name, time in times.items()}
    return Row(case.spec.name, case.length, case.batch, case.heads, times, tflops)


def _peer(name: str, spec: AttentionSpec, q: Any, k: Any, v: Any) -> Run | None:
    if name != "Flex":
        return sdpa(spec, SDPA_BACKENDS[name], q, k, v)
    found = flex(spec, q, k, v)
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
