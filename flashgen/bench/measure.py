"""Measures the rows of the speed table: the TFLOP/s of flashgen and of each peer in a case."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flashgen.attention import compile
from flashgen.bench.cases import Case, Timed, case, inputs
from flashgen.bench.ours import ours
from flashgen.bench.peers import PEERS, peer
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.timing import medians_ms

_PACKAGES = {
    "FA4": "flash-attn-4",
    "FFPA": "ffpa-attn",
    "FlashInfer": "flashinfer-python",
    "FlashMLA": "sgl-flash-mla",
    "triton": "triton",
}


@dataclass(frozen=True)
class Row:
    """A measured case: median milliseconds and TFLOP/s by implementation.

    Implementations are "flashgen", "deterministic" (the deterministic backward of flashgen), and the peers of PEERS.
    `target` is the architecture of the kernels of flashgen.
    """

    spec: str
    target: str
    timed: Timed
    length: int
    batch: int
    heads: int
    milliseconds: Mapping[str, float]
    tflops: Mapping[str, float]

    def ratio(self, peer: str) -> float | None:
        """Returns the speed of flashgen relative to a peer; None if the peer was not measured."""
        return self.milliseconds[peer] / self.milliseconds["flashgen"] if peer in self.milliseconds else None

    @property
    def best_peer(self) -> str | None:
        """The fastest measured peer."""
        return min(
            (peer for peer in PEERS if peer in self.milliseconds), key=self.milliseconds.__getitem__, default=None
        )

    @property
    def best_ratio(self) -> float | None:
        """The speed of flashgen relative to the fastest peer."""
        return self.ratio(self.best_peer) if self.best_peer else None

    def to_dict(self) -> dict[str, Any]:
        ratios = {peer: self.ratio(peer) for peer in PEERS if peer in self.milliseconds}
        return asdict(self) | {"ratios": ratios, "best_peer": self.best_peer}


def speed_rows(
    specs: Sequence[AttentionSpec],
    lengths: Sequence[int],
    peers: Sequence[str] = PEERS,
    timed: Timed = "forward",
    deterministic: bool = False,
    target: str | None = None,
    batch: int | None = None,
    heads: int | None = None,
) -> Iterator[Row]:
    """Measures the specs at the lengths, one case after another, together with the peers that support them.

    With `deterministic`, the deterministic backward is measured as well. `target` is that of `flashgen.compile`.
    `batch` and `heads` replace those of the case (`flashgen.bench.cases.Case`).
    """
    for spec in specs:
        for length in lengths:
            usual = case(spec, length)
            sized = replace(usual, batch=batch or usual.batch, heads=heads or usual.heads)
            yield measure(sized, peers, timed, deterministic, target)


def measure(
    case: Case,
    peers: Sequence[str],
    timed: Timed = "forward",
    deterministic: bool = False,
    target: str | None = None,
) -> Row:
    """Times one case with interleaved runs of its implementations."""
    spec, arrays = case.spec, inputs(case)
    attention = compile(spec, target)
    runs = {"flashgen": ours(attention, timed, arrays)}
    if deterministic and timed != "forward":
        runs["deterministic"] = ours(compile(spec, target, deterministic=True), timed, arrays)
    for name in peers:
        run = peer(name, spec, timed, arrays)
        if run is not None:
            runs[name] = run
    times = medians_ms(runs)
    tflops = {name: case.flops(timed) / time / 1e9 for name, time in times.items()}
    return Row(spec.name, attention.target.name, timed, case.length, case.batch, case.heads, times, tflops)


def environment() -> dict[str, str]:
    """Returns the names of the GPU and of the library versions of a measurement."""
    import cupy

    from flashgen import __version__
    from flashgen.build import nvrtc

    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    found = {
        "flashgen": __version__,
        "gpu": device["name"].decode(),
        "driver": str(cupy.cuda.runtime.driverGetVersion()),
        "nvrtc": ".".join(map(str, nvrtc.version())),
        "cupy": cupy.__version__,
    }
    for name, package in _PACKAGES.items():
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        import torch
    except ImportError:
        return found
    return found | {"torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version())}
