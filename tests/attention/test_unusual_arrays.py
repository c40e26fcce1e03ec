"""Arrays whose memory alone does not determine their elements are refused by name, wherever a call takes arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.errors import ArgumentError
from flashgen.runtime.arrays import library_of

BIAS = fg.Tensor("bias", "float32", 1)
SPEC = fg.AttentionSpec(32, score=lambda s, b, h, q, k: s + BIAS[q])


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "out"])
def test_masked_arrays(name: str) -> None:
    rows, bias = np.zeros((1, 1, 20, 32), np.float16), np.zeros(20, np.float32)
    given: dict[str, Any] = {"q": rows, "k": rows, "v": rows, "bias": bias, "out": rows.copy()}
    given[name] = np.ma.masked_array(given[name], given[name] > 0)
    compiled = fg.compile(SPEC, emulate=True)
    with pytest.raises(ArgumentError, match=f"{name} is a masked array of NumPy.* give {name}.filled"):
        compiled(**given)


def test_subclasses_of_torch_tensors() -> None:
    torch = pytest.importorskip("torch", reason="of torch's tensors")
    from torch.nn.attention.bias import causal_lower_right

    class Named(torch.Tensor):  # type: ignore[misc, name-defined]
        """A subclass without special behaviour."""

    numbers = torch.zeros(3, 3)
    for plain in (numbers, torch.nn.Parameter(numbers), numbers.as_subclass(Named)):
        assert library_of(plain, "bias").name == "torch"
    fake = torch._subclasses.FakeTensorMode().from_tensor(numbers)
    for other in (causal_lower_right(3, 4), fake):
        with pytest.raises(ArgumentError, match=f"bias of type .*{type(other).__name__} is no plain tensor of torch"):
            library_of(other, "bias")


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_values_may_be_a_part_of_the_keys(target: str) -> None:
    """Latent attention: v is the first columns of k, as a view. Both passes read it by its strides."""
    compiled = fg.compile(fg.AttentionSpec(128, value_dim=64, mask=fg.causal()), target=target, emulate=True)
    random = np.random.default_rng(0)
    q, k = random.standard_normal((2, 1, 2, 70, 128)).astype(np.float16)
    d_out = random.standard_normal((1, 2, 70, 64)).astype(np.float16)
    out, lse = compiled(q, k, k[..., :64], return_lse=True)
    copied = np.ascontiguousarray(k[..., :64])
    assert np.array_equal(out, compiled(q, k, copied))
    gradients = compiled.backward(d_out, q, k, k[..., :64], out, lse)
    expected = compiled.backward(d_out, q, k, copied, out, lse)
    assert all(np.allclose(one, other, atol=1e-3) for one, other in zip(gradients[:3], expected[:3], strict=True))
