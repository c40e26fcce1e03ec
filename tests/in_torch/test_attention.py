"""`flashgen.torch.attention`: results, gradients, torch's machinery, and refusals."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import ml_dtypes
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flashgen as fg
import flashgen.torch as ours
import plain
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.torch import Attention, attention, emulated, register

slopes = fg.Tensor("slopes", "float32", 1, grad=True)
width = fg.Scalar("width")
CAUSAL = fg.AttentionSpec(32, "bfloat16", mask=fg.causal())
LEARNED = fg.AttentionSpec(32, "bfloat16", mask=fg.causal(), score=lambda s, b, h, q, k: s + slopes[h] * (q - k))
DROPPED = fg.AttentionSpec(32, "bfloat16", dropout=0.25)


def below(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q


def test_results_and_gradients(qkv: Any) -> None:
    out, lse = attention(CAUSAL, *qkv, return_lse=True)
    expected, expected_lse = plain.attention(*qkv, mask=below)
    plain.assert_close(out, expected)
    plain.assert_close(lse, expected_lse)
    plain.assert_gradients(out, expected, qkv)
    plain.assert_gradients(lse, expected_lse, qkv[:2])
    assert torch.equal(attention(CAUSAL, *(x.detach() for x in qkv)), out), "equal without the operator"


def test_captures_are_learned(qkv: Any) -> None:
    values = torch.tensor([-0.1, 0.05], requires_grad=True)
    out = attention(LEARNED, *qkv, slopes=values)
    expected, _ = plain.attention(*qkv, mask=below, score=lambda s, b, h, q, k: s + values[h] * (q - k))
    plain.assert_close(out, expected)
    plain.assert_gradients(out, expected, [*qkv, values])


def test_numbers_and_integers_of_64_bits(qkv: Any) -> None:
    ids = fg.Tensor("ids", "int32", 1)
    spec = fg.AttentionSpec(32, "bfloat16", mask=lambda b, h, q, k: (ids[q] == ids[k]) & (abs(q - k) <= width))
    given = torch.arange(40) // 13
    out = attention(spec, *qkv, ids=given, width=4)
    expected, _ = plain.attention(*qkv, mask=lambda b, h, q, k: (given[q] == given[k]) & ((q - k).abs() <= 4))
    plain.assert_close(out, expected)
    with pytest.raises(RuntimeError, match="do not fit"):
        attention(spec, *qkv, ids=given + 2**32, width=4)


def test_closed_over_arrays(qkv: Any) -> None:
    ids, bias = torch.arange(40) // 13, torch.zeros(2, requires_grad=True)
    spec = fg.AttentionSpec(
        32, "bfloat16", mask=lambda b, h, q, k: ids[q] == ids[k], score=lambda s, b, h, q, k: s + bias[h] * (q - k)
    )
    expected, _ = plain.attention(
        *qkv, mask=lambda b, h, q, k: ids[q] == ids[k], score=lambda s, b, h, q, k: s + bias[h] * (q - k)
    )
    for made in (spec, fg.compile(spec, emulate=True)):
        out = attention(made, *qkv)
        plain.assert_close(out, expected)
        plain.assert_gradients(out, expected, [*qkv, bias])


def test_any_strides(qkv: Any) -> None:
    turned = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv]
    packed = torch.stack([x.detach() for x in qkv], -1)  # rows that are not contiguous
    expected = attention(CAUSAL, *qkv)
    assert torch.equal(attention(CAUSAL, *turned), expected)
    assert torch.equal(attention(CAUSAL, *packed.unbind(-1)), expected)
    out = attention(CAUSAL, *turned)
    out.sum().backward()  # its gradient is a broadcast number
    assert all(x.grad is not None and x.grad.shape == x.shape for x in turned)


def test_dropout_follows_torchs_generator(qkv: Any) -> None:
    torch.manual_seed(3)
    first, second = (attention(DROPPED, *qkv) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(attention(DROPPED, *qkv), first) and not torch.equal(first, second)
    assert torch.equal(attention(DROPPED, *qkv, seed=5), attention(DROPPED, *qkv, seed=torch.tensor([5])))


def test_a_seed_acts_as_in_the_attention_itself(qkv: Any) -> None:
    """Numbers are passed in the struct as halves; tensors are read by the emulator's kernels."""
    compiled = fg.compile(DROPPED, emulate=True)
    q, k, v = ([x.detach().float().numpy() for x in qkv][i].astype(ml_dtypes.bfloat16) for i in range(3))
    expected = torch.from_numpy(compiled(q, k, v, seed=2**40 + 5).astype("float32"))
    assert torch.equal(attention(DROPPED, *qkv, seed=2**40 + 5).float(), expected)


