"""Nested transforms of torch.func, and forward-mode differentiation, which is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import torch
import torch.autograd.forward_ad as forward_ad
from torch.func import grad, hessian, jacfwd, jvp, vmap

import flashgen as fg
import flashgen.torch as ours
import plain
from flashgen.errors import UnsupportedError

SLOPES = fg.Tensor("slopes", "float32", 1, grad=True)
SPEC = fg.AttentionSpec(16, mask=fg.causal(), score=lambda s, b, h, q, k: s + SLOPES[h] * (q - k))
REFUSED = "forward-mode differentiation .* of flashgen's attention is not supported"


def rows(*leading: int) -> list[Any]:
    return [torch.randn(*leading, 2, 9, 16).half() for _ in range(3)]


def squares(out: Any) -> Any:
    return (out.float() * torch.linspace(-1, 1, 16)).square().sum()


def loss(q: Any, k: Any, v: Any, slopes: Any) -> Any:
    return squares(ours.attention(SPEC, q, k, v, slopes=slopes))


def expected_loss(q: Any, k: Any, v: Any, slopes: Any) -> Any:
    score = lambda s, b, h, i, j: s + slopes[h] * (i - j)
    out, _ = plain.attention(q, k, v, mask=lambda b, h, i, j: i >= j, score=score)
    return (out * torch.linspace(-1, 1, 16, dtype=torch.float64)).square().sum()


def test_gradients_of_mapped_calls() -> None:
    """With respect to mapped arguments and to shared ones, including captures."""
    (q, k, v), slopes = rows(3, 2), torch.randn(3, 2)
    inputs = [x.clone().requires_grad_() for x in (q, k[0], v, slopes)]

    def mapped(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        return vmap(loss, in_dims=(0, None, 0, 0))(q, k, v, slopes).sum()

    q_, k_, v_, slopes_ = inputs
    whole = sum(expected_loss(q_[n], k_, v_[n], slopes_[n]) for n in range(3))
    got = grad(mapped, argnums=(0, 1, 2, 3))(q, k[0], v, slopes)
    for name, one, other in zip("qkvs", got, torch.autograd.grad(whole, inputs), strict=True):
        plain.assert_close(one, other.double(), f"gradient by {name}")
    twice = grad(lambda a: vmap(vmap(lambda x: squares(ours.scaled_dot_product_attention(x, x, x))))(a).sum())(q)
    flat = q.flatten(0, 1).requires_grad_()
    (expected,) = torch.autograd.grad(squares(ours.scaled_dot_product_attention(flat, flat, flat)), flat)
    plain.assert_close(twice.flatten(0, 1), expected.double())


def packed(x: Any) -> Any:
    tokens, ends = x[0].transpose(0, 1), torch.tensor([0, 4, 9], dtype=torch.int32)
    return ours.varlen_attention(tokens, tokens, tokens, ends, ends)


CALLS: dict[str, Callable[..., Any]] = {
    "attention": lambda x: ours.attention(SPEC, x, x, x, slopes=torch.ones(2)),
    "captures": lambda x: ours.attention(SPEC, *rows(2), slopes=x[0, :, 0, 0].float()),
    "sdpa": lambda x: ours.scaled_dot_product_attention(x, x, x),
    "flex": lambda x: ours.flex_attention(x, x, x),
    "varlen": packed,
    "merge_states": lambda x: ours.merge_states([x, x], [torch.zeros(2, 2, 9)] * 2).out,
}


@pytest.mark.parametrize("name", CALLS)
def test_forward_mode_is_refused(name: str) -> None:
    call, (q, tangent, _) = CALLS[name], rows(2)
    with pytest.raises(UnsupportedError, match=REFUSED):
        jvp(call, (q,), (tangent,))
    with pytest.raises(UnsupportedError, match=REFUSED), forward_ad.dual_level():
        call(forward_ad.make_dual(q, tangent))
    if name != "merge_states":  # which has no gradient either
        with pytest.raises(UnsupportedError, match=REFUSED), forward_ad.dual_level():
            call(forward_ad.make_dual(q.clone().requires_grad_(), tangent))
    with forward_ad.dual_level():
        call(q)  # without a tangent


def test_forward_mode_around_and_inside_other_transforms() -> None:
    q, tangent, _ = rows(2)
    attend = lambda x: ours.scaled_dot_product_attention(x, x, x)
    for transformed in (
        lambda: jvp(vmap(attend), (q,), (tangent,)),
        lambda: vmap(lambda x: jvp(attend, (x,), (x,)))(q),
        lambda: jacfwd(attend)(q[:1, :1]),
        lambda: hessian(lambda x: squares(attend(x)))(q[:1, :1]),
    ):
        with pytest.raises(UnsupportedError, match=REFUSED):
            transformed()


def test_pages_are_not_written_with_a_tangent() -> None:
    new, pages = torch.randn(2, 1, 2, 32).half(), torch.zeros(4, 16, 2, 32).half()
    table, used = torch.arange(4, dtype=torch.int32).view(2, 2), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=REFUSED), forward_ad.dual_level():
        k_new = forward_ad.make_dual(new, new)
        ours.append_kv(k_new, new, pages, pages.clone(), page_table=table, seqused_k=used)


def test_compiled_functions_with_transforms() -> None:
    """Mapped calls are in the graph; derivatives break it, because torch's compiler loses tangents of operators."""
    q, tangent, _ = rows(3)
    attend = lambda x: ours.scaled_dot_product_attention(x, x, x)
    mapped = torch.compile(lambda q: vmap(attend)(q), fullgraph=True, backend="aot_eager")
    assert torch.equal(mapped(q), vmap(attend)(q))
    derived = lambda q: grad(lambda x: squares(vmap(attend)(x)))(q)
    plain.assert_close(torch.compile(derived, backend="aot_eager")(q), derived(q).double())
    with pytest.raises(UnsupportedError, match=REFUSED):
        torch.compile(lambda q, t: jvp(attend, (q,), (t,)), backend="aot_eager")(q, tangent)
