"""Varlen batches: arguments, refusals, and rows that belong to no sequence."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashgen as fg
from flashgen.errors import ArgumentError, SpecError, UnsupportedError
from flashgen.runtime.schedule import Schedule

TARGETS = ("sm_80", "sm_90a")
targets = pytest.mark.parametrize("target", TARGETS)
Array = np.ndarray[Any, Any]


def spec_of(layout: str = "thd", **given: Any) -> fg.AttentionSpec:
    return fg.AttentionSpec(32, "float16", layout=layout, **given)


def arrays(rows_q: int, rows_k: int, heads: int = 2, heads_kv: int = 1, seed: int = 0) -> tuple[Array, Array, Array]:
    random = np.random.default_rng(seed)
    shapes = ((rows_q, heads, 32), (rows_k, heads_kv, 32), (rows_k, heads_kv, 32))
    q, k, v = (random.standard_normal(shape, dtype=np.float32).astype(np.float16) for shape in shapes)
    return q, k, v


def offsets(*lengths: int, first: int = 0) -> Array:
    return (first + np.concatenate([[0], np.cumsum(lengths)])).astype(np.int32)


def compiled(target: str, sanitize: Any = None, layout: str = "thd", **given: Any) -> Any:
    return fg.compile(spec_of(layout, **given), target, emulate=True, sanitize=sanitize)


def into(q: Array) -> tuple[Array, Array]:
    return np.full_like(q, np.nan), np.full((q.shape[1], q.shape[0]), np.nan, np.float32)


@targets
def test_each_sequence_has_the_bits_of_a_separate_call(target: str) -> None:
    """Tiles have the same position in the sequence as in a batch of one, so the order of additions is the same."""
    lengths = (130, 1, 64, 200)
    q, k, v = arrays(395, 395)
    starts = offsets(*lengths)
    out, lse = compiled(target, mask=fg.causal())(q, k, v, cu_seqlens_q=starts, return_lse=True)
    plan = compiled(target, mask=fg.causal()).plan  # this call packs no heads
    alone = fg.compile(spec_of("bshd", mask=fg.causal()), target, emulate=True, plan=plan)
    for begin, end in pairwise(starts):
        o, each = alone(q[None, begin:end], k[None, begin:end], v[None, begin:end], return_lse=True)
        assert out[begin:end].tobytes() == o[0].tobytes() and lse[:, begin:end].tobytes() == each[0].tobytes()


@targets
def test_rows_of_no_sequence_give_0_and_no_gradient(target: str) -> None:
    q, k, v = arrays(90, 120)
    k[:7] = v[:7] = k[100:] = v[100:] = np.nan
    starts = {"cu_seqlens_q": offsets(20, 0, 50, first=4), "cu_seqlens_k": offsets(33, 5, 55, first=7)}
    attention, (out, lse) = compiled(target, mask=fg.causal(align="top_left")), into(q)
    attention(q, k, v, return_lse=True, out=(out, lse), **starts)
    outside = np.r_[:4, 74:90]
    assert (out[outside] == 0).all() and (lse[:, outside] == -np.inf).all()
    assert not np.isnan(out).any() and np.isfinite(lse[:, 4:74]).all()
    gradients = attention.backward(
        np.ones_like(q), q, k, v, out, lse, into=tuple(np.full_like(a, np.nan) for a in (q, k, v)), **starts
    )
    assert not any(np.isnan(gradient).any() for gradient in gradients)
    assert (gradients.dq[outside] == 0).all()
    for gradient in (gradients.dk, gradients.dv):
        assert (gradient[np.r_[:7, 40:45, 100:120]] == 0).all()  # including the five keys of the empty sequence
        assert (gradient[7:27] != 0).any()


@targets
def test_unused_keys_may_hold_anything(target: str) -> None:
    q, k, v = arrays(60, 150)
    starts = {"cu_seqlens_q": offsets(20, 20, 20), "cu_seqlens_k": offsets(50, 50, 50)}
    used = np.array([50, 0, 13], np.int32)
    attention, clean = compiled(target), into(q)
    attention(q, k, v, seqused_k=used, return_lse=True, out=clean, **starts)
    k[50:100] = v[50:100] = k[113:] = v[113:] = np.nan
    dirty = into(q)
    attention(q, k, v, seqused_k=used, return_lse=True, out=dirty, **starts)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(clean, dirty, strict=True))
    assert (dirty[0][20:40] == 0).all() and (dirty[1][:, 20:40] == -np.inf).all()
    nowhere = tuple(np.full_like(array, np.nan) for array in (q, k, v))
    gradients = attention.backward(np.ones_like(q), q, k, v, *dirty, seqused_k=used, into=nowhere, **starts)
    assert not any(np.isnan(gradient).any() for gradient in gradients)
    assert (gradients.dk[np.r_[50:100, 113:150]] == 0).all() and (gradients.dv[np.r_[50:100, 113:150]] == 0).all()


@targets
@pytest.mark.parametrize("rows", [(0, 0), (0, 5), (5, 0), (5, 7)])
def test_batches_without_sequences(target: str, rows: tuple[int, int]) -> None:
    q, k, v = arrays(*rows)
    none = np.zeros(1, np.int32)
    attention, (out, lse) = compiled(target), into(q)
    where = {"cu_seqlens_q": none, "cu_seqlens_k": none}
    attention(q, k, v, **where, return_lse=True, out=(out, lse))
    assert (out == 0).all() and (lse == -np.inf).all()
    gradients = attention.backward(out, q, k, v, out, lse, **where)
    assert all((gradient == 0).all() for gradient in gradients)


@targets
def test_sequences_of_one_token(target: str) -> None:
    q, k, v = arrays(40, 40, heads=2, heads_kv=2)
    starts = np.arange(41, dtype=np.int32)
    out = compiled(target, mask=fg.causal())(q, k, v, cu_seqlens_q=starts)
    assert (out == v).all()


@targets
@pytest.mark.slow
def test_invalid_offsets_access_nothing_outside(target: str) -> None:
    """Results are undefined, but no row outside the arrays is accessed."""
    q, k, v = arrays(70, 90)
    attention = compiled(target, "address", mask=fg.causal())
    for starts_q, starts_k, used in (
        ([0, 1000, 40], [0, 50, 4000], [9999, 9999]),
        ([-50, 20, 70], [-3, -2, -1], [-5, 7]),
        ([60, 10, 65], [90, 0, 90], [90, 90]),
    ):
        given = {
            "cu_seqlens_q": np.array(starts_q, np.int32),
            "cu_seqlens_k": np.array(starts_k, np.int32),
            "seqused_k": np.array(used, np.int32),
        }
        out, lse = attention(q, k, v, return_lse=True, **given)
        attention.backward(out, q, k, v, out, lse, **given)


def test_bounds_limit_tile_lists() -> None:
    """A list has room for the tiles of the bound; a longer sequence attends only to its first keys."""
    mask = fg.trace_mask(lambda b, h, q, k: (q // 8 + k // 8) % 3 != 0)
    q, k, v = arrays(100, 300)
    attention = compiled("sm_80", "address", mask=mask)
    starts = {"cu_seqlens_q": offsets(50, 50), "cu_seqlens_k": offsets(140, 160)}
    cut = attention(q, k, v, max_seqlen_k=100, **starts)
    used = attention(q, k, v, seqused_k=np.array([100, 100], np.int32), **starts)
    assert cut.tobytes() == used.tobytes()


def test_captures_are_per_sequence_and_checked_against_the_bounds() -> None:
    bias = fg.Tensor("bias", "float32", 2)
    score = fg.trace_score(lambda score, b, h, q, k: score + bias[b, k])
    attention = compiled("sm_80", score=score)
    q, k, v = arrays(60, 60)
    table = np.random.default_rng(1).standard_normal((3, 25)).astype(np.float32)
    starts = offsets(20, 25, 15)
    with pytest.raises(ArgumentError, match="axis 1 is indexed by k, which goes up to 59: give 60 elements"):
        attention(q, k, v, cu_seqlens_q=starts, bias=table)
    out = attention(q, k, v, cu_seqlens_q=starts, bias=table, max_seqlen_k=25)
    expected = fg.reference.attention(attention.spec, q, k, v, cu_seqlens_q=starts, bias=table)
    assert np.abs(out - expected).max() < 4e-3
    with pytest.raises(ArgumentError, match="axis 0 is indexed by b, which goes up to 2: give 3 elements"):
        attention(q, k, v, cu_seqlens_q=starts, bias=table[:2], max_seqlen_k=25)
    with pytest.raises(ArgumentError, match="goes up to 59"):  # also after a call with a valid bound
        attention(q, k, v, cu_seqlens_q=starts, bias=table)


def test_calls_of_other_lengths_share_the_launch_cache() -> None:
    """Lengths affect nothing on the host: neither launches nor their memory."""
    q, k, v = arrays(64, 64)
    attention = compiled("sm_80", mask=fg.causal())
    out = attention(q, k, v, cu_seqlens_q=offsets(30, 34))
    known = attention.forward._prepared.values()
    assert (out != attention(q, k, v, cu_seqlens_q=offsets(1, 63))).any()
    assert attention.forward._prepared.values() == known


def test_mismatched_arguments_are_refused() -> None:
    attention = compiled("sm_80")
    q, k, v = arrays(64, 64)
    starts = offsets(30, 34)
    for given, message in (
        ({}, r"cu_seqlens_q is missing: give int32 \(sequences \+ 1,\)"),
        ({"cu_seqlens_q": starts.astype(np.int64)}, r"cu_seqlens_q is int64 \(3,\); give int32 \(sequences \+ 1,\)"),
        ({"cu_seqlens_q": starts[None]}, r"cu_seqlens_q is int32 \(1, 3\)"),
        ({"cu_seqlens_q": starts[:0]}, "cu_seqlens_q is of -1 sequences"),
        (
            {"cu_seqlens_q": starts, "cu_seqlens_k": starts[:2]},
            r"\(2,\); give int32 \(3,\) .*; cu_seqlens_q is of 2 seq",
        ),
        ({"cu_seqlens_q": starts, "seqused_k": starts}, r"seqused_k is int32 \(3,\); give int32 \(2,\)"),
        ({"cu_seqlens_q": np.repeat(starts, 2)[::2]}, "cu_seqlens_q has strides"),
        ({"cu_seqlens_q": starts, "max_seqlen_q": -1}, "max_seqlen_q=-1 must be an integer from 0"),
        ({"cu_seqlens_q": starts, "max_seqlen_k": 2.0}, "max_seqlen_k=2.0 must be an integer"),
        ({"cu_seqlens_q": starts, "window": 1}, "unknown argument 'window'"),
    ):
        with pytest.raises(ArgumentError, match=message):
            attention(q, k, v, **given)
    with pytest.raises(ArgumentError, match=r"q has shape \(1, 64, 2, 32\); give 3 dimensions \(tokens, heads, dim\)"):
        attention(q[None], k, v, cu_seqlens_q=starts)
    with pytest.raises(ArgumentError, match=r"k has .* v has|v has \(heads, length\)"):
        attention(q, k, v[:60], cu_seqlens_q=starts)
    of_both = (attention, partial(fg.reference.attention, attention.spec))
    for of_either in (*of_both, lambda *given, **where: attention.backward(q, *given, q, q, **where)):
        with pytest.raises(ArgumentError, match="cu_seqlens_k is missing: q has 64 tokens and k 60"):
            of_either(q, k[:60], v[:60], cu_seqlens_q=starts)
    with pytest.raises(ArgumentError, match="cu_seqlens_q is of varlen batches: make the spec with layout='thd'"):
        compiled("sm_80", layout="bshd")(q[None], k[None], v[None], cu_seqlens_q=starts)
    with pytest.raises(ArgumentError, match=r"lse is float32 \(1, 2, 64\); give float32 \(2, 64\)"):
        attention.backward(q, q, k, v, q, np.zeros((1, 2, 64), np.float32), cu_seqlens_q=starts)


def test_unsupported_options_are_refused_by_name() -> None:
    attention = compiled("sm_80", mask=fg.document("ids"))
    for ask in (
        lambda: attention.tiles(64),
        lambda: attention.tile_lists(64),
        lambda: attention.backward_tile_lists(64),
        lambda: attention.plan_for(64),
        lambda: attention.tune(*arrays(8, 8)),
    ):
        with pytest.raises(UnsupportedError, match="is not supported for layout='thd': "):
            ask()


def test_lists_of_other_batches_are_refused() -> None:
    """Their sizes may be equal."""
    mask = fg.trace_mask(lambda b, h, q, k: (q // 8 + k // 8) % 3 != 0)
    lists = compiled("sm_80", layout="bshd", mask=mask).tile_lists(64, 64)
    q, k, v = arrays(64, 64)
    with pytest.raises(UnsupportedError, match="tile_lists is not supported for layout='thd': leave them out"):
        compiled("sm_80", mask=mask)(q, k, v, cu_seqlens_q=offsets(30, 34), tile_lists=lists)


def test_captures_may_be_named_like_struct_members() -> None:
    names = ("total_q", "total_k", "rows", "slot", "sequence", "uniform", "launched")
    tables = [fg.Tensor(name, "float32", 1, grad=True) for name in names]
    score = fg.trace_score(lambda score, b, h, q, k: sum((table[h] for table in tables), score))
    q, k, v = arrays(64, 64)
    given: dict[str, Any] = {table.name: np.full(2, 0.01, np.float32) for table in tables}
    given["cu_seqlens_q"] = offsets(30, 34)
    for target in TARGETS:
        attention = compiled(target, score=score)
        out, lse = attention(q, k, v, return_lse=True, **given)
        assert np.abs(out - fg.reference.attention(attention.spec, q, k, v, **given)).max() < 2e-3
        attention.backward(out, q, k, v, out, lse, **given)


def test_a_capture_cannot_be_named_like_an_argument() -> None:
    starts = fg.Tensor("cu_seqlens_q", "int32", 1)
    mask = fg.trace_mask(lambda b, h, q, k: k < starts[b])
    with pytest.raises(SpecError, match="with layout='thd' that is an argument of each call; give it another name"):
        spec_of(mask=mask)
    plain = fg.compile(spec_of("bshd", mask=mask), "sm_80", emulate=True)
    q, k, v = arrays(16, 16)
    out = plain(q[None], k[None], v[None], cu_seqlens_q=np.array([0], np.int32))
    assert (out == 0).all()


def test_dropout_depends_on_the_sequence() -> None:
    """Dropped elements follow from the sequence's index and positions within it, wherever it is stored."""
    lengths = (40, 70)
    q, k, v = arrays(110, 110)
    starts = offsets(*lengths)
    found = compiled("sm_80", dropout=0.25)(q, k, v, cu_seqlens_q=starts, seed=5)
    alone = compiled("sm_80", layout="bshd", dropout=0.25)
    for number, (begin, end) in enumerate(pairwise(starts)):
        batch = [np.repeat(array[None, begin:end], number + 1, axis=0) for array in (q, k, v)]
        assert found[begin:end].tobytes() == alone(*batch, seed=5)[number].tobytes()