def test_checkpoints_recompute_the_same(qkv: Any) -> None:
    torch.manual_seed(3)
    plainly = attention(DROPPED, *qkv)
    expected = torch.autograd.grad(plainly.sum(), qkv)
    torch.manual_seed(3)
    again = checkpoint(lambda *x: attention(DROPPED, *x), *qkv, use_reentrant=False)
    assert torch.equal(again, plainly)
    for one, other in zip(torch.autograd.grad(again.sum(), qkv), expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def test_a_selective_checkpoint_computes_attention_once(qkv: Any) -> None:
    seen = []

    def policy(_context: Any, operator: Any, *_rest: Any, **_more: Any) -> CheckpointPolicy:
        mine = operator == torch.ops.flashgen.forward.default
        seen.append(mine)
        return CheckpointPolicy.MUST_SAVE if mine else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = lambda: create_selective_checkpoint_contexts(policy)
    out = checkpoint(lambda *x: attention(CAUSAL, *x).sin(), *qkv, use_reentrant=False, context_fn=contexts)
    out.sum().backward()
    assert any(seen) and qkv[0].grad is not None


def test_autocast_converts_inputs_and_not_captures(qkv: Any) -> None:
    values = torch.tensor([0.1, 0.2], requires_grad=True)
    wide = [x.detach().float().requires_grad_() for x in qkv]
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(LEARNED, *wide, slopes=values)
        direct, _ = torch.ops.flashgen.forward(*wide, [values], register(LEARNED), [], [], None)
    assert out.dtype == torch.bfloat16 and torch.equal(out, direct)
    assert torch.equal(out, attention(LEARNED, *qkv, slopes=values))
    out.sum().backward()
    assert wide[0].grad is not None and wide[0].grad.dtype == torch.float32


def test_vmap_and_grad(qkv: Any) -> None:
    q, k, v = (x.detach() for x in qkv)
    many = torch.stack([q, q * 2, q * 3])
    mapped = torch.func.vmap(lambda x: attention(CAUSAL, x, k, v))(many)
    assert torch.equal(mapped, torch.stack([attention(CAUSAL, x, k, v) for x in many]))
    tables = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    mapped = torch.func.vmap(lambda table: attention(LEARNED, q, k, v, slopes=table))(tables)
    assert torch.equal(mapped, torch.stack([attention(LEARNED, q, k, v, slopes=table) for table in tables]))
    by_function = torch.func.grad(lambda x: attention(CAUSAL, x, k, v).float().sum())(q)
    (by_tape,) = torch.autograd.grad(attention(CAUSAL, *qkv).float().sum(), qkv[:1])
    torch.testing.assert_close(by_function, by_tape, atol=1e-2, rtol=1e-2)
    each = torch.func.vmap(torch.func.grad(lambda x: attention(CAUSAL, x, k, v).float().sum()))(many)
    torch.testing.assert_close(each[0], by_tape, atol=1e-2, rtol=1e-2)
    with pytest.raises(UnsupportedError, match="no second derivative"):
        torch.func.grad(lambda x: torch.func.grad(lambda y: attention(CAUSAL, y, k, v).float().sum())(x).sum())(q)
    with pytest.raises(ArgumentError, match="randomness"):
        torch.func.vmap(lambda x: attention(DROPPED, x, k, v, seed=1))(many)


def test_a_module_holds_its_parameters(qkv: Any) -> None:
    layer = Attention(LEARNED, slopes=torch.tensor([0.1, 0.2]))
    assert [name for name, _ in layer.named_parameters()] == ["slopes"]
    layer(*qkv).sum().backward()
    assert layer.slopes.grad is not None and layer.slopes.grad.any()
    assert torch.equal(Attention(LEARNED, emulate=False, slopes=layer.slopes)(*qkv, emulate=True), layer(*qkv))
    for wrong in (fg.causal(), "causal()"):
        with pytest.raises(ArgumentError, match=r"give a flashgen\.AttentionSpec"):
            Attention(wrong)
    with pytest.raises(ArgumentError, match="slopes of type float is no tensor of torch"):
        Attention(LEARNED, slopes=0.1)
    with pytest.raises(ArgumentError, match="unknown argument 'tables'"):
        Attention(LEARNED, tables=torch.zeros(2))


def test_deterministic_gradients(qkv: Any) -> None:
    first, second = (
        torch.autograd.grad(attention(CAUSAL, *qkv, deterministic=True).float().square().sum(), qkv) for _ in range(2)
    )
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert register(CAUSAL, deterministic=True) != register(CAUSAL)


def test_second_derivatives_are_refused(qkv: Any) -> None:
    (dq,) = torch.autograd.grad(attention(CAUSAL, *qkv).sum(), qkv[:1], create_graph=True)
    with pytest.raises(UnsupportedError, match="no second derivative"):
        dq.sum().backward()


def test_a_float32_output_and_its_gradients(qkv: Any) -> None:
    spec = fg.AttentionSpec(32, "bfloat16", mask=fg.causal(), out_dtype="float32")
    out = attention(spec, *qkv)
    expected, _ = plain.attention(*qkv, mask=below)
    assert out.dtype == torch.float32 and not torch.equal(out, out.bfloat16().float())
    plain.assert_close(out, expected)
    plain.assert_gradients(out, expected, qkv)
    compiled = torch.compile(lambda *x: attention(spec, *x), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*qkv), out)
    meta = attention(spec, *(x.detach().to("meta") for x in qkv))
    assert (meta.dtype, meta.shape) == (out.dtype, out.shape)


