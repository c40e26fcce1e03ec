"""Sizes of 0 and 1 on a mock GPU: tuned plans, tensor maps, counters and grids run the GPU's code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashgen.language as fg
from flashgen.attention import Attention, appending, merging
from flashgen.build.cache import KernelCache
from flashgen.codegen.targets import target_named
from flashgen.runtime import counters
from flashgen.verify import Shape, random_gradients, random_inputs
from made_up_card import MadeUpCard, counts, stand_in

targets = pytest.mark.parametrize("target", ["sm_80", "sm_90a"])  # one per family
SINKS = fg.Tensor("sinks", "float32", 1, grad=True)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Asserts that every counter is 0 after the calls of a test."""
    stand_in(monkeypatch)
    yield
    assert counts(counters.counters(0)) == 0


def compiled(spec: fg.AttentionSpec, target: str, folder: Path, **how: Any) -> Attention:
    return Attention(spec, target_named(target), MadeUpCard(), tuned=KernelCache(folder), **how)


def poisoned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.full_like(array, np.nan)


def near_or_first(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (abs(q - k) <= 20) | (q < 4) | (k < 4)


SPECS = {
    "plain": fg.AttentionSpec(32),
    "sink": fg.AttentionSpec(32, sink=SINKS),
    "causal": fg.AttentionSpec(32, mask=fg.causal(), sink=SINKS, layout="bshd"),
    "lists": fg.AttentionSpec(32, mask=fg.trace_mask(near_or_first, "near or first"), sink=SINKS),
    "wide": fg.AttentionSpec(160, sink=SINKS),
}
SHAPES = [(0, 0), (0, 1), (1, 0), (1, 1), (5, 0), (0, 5), (5, 1), (1, 5), (300, 0)]


@targets
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.covering(6)
def test_lengths(name: str, deterministic: bool, target: str, tmp_path: Path, right: Any, gradients_right: Any) -> None:
    spec = SPECS[name]
    it = compiled(spec, target, tmp_path, deterministic=deterministic)
    for len_q, len_k in SHAPES:
        shape = Shape(len_q, len_k, 1, 4, 2)
        inputs, (d_out, d_lse) = random_inputs(spec, shape), random_gradients(spec, shape, of_lse=True)
        rows = inputs.q, inputs.k, inputs.v
        o, lse = random_gradients(spec, shape, of_lse=True)
        assert lse is not None
        out, lse = it(*rows, return_lse=True, out=(poisoned(o), poisoned(lse)), **inputs.captures)
        into = tuple(map(poisoned, (*rows, *inputs.captures.values())))
        made = it.backward(d_out, *rows, out, lse, d_lse=d_lse, into=into, **inputs.captures)
        right(spec, inputs, out, lse)
        gradients_right(spec, inputs, d_out, made, d_lse=d_lse)


@targets
@pytest.mark.parametrize("sink", [None, SINKS], ids=["plain", "sink"])
@pytest.mark.parametrize("head_dim", [32, 160])
@pytest.mark.covering(6)
def test_varlen_batches(head_dim: int, sink: Any, target: str, tmp_path: Path) -> None:
    """Without sequences, with empty ones, without tokens, and with tokens that belong to no sequence."""
    spec = fg.AttentionSpec(head_dim, mask=fg.causal(), layout="thd", sink=sink)
    it, sinks = compiled(spec, target, tmp_path), np.linspace(-1, 1, 4, dtype=np.float32)
    given = {} if sink is None else {"sinks": sinks}
    for rows_q, rows_k in ((0, 0), (0, 3), (3, 0), (1, 1), (3, 3)):
        q, d_out = (random_rows(seed, rows_q, 4, head_dim) for seed in (0, 1))
        k, v = (random_rows(seed, rows_k, 2, head_dim) for seed in (2, 3))
        lse = np.full((4, rows_q), np.nan, np.float32)
        for lengths in ((), (0,), (0, 0), (rows_q, 0)):
            starts_q = np.cumsum((0, *lengths), dtype=np.int32)
            starts_k = np.minimum(starts_q, rows_k).astype(np.int32)
            for bounds in ({}, {"max_seqlen_q": max(lengths, default=0), "max_seqlen_k": int(starts_k.max())}):
                where: dict[str, Any] = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, **bounds, **given}
                out, _ = it(q, k, v, return_lse=True, out=(poisoned(q), lse), **where)
                into = tuple(map(poisoned, (q, k, v, *given.values())))
                made = it.backward(d_out, q, k, v, out, lse, into=into, **where)
                keys = int(starts_k[-1])
                alone = out[: rows_q if lengths and keys else 0]
                assert np.isfinite(out).all() and (out[len(alone) :] == 0).all()
                assert all(np.isfinite(gradient).all() for gradient in made)
                assert all((gradient[keys:] == 0).all() for gradient in made[1:3])
                outside = rows_q if not lengths else rows_q - max(lengths)
                assert (lse[:, rows_q - outside :] == -np.inf).all()


