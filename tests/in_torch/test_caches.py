"""Caches in torch: pages, 8 bits, appending and merging, with torch's operator checks and its compiler."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flashgen as fg
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.torch import append_kv, attention, merge_states, register

SPEC = fg.AttentionSpec(32, "bfloat16", mask=fg.causal(), page_size=16)
SINKS = fg.AttentionSpec(32, "bfloat16", page_size=4, sink=fg.Tensor("sinks", "float32", 1, grad=True))
NARROW = {
    kv_dtype: fg.AttentionSpec(32, "bfloat16", mask=fg.causal(), page_size=16, kv_dtype=kv_dtype)
    for kv_dtype in ("float8_e4m3fn", "int8")
}
TABLE, USED = [[4, 0, 2], [1, 5, 3]], [41, 18]


def pages(size: int = 16, count: int = 6) -> Any:
    return [torch.randn(count, size, 2, 32).to(torch.bfloat16) for _ in range(2)]


def where(table: Any = TABLE, used: Any = USED) -> dict[str, Any]:
    return {
        "page_table": torch.tensor(table, dtype=torch.int32),
        "seqused_k": torch.tensor(used, dtype=torch.int32),
    }


def as_numpy(tensor: Any) -> Any:
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn):
        bits = torch.int16 if tensor.dtype == torch.bfloat16 else torch.uint8
        name = str(tensor.dtype).removeprefix("torch.")
        return tensor.view(bits).numpy().view(getattr(ml_dtypes, name))
    return tensor.numpy()


def expected(spec: fg.AttentionSpec, q: Any, k: Any, v: Any, **given: Any) -> Any:
    return fg.reference.attention(
        spec, *(as_numpy(x) for x in (q, k, v)), **{name: as_numpy(x) for name, x in given.items()}
    )


def assert_near(out: Any, wanted: Any) -> None:
    np.testing.assert_allclose(out.float().numpy(), wanted, atol=2e-2)


@pytest.mark.parametrize("splits", [None, 1, 3])
def test_pages_against_the_reference(splits: Any) -> None:
    """Also with slices of one tensor that holds keys beside values."""
    q, both = torch.randn(2, 4, 1, 32).to(torch.bfloat16), torch.stack(pages(), 1)
    k, v = both[:, 0], both[:, 1]
    out, lse = attention(SPEC, q, k, v, num_splits=splits, return_lse=True, **where())
    assert_near(out, expected(SPEC, q, k, v, **where()))
    assert out.shape == q.shape and lse.shape == (2, 4, 1)


def test_sinks_and_lengths_around_page_borders() -> None:
    sinks, table = torch.tensor([0.5, -1.0, 2.0, 0.0]), [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    q, (k, v) = torch.randn(4, 4, 1, 32).to(torch.bfloat16), pages(4, 12)
    for used in ([0, 1, 3, 4], [5, 8, 9, 12]):
        given = where(table, used) | {"sinks": sinks}
        assert_near(attention(SINKS, q, k, v, **given), expected(SINKS, q, k, v, **given))


@pytest.mark.parametrize("kv_dtype", NARROW)
def test_8_bits_with_scales(kv_dtype: str) -> None:
    """Also under torch.compile."""
    q, (k, v), spec = torch.randn(2, 4, 1, 32).to(torch.bfloat16), pages(), NARROW[kv_dtype]
    scales = {"k_scale": torch.tensor([0.03]), "v_scale": torch.tensor([0.03, 0.04])}
    k8, v8 = ((x.float() / 0.03).clamp(-127, 127).to(getattr(torch, kv_dtype)) for x in (k, v))
    out = attention(spec, q, k8, v8, **where(), **scales)
    assert_near(out, expected(spec, q, k8, v8, **where(), **scales))
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(spec, q, k8, v8, **where(), **scales), out)


def test_records_of_bytes() -> None:
    """Appended and read as a uint8 tensor, also under torch.compile; a gradient is refused."""
    options: Any = {"value_dim": 512, "page_size": 16, "shared_kv": True, "kv_dtype": "fp8_ds_mla"}
    spec = fg.AttentionSpec(576, "bfloat16", **options)
    rows, q = (torch.randn(2, n, h, 576).to(torch.bfloat16) for n, h in ((18, 1), (12, 1)))
    cache, table = torch.zeros(6, 16, 1, 656, dtype=torch.uint8), where()["page_table"]
    append_kv(rows, None, cache, None, page_table=table, seqused_k=torch.zeros(2, dtype=torch.int32))
    given = {"page_table": table, "seqused_k": torch.tensor([18, 7], dtype=torch.int32)}
    out = attention(spec, q, cache, **given)
    wanted = fg.reference.attention(spec, as_numpy(q), cache.numpy(), **{n: x.numpy() for n, x in given.items()})
    assert_near(out, wanted)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(spec, q, cache, **given), out)
    with pytest.raises(ArgumentError, match=r"k is float8_e4m3fn .* fp8_ds_mla takes uint8 \(pages, 16, 1, 656\)"):
        attention(spec, q, cache.view(torch.float8_e4m3fn), **given)
    with pytest.raises(UnsupportedError, match="q requires a gradient"):
        attention(spec, q.clone().requires_grad_(), cache, **given)


def test_splits_of_contiguous_keys_have_a_gradient() -> None:
    spec = fg.AttentionSpec(32, "bfloat16")
    q, k, v = (torch.randn(1, 2, n, 32).to(torch.bfloat16).requires_grad_() for n in (1, 300, 300))
    out = attention(spec, q, k, v, num_splits=3)
    torch.testing.assert_close(out, attention(spec, q, k, v), atol=1e-2, rtol=1e-2)
    out.sum().backward()
    assert k.grad is not None and k.grad.shape == k.shape and v.grad.any()


def step(cache: Any, k_new: Any, v_new: Any, q: Any, table: Any, used: Any) -> Any:
    """One decode step of a layer: append, attend, and merge with a shared prefix."""
    k, v = cache[:, 0], cache[:, 1]
    append_kv(k_new, v_new, k, v, page_table=table, seqused_k=used)
    own = attention(SPEC, q, k, v, page_table=table, seqused_k=used + 1, return_lse=True)
    first = attention(SPEC, q, k, v, page_table=table[:1].expand(2, -1), seqused_k=used * 0 + 16, return_lse=True)
    return merge_states(*zip(own, first, strict=True)).out


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_step_compiles_without_breaks(backend: str) -> None:
    """The appending operator writes into the cache that was passed, whatever the compiler does with it."""
    made = [torch.randn(2, 1, 2, 32).to(torch.bfloat16) for _ in range(2)]
    q, table, used = torch.randn(2, 4, 1, 32).to(torch.bfloat16), *where(used=[40, 17]).values()
    cache = torch.stack(pages(), 1)
    other, before = cache.clone(), cache.clone()
    wanted = step(cache, *made, q, table, used)
    out = torch.compile(step, fullgraph=True, backend=backend)(other, *made, q, table, used)
    assert torch.equal(out, wanted) and torch.equal(other, cache) and not torch.equal(cache, before)
    assert torch.equal(cache[2, 0, 8], made[0][0, 0]) and torch.equal(cache[5, 1, 1], made[1][1, 0])


def test_opcheck() -> None:
    made = [torch.randn(2, 1, 2, 32).to(torch.bfloat16) for _ in range(2)]
    given = (*made, *pages(), *where().values(), True)
    q = torch.randn(2, 4, 1, 32).to(torch.bfloat16)
    over_pages = (q, *pages(), list(where().values()), register(SPEC), [2], [], None)
    out, lse = attention(SPEC, q, *pages(), return_lse=True, **where())
    for operator, arguments in (
        (torch.ops.flashgen.append_kv, given),
        (torch.ops.flashgen.forward, over_pages),
        (torch.ops.flashgen.merge_states, ([out, out], [lse, lse], "bhsd", True)),
    ):
        results = torch.library.opcheck(operator.default, arguments)
        assert set(results.values()) == {"SUCCESS"} and len(results) == 4


def test_gradients_are_refused_by_name() -> None:
    q, (k, v) = torch.randn(2, 4, 1, 32).to(torch.bfloat16), pages()
    with pytest.raises(UnsupportedError, match=r"q requires a gradient, and a call with page_size=16 has none"):
        attention(SPEC, q.clone().requires_grad_(), k, v, **where())
    with pytest.raises(UnsupportedError, match=r"k requires a gradient"):
        torch.ops.flashgen.forward(
            q, k.clone().requires_grad_(), v, list(where().values()), register(SPEC), [], [], None
        )
    sinks = torch.zeros(4, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"sinks requires a gradient"):
        attention(SINKS, q, *pages(4, 6), sinks=sinks, **where())
    with torch.no_grad():
        attention(SINKS, q, *pages(4, 6), sinks=sinks, **where())
    with pytest.raises(UnsupportedError, match="k_new requires a gradient, and append_kv"):
        append_kv(torch.zeros(2, 1, 2, 32, requires_grad=True), v[:2, :1], k, v, **where())
    lse = torch.zeros(2, 4, 1)
    with pytest.raises(UnsupportedError, match=r"outs\[1\] requires a gradient, and merge_states"):
        merge_states([q, q.clone().requires_grad_()], [lse, lse])


def test_mismatched_arguments() -> None:
    q, (k, v) = torch.randn(2, 4, 1, 32).to(torch.bfloat16), pages()
    for match, given in {
        "page_table is missing": {"seqused_k": where()["seqused_k"]},
        "seqused_k is missing": {"page_table": where()["page_table"]},
        "page_table is int32 .*give int32": where() | {"page_table": where()["page_table"][:1]},
        "unknown argument 'cu_seqlens_q'": where() | {"cu_seqlens_q": where()["seqused_k"]},
        "num_splits=0": where() | {"num_splits": 0},
    }.items():
        with pytest.raises(ArgumentError, match=match):
            attention(SPEC, q, k, v, **given)
    for name, without in {"page_table": "seqused_k", "seqused_k": "page_table"}.items():
        with pytest.raises(ArgumentError, match=f"append_kv: {name} is missing; give int32"):
            append_kv(k[:2, :1], v[:2, :1], k, v, **{without: where()[without]})


def test_autocast_only_converts_queries() -> None:
    """A cache keeps its type: each call would copy a server's memory."""
    q, (k, v) = torch.randn(2, 4, 1, 32), pages()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention(SPEC, q, k, v, **where()), attention(SPEC, q.bfloat16(), k, v, **where()))
        with pytest.raises(ArgumentError, match="k has dtype float32"):
            attention(SPEC, q, k.float(), v.float(), **where())


