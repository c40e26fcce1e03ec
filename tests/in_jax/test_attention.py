"""`flashgen.jax.attention` under JAX's transformations, on the CPU with the emulator."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.errors import ArgumentError, UnsupportedError

jax = pytest.importorskip("jax", reason="flashgen.jax needs JAX: pip install 'flashgen[jax]'")
jnp = jax.numpy
from flashgen.jax import attention

LENGTH = 40
CPU = jax.devices("cpu")[0]


@pytest.fixture(autouse=True)
def where(request: pytest.FixtureRequest) -> Iterator[None]:
    """Uses the CPU even if JAX has a GPU, except for tests marked gpu."""
    with nullcontext() if request.node.get_closest_marker("gpu") else jax.default_device(CPU):
        yield


slopes = fg.Tensor("slopes", "float32", 1, grad=True)
ids = fg.Tensor("ids", "int32", 2)
CAUSAL = fg.AttentionSpec(32, "bfloat16", mask=fg.causal())
LEARNED = fg.AttentionSpec(
    32, "float16", mask=fg.document(ids) & fg.causal(), score=lambda s, b, h, q, k: s + slopes[h] * (q - k)
)
IDS = np.arange(LENGTH, dtype=np.int32)[None] // np.array([[7], [19]], np.int32)
SLOPES = np.array([0.1, -0.05], np.float32)


def rows(dtype: Any = None, heads: int = 2) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (2, heads, LENGTH, 32), dtype or jnp.bfloat16) for key in keys]


def plain(q: Any, k: Any, v: Any, table: Any = None, documents: Any = None) -> Any:
    """Returns output and LSE of causal attention in float32."""
    q, k, v = (array.astype(jnp.float32) for array in (q, k, v))
    scores, place = jnp.einsum("bhqd,bhkd->bhqk", q, k) * 32**-0.5, jnp.arange(LENGTH)
    kept = (place[:, None] >= place)[None, None]
    if table is not None:
        scores = scores + table[:, None, None] * (place[:, None] - place)
        kept = kept & (documents[:, None, :, None] == documents[:, None, None])
    scores = jnp.where(kept, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, -1)
    return jnp.einsum("bhqk,bhkd->bhqd", jnp.exp(scores - lse[..., None]), v), lse


def assert_close(got: Any, expected: Any, share: float = 2e-2) -> None:
    got, expected = (np.asarray(array, np.float32) for array in (got, expected))
    assert np.abs(got - expected).max() <= share * max(np.abs(expected).max(), 0.1)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_results_and_gradients(wrap: Any) -> None:
    given = [*rows(jnp.float16), SLOPES]

    def both(q: Any, k: Any, v: Any, table: Any) -> Any:
        out, lse = attention(LEARNED, q, k, v, slopes=table, ids=IDS, emulate=True, return_lse=True)
        return out.astype(jnp.float32), lse

    def expected(q: Any, k: Any, v: Any, table: Any) -> Any:
        return plain(q, k, v, table, IDS)

    for got, wanted in zip(wrap(both)(*given), expected(*given), strict=True):
        assert_close(got, wanted)
    weights = jax.random.normal(jax.random.key(1), (2, 2, LENGTH, 32))
    loss = lambda f: lambda *x: (f(*x)[0] * weights).sum() + (f(*x)[1] * weights[..., 0]).sum()
    ours = wrap(jax.grad(loss(both), argnums=(0, 1, 2, 3)))(*given)
    for got, wanted in zip(ours, jax.grad(loss(expected), argnums=(0, 1, 2, 3))(*given), strict=True):
        assert got.dtype == wanted.dtype
        assert_close(got, wanted)


def test_a_float32_output_and_its_gradients() -> None:
    spec = fg.AttentionSpec(32, "bfloat16", mask=fg.causal(), out_dtype="float32")
    q, k, v = rows()
    out = attention(spec, q, k, v, emulate=True)
    assert out.dtype == jnp.float32 and (out != out.astype(jnp.bfloat16)).any()
    assert_close(out, plain(q, k, v)[0], 1e-2)
    got = jax.grad(lambda x: attention(spec, x, k, v, emulate=True).sum())(q)
    assert got.dtype == jnp.bfloat16
    assert_close(got, jax.grad(lambda x: plain(x, k, v)[0].sum())(q))
    with pytest.raises(UnsupportedError, match="grad_dtype='float32': in JAX a gradient has the dtype of its input"):
        attention(fg.AttentionSpec(32, "bfloat16", grad_dtype="float32"), q, k, v, emulate=True)


def test_gradients_of_the_output_only() -> None:
    q, k, v = rows()
    got = jax.grad(lambda x: attention(CAUSAL, x, k, v, emulate=True).astype(jnp.float32).sum())(q)
    assert_close(got, jax.grad(lambda x: plain(x, k, v)[0].sum())(q))


def test_closed_over_arrays() -> None:
    """Arrays, and tracers of a program, with their gradients."""
    given = rows(jnp.float16)

    def loss(table: Any, mine: bool) -> Any:
        def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s + table[h] * (q - k)

        documents = IDS[0]
        if not mine:
            return plain(*given, table, IDS[:1])[0].sum()
        spec = fg.AttentionSpec(32, mask=fg.causal() & fg.document(documents), score=score)
        return attention(spec, *given, emulate=True).astype(jnp.float32).sum()

    ours, theirs = (jax.jit(jax.grad(loss), static_argnums=1)(SLOPES, mine) for mine in (True, False))
    assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["rows", "captures", "documents"])
def test_vmap(name: str) -> None:
    """Where the mapped axis is merged into the batch, and where calls run one after another."""
    q, k, v = rows(jnp.float16)
    many = jnp.stack([q, 2 * q, -q])
    tables = jnp.stack([jnp.asarray(SLOPES), 2 * SLOPES, -SLOPES])
    spec = fg.AttentionSpec(32, "float16", mask=fg.causal())
    call, axis = {
        "rows": (lambda x: attention(spec, x, k, v, emulate=True), many),
        "captures": (lambda x: attention(LEARNED, q, k, v, slopes=x, ids=IDS, emulate=True), tables),
        "documents": (lambda x: attention(LEARNED, x, k, v, slopes=SLOPES, ids=IDS, emulate=True), many),
    }[name]
    assert jnp.array_equal(jax.jit(jax.vmap(call))(axis), jnp.stack([call(x) for x in axis]))
    loss = lambda x: call(x).astype(jnp.float32).sum()
    assert_close(jax.vmap(jax.grad(loss))(axis)[1], jax.grad(loss)(axis[1]))


def test_dropout() -> None:
    spec = fg.AttentionSpec(32, "bfloat16", dropout=0.5)
    call = jax.jit(lambda seed, *x: attention(spec, *x, seed=seed, emulate=True))
    first, again, other = (call(seed, *rows()) for seed in (3, 3, 4))
    assert jnp.array_equal(first, again) and not jnp.array_equal(first, other)
    assert jnp.array_equal(first, attention(spec, *rows(), seed=3, emulate=True))


def test_numbers() -> None:
    spec = fg.AttentionSpec(32, "bfloat16", mask=fg.sliding_window(fg.Scalar("width")))
    calls = [jax.jit(lambda *x, n=n: attention(spec, *x, width=n, emulate=True))(*rows()) for n in (2, 9)]
    fixed = attention(fg.AttentionSpec(32, "bfloat16", mask=fg.sliding_window(9)), *rows(), emulate=True)
    assert jnp.array_equal(calls[1], fixed) and not jnp.array_equal(*calls)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, flashgen as fg
from flashgen.jax import attention
from jax.sharding import Mesh, PartitionSpec as P
q, k, v = (jax.random.normal(key, (2, 2, 40, 32), jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 3))
spec = fg.AttentionSpec(32, "bfloat16", mask=fg.causal())
call = lambda q, k, v: attention(spec, q, k, v, emulate=True)
mesh = Mesh(np.array(jax.devices()), ("batch",))
sharded = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("batch"), out_specs=P("batch")))
assert len(jax.devices()) == 2 and jnp.array_equal(sharded(q, k, v), call(q, k, v))
loss = lambda f: lambda q: f(q, k, v).astype(jnp.float32).sum()
ours, expected = jax.grad(loss(sharded))(q), jax.grad(loss(call))(q)
assert jnp.abs(ours - expected).max() <= 2e-2 * jnp.abs(expected).max()
"""