def random_rows(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(np.float16)


@targets
@pytest.mark.parametrize("name", ["plain", "sink", "lists"])
def test_batches_and_heads(name: str, target: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    it = compiled(spec, target, tmp_path)
    for batch, heads, heads_kv in ((0, 4, 2), (2, 0, 2), (2, 0, 0), (0, 0, 0), (1, 1, 1)):
        for len_q, len_k in ((1, 1), (1, 0), (0, 1)):
            q, d_out = (random_rows(seed, batch, heads, len_q, 32) for seed in (0, 1))
            k, v = (random_rows(seed, batch, heads_kv, len_k, 32) for seed in (2, 3))
            given = {} if spec.sink is None else {"sinks": np.zeros(heads, np.float32)}
            out, lse = it(q, k, v, return_lse=True, **given)
            into = tuple(map(poisoned, (q, k, v, *given.values())))
            made = it.backward(d_out, q, k, v, out, lse, into=into, **given)
            assert all(np.isfinite(array).all() for array in (out, *made))


@targets
def test_pages(target: str, tmp_path: Path) -> None:
    """Tables without pages, caches without pages, and lengths of 0."""
    spec = fg.AttentionSpec(64, mask=fg.causal(), page_size=16, sink=fg.Tensor("sinks", "float32", 1))
    it = compiled(spec, target, tmp_path)
    for batch in (0, 1, 2):
        for len_q in (0, 1, 70):
            for pages, columns in ((0, 0), (0, 2), (3, 0), (3, 2)):
                q = random_rows(0, batch, 4, len_q, 64)
                k, v = (random_rows(seed, pages, 16, 2, 64) for seed in (1, 2))
                where = {"page_table": np.zeros((batch, columns), np.int32), "seqused_k": np.zeros(batch, np.int32)}
                for splits in (None, 1, 3):
                    out, lse = poisoned(q), np.full(q.shape[:3], np.nan, np.float32)
                    options: dict[str, Any] = {"sinks": np.ones(4, np.float32), "num_splits": splits, **where}
                    it(q, k, v, return_lse=True, out=(out, lse), **options)
                    assert (out == 0).all() and (lse == 1).all()


def test_calls_without_scores_have_default_plans(tmp_path: Path) -> None:
    it = compiled(SPECS["sink"], "sm_90a", tmp_path)
    for len_q, len_k in SHAPES:
        if not (len_q and len_k):
            assert it.plan_for(len_q, len_k, heads=4, heads_kv=2) == it.plan
            assert it.backward_plan_for(len_q, len_k, heads=4, heads_kv=2) == it.backward_plan


@targets
@pytest.mark.parametrize("page_size", [4, 16])
def test_mixed_batches(page_size: int, target: str, tmp_path: Path) -> None:
    spec = fg.AttentionSpec(64, mask=fg.causal(), page_size=page_size, layout="thd")
    it = compiled(spec, target, tmp_path)
    for lengths in ((), (0,), (1,), (0, 0), (0, 70)):
        starts = np.cumsum((0, *lengths), dtype=np.int32)
        for rows in {int(starts[-1]), int(starts[-1]) + 2}:
            for pages, columns in ((0, 0), (0, 2), (3, 0), (3, 2)):
                q = random_rows(0, rows, 4, 64)
                k, v = (random_rows(seed, pages, page_size, 2, 64) for seed in (1, 2))
                batch = len(lengths)
                where = {"page_table": np.zeros((batch, columns), np.int32), "seqused_k": np.zeros(batch, np.int32)}
                for bound in (None, max(lengths, default=0)):
                    out, lse = poisoned(q), np.full((4, rows), np.nan, np.float32)
                    options: dict[str, Any] = {"cu_seqlens_q": starts, "max_seqlen_q": bound, **where}
                    it(q, k, v, return_lse=True, out=(out, lse), **options)
                    assert (out == 0).all() and (lse == -np.inf).all()


@targets
def test_schedules(target: str, tmp_path: Path) -> None:
    it = compiled(fg.AttentionSpec(64, page_size=16), target, tmp_path)
    k, v = (random_rows(seed, 3, 16, 2, 64) for seed in (1, 2))
    for batch, columns in ((1, 0), (1, 2), (2, 1)):
        for len_q in (0, 1):
            where = {"page_table": np.zeros((batch, columns), np.int32), "seqused_k": np.zeros(batch, np.int32)}
            schedule = it.decode_schedule(len_q, heads=4, heads_kv=2, **where)
            q = random_rows(0, batch, 4, len_q, 64)
            out, lse = it(q, k, v, return_lse=True, decode_schedule=schedule, **where)
            assert (out == 0).all() and (lse == -np.inf).all()


@targets
def test_tile_lists(target: str, tmp_path: Path) -> None:
    spec = SPECS["lists"]
    it, sinks = compiled(spec, target, tmp_path), np.zeros(4, np.float32)
    for len_q, len_k in SHAPES:
        q, d_out = (random_rows(seed, 1, 4, len_q, 32) for seed in (0, 1))
        k, v = (random_rows(seed, 1, 2, len_k, 32) for seed in (2, 3))
        lists, of_keys = (make(len_q, len_k, heads=4) for make in (it.tile_lists, it.backward_tile_lists))
        out, lse = it(q, k, v, return_lse=True, tile_lists=lists, sinks=sinks)
        made = it.backward(d_out, q, k, v, out, lse, tile_lists=of_keys, sinks=sinks)
        assert all(np.isfinite(array).all() for array in (out, *made))


def test_appending_and_merging(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MadeUpCard()  # one attention, because engines cache runners
    for module in (appending, merging):
        monkeypatch.setattr(module, "Emulator", lambda: engine)
    empty = ((0, 1, 2, 3, 8), (1, 0, 2, 3, 8), (1, 1, 0, 3, 8), (1, 1, 2, 0, 8), (1, 1, 2, 3, 0), (1, 1, 1, 1, 8))
    for batch, tokens, heads, pages, dim in empty:
        new = random_rows(0, batch, tokens, heads, dim)
        cache, where = random_rows(1, pages, 16, heads, dim), np.zeros((batch, 1), np.int32)
        lengths = np.ones(batch, np.int32)
        appending.append_kv(new, new, cache, cache.copy(), page_table=where, seqused_k=lengths, emulate=True)
        part, lse = random_rows(0, batch, heads, tokens, dim), np.zeros((batch, heads, tokens), np.float32)
        assert merging.merge_states([part, part], [lse, lse], emulate=True).out.shape == part.shape


LEARNED = fg.Tensor("bias", "float16", 1, grad=True)


@targets
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.covering(3)
def test_captures_with_gradients_and_dropout(deterministic: bool, target: str, tmp_path: Path) -> None:
    spec = fg.AttentionSpec(32, score=fg.trace_score(lambda s, b, h, q, k: s + LEARNED[k]), dropout=0.25, sink=SINKS)
    it = compiled(spec, target, tmp_path, deterministic=deterministic)
    for len_q, len_k in SHAPES:
        q, d_out = (random_rows(seed, 1, 4, len_q, 32) for seed in (0, 1))
        k, v = (random_rows(seed, 1, 2, len_k, 32) for seed in (2, 3))
        given = {"bias": random_rows(4, len_k), "sinks": np.zeros(4, np.float32)}
        out, lse = it(q, k, v, return_lse=True, seed=1, **given)
        made = it.backward(
            d_out, q, k, v, out, lse, seed=1, into=tuple(map(poisoned, (q, k, v, *given.values()))), **given
        )
        assert all(np.isfinite(array).all() for array in (out, *made))
