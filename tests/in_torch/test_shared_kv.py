"""V as a part of K in torch: calls take q and kv, and the gradient of kv is that of keys and values."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

import flashgen as fg
import plain
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.torch import Attention, append_kv, attention, emulated, merge_states, register
from flashgen.torch.context_parallel import attention as attention_of_ranks

slopes = fg.Tensor("slopes", "float32", 1, grad=True)
VALUE_DIM = 24
CAUSAL = fg.AttentionSpec(40, "bfloat16", value_dim=VALUE_DIM, mask=fg.causal(), shared_kv=True)
LEARNED = fg.AttentionSpec(
    40, "bfloat16", value_dim=VALUE_DIM, shared_kv=True, mask=fg.causal(),
    score=lambda s, b, h, q, k: s + slopes[h] * (q - k),
)  # fmt: skip
DROPPED = fg.AttentionSpec(40, "bfloat16", value_dim=VALUE_DIM, shared_kv=True, dropout=0.5)
PAGED = fg.AttentionSpec(40, "bfloat16", value_dim=VALUE_DIM, shared_kv=True, page_size=16)


def inputs(length: int = 40) -> list[Any]:
    """Returns q of four heads and kv of one."""
    return [torch.randn(2, heads, length, 40, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 1)]


def below(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q


def expected(q: Any, kv: Any, **given: Any) -> tuple[Any, Any]:
    return plain.attention(q, kv, kv[..., :VALUE_DIM], mask=below, **given)


def test_results_and_gradients() -> None:
    given = inputs()
    out, lse = attention(CAUSAL, *given, return_lse=True)
    wanted, wanted_lse = expected(*given)
    plain.assert_close(out, wanted)
    plain.assert_close(lse, wanted_lse)
    plain.assert_gradients(out, wanted, given)
    plain.assert_gradients(lse, wanted_lse, given)
    assert torch.equal(attention(fg.compile(CAUSAL, emulate=True), *(x.detach() for x in given)), out)


def test_captures_are_learned() -> None:
    values, given = torch.tensor([-0.1, 0.05, 0.1, -0.05], requires_grad=True), inputs()
    out = Attention(LEARNED)(*given, slopes=values)
    wanted, _ = expected(*given, score=lambda s, b, h, q, k: s + values[h] * (q - k))
    plain.assert_close(out, wanted)
    plain.assert_gradients(out, wanted, [*given, values])


def test_any_strides() -> None:
    """Rows that kernels cannot read are copied, and gradients have the order of the inputs in memory."""
    q, kv = inputs()
    wanted = attention(CAUSAL, q, kv)
    turned = [x.detach().mT.contiguous().mT.requires_grad_() for x in (q, kv)]
    out = attention(CAUSAL, *turned)
    assert torch.equal(out, wanted)
    d_out = torch.randn_like(wanted)
    for one, other in zip(plain.gradients(out, d_out, turned), plain.gradients(wanted, d_out, (q, kv)), strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)
        assert one.stride(-1) != 1


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph_for_all_lengths(backend: str) -> None:
    counter = CompileCounterWithBackend(backend)

    def model(q: Any, kv: Any) -> Any:
        return attention(CAUSAL, q * 2, kv).sin()

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for length in (24, 40, 33):
        given = inputs(length)
        out, wanted = compiled(*given), model(*given)
        torch.testing.assert_close(out, wanted)
        d_out = torch.randn_like(out)
        ours, theirs = (torch.autograd.grad(each, given, d_out) for each in (out, wanted))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, atol=4e-2, rtol=4e-2)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["causal", "learned", "dropout"])
def test_opcheck(name: str) -> None:
    """Checks the schemas, autograd, the fake kernels, and AOTAutograd with symbolic sizes."""
    spec = {"causal": CAUSAL, "learned": LEARNED, "dropout": DROPPED}[name]
    captures = [torch.zeros(4, requires_grad=True)] if name == "learned" else []
    q, kv = inputs()
    rest = (captures, register(spec), [], [], torch.tensor(7) if name == "dropout" else None)
    given = (q, kv, kv.detach()[..., :0], *rest)
    results = torch.library.opcheck(torch.ops.flashgen.forward.default, given, atol=3e-2, rtol=3e-2)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4
    q, kv, captures = q.detach(), kv.detach(), [each.detach() for each in captures]
    out, lse = torch.ops.flashgen.forward(q, kv, kv[..., :0], captures, *rest[1:])
    back = (torch.ones_like(out), torch.ones_like(lse), q, kv, kv[..., :0], out, lse, captures, *rest[1:])
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    results = torch.library.opcheck(torch.ops.flashgen.backward.default, back, test_utils=utilities)
    assert set(results.values()) == {"SUCCESS"}


def test_exported_programs() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention(CAUSAL)

        def forward(self, q: Any, kv: Any) -> Any:
            return self.attention(q, kv)

    given = [x.detach() for x in inputs()]
    program = torch.export.export(Model(), tuple(given))
    assert torch.equal(program.module()(*given), attention(CAUSAL, *given))


def test_transforms() -> None:
    """vmap with a larger batch and one call per index, and gradients of mapped calls for mapped and shared arrays."""
    q, kv = (torch.stack([x.detach(), 2 * x.detach()]) for x in inputs())
    alone = torch.stack([attention(CAUSAL, *each) for each in zip(q, kv, strict=True)])
    assert torch.equal(vmap(lambda *x: attention(CAUSAL, *x))(q, kv), alone)
    dropped = vmap(lambda *x: attention(DROPPED, *x, seed=5), randomness="same")(q, kv)
    assert torch.equal(dropped[1], attention(DROPPED, q[1], kv[1], seed=5))

    def loss(q: Any, kv: Any) -> Any:
        return attention(CAUSAL, q, kv).float().square().sum()

    shared = kv[0]
    gradients = grad(lambda a, b: vmap(loss, in_dims=(0, None))(a, b).sum(), argnums=(0, 1))(q, shared)
    each = [grad(loss, argnums=(0, 1))(one, shared) for one in q]
    plain.assert_close(gradients[0], torch.stack([one for one, _ in each]).double())
    plain.assert_close(gradients[1], sum(other.double() for _, other in each))


def test_autocast_and_checkpoints() -> None:
    q, kv = (x.detach().float().requires_grad_() for x in inputs())
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(CAUSAL, q, kv)
        again = checkpoint(lambda *x: attention(CAUSAL, *x), q, kv, use_reentrant=False)
    assert torch.equal(out, attention(CAUSAL, q.bfloat16(), kv.bfloat16())) and torch.equal(out, again)
    gradients = torch.autograd.grad(again.float().sum(), (q, kv))
    assert [each.dtype for each in gradients] == [torch.float32] * 2


def test_pages() -> None:
    q, kv = torch.randn(2, 4, 1, 40).bfloat16(), torch.randn(6, 16, 1, 40).bfloat16()
    where = {"page_table": torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32)}
    where["seqused_k"] = torch.tensor([41, 18], dtype=torch.int32)
    out = attention(PAGED, q, kv, **where)
    for b, keys in enumerate((41, 18)):
        rows = kv[where["page_table"][b].long()].flatten(0, 1)[:keys].transpose(0, 1)[None]
        plain.assert_close(out[b : b + 1], plain.attention(q[b : b + 1], rows, rows[..., :VALUE_DIM])[0])
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(PAGED, q, kv, **where), out)
    with pytest.raises(UnsupportedError, match="k requires a gradient, and a call with page_size=16 has none"):
        attention(PAGED, q, kv.requires_grad_(), **where)


def test_varlen_and_mixed_batches() -> None:
    """Packed sequences, with gradients, and packed queries over pages."""
    ends = torch.tensor([0, 13, 40], dtype=torch.int32)
    spec = fg.AttentionSpec(40, "bfloat16", value_dim=VALUE_DIM, shared_kv=True, mask=fg.causal(), layout="thd")
    q, kv = (torch.randn(40, heads, 40, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 1))
    out = attention(spec, q, kv, cu_seqlens_q=ends)
    rows = [[x[a:b].transpose(0, 1)[None] for x in (q, kv)] for a, b in ((0, 13), (13, 40))]
    wanted = torch.cat([expected(*each)[0][0].transpose(0, 1) for each in rows])
    plain.assert_close(out, wanted)
    plain.assert_gradients(out, wanted, [q, kv])
    mixed = fg.AttentionSpec(
        40, "bfloat16", value_dim=VALUE_DIM, shared_kv=True, mask=fg.causal(), layout="thd", page_size=16
    )
    pages, table = torch.zeros(4, 16, 1, 40).bfloat16(), torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    used = torch.tensor([13, 27], dtype=torch.int32)
    for b, keys in enumerate((kv[:13], kv[13:])):
        pages[table[b].long()] = (
            torch.cat([keys.detach(), torch.zeros(32 - len(keys), 1, 40)]).bfloat16().view(2, 16, 1, 40)
        )
    over_pages = attention(mixed, q.detach(), pages, cu_seqlens_q=ends, page_table=table, seqused_k=used)
    plain.assert_close(over_pages, wanted)


def step(cache: Any, kv_new: Any, q: Any, table: Any, used: Any) -> Any:
    """One decode step of a layer: append, attend, and merge with a shared prefix."""
    append_kv(kv_new, None, cache, None, page_table=table, seqused_k=used)
    own = attention(PAGED, q, cache, page_table=table, seqused_k=used + 1, return_lse=True)
    first = attention(PAGED, q, cache, page_table=table[:1].expand(2, -1), seqused_k=used * 0 + 16, return_lse=True)
    return merge_states(*zip(own, first, strict=True)).out


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_step_compiles_without_breaks(backend: str) -> None:
    kv_new, q, cache = (torch.randn(shape).bfloat16() for shape in ((2, 1, 1, 40), (2, 4, 1, 40), (6, 16, 1, 40)))
    table, used = (torch.tensor(each, dtype=torch.int32) for each in ([[4, 0, 2], [1, 5, 3]], [40, 17]))
    other, before = cache.clone(), cache.clone()
    wanted = step(cache, kv_new, q, table, used)
    out = torch.compile(step, fullgraph=True, backend=backend)(other, kv_new, q, table, used)
    assert torch.equal(out, wanted) and torch.equal(other, cache) and not torch.equal(cache, before)
    assert torch.equal(cache[2, 8], kv_new[0, 0]) and torch.equal(cache[5, 1], kv_new[1, 0])
    given = (kv_new, None, cache, None, table, used, True)
    results = torch.library.opcheck(torch.ops.flashgen.append_kv.default, given)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


def test_tensors_without_elements() -> None:
    q, kv = (x.detach().to("meta") for x in inputs())
    out, lse = attention(CAUSAL, q, kv, return_lse=True)
    assert out.shape == (2, 4, 40, VALUE_DIM) and lse.shape == (2, 4, 40) and out.is_meta


def test_given_and_missing_values() -> None:
    q, kv = inputs()
    match = "v: with shared_kv=True, V is the first 24 columns of k: leave v out"
    for device in ("cpu", "meta"):
        with pytest.raises(ArgumentError, match=match):
            attention(CAUSAL, *(x.detach().to(device) for x in (q, kv, kv[..., :VALUE_DIM])))
    with pytest.raises(ArgumentError, match=match):
        attention(CAUSAL, q, kv, 3)
    with pytest.raises(ArgumentError, match="v is missing: give q, k and v, or declare shared_kv=True"):
        attention(fg.AttentionSpec(40, "bfloat16"), q, kv)
    with pytest.raises(ArgumentError, match="shared_kv=True is not supported on several ranks"):
        attention_of_ranks(CAUSAL, q, kv, kv[..., :0])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "default", "reduce-overhead"])
def test_on_a_gpu(mode: str) -> None:
    """Also in graphs of torch.compile, and with rows that have to be copied."""
    spec = fg.AttentionSpec(576, "bfloat16", value_dim=512, mask=fg.causal(), shared_kv=True)
    with emulated(False):
        call: Any = lambda q, kv: attention(spec, q, kv)
        compiled = call if mode == "eager" else torch.compile(call, fullgraph=True, mode=mode)
        for offset in (0, 0, 1):
            q, kv = (
                torch.randn(2, heads, 100, 577, device="cuda", dtype=torch.bfloat16)[..., offset:][..., :576]
                .detach()
                .requires_grad_()
                for heads in (4, 1)
            )
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(q, kv)
            on_cpu = [x.detach().cpu().requires_grad_() for x in (q, kv)]
            wanted, _ = plain.attention(*on_cpu, on_cpu[1][..., :512], mask=below)
            plain.assert_close(out.cpu(), wanted)
            d_out = torch.randn_like(out)
            ours = torch.autograd.grad(out, (q, kv), d_out)
            for one, other in zip(ours, torch.autograd.grad(wanted, on_cpu, d_out.cpu().double()), strict=True):
                plain.assert_close(one.cpu(), other.double())
