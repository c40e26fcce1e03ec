"""Varlen batches in torch: compared with each sequence alone; gradients, torch's checks, one graph."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend

import flashgen as fg
import plain
from flashgen.errors import ArgumentError
from flashgen.torch import Attention, attention, register, varlen_attention

slopes = fg.Tensor("slopes", "float32", 1, grad=True)
SPEC = fg.AttentionSpec(
    32, "bfloat16", layout="thd", mask=fg.causal(), score=lambda s, b, h, q, k: s + slopes[h] * (q - k)
)
SINKS = fg.AttentionSpec(32, "bfloat16", layout="thd", sink=fg.Tensor("sinks", "float32", 1, grad=True))
ENDS_Q, ENDS_K = [0, 13, 13, 40], [0, 20, 26, 50]


def packed(*lengths: int, heads: int = 2) -> list[Any]:
    return [torch.randn(length, heads, 32, dtype=torch.bfloat16, requires_grad=True) for length in lengths]


def offsets(ends: list[int]) -> Any:
    return torch.tensor(ends, dtype=torch.int32)


def of_each(qkv: Any, used: Any, slope: Any) -> Any:
    """Returns the output of each sequence by itself, in float64; rows of no sequence are 0."""
    q, k, v = qkv
    expected = torch.zeros(q.shape, dtype=torch.float64)
    for b, (start, end) in enumerate(pairwise(ENDS_Q)):
        first, last = ENDS_K[b], ENDS_K[b] + (used[b] if used else ENDS_K[b + 1] - ENDS_K[b])
        shift = (last - first) - (end - start)
        rows, _ = plain.attention(
            *(x.transpose(0, 1)[None] for x in (q[start:end], k[first:last], v[first:last])),
            mask=lambda _b, _h, i, j, shift=shift: j <= i + shift,
            score=lambda s, _b, h, i, j: s + slope[h] * (i - j),
        )
        expected[start:end] = rows[0].transpose(0, 1)
    return expected


@pytest.mark.parametrize("used", [None, [15, 0, 24]])
def test_each_sequence_equals_a_separate_call(used: Any) -> None:
    """Includes tokens behind the last sequence, and unused keys."""
    qkv, slope = packed(44, 54, 54), torch.tensor([0.1, 0.2], requires_grad=True)
    where = {"cu_seqlens_q": offsets(ENDS_Q), "cu_seqlens_k": offsets(ENDS_K)}
    where |= {"seqused_k": torch.tensor(used)} if used else {}
    out, lse = attention(SPEC, *qkv, slopes=slope, return_lse=True, **where)
    expected = of_each(qkv, used, slope)
    plain.assert_close(out, expected)
    assert lse.shape == (2, 44) and lse[:, 40:].isneginf().all()
    plain.assert_gradients(out, expected, [*qkv, slope])


def arguments(qkv: Any, used: bool, bounds: bool) -> Any:
    """Returns what the operator takes: the last array and the integers may be omitted."""
    arrays = [torch.tensor([0.1, 0.2], requires_grad=True), offsets(ENDS_Q), offsets(ENDS_K)]
    arrays += [torch.tensor([15, 0, 24], dtype=torch.int32)] if used else []
    return (*qkv, arrays, register(SPEC), [27, -1] if bounds else [], [], None)


@pytest.mark.parametrize("used", [False, True])
def test_opcheck(used: bool) -> None:
    tolerances = {"atol": 3e-2, "rtol": 3e-2}  # the order of additions to dq varies
    given = arguments(packed(44, 54, 54), used, bounds=used)
    results = torch.library.opcheck(torch.ops.flashgen.forward.default, given, **tolerances)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4
    q, k, v, arrays, *rest = given
    q, k, v, *arrays = (tensor.detach() for tensor in (q, k, v, *arrays))
    out, lse = torch.ops.flashgen.forward(q, k, v, arrays, *rest)
    of_backward = (torch.ones_like(out), torch.ones_like(lse), q, k, v, out, lse, arrays, *rest)
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    results = torch.library.opcheck(torch.ops.flashgen.backward.default, of_backward, test_utils=utilities)
    assert set(results.values()) == {"SUCCESS"}


def test_one_graph_for_all_batches() -> None:
    """Tokens, sequences and bounds compile once more, when torch first sees them change, and not again."""
    counter = CompileCounterWithBackend("aot_eager")

    def model(q: Any, k: Any, v: Any, slope: Any, starts: Any, longest: int) -> Any:
        how = {"cu_seqlens_q": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return attention(SPEC, q * 2, k, v, slopes=slope, **how) + varlen_attention(
            q, k, v, starts, starts, longest, longest, causal=True, alibi_slopes=slope, sinks=slope
        )

    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for tokens, ends in ((40, [0, 13, 40]), (30, [0, 5, 6, 30]), (44, [0, 40, 41, 42, 44]), (50, [0, 7, 9, 30, 50])):
        q, k, v = packed(tokens, tokens, tokens)
        slope = torch.tensor([0.1, 0.2], requires_grad=True)
        out = compiled(q, k, v, slope, offsets(ends), max(b - a for a, b in pairwise(ends)))
        torch.testing.assert_close(out, model(q, k, v, slope, offsets(ends), tokens))
        out.sum().backward()
        assert all(x.grad is not None and x.grad.any() for x in (q, k, v, slope))
    assert counter.frame_count == 2


def test_sinks_of_packed_sequences_are_learned() -> None:
    qkv, sinks = packed(40, 40, 40), torch.tensor([0.5, -1.0], requires_grad=True)
    starts = offsets([0, 13, 40])
    out = varlen_attention(*qkv, starts, starts, sinks=sinks)
    again = Attention(SINKS, sinks=sinks)(*qkv, cu_seqlens_q=starts)
    assert torch.equal(out, again)
    expected = torch.zeros(out.shape, dtype=torch.float64)
    for start, end in ((0, 13), (13, 40)):
        rows, lse = plain.attention(*(x[start:end].transpose(0, 1)[None] for x in qkv))
        kept = torch.sigmoid(lse - sinks.double()[:, None])
        expected[start:end] = (rows * kept[..., None])[0].transpose(0, 1)
    plain.assert_close(out, expected)
    plain.assert_gradients(out, expected, [*qkv, sinks])


@pytest.mark.parametrize("window", [(5, -1), (-1, 4), (0, 0)])
def test_windows_open_on_one_side(window: Any) -> None:
    q, k, v = packed(24, 30, 30)
    starts_q, starts_k = offsets([0, 24]), offsets([0, 30])
    out = varlen_attention(q, k, v, starts_q, starts_k, 24, 30, window_size=window)
    left, right = (1000 if side < 0 else side for side in window)
    expected, _ = plain.attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        mask=lambda _b, _h, i, j: (j <= i + 6 + right) & (j >= i + 6 - left),
    )
    plain.assert_close(out, expected[0].transpose(0, 1))


def test_transforms_of_torch() -> None:
    """vmap makes a call for each: sequences of several batches are not merged; grad and vjp work as elsewhere."""
    stacked = [torch.stack([x.detach() for x in packed(24, 24, 24)]) for _ in range(3)]
    starts, slope = offsets([0, 10, 24]), torch.tensor([0.1, 0.2])

    def call(q: Any, k: Any, v: Any) -> Any:
        return attention(SPEC, q, k, v, slopes=slope, cu_seqlens_q=starts)

    mapped = torch.func.vmap(call)(*stacked)
    assert torch.equal(mapped, torch.stack([call(*each) for each in zip(*stacked, strict=True)]))
    q, k, v = (x[0] for x in stacked)
    found = torch.func.grad(lambda q: call(q, k, v).float().sum())(q)
    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(call(leaf, k, v).float().sum(), [leaf])
    torch.testing.assert_close(found, expected, atol=3e-2, rtol=3e-2)


def test_per_sequence_slopes() -> None:
    q, k, v = packed(24, 24, 24)
    table = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    starts = offsets([0, 10, 24])
    out = varlen_attention(q, k, v, starts, starts, causal=True, alibi_slopes=table)
    for b, rows in enumerate((slice(10), slice(10, 24))):
        one = offsets([0, rows.stop - (rows.start or 0)])
        alone = varlen_attention(q[rows], k[rows], v[rows], one, one, causal=True, alibi_slopes=table[b])
        torch.testing.assert_close(out[rows], alone)


def test_mismatched_arguments() -> None:
    q, k, v = packed(24, 24, 24)
    starts = offsets([0, 24])
    plain_spec = fg.AttentionSpec(32, "bfloat16", layout="thd")
    for match, given in {
        "cu_seqlens_q is missing": {},
        r"give int32 \(2,\)": {"cu_seqlens_q": starts, "cu_seqlens_k": offsets([0, 12, 24])},
        "calls take it int32 of 1": {"cu_seqlens_q": starts[None]},
        "unknown argument 'page_table'.*cu_seqlens_k": {"cu_seqlens_q": starts, "page_table": starts},
        "unknown argument 'num_splits'": {"cu_seqlens_q": starts, "num_splits": 2},
        "max_seqlen_q='a'": {"cu_seqlens_q": starts, "max_seqlen_q": "a"},
    }.items():
        with pytest.raises(ArgumentError, match=match):
            attention(plain_spec, q, k, v, **given)
    with pytest.raises(ArgumentError, match="cu_seqlens_k is missing: q has 24 tokens and k 20"):
        attention(plain_spec, q, k[:20], v[:20], cu_seqlens_q=starts)
    with pytest.raises(ArgumentError, match="max_seqlen_k=-1"):
        varlen_attention(q, k, v, starts, starts, 24, -1)


@pytest.mark.gpu
def test_a_captured_graph_follows_lengths() -> None:
    """Offsets are read when kernels run: one graph is replayed for other sequences."""
    qkv = [x.detach().cuda() for x in packed(44, 44, 44)]
    starts = offsets([0, 13, 44]).cuda()
    call = lambda: varlen_attention(*qkv, starts, starts, 44, 44, causal=True, emulate=False)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for ends in ([0, 20, 44], [0, 0, 30], [0, 43, 44]):
        starts.copy_(offsets(ends))
        graph.replay()
        torch.testing.assert_close(out, call())