def test_any_strides_and_both_dtypes() -> None:
    random = np.random.default_rng(3)
    packed = random.standard_normal((90, 3, 2, 32), dtype=np.float32).astype(ml_dtypes.bfloat16)
    q, k, v = (packed[:, i] for i in range(3))
    spec = fg.AttentionSpec(32, "bfloat16", layout="thd", mask=fg.causal())
    for target in TARGETS:
        attention = fg.compile(spec, target, emulate=True, schedule=Schedule("random", "random", 3))
        apart = attention(*(np.ascontiguousarray(array) for array in (q, k, v)), cu_seqlens_q=offsets(60, 30))
        assert attention(q, k, v, cu_seqlens_q=offsets(60, 30)).tobytes() == apart.tobytes()


def test_pullbacks_and_closed_over_arrays() -> None:
    table = np.random.default_rng(2).uniform(0.01, 0.1, 2).astype(np.float32)
    score = fg.trace_score(lambda score, b, h, q, k: score + table[h] * (q - k))
    attention = fg.compile(spec_of(score=score, mask=fg.causal()), "sm_80", emulate=True)
    q, k, v = arrays(60, 60)
    starts = offsets(20, 40)
    out, pullback = attention.vjp(q, k, v, cu_seqlens_q=starts)
    expected, lse = attention(q, k, v, cu_seqlens_q=starts, return_lse=True)
    gradients = attention.backward(q, q, k, v, expected, lse, cu_seqlens_q=starts)
    assert out.tobytes() == expected.tobytes()
    for one, other in zip(pullback(q), gradients, strict=True):
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), atol=1e-3)


