"""Launches by addresses, as on a GPU: kernels get the addresses of their arrays, which are looked up once.

The emulator normally takes arrays. Here it gets addresses and finds the arrays at them, so that the handling of
addresses is tested without a GPU.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

import flashgen.language as fg
from by_address import ByAddress
from flashgen.attention import Attention
from flashgen.attention.tile_lists import sizes_of
from flashgen.codegen.targets import target_named
from flashgen.launch.argument_writer import Addresses
from flashgen.launch.engines import Emulator, Place
from flashgen.runtime.arrays import NUMPY
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


@pytest.mark.rotated(36)
@pytest.mark.parametrize("given", [False, True], ids=["made", "given"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_addresses_give_the_same_results_as_arrays(
    spec: fg.AttentionSpec, target: str, deterministic: bool, given: bool
) -> None:
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


def test_evicted_tile_lists_live_until_the_launch() -> None:
    """Calls of other threads may evict them between the lookup and the launch that reads them."""
    engine = ByAddress()
    compiled = Attention(fg.AttentionSpec(32, mask=fg.trace_mask(near_or_first, "near")), target_named("sm_80"), engine)
    lister, problem = compiled.forward.lister, sizes_of(150, 150, 1, 2)
    assert lister is not None
    taken = lister.lists_for_call(lister.prepare(problem, {}, NUMPY, 0), problem, Addresses(), {}, Place())
    ((lists, operands),) = lister._cache.values()
    assert {taken[name] for name in taken} == {array.ctypes.data for array in lists.arguments().values()}
    arrays = [weakref.ref(array) for array in lists.arguments().values()]
    engine.known.clear()
    lister._cache.clear()
    del lists, operands
    assert all(array() is not None for array in arrays)
    del taken
    assert all(array() is None for array in arrays)


def near_or_first(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (abs(q - k) <= 20) | (k < 4)