def test_heads_of_512_columns() -> None:
    wide = [torch.randn(1, 2, 40, 512).bfloat16().requires_grad_() for _ in range(3)]
    out = attention(fg.AttentionSpec(512, "bfloat16", mask=fg.causal()), *wide)
    expected, _ = plain.attention(*wide, mask=below)
    plain.assert_close(out, expected)
    plain.assert_gradients(out, expected, wide)


def test_gradients_of_another_dtype_are_refused(qkv: Any) -> None:
    with pytest.raises(UnsupportedError, match="grad_dtype='float32': in torch's autograd a gradient has the dtype of"):
        attention(fg.AttentionSpec(32, "bfloat16", grad_dtype="float32"), *qkv)


WRONG: Any = [
    (lambda q, k, v: attention(CAUSAL, q, k, v, emulate=False), "on the CPU: move it to a GPU"),
    (lambda q, k, v: attention(CAUSAL, q.float(), k, v), r"q is float32; the spec is of bfloat16.*autocast"),
    (lambda q, k, v: attention(CAUSAL, q[0], k, v), "give 4 dimensions"),
    (lambda q, k, v: attention(CAUSAL, q[..., :16], k, v), "head_dim=32"),
    (lambda q, k, v: attention(CAUSAL, q, k.to("meta"), v), "k is on meta and q on cpu"),
    (lambda q, k, v: attention(CAUSAL, q, k, v, slopes=q), "unknown argument 'slopes'"),
    (lambda q, k, v: attention(CAUSAL, q, k, v, seed=3), "no dropout"),
    (lambda q, k, v: attention(DROPPED, q, k, v, seed=-1), "seed=-1 must be an integer from 0"),
    (lambda q, k, v: attention(DROPPED, q, k, v, seed=2**63), "must be an integer from 0"),
    (lambda q, k, v: attention(DROPPED, q, k, v, seed=torch.zeros(2, dtype=torch.int64)), r"seed is int64 of .*2"),
    (lambda q, k, v: attention(DROPPED, q, k, v, seed=torch.zeros(1)), "seed is float32"),
    (lambda q, k, v: attention(LEARNED, q, k, v), "capture 'slopes' is missing"),
    (lambda q, k, v: attention(LEARNED, q, k, v, slopes=0.5), "of type float is no tensor"),
    (lambda q, k, v: attention(LEARNED, q, k, v, slopes=torch.zeros(2, 2)), "declared float32 of 1 dimension"),
    (lambda q, k, v: attention(GIVEN, q, k, v, bias=torch.zeros(2, requires_grad=True)), "declare it with grad=True"),
]
bias = fg.Tensor("bias", "float32", 1)
GIVEN = fg.AttentionSpec(32, "bfloat16", score=lambda s, b, h, q, k: s + bias[h])


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_refusals(qkv: Any, call: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(*(x.detach() for x in qkv))


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_refusals_under_torch_compile(qkv: Any, call: Any, message: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=message):
        torch.compile(call, fullgraph=True, backend="eager")(*(x.detach() for x in qkv))


def test_arguments_that_are_no_tensors(qkv: Any) -> None:
    """For every function and argument, before an operator or an attribute is looked up."""
    q, k, v = (x.detach() for x in qkv)
    array, starts = q.float().numpy(), torch.tensor([0, 24], dtype=torch.int32)
    row, pages = q[0].transpose(0, 1), q.transpose(1, 2)
    append, table = ours.append_kv, torch.zeros(1, 3, dtype=torch.int32)
    for name, call in {
        "q": lambda: attention(CAUSAL, array, k, v),
        "k": lambda: attention(CAUSAL, q, None, v),
        "query": lambda: ours.scaled_dot_product_attention(array, k, v),
        "value": lambda: ours.flex_attention(q, k, array),
        "attn_mask": lambda: ours.scaled_dot_product_attention(q, k, v, attn_mask=array),
        "v": lambda: ours.varlen_attention(row, row, array, starts, starts),
        "cu_seqlens_q": lambda: ours.varlen_attention(row, row, row, [0, 24], starts),
        "cu_seqlens_k": lambda: ours.varlen_attention(row, row, row, starts, [0, 24]),
        "page_table": lambda: append(pages, pages, pages, pages, page_table=[[0]], seqused_k=starts[1:]),
        "seqused_k": lambda: append(pages, pages, pages, pages, page_table=table, seqused_k=3),
        r"outs\[1\]": lambda: ours.merge_states([q, array], [q, q]),
    }.items():
        with pytest.raises(ArgumentError, match=f"^{name} of type .* is no tensor of torch: torch.from_numpy"):
            call()


def test_tensors_that_are_not_dense_are_refused_by_name(qkv: Any) -> None:
    q, k, v = (x.detach() for x in qkv)
    several = torch.nested.nested_tensor([q[0].transpose(0, 1), q[0, :, :9].transpose(0, 1)], layout=torch.jagged)
    jagged = several.transpose(1, 2)
    for call in (partial(attention, CAUSAL), ours.scaled_dot_product_attention, ours.flex_attention):
        with pytest.raises(ArgumentError, match=r"is nested: give a dense tensor; .*\.varlen_attention"):
            call(jagged, jagged, jagged)
    with pytest.raises(ArgumentError, match=r"key is of layout torch\.sparse_coo: give a dense tensor"):
        ours.scaled_dot_product_attention(q, k.to_sparse(), v)


def test_invalid_specs(qkv: Any) -> None:
    with pytest.raises(ArgumentError, match=r"give a flashgen\.AttentionSpec"):
        attention(fg.causal(), *qkv)
    with pytest.raises(ArgumentError, match="no spec is registered as 'nothing'"):
        torch.ops.flashgen.forward(*qkv, [], "nothing", [], [], None)


def test_cpu_tensors_use_the_emulator_only_on_request(qkv: Any) -> None:
    with emulated(False), pytest.raises(ArgumentError, match=r"emulate=True .*flashgen\.torch\.emulated\(\)"):
        attention(CAUSAL, *qkv)
    with pytest.raises(ArgumentError, match=r"flashgen\.torch\.attention\(spec, \.\.\., emulate=True\) takes torch's"):
        fg.compile(CAUSAL, emulate=True)(*qkv)


def test_importing_flashgen_imports_no_torch() -> None:
    program = "import flashgen, sys; flashgen.AttentionSpec(64); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    spec = fg.AttentionSpec(64, "bfloat16", mask=fg.causal())
    with emulated(False):
        out = attention(spec, q, k, v)
        expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
        plain.assert_close(out, expected)
        d_out = torch.randn_like(out)
        ours = torch.autograd.grad(out, (q, k, v), d_out)
        for one, other in zip(ours, torch.autograd.grad(expected, (q, k, v), d_out.double()), strict=True):
            plain.assert_close(one, other.double())
        with pytest.raises(ArgumentError, match="on the CPU"):
            attention(spec, *(x.cpu() for x in (q, k, v)))