def test_shard_map() -> None:
    """On two CPU devices, which a process has from its start."""
    import os

    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SHARDED], env={**os.environ, **flags}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_compiled_attention() -> None:
    made = fg.compile(CAUSAL, emulate=True)
    assert jnp.array_equal(attention(made, *rows()), attention(CAUSAL, *rows(), emulate=True))


@pytest.mark.parametrize("engine", [{"emulate": True}, {"target": "sm_80"}], ids=["emulator", "gpu"])
@pytest.mark.parametrize("wrap", [jax.jit, jax.grad, jax.vmap], ids=["jit", "grad", "vmap"])
def test_a_compiled_attention_that_jax_traces_names_the_function_to_call(wrap: Any, engine: Any) -> None:
    made, (q, k, v) = fg.compile(CAUSAL, **engine), rows()
    with pytest.raises(ArgumentError, match=r"flashgen\.jax\.attention\("):
        wrap(lambda x: made(x, k, v).sum())(q)


WRONG: Any = [
    (lambda q, k, v: attention(fg.causal(), q, k, v), "give a flashgen.AttentionSpec"),
    (lambda q, k, v: attention(CAUSAL, q.astype(jnp.float32), k, v, emulate=True), "q has dtype float32"),
    (lambda q, k, v: attention(CAUSAL, q[0], k, v, emulate=True), "give 4 dimensions"),
    (lambda q, k, v: attention(CAUSAL, q, k, v, seed=1, emulate=True), "no dropout"),
    (lambda q, k, v: attention(CAUSAL, q, k, v, width=1, emulate=True), "unknown argument 'width'"),
    (lambda q, k, v: attention(GIVEN, q, k, v, emulate=True), "capture 'bias' is missing"),
    (lambda q, k, v: attention(GIVEN, q, k, v, bias=jnp.zeros((2, 2)), emulate=True), "of 1 dimension"),
    (lambda q, k, v: jax.grad(lambda x: attention(GIVEN, q, k, v, bias=x, emulate=True).sum())(SLOPES), "grad=True"),
    (lambda q, k, v: attention(NUMBER, q, k, v, width=jnp.int32(3), emulate=True), "give a Python number"),
    (lambda q, k, v: attention(DROPPED, q, k, v, emulate=True), "seed is missing"),
]
bias = fg.Tensor("bias", "float32", 1)
GIVEN = fg.AttentionSpec(32, "bfloat16", score=lambda s, b, h, q, k: s + bias[h])
NUMBER = fg.AttentionSpec(32, "bfloat16", mask=fg.sliding_window(fg.Scalar("width")))
DROPPED = fg.AttentionSpec(32, "bfloat16", dropout=0.5)


