"""Tensors on the device "meta" have no elements: calls that would read them are refused by name."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import flashgen as fg
from flashgen.errors import ArgumentError

META = torch.zeros(1, 1, 8, 32, dtype=torch.float16, device="meta")


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_compiled_attention_on_the_emulator_refuses_them(name: str) -> None:
    attention = fg.compile(fg.AttentionSpec(32, mask=fg.causal()), emulate=True)
    given = dict.fromkeys("qkv", torch.zeros(1, 1, 8, 32, dtype=torch.float16).numpy())
    with pytest.raises(ArgumentError, match=f"{name} of type Tensor: the emulator takes NumPy arrays"):
        attention(**given | {name: META})


def test_a_compiled_attention_for_a_gpu_refuses_them() -> None:
    attention = fg.compile(fg.AttentionSpec(32), target="sm_80")
    with pytest.raises(ArgumentError, match="q is a torch tensor on meta, which has no elements; give one that is on"):
        attention(META, META, META)
