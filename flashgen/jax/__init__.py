"""flashgen in JAX: attention under jit, grad, vmap and shard_map.

    import flashgen as fg
    from flashgen.jax import attention

    out = jax.jit(lambda q, k, v: attention(spec, q, k, v))(q, k, v)

Kernels are launched on XLA's stream and write to XLA's memory, through jax.experimental.buffer_callback. With
`emulate=True` arrays on the CPU run on the emulator. `import flashgen` does not import this package and needs no JAX.
"""

from flashgen.remedies import missing

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as error:
    raise missing("jax", error) from None

from flashgen.jax.dot_product import dot_product_attention
from flashgen.jax.functional import attention

__all__ = ["attention", "dot_product_attention"]