@pytest.mark.parametrize(("call", "message"), WRONG)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_refusals(call: Any, message: str, wrap: Any) -> None:
    with pytest.raises(ArgumentError, match=message):
        wrap(call)(*rows())


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_cpu_arrays_use_the_emulator_only_on_request(wrap: Any) -> None:
    with pytest.raises(Exception, match="arrays are on the CPU"):
        jax.block_until_ready(wrap(lambda *x: attention(CAUSAL, *x))(*rows()))
    with pytest.raises(ArgumentError, match=r"^arrays are on the CPU"):  # untraced arrays are checked at once
        attention(CAUSAL, *rows())


def test_importing_flashgen_imports_no_jax() -> None:
    program = "import flashgen, sys; flashgen.AttentionSpec(64); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    given = [*rows(jnp.float16), SLOPES]

    def ours(q: Any, k: Any, v: Any, table: Any) -> Any:
        return attention(LEARNED, q, k, v, slopes=table, ids=IDS).astype(jnp.float32)

    def theirs(q: Any, k: Any, v: Any, table: Any) -> Any:
        return plain(q, k, v, table, IDS)[0]

    assert_close(jax.jit(ours)(*given), theirs(*given))
    gradients = [jax.jit(jax.grad(lambda *x, f=f: f(*x).sum(), argnums=(0, 1, 2, 3)))(*given) for f in (ours, theirs)]
    for got, wanted in zip(*gradients, strict=True):
        assert_close(got, wanted)
    causal = jax.jit(lambda *x: attention(CAUSAL, *x))(*rows())
    assert_close(causal, plain(*rows())[0])
