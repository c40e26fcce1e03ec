"""Launches by addresses, as on a GPU: what goes to a kernel is where its arrays are, found by one look at each.

The emulator takes arrays themselves. Here it is given addresses, and finds the arrays that are there, so that what only
a GPU's calls do to a call's arrays is seen without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import flashgen.language as fg
from flashgen.attention import Attention
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.targets import target_named
from flashgen.launch.engines import Arrays, Emulator, EmulatorRunner, Launch, Located, Numbers, Place, located
from flashgen.verify import Shape, random_gradients, random_inputs

SLOPES = fg.Tensor("slopes", "bfloat16", 1, grad=True)
TABLE = fg.Tensor("table", "float32", 2, grad=True)
SPECS = (
    fg.AttentionSpec(32, mask=fg.causal()),
    fg.AttentionSpec(32, mask=fg.document("ids") & fg.causal(), dropout=0.1),
    fg.AttentionSpec(16, score=fg.alibi(SLOPES), mask=fg.causal()),
    fg.AttentionSpec(16, score=fg.relative_bias(TABLE, 12)),
)
SHAPE = Shape(150, 150, 2, 4, 2)


class AddressRunner:
    """Takes addresses, or arrays of which none was looked at yet, and never some of each."""

    def __init__(self, runner: EmulatorRunner, known: dict[int, Any]) -> None:
        self._runner, self._known = runner, known

    def launch(self, launch: Launch, arrays: Arrays, numbers: Numbers, place: Place) -> None:
        if isinstance(arrays, Located):
            arrays = {name: self._known[at] for name, at in arrays.items()}
        assert all(isinstance(array, np.ndarray) for array in arrays.values())
        self._runner.launch(launch, arrays, numbers, place)


@dataclass(frozen=True)
class ByAddress(Emulator):
    """The emulator, launched as a GPU is."""

    known: dict[int, Any] = field(default_factory=dict, compare=False)

    def runner(self, kernel: RenderedKernel, prebuild: str) -> Any:
        return AddressRunner(super().runner(kernel, prebuild), self.known)

    def located(self, arrays: Arrays, known: Mapping[str, int] = {}) -> Arrays:
        found = located(arrays, known)
        self.known.update({found[name]: array for name, array in arrays.items() if not isinstance(array, int)})
        return found


@pytest.mark.parametrize("given", [False, True], ids=["made", "given"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_addresses_give_what_arrays_give(spec: fg.AttentionSpec, target: str, deterministic: bool, given: bool) -> None:
    inputs, (d_out, d_lse) = random_inputs(spec, SHAPE), random_gradients(spec, SHAPE, of_lse=True)
    rest = inputs.captures | ({"seed": 5} if spec.dropout else {})
    q, k, v = inputs.q, inputs.k, inputs.v
    results = []
    for engine in (Emulator(), ByAddress()):
        attention = Attention(spec, target_named(target), engine, deterministic=deterministic)
        place = (np.full_like(q[..., : spec.value_dim], np.nan), np.full(q.shape[:3], np.nan, np.float32))
        out, lse = attention(q, k, v, return_lse=True, out=place if given else None, **rest)
        grads = [capture for capture in spec.captures if capture.grad]
        into = tuple(np.full_like(array, np.nan) for array in (q, k, v, *(inputs.captures[c.name] for c in grads)))
        gradients = attention.backward(d_out, q, k, v, out, lse, d_lse=d_lse, into=into if given else None, **rest)
        results.append((out, lse, *gradients))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=2e-2, atol=2e-2)
        assert not np.isnan(other.astype(np.float32)).any()
