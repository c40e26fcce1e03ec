"""Prompts and single queries over pages in one call of torch: compared with each sequence alone, in one graph."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend

import flashgen as fg
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.torch import attention, register, varlen_attention

SPEC = fg.AttentionSpec(32, "bfloat16", layout="thd", mask=fg.causal(), page_size=8)
ALONE = fg.AttentionSpec(32, "bfloat16", layout="bshd", mask=fg.causal(), page_size=8)
ENDS, USED = [0, 1, 71, 71, 74, 75], [40, 90, 5, 3, 17]


def pages(heads: int = 2) -> tuple[Any, Any, Any]:
    """Returns k and v for 12 pages of each of 5 sequences, and their table."""
    torch.manual_seed(0)
    k, v = (torch.randn(60, 8, heads, 32, dtype=torch.bfloat16) for _ in range(2))
    return k, v, torch.randperm(60).to(torch.int32).view(5, 12)


def integers(numbers: list[int]) -> Any:
    return torch.tensor(numbers, dtype=torch.int32)


def test_each_sequence_equals_a_separate_call() -> None:
    """Includes tokens behind the last sequence; int64 is converted to int32."""
    q, (k, v, table) = torch.randn(77, 4, 32, dtype=torch.bfloat16), pages()
    where = {"page_table": table, "cu_seqlens_q": torch.tensor(ENDS), "seqused_k": torch.tensor(USED)}
    out, lse = attention(SPEC, q, k, v, return_lse=True, **where)
    assert lse.shape == (4, 77) and lse[:, 75:].isneginf().all() and not out[75:].any()
    for b, (start, end) in enumerate(pairwise(ENDS)):
        alone = {"page_table": table[b : b + 1], "seqused_k": integers(USED[b : b + 1])}
        wanted, wanted_lse = attention(ALONE, q[None, start:end], k, v, return_lse=True, **alone)
        torch.testing.assert_close(out[start:end], wanted[0], atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(lse[:, start:end], wanted_lse[0], atol=1e-3, rtol=1e-3)


def test_flash_attns_signature() -> None:
    """Its block_table, with cumulative lengths or with lengths."""
    q, (k, v, table) = torch.randn(75, 4, 32, dtype=torch.bfloat16), pages()
    spec = fg.AttentionSpec(
        32, "bfloat16", layout="thd", mask=fg.sliding_window(20, 0), score=fg.softcap(15.0), page_size=8
    )
    starts, used = integers(ENDS), integers(USED)
    expected = attention(spec, q, k, v, page_table=table, cu_seqlens_q=starts, seqused_k=used)
    how: dict[str, Any] = {"causal": True, "window_size": (20, 0), "softcap": 15.0, "block_table": table}
    sums = integers([0, *torch.tensor(USED).cumsum(0).tolist()])
    for keys, more in ((sums, {}), (None, {"seqused_k": used})):
        assert torch.equal(varlen_attention(q, k, v, starts, keys, 70, 90, **how, **more), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(varlen_attention(q.float(), k, v, starts, sums, 70, 90, **how), expected)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    with_sinks = varlen_attention(q, k, v, starts, sums, causal=True, block_table=table, sinks=sinks)
    assert not torch.equal(with_sinks, varlen_attention(q, k, v, starts, sums, causal=True, block_table=table))


@pytest.mark.parametrize("bounds", [False, True])
def test_opcheck(bounds: bool) -> None:
    q, (k, v, table) = torch.randn(77, 4, 32, dtype=torch.bfloat16), pages()
    arrays = [integers(ENDS), table, integers(USED)]
    given = (q, k, v, arrays, register(SPEC), [70, -1] if bounds else [], [], None)
    results = torch.library.opcheck(torch.ops.flashgen.forward.default, given)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


def test_one_graph_for_all_batches() -> None:
    counter, (k, v, table) = CompileCounterWithBackend("aot_eager"), pages()

    def model(q: Any, starts: Any, table: Any, used: Any) -> Any:
        own = attention(SPEC, q * 2, k, v, cu_seqlens_q=starts, page_table=table, seqused_k=used)
        return own + varlen_attention(q, k, v, starts, None, causal=True, block_table=table, seqused_k=used)

    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for ends, used in ((ENDS, USED), ([0, 66, 70], [70, 9]), ([0, 3, 4, 5], [3, 80, 1]), ([0, 1, 2, 3, 90], [5] * 4)):
        q, rows = torch.randn(ends[-1], 4, 32, dtype=torch.bfloat16), table[: len(used)]
        given = (q, integers(ends), rows, integers(used))
        torch.testing.assert_close(compiled(*given), model(*given))
    assert counter.frame_count == 2


def test_mismatched_arguments() -> None:
    q, (k, v, table) = torch.randn(75, 4, 32, dtype=torch.bfloat16), pages()
    starts, used = integers(ENDS), integers(USED)
    for match, given in {
        r"cu_seqlens_q is missing: give int32 \(sequences \+ 1\)": {"page_table": table, "seqused_k": used},
        "seqused_k is missing": {"page_table": table, "cu_seqlens_q": starts},
        "unknown argument 'cu_seqlens_k'": {"page_table": table, "seqused_k": used, "cu_seqlens_q": starts,
                                            "cu_seqlens_k": starts},
        r"page_table is int32 \(4, 12\); give int32 \(5, ": {"page_table": table[:4], "seqused_k": used,
                                                          "cu_seqlens_q": starts},
    }.items():  # fmt: skip
        with pytest.raises(ArgumentError, match=match):
            attention(SPEC, q, k, v, **given)
    for match, keys, more in (
        ("give either seqused_k or cu_seqlens_k", starts, {"seqused_k": used}),
        ("give either seqused_k or cu_seqlens_k", None, {}),
    ):
        with pytest.raises(ArgumentError, match=match):
            varlen_attention(q, k, v, starts, keys, block_table=table, **more)
    with pytest.raises(ArgumentError, match="with block_table give"):
        varlen_attention(q, q, q, starts, starts, block_table=table)
    with pytest.raises(ArgumentError, match="cu_seqlens_k is None"):
        varlen_attention(q, q, q, starts, None)
    with pytest.raises(UnsupportedError, match="q requires a gradient, and a call with page_size=8 has none"):
        attention(SPEC, q.requires_grad_(), k, v, page_table=table, seqused_k=used, cu_seqlens_q=starts)


@pytest.mark.gpu
@pytest.mark.quick
def test_a_captured_graph_follows_lengths() -> None:
    """One graph, replayed with other offsets, lengths and pages."""
    k, v, table = (x.cuda() for x in pages())
    q, starts, used = torch.randn(75, 4, 32, dtype=torch.bfloat16).cuda(), integers(ENDS).cuda(), integers(USED).cuda()
    call = lambda: varlen_attention(
        q, k, v, starts, None, causal=True, block_table=table, seqused_k=used, emulate=False
    )
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for ends, lengths in (([0, 70, 71, 72, 73, 75], [96, 1, 0, 50, 2]), ([0, 1, 2, 3, 4, 5], USED), ([0] * 6, USED)):
        starts.copy_(integers(ends))
        used.copy_(integers(lengths))
        table.copy_(table.flip(0))
        graph.replay()
        torch.testing.assert_close(out, call())