@pytest.mark.gpu
def test_a_cache_is_never_copied() -> None:
    """Rows of q that kernels cannot read are copied; pages are refused, as each call would copy a server's memory."""
    k, v = (torch.randn(6, 16, 2, 33).to(torch.bfloat16).cuda()[..., :32] for _ in range(2))
    q = torch.randn(2, 4, 1, 33).to(torch.bfloat16).cuda()[..., 1:]
    given = {name: tensor.cuda() for name, tensor in where().items()}
    attention(SPEC, q, k.contiguous(), v.contiguous(), emulate=False, **given)
    with pytest.raises(ArgumentError, match=r"k at address .*every row must start"):
        attention(SPEC, q, k, v, emulate=False, **given)


@pytest.mark.gpu
def test_a_captured_step_follows_tables_and_lengths() -> None:
    made = [torch.randn(2, 1, 2, 32).to(torch.bfloat16).cuda() for _ in range(2)]
    q = torch.randn(2, 4, 1, 32).to(torch.bfloat16).cuda()
    table, used = (tensor.cuda() for tensor in where(used=[40, 17]).values())
    cache = torch.stack(pages(), 1).cuda()
    from flashgen.torch import emulated

    with emulated(False):
        step(cache.clone(), *made, q, table, used)
        graph, other = torch.cuda.CUDAGraph(), cache.clone()
        with torch.cuda.graph(graph):
            out = step(other, *made, q, table, used)
        for rows, lengths in (([[3, 1, 0], [2, 4, 5]], [20, 47]), ([[5, 4, 3], [2, 1, 0]], [16, 31])):
            table.copy_(torch.tensor(rows))
            used.copy_(torch.tensor(lengths))
            mine = other.clone()
            graph.replay()
            torch.testing.assert_close(out, step(mine, *made, q, table, used))
            assert torch.equal(mine, other)
