"""Uses flashgen's attention in JAX under jit and vmap, with gradients of the inputs and of a table of slopes.

python examples/jax_attention.py             # needs a GPU and JAX
python examples/jax_attention.py --emulate   # on the CPU with flashgen's emulator
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import flashgen as fg

try:
    import jax
    import jax.numpy as jnp

    from flashgen.jax import attention
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    raise SystemExit(f"error: this example needs JAX ({error}): pip install 'flashgen[jax]'") from None

slopes = fg.Tensor("slopes", dtype="float32", ndim=1, grad=True)
SPEC = fg.AttentionSpec(64, "bfloat16", mask=fg.causal(), score=lambda s, b, h, q, k: s + slopes[h] * (k - q))


def plain(q: Any, k: Any, v: Any, table: Any) -> Any:
    """The same attention in plain JAX."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    position = jnp.arange(q.shape[2])
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / 8 + table[:, None, None] * (position - position[:, None])
    scores = jnp.where(position[:, None] >= position, scores, -jnp.inf)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulate", action="store_true", help="run on the CPU with flashgen's emulator")
    emulate = parser.parse_args().emulate
    if emulate:
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        raise SystemExit("error: there is no GPU that JAX can use; try --emulate")
    length = 96 if emulate else 2048
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (jax.random.normal(key, (2, 4, length, 64), jnp.bfloat16) for key in keys[:3])
    table, weights = jnp.array([0.5, 0.25, 0.125, 0.0625]), jax.random.normal(keys[3], q.shape)

    def ours(q: Any, k: Any, v: Any, table: Any) -> Any:
        return attention(SPEC, q, k, v, slopes=table, emulate=emulate).astype(jnp.float32)

    @partial(jax.jit, static_argnums=0)
    def gradients(function: Any, *inputs: Any) -> Any:
        return jax.grad(lambda *x: (function(*x) * weights).mean(), argnums=(0, 1, 2, 3))(*inputs)

    errors = {"out": _relative_error(jax.jit(ours)(q, k, v, table), plain(q, k, v, table))}
    pairs = zip(gradients(ours, q, k, v, table), gradients(plain, q, k, v, table), strict=True)
    errors |= {name: _relative_error(*pair) for name, pair in zip(("dq", "dk", "dv", "d_slopes"), pairs, strict=True)}
    tables = jnp.stack([table, 2 * table])
    mapped = jax.jit(jax.vmap(partial(ours, q, k, v)))(tables)
    errors["vmap"] = _relative_error(mapped[1], plain(q, k, v, tables[1]))
    print(
        "errors against plain JAX, relative to the largest element: "
        + ", ".join(f"{name} {x:.1%}" for name, x in errors.items())
    )
    if max(errors.values()) > 0.03:
        raise SystemExit("error: the difference exceeds the rounding of bfloat16")


def _relative_error(ours: Any, expected: Any) -> float:
    ours, expected = ours.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.abs(ours - expected).max() / jnp.abs(expected).max())


if __name__ == "__main__":
    try:
        main()
    except fg.errors.FlashgenError as error:
        raise SystemExit(f"error: {error}") from None
