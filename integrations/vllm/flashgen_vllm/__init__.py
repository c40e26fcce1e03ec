"""Attention backends of vLLM that run flashgen's kernels: "FLASHGEN", and "FLASHGEN_MLA" for latent attention.

vLLM calls `register` in each of its processes, by the entry point "flashgen" of the group `vllm.general_plugins`. The
names then work as values of `--attention-backend` and of `AttentionConfig.backend`:

    vllm serve MODEL --attention-backend FLASHGEN
"""

from __future__ import annotations

BACKENDS = {
    "FLASHGEN": "flashgen_vllm.backend.FlashgenBackend",
    "FLASHGEN_MLA": "flashgen_vllm.mla.FlashgenMLABackend",
}
"""The names of the backends, and the paths of their classes."""


def register() -> None:
    """Adds the names of the backends to vLLM's registry. Further calls in the same process change nothing.

    The classes are imported when a backend is selected. In an untested version of vLLM, this import raises an error
    that names the tested versions; other backends work as without this package.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, path in BACKENDS.items():
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, path)
