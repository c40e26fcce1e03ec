"""Measures arrays with a number or a boolean for each score: `flashgen bench biases`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashgen.attention import compile
from flashgen.bench.cases import Case, Timed, inputs
from flashgen.bench.ours import ours
from flashgen.bench.peers import SDPA_BACKENDS, flex
from flashgen.bench.torch_runs import differentiated
from flashgen.language import captures
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.timing import Run, medians_ms

BIAS_PEERS = ("cuDNN", "EFFICIENT", "Flex")
_BACKENDS = {**SDPA_BACKENDS, "EFFICIENT": "EFFICIENT_ATTENTION"}


@dataclass(frozen=True)
class BiasCase:
    """The sizes of a call with an array for each score.

    It is a bias (heads, length, length) that all sequences share, and that has a gradient; or with `masks` a boolean
    mask (batch, 1, length, length). In triangle attention of protein models the rows of the pair representation are the
    batch.
    """

    name: str
    batch: int
    heads: int
    length: int
    head_dim: int
    masks: bool = False


BIAS_CASES = (
    BiasCase("2 x 2048, dim 64", 2, 16, 2048, 64),
    BiasCase("2 x 4096, dim 64", 2, 16, 4096, 64),
    BiasCase("2 x 4096, dim 128", 2, 16, 4096, 128),
    BiasCase("64 x 256, dim 32", 64, 16, 256, 32),
    *(BiasCase(f"triangle {length}", length, 4, length, 32) for length in (256, 512, 768)),
    BiasCase("mask 2 x 2048, dim 64", 2, 16, 2048, 64, masks=True),
    BiasCase("mask 2 x 4096, dim 64", 2, 16, 4096, 64, masks=True),
    BiasCase("mask 2 x 4096, dim 128", 2, 16, 4096, 128, masks=True),
)
_DTYPE = "bfloat16"
_KEPT = 0.8  # of the scores, at random, so that a mask decides about every score


@dataclass(frozen=True)
class BiasRow:
    """The median milliseconds of a case by implementation. `target` is the architecture of flashgen's kernels."""

    name: str
    target: str
    timed: Timed
    milliseconds: Mapping[str, float]

    @property
    def best_ratio(self) -> float | None:
        """The speed of flashgen relative to the fastest measured peer."""
        peers = [time for name, time in self.milliseconds.items() if name in BIAS_PEERS]
        return min(peers) / self.milliseconds["flashgen"] if peers else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"best_ratio": self.best_ratio}


def bias_rows(
    cases: Sequence[BiasCase] = BIAS_CASES,
    peers: Sequence[str] = BIAS_PEERS,
    timed: Timed = "forward",
    target: str | None = None,
) -> Iterator[BiasRow]:
    """Measures the cases, one after another, with interleaved runs. `target` is that of `flashgen.compile`."""
    for case in cases:
        yield _measure(case, peers, timed, target)


def bias_spec(head_dim: int, dtype: str) -> AttentionSpec:
    """Returns the spec of a score plus an element of a captured bias."""
    bias = captures.Tensor("bias", dtype, 3, grad=True)
    return AttentionSpec(head_dim, dtype, score=lambda score, b, h, q, k: score + bias[h, q, k])


def mask_spec(head_dim: int, dtype: str) -> AttentionSpec:
    """Returns the spec of a mask that is a captured array of booleans."""
    mask = captures.Tensor("mask", "bool", 4)
    return AttentionSpec(head_dim, dtype, mask=lambda b, h, q, k: mask[b, h, q, k])


def _measure(case: BiasCase, peers: Sequence[str], timed: Timed, target: str | None) -> BiasRow:
    import torch

    spec = (mask_spec if case.masks else bias_spec)(case.head_dim, _DTYPE)
    arrays = inputs(Case(spec, case.length, case.batch, case.heads))
    if case.masks:
        captured = {"mask": torch.rand((case.batch, 1, case.length, case.length), device="cuda") < _KEPT}
    else:
        shape = (case.heads, case.length, case.length)
        captured = {"bias": torch.randn(shape, device="cuda", dtype=getattr(torch, _DTYPE))}
    attention = compile(spec, target)
    runs: dict[str, Run] = {"flashgen": ours(attention, timed, arrays, captured)}
    for name in peers:
        run = _peer(name, spec, timed, arrays, captured)
        if run is not None:
            runs[name] = run
    return BiasRow(case.name, attention.target.name, timed, medians_ms(runs))


def _peer(name: str, spec: AttentionSpec, timed: Timed, arrays: Any, captured: dict[str, Any]) -> Run | None:
    """Returns a run of a peer of BIAS_PEERS; None if it fails. With a backward a bias has a gradient."""
    if name == "Flex":
        found = flex(spec, timed, arrays, captured)
        return found.run if found else None
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    *rows, d_out = arrays
    backend = getattr(SDPBackend, _BACKENDS[name])

    def forward(q: Any, k: Any, v: Any, *bias: Any) -> Any:
        mask = bias[0][None] if bias else captured["mask"]
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale)

    learned = [captured["bias"]] if "bias" in captured else []
    return differentiated(forward, timed, (*rows, *learned), d_out)