def test_json_round_trip() -> None:
    spec = spec_of(mask=fg.causal())
    assert fg.AttentionSpec.from_json(spec.to_json()) == spec and "-thd-" in spec.name
    assert spec.is_varlen and not spec_of("bshd").is_varlen


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("listed", [False, True], ids=["closed form", "lists"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_a_captured_graph_serves_any_lengths(listed: bool, deterministic: bool) -> None:
    """Offsets are read on the device: a replay with others gives the results of a call."""
    torch = pytest.importorskip("torch")
    mask = fg.trace_mask(lambda b, h, q, k: (q // 64 + k // 64 + b) % 3 != 0) if listed else fg.causal()
    attention = fg.compile(fg.AttentionSpec(128, "bfloat16", layout="thd", mask=mask), deterministic=deterministic)
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn((3000, 4, 128), device="cuda", dtype=torch.bfloat16) for _ in range(4))
    starts = torch.tensor([0, 1000, 1001, 2500, 3000], dtype=torch.int32, device="cuda")
    used = torch.diff(starts)

    def run() -> Any:
        out, lse = attention(q, k, v, cu_seqlens_q=starts, seqused_k=used, return_lse=True)
        return out, lse, *attention.backward(d_out, q, k, v, out, lse, cu_seqlens_q=starts, seqused_k=used)

    run()  # compiles the kernels
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        captured = run()
    for offsets_, keys in (
        ([0, 1000, 1001, 2500, 3000], [1000, 1, 1499, 500]),
        ([5, 5, 700, 2900, 2990], [0, 690, 100, 90]),
        ([0, 3000, 3000, 3000, 3000], [3000, 0, 0, 0]),
        ([1500, 1501, 1502, 1503, 1504], [1, 1, 0, 1]),
    ):
        starts.copy_(torch.tensor(offsets_, dtype=torch.int32))
        used.copy_(torch.tensor(keys, dtype=torch.int32))
        for array in captured:
            array.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for found, wanted in zip(captured, run(), strict=True):
            assert not found.isnan().any()
            if deterministic:
                assert torch.equal(found, wanted)
            else:
                assert torch.allclose(found.float(), wanted.float(), atol=0.02, rtol=0.02)
        given = {"cu_seqlens_q": starts.cpu().numpy(), "seqused_k": used.cpu().numpy()}
        arrays_ = [array.float().cpu().numpy() for array in (q, k, v)]
        expected = fg.reference.attention(attention.spec, *arrays_, **given)
        assert np.abs(captured[0].float().cpu().numpy() - expected).max() < 0.03
