"""V as a part of K in JAX: calls take q and kv, and the gradient of kv is that of keys and values."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.errors import ArgumentError

jax = pytest.importorskip("jax", reason="flashgen.jax needs JAX: pip install 'flashgen[jax]'")
jnp = jax.numpy
from flashgen.jax import attention

VALUE_DIM = 24
slopes = fg.Tensor("slopes", "float32", 1, grad=True)
COMMON: Any = {"head_dim": 40, "value_dim": VALUE_DIM, "dtype": "bfloat16", "mask": fg.causal(), "shared_kv": True}
CAUSAL = fg.AttentionSpec(**COMMON)
LEARNED = fg.AttentionSpec(**COMMON, score=lambda s, b, h, q, k: s + slopes[h] * (q - k))
SLOPES = np.array([0.1, -0.05, 0.05, 0.02], np.float32)


@pytest.fixture(autouse=True)
def where(request: pytest.FixtureRequest) -> Iterator[None]:
    """Uses the CPU even if JAX has a GPU, except for tests marked gpu."""
    with nullcontext() if request.node.get_closest_marker("gpu") else jax.default_device(jax.devices("cpu")[0]):
        yield


def inputs(dim: int = 40) -> tuple[Any, Any]:
    """Returns q of four heads and kv of one."""
    keys = jax.random.split(jax.random.key(0), 2)
    q, kv = (jax.random.normal(key, (2, n, 40, dim), jnp.bfloat16) for key, n in zip(keys, (4, 1), strict=True))
    return q, kv


def plain(q: Any, kv: Any, table: Any, value_dim: int = VALUE_DIM) -> Any:
    """Returns output and LSE of causal attention with slopes in float32."""
    q, kv = q.astype(jnp.float32), kv.astype(jnp.float32)[:, 0]
    place = jnp.arange(q.shape[2])
    scores = jnp.einsum("bhqd,bkd->bhqk", q, kv) * q.shape[-1] ** -0.5
    scores = scores + table[:, None, None] * (place[:, None] - place)
    scores = jnp.where(place[:, None] >= place, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, -1)
    return jnp.einsum("bhqk,bkd->bhqd", jnp.exp(scores - lse[..., None]), kv[..., :value_dim]), lse


def assert_close(got: Any, expected: Any) -> None:
    got, expected = (np.asarray(array, np.float32) for array in (got, expected))
    assert np.abs(got - expected).max() <= 2e-2 * max(np.abs(expected).max(), 0.1)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.rotated(3)
def test_results_and_gradients(wrap: Any) -> None:
    given = (*inputs(), SLOPES)

    def ours(q: Any, kv: Any, table: Any) -> Any:
        return attention(LEARNED, q, kv, slopes=table, emulate=True, return_lse=True)

    for got, wanted in zip(wrap(ours)(*given), plain(*given), strict=True):
        assert_close(got, wanted)
    weights = jax.random.normal(jax.random.key(1), (2, 4, 40, VALUE_DIM))
    loss = lambda f: lambda *x: (f(*x)[0] * weights).sum() + (f(*x)[1] * weights[..., 0]).sum()
    pairs = zip(*(wrap(jax.grad(loss(f), argnums=(0, 1, 2)))(*given) for f in (ours, plain)), strict=True)
    for got, wanted in pairs:
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        assert_close(got, wanted)


@pytest.mark.parametrize("spec", [CAUSAL, LEARNED], ids=["joined", "in sequence"])
def test_vmap(spec: fg.AttentionSpec) -> None:
    """The mapped axis joins the batch, or calls run one after another."""
    q, kv = inputs()
    many = jnp.stack([kv, 2 * kv, -kv])
    captures = {"slopes": SLOPES} if spec is LEARNED else {}
    call = lambda x: attention(spec, q, x, emulate=True, **captures)
    assert jnp.array_equal(jax.jit(jax.vmap(call))(many), jnp.stack([call(x) for x in many]))
    loss = lambda x: call(x).astype(jnp.float32).sum()
    assert_close(jax.vmap(jax.grad(loss))(many)[1], jax.grad(loss)(many[1]))


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, flashgen as fg
from flashgen.jax import attention
from jax.sharding import Mesh, PartitionSpec as P
q, kv = (jax.random.normal(key, (2, 2, 40, 32), jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 2))
spec = fg.AttentionSpec(32, "bfloat16", value_dim=16, mask=fg.causal(), shared_kv=True)
call = lambda q, kv: attention(spec, q, kv, emulate=True)
mesh = Mesh(np.array(jax.devices()), ("batch",))
sharded = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("batch"), out_specs=P("batch")))
assert len(jax.devices()) == 2 and jnp.array_equal(sharded(q, kv), call(q, kv))
loss = lambda f: lambda kv: f(q, kv).astype(jnp.float32).sum()
ours, expected = jax.grad(loss(sharded))(kv), jax.grad(loss(call))(kv)
assert jnp.abs(ours - expected).max() <= 2e-2 * jnp.abs(expected).max()
"""


@pytest.mark.rotated(3)
def test_shard_map() -> None:
    """On two CPU devices, which a process has from its start."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SHARDED], env={**os.environ, **flags}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_given_and_missing_values() -> None:
    q, kv = inputs()
    assert jnp.array_equal(attention(fg.compile(CAUSAL, emulate=True), q, kv), attention(CAUSAL, q, kv, emulate=True))
    with pytest.raises(ArgumentError, match="v: with shared_kv=True, V is the first 24 columns of k: leave v out"):
        attention(CAUSAL, q, kv, kv, emulate=True)
    with pytest.raises(ArgumentError, match="v is missing: give q, k and v, or declare shared_kv=True"):
        attention(fg.AttentionSpec(40, "bfloat16"), q, kv, emulate=True)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    spec = fg.AttentionSpec(576, "bfloat16", value_dim=512, mask=fg.causal(), shared_kv=True)
    given, none = inputs(576), jnp.zeros(4)
    ours = lambda q, kv: attention(spec, q, kv).astype(jnp.float32)
    theirs = lambda q, kv: plain(q, kv, none, 512)[0]
    assert_close(jax.jit(ours)(*given), theirs(*given))
    gradients = [jax.jit(jax.grad(lambda *x, f=f: f(*x).sum(), argnums=(0, 1)))(*given) for f in (ours, theirs)]
    for got, wanted in zip(*gradients, strict=True):
        assert_close(got, wanted)
