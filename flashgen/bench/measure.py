"""Rows of the speed table: a case, and the TFLOP/s of flashgen and of each peer."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashgen.attention import compile
from flashgen.bench.cases import Case, Timed, case, inputs
from flashgen.bench.ours import ours
from flashgen.bench.peers import PEERS, peer
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.timing import medians_ms


@dataclass(frozen=True)
class Row:
    """A measured case: median milliseconds and TFLOP/s by contender.

    Contenders are "flashgen", the peers "FA2", "cuDNN", "Flex", "FA4", and "deterministic", flashgen's deterministic
    backward. target: the architecture that flashgen's kernels were emitted for.
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
        """How many times as fast as the peer flashgen is."""
        return self.milliseconds[peer] / self.milliseconds["flashgen"] if peer in self.milliseconds else None

    @property
    def best_peer(self) -> str | None:
        """The fastest of the peers that were measured."""
        return min(
            (peer for peer in PEERS if peer in self.milliseconds), key=self.milliseconds.__getitem__, default=None
        )

    @property
    def best_ratio(self) -> float | None:
        """How many times as fast as the best peer flashgen is."""
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
) -> Iterator[Row]:
    """Measures the specs at the lengths, each beside the peers that can do it, one case after the other.

    deterministic: measure the deterministic backward beside the default one. target is that of `flashgen.compile`.
    """
    for spec in specs:
        for length in lengths:
            yield measure(case(spec, length), peers, timed, deterministic, target)


def measure(
    case: Case,
    peers: Sequence[str],
    timed: Timed = "forward",
    deterministic: bool = False,
    target: str | None = None,
) -> Row:
    """Times one case; its contenders take turns."""
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
    for name, package in (("FA4", "flash-attn-4"), ("triton", "triton")):
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        import torch
    except ImportError:
        return found
    return found | {"torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version())}
