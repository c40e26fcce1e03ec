"""`flashgen.jax.dot_product_attention` beside the function of the same name in jax.nn, on the CPU with the emulator."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from flashgen.errors import ArgumentError

jax = pytest.importorskip("jax", reason="flashgen.jax needs JAX: pip install 'flashgen[jax]'")
jnp = jax.numpy
from flashgen.jax import calls, dot_product_attention

CPU = jax.devices("cpu")[0]
BATCH, LENGTH, KEYS, HEADS, DIM = 2, 24, 33, 4, 32
ours = partial(dot_product_attention, emulate=True)


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with jax.default_device(CPU):
        yield


def normal(seed: int, *shape: int, dtype: Any = None) -> Any:
    with jax.default_device(CPU):
        return jax.random.normal(jax.random.key(seed), shape).astype(dtype or jnp.float16)


def rows(dim: int = DIM, heads_kv: int = 2) -> tuple[Any, Any, Any]:
    keys = (BATCH, KEYS, heads_kv, dim)
    return normal(0, BATCH, LENGTH, HEADS, dim), normal(1, *keys), normal(2, *keys)


def theirs(*given: Any, **named: Any) -> Any:
    """jax.nn's function of float32 copies."""
    return jax.nn.dot_product_attention(*(each.astype(jnp.float32) for each in given), **named)


def kept(*shape: int) -> Any:
    return np.random.default_rng(3).random(shape) < 0.7


def lengths(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (3, 2), "scale": 0.3},
    "causal window": {"is_causal": True, "local_window_size": 5},
    "lengths": {"query_seq_lengths": lengths(20, 3), "key_value_seq_lengths": lengths(33, 9)},
    "lengths of keys": {"key_value_seq_lengths": lengths(1, 9), "is_causal": True},
    "mask": {"mask": kept(BATCH, 1, LENGTH, KEYS)},
    "mask of heads": {"mask": kept(HEADS, 1, KEYS)},
    "bias": {"bias": normal(7, 1, HEADS, LENGTH, KEYS, dtype=jnp.float32)},
    "bias of rows": {"bias": normal(8, BATCH, 1, LENGTH, 1), "is_causal": True},
    "bias and mask": {"bias": normal(9, KEYS), "mask": kept(LENGTH, KEYS), "scale": 0.5},
}


@pytest.mark.rotated(3)
@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_jax(name: str) -> None:
    given, how, d_out = rows(), CASES[name], normal(4, BATCH, LENGTH, HEADS, DIM, dtype=jnp.float32)
    in_use = how.get("query_seq_lengths", lengths(LENGTH, LENGTH))[:, None, None] > np.arange(LENGTH)[:, None]
    (out, lse), (wanted, wanted_lse) = (each(*given, return_residual=True, **how) for each in (ours, theirs))
    assert (out.shape, out.dtype) == (wanted.shape, given[0].dtype) and (lse.shape, lse.dtype) == (lse.shape, out.dtype)
    np.testing.assert_allclose(out, wanted, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(np.where(in_use, lse, 0), np.where(in_use, wanted_lse, 0), rtol=2e-3, atol=2e-3)

    def loss(attend: Any, *inputs: Any) -> Any:
        return (attend(*inputs, **how).astype(jnp.float32) * d_out).sum()

    gradients = [jax.grad(partial(loss, each), (0, 1, 2))(*given) for each in (ours, theirs)]
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=8e-3)


@pytest.mark.parametrize(
    ("wrap", "shape"),
    [(lambda f: f, (1, HEADS, LENGTH, KEYS)), (jax.jit, (BATCH, 1, LENGTH, KEYS)), (jax.jit, (HEADS, 1, KEYS))],
)
def test_gradient_of_a_bias(wrap: Any, shape: tuple[int, ...]) -> None:
    given, bias = rows(), normal(5, *shape, dtype=jnp.float32)
    d_out = normal(4, BATCH, LENGTH, HEADS, DIM, dtype=jnp.float32)

    def loss(attend: Any, learned: Any, query: Any) -> Any:
        return (attend(query, *given[1:], learned, is_causal=True).astype(jnp.float32) * d_out).sum()

    gradients = [wrap(jax.grad(partial(loss, each), (0, 1)))(bias, given[0]) for each in (ours, theirs)]
    for one, other in zip(*gradients, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-2 * float(jnp.abs(other).max()))


