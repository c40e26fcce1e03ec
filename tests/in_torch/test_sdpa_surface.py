"""Unusual arguments of scaled_dot_product_attention: torch's results, or a refusal."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import flashgen as fg
import plain
from flashgen.errors import ArgumentError
from flashgen.runtime.arrays import nesting
from flashgen.torch import attention, scaled_dot_product_attention


def rows(*shapes: Any) -> list[Any]:
    return [torch.randn(shape).half().requires_grad_() for shape in shapes]


def assert_as_torchs(inputs: Any, expected_options: Any = None, **options: Any) -> None:
    """Compares output and gradients with torch's in float64; expected_options change torch's call."""
    out = scaled_dot_product_attention(*inputs, **options)
    wide = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in (options if expected_options is None else expected_options).items()
    }
    expected = functional.scaled_dot_product_attention(*(x.double() for x in inputs), **wide)
    assert out.shape == expected.shape
    plain.assert_close(out, expected)
    learned = [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    plain.assert_gradients(out, expected, [*inputs, *learned])


BROADCAST: dict[str, Any] = {
    "keys of batch 1": ((3, 2, 9, 32), (1, 2, 11, 32), (1, 2, 11, 32)),
    "queries of batch 1": ((1, 2, 9, 32), (3, 2, 11, 32), (3, 2, 11, 32)),
    "one head of keys": ((3, 4, 9, 32), (3, 1, 11, 32), (3, 1, 11, 32)),
    "one head of keys, several of values": ((3, 4, 9, 32), (3, 1, 11, 32), (3, 4, 11, 32)),
    "one head of queries": ((3, 1, 9, 32), (3, 4, 11, 32), (1, 4, 11, 32)),
    "fewer dimensions": ((9, 32), (3, 4, 11, 32), (4, 11, 32)),
    "three dimensions": ((3, 9, 32), (1, 11, 32), (3, 11, 32)),
    "two dimensions": ((9, 32), (11, 32), (11, 32)),
    "five dimensions": ((2, 3, 2, 9, 32), (3, 2, 11, 32), (2, 1, 2, 11, 32)),
}


@pytest.mark.parametrize("name", BROADCAST)
def test_leading_dimensions_broadcast(name: str) -> None:
    inputs = rows(*BROADCAST[name])
    assert_as_torchs(inputs)
    out = scaled_dot_product_attention(*inputs)
    mask = torch.rand((*out.shape[:-1], 11)) > 0.4
    mask[..., 0] = True
    assert_as_torchs(inputs, attn_mask=mask)
    assert_as_torchs(inputs, attn_mask=torch.randn(9, 11))


@pytest.mark.parametrize("name", ["plain", "three dimensions", "batch of 1"])
def test_grouped_heads_broadcast(name: str) -> None:
    before = {"plain": (2,), "three dimensions": (), "batch of 1": (2,)}[name]
    of_keys = (1, 2, 11, 32) if name == "batch of 1" else (*before, 2, 11, 32)
    assert_as_torchs(rows((*before, 4, 9, 32), of_keys, of_keys), enable_gqa=True)


def test_shapes_that_do_not_broadcast() -> None:
    for q, k in (((2, 4, 9, 32), (3, 4, 9, 32)), ((2, 4, 9, 32), (2, 2, 9, 32))):
        with pytest.raises(ArgumentError, match=r"have sizes \d, \d, \d in one dimension, which do not broadcast"):
            scaled_dot_product_attention(*rows(q, k, k))


@pytest.mark.parametrize(("dim", "value_dim"), [(30, 30), (1, 3), (32, 21), (60, 64)])
def test_dims_that_are_no_multiple_of_8(dim: int, value_dim: int) -> None:
    inputs = rows((2, 2, 9, dim), (2, 2, 11, dim), (2, 2, 11, value_dim))
    assert_as_torchs(inputs)
    assert_as_torchs(inputs, scale=0.3, is_causal=True)
    turned = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs]
    out = scaled_dot_product_attention(*turned)
    assert nesting(out.stride()) == (0, 2, 1, 3)
    assert all(nesting(x.stride()) == (0, 2, 1, 3) for x in torch.autograd.grad(out.sum(), turned))


def test_head_dims_that_are_refused() -> None:
    q, k = rows((2, 2, 9, 30), (2, 2, 9, 31))
    with pytest.raises(ArgumentError, match="query has a last dimension of 30 and key of 31: give both the same"):
        scaled_dot_product_attention(q, k, k)


@pytest.mark.parametrize("scale", [0.0, -0.3, 2])
def test_scales_that_are_not_positive(scale: float) -> None:
    inputs = rows(*[(2, 2, 9, 32)] * 3)
    assert_as_torchs(inputs, scale=scale)
    assert_as_torchs(inputs, scale=scale, attn_mask=torch.randn(9, 9))


def test_a_scale_tensor_is_read_by_each_call_and_learned() -> None:
    inputs, scale = rows(*[(2, 2, 9, 32)] * 3), torch.tensor(0.3, requires_grad=True)
    bias = torch.randn(9, 9, requires_grad=True)
    for value in (0.3, -0.7):
        with torch.no_grad():
            scale.fill_(value)
        for mask in (None, bias):
            out = scaled_dot_product_attention(*inputs, attn_mask=mask, scale=scale)
            scores = inputs[0].double() @ inputs[1].double().mT * scale.double() + (
                0 if mask is None else mask.double()
            )
            expected = scores.softmax(-1) @ inputs[2].double()
            plain.assert_close(out, expected)
            plain.assert_gradients(out, expected, [*inputs, scale, *([] if mask is None else [mask])])
    with pytest.raises(ArgumentError, match=r"scale is a torch.float32 tensor of shape \(2,\)"):
        scaled_dot_product_attention(*inputs, scale=torch.ones(2))


def test_causal_biases_of_torch() -> None:
    """They are tensors over uninitialized memory."""
    inputs = rows((2, 2, 9, 32), (2, 2, 12, 32), (2, 2, 12, 32))
    assert_as_torchs(inputs, {"is_causal": True}, attn_mask=causal_upper_left(9, 12))
    lower_right = torch.ones(9, 12, dtype=torch.bool).tril(3)
    assert_as_torchs(inputs, {"attn_mask": lower_right}, attn_mask=causal_lower_right(9, 12))
    bias, q, k, v = causal_lower_right(9, 12), *(x.detach() for x in inputs)
    compiled = torch.compile(
        lambda q, k, v, bias: scaled_dot_product_attention(q, k, v, bias), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(q, k, v, bias), scaled_dot_product_attention(q, k, v, bias))
    with pytest.raises(ArgumentError, match="CausalBias of 9 queries and 11 keys; query has 9 and key 12"):
        scaled_dot_product_attention(*inputs, attn_mask=causal_lower_right(9, 11))
    with pytest.raises(ArgumentError, match="both given"):
        scaled_dot_product_attention(*inputs, attn_mask=bias, is_causal=True)


class Meaningful(torch.Tensor):
    """A tensor subclass whose functions behave differently."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(torch.Tensor):
    """A tensor subclass without special behaviour."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_masks_of_other_classes() -> None:
    inputs, numbers = rows(*[(2, 2, 9, 32)] * 3), torch.randn(9, 9)
    with pytest.raises(
        ArgumentError, match=r"attn_mask of type .*Meaningful: the meaning of its elements is not known"
    ):
        scaled_dot_product_attention(*inputs, attn_mask=numbers.as_subclass(Meaningful))
    masked = torch.masked.masked_tensor(numbers, numbers > 0)
    with pytest.raises(ArgumentError, match=r"attn_mask of type .*MaskedTensor"):
        scaled_dot_product_attention(*inputs, attn_mask=masked)
    nested = torch.nested.nested_tensor([numbers, numbers[:3]], layout=torch.jagged)
    with pytest.raises(ArgumentError, match="attn_mask is nested"):
        scaled_dot_product_attention(*inputs, attn_mask=nested)
    expected = scaled_dot_product_attention(*inputs, attn_mask=numbers)
    for mask in (numbers.as_subclass(Named), torch.nn.Parameter(numbers), torch.nn.Buffer(numbers)):
        assert torch.equal(scaled_dot_product_attention(*inputs, attn_mask=mask), expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_inputs_and_captures_of_other_classes_or_layouts() -> None:
    q, k, v = (x.detach() for x in rows(*[(2, 2, 9, 32)] * 3))
    with pytest.raises(ArgumentError, match=r"query of type .*MaskedTensor: the meaning of its elements is not known"):
        scaled_dot_product_attention(torch.masked.masked_tensor(q, q > 0), k, v)
    with pytest.raises(ArgumentError, match="value is nested"):
        scaled_dot_product_attention(q, k, torch.nested.nested_tensor([v[0], v[1]]))
    bias = fg.Tensor("bias", "float32", 1)
    spec, numbers = fg.AttentionSpec(32, score=lambda s, b, h, i, j: s + bias[i]), torch.zeros(9)
    for other, message in (
        (torch.nested.nested_tensor([numbers, numbers[:3]]), "capture 'bias' is nested"),
        (numbers.to_sparse(), "capture 'bias' is of layout torch.sparse_coo"),
        (numbers.to("meta"), "capture 'bias' is on meta and q on cpu"),
    ):
        with pytest.raises(ArgumentError, match=message):
            attention(spec, q, k, v, bias=other)


def test_dropping_everything_gives_zeros() -> None:
    inputs = rows(*[(2, 2, 9, 32)] * 3)
    inputs[2].data[0, 0, 0, 0] = float("inf")
    for probability in (1, 1.0):
        out = scaled_dot_product_attention(*inputs, dropout_p=probability)
        assert not out.any() and not any(x.any() for x in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize(
    ("probability", "message"),
    [
        (0.001, "dropout_p=0.001 would drop nothing: .* give 0, or at least 1/256"),
        (0.999, "dropout_p=0.999 would drop everything: .* give 1, or at most 255/256"),
        (-0.1, "dropout_p=-0.1 must be a number from 0 to 1"),
        (1.5, "dropout_p=1.5 must be a number from 0 to 1"),
        (True, "dropout_p=True must be"),
    ],
)
def test_probabilities_that_are_refused(probability: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        scaled_dot_product_attention(*rows(*[(1, 1, 9, 32)] * 3), dropout_p=probability)


def test_tensors_without_data_give_results_without_data() -> None:
    q, k, v = (torch.empty(2, 9, 4, 32, device="meta", dtype=torch.float16).transpose(1, 2) for _ in range(3))
    out = scaled_dot_product_attention(q, k, v)
    assert (out.device.type, out.shape, out.stride(), out.dtype) == ("meta", q.shape, q.stride(), q.dtype)
    bias = torch.empty(9, 9, device="meta", requires_grad=True)
    out = scaled_dot_product_attention(q.requires_grad_(), k, v, bias, dropout_p=0.5, emulate=False)
    assert [x.shape for x in torch.autograd.grad(out.sum(), (q, bias))] == [q.shape, bias.shape]


def test_8_bit_inputs_are_refused() -> None:
    (q,) = rows((2, 2, 9, 32))
    narrow = q.detach().to(torch.float8_e4m3fn)
    with pytest.raises(ArgumentError, match="query is float8_e4m3fn; flashgen computes in float16 and bfloat16"):
        scaled_dot_product_attention(narrow, narrow, narrow)
    with pytest.raises(ArgumentError, match="k is float8_e4m3fn; the spec is of float16"):
        scaled_dot_product_attention(q, narrow, narrow)