def test_the_backward_computes_no_gradient_that_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under jit, JAX traces the bias even if it is not differentiated."""
    seen = []
    backward = calls.backward
    monkeypatch.setattr(
        calls,
        "backward",
        lambda entry, *given: (seen.append([c.name for c in entry.differentiated]), backward(entry, *given))[1],
    )
    given, bias = rows(), normal(5, LENGTH, KEYS, dtype=jnp.float32)

    def loss(query: Any, learned: Any) -> Any:
        return ours(query, *given[1:], learned).astype(jnp.float32).sum()

    alone = jax.jit(jax.grad(loss))(given[0], bias)
    both = jax.jit(jax.grad(loss, (0, 1)))(given[0], bias)
    assert seen == [[], ["bias"]]
    np.testing.assert_allclose(alone, both[0], rtol=1e-3, atol=1e-3)


def test_without_batch_and_dims_that_are_padded() -> None:
    given = [each[0] for each in rows(dim=12)]
    out, lse = ours(*given, return_residual=True)
    wanted, wanted_lse = theirs(*given, return_residual=True)
    assert out.shape == wanted.shape == (LENGTH, HEADS, 12) and lse.shape == wanted_lse.shape == (LENGTH, HEADS)
    np.testing.assert_allclose(out, wanted, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(lse, wanted_lse, rtol=2e-3, atol=2e-3)


def test_under_jit_and_vmap() -> None:
    given = rows()
    stacked = [jnp.stack([each, each[::-1]]) for each in given]
    used = jnp.array([[33, 9], [9, 33]], jnp.int32)
    out = jax.jit(jax.vmap(lambda q, k, v, n: ours(q, k, v, key_value_seq_lengths=n)))(*stacked, used)
    np.testing.assert_allclose(out[0], ours(*given, key_value_seq_lengths=used[0]), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(out[1], out[0][::-1], rtol=1e-3, atol=1e-3)


def test_rows_with_nothing_to_attend_to_are_zero() -> None:
    out, lse = ours(*rows(), mask=np.zeros((1, 1), bool), return_residual=True)
    assert not out.any() and np.isneginf(lse).all()


def test_the_signature_is_that_of_jax() -> None:
    """Every argument of jax.nn's function, in its order and with its default."""
    mine, wanted = (
        inspect.signature(each).parameters for each in (dot_product_attention, jax.nn.dot_product_attention)
    )
    for name, parameter in wanted.items():
        assert (mine[name].default, mine[name].kind) == (parameter.default, parameter.kind), name
    assert [name for name in mine if name in wanted] == [*wanted] and [*mine][-1] == "emulate"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "implementation": ({"implementation": "cudnn"}, "implementation='cudnn'.*jax.nn.dot_product_attention"),
    "scale": ({"scale": jnp.ones(())}, "scale is an array.*multiply query by it"),
    "dtype": ({"query": normal(0, BATCH, LENGTH, HEADS, DIM, dtype=jnp.float32)}, "query is float32.*convert"),
    "other dtype": ({"key": normal(0, BATCH, KEYS, 2, DIM, dtype=jnp.bfloat16)}, "key is bfloat16 and query float16"),
    "five dimensions": ({"query": normal(0, 1, BATCH, LENGTH, HEADS, DIM)}, "at most four dimensions"),
    "value dim": ({"value": normal(0, BATCH, KEYS, 2, 16)}, "the same shape of key and value"),
    "heads": ({"query": normal(0, BATCH, LENGTH, 3, DIM)}, "query has 3 heads and key 2"),
    "integer mask": ({"mask": np.ones((LENGTH, KEYS), np.int32)}, "mask is int32: give bool, or a bias"),
    "boolean bias": ({"bias": np.ones((LENGTH, KEYS), bool)}, "bias is bool: give .*or a mask"),
    "shape of a bias": ({"bias": np.ones((3, KEYS), np.float32)}, r"bias has shape \(1, 1, 3, 33\)"),
    "shape of lengths": ({"query_seq_lengths": lengths(1, 2, 3)}, "query_seq_lengths has shape"),
    "dtype of lengths": ({"key_value_seq_lengths": np.ones(BATCH, np.float32)}, "key_value_seq_lengths is float32"),
    "window": ({"local_window_size": (1, 2, 3)}, r"local_window_size=\(1, 2, 3\)"),
    "negative window": ({"local_window_size": -1}, "local_window_size=-1: give integers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_argument_and_the_remedy(name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=message):
        ours(**dict(zip(("query", "key", "value"), rows(), strict=True)) | given)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    with jax.default_device(jax.devices("gpu")[0]):
        given = [jnp.asarray(np.asarray(each)) for each in rows()]
        bias = jnp.asarray(np.asarray(normal(5, 1, HEADS, LENGTH, KEYS, dtype=jnp.float32)))

        def loss(attend: Any, learned: Any, query: Any) -> Any:
            return (attend(query, *given[1:], learned, is_causal=True).astype(jnp.float32) ** 2).sum()

        pair = (dot_product_attention, theirs)
        np.testing.assert_allclose(pair[0](*given), pair[1](*given), rtol=5e-3, atol=5e-3)
        gradients = [jax.jit(jax.grad(partial(loss, each), (0, 1)))(bias, given[0]) for each in pair]
        for one, other in zip(*gradients, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-2 * float(jnp.abs(other).max()))
