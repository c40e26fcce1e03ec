"""torch's flash operators computed by flashgen: results, refused calls, counts, dropout, compilation, the registry."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import torch
import torch.nn.attention
from torch._dynamo.testing import EagerAndRecordGraphs

import flashgen as fg
from flashgen.errors import LaunchError, UnsupportedError
from flashgen.torch import attention, flash_operators, register_sdpa, sdpa_calls, sdpa_registry, table, varlen_attention

if sdpa_registry.why_no_registry():
    pytest.skip(str(sdpa_registry.why_no_registry()), allow_module_level=True)

from torch.nn.attention.varlen import varlen_attn

from in_torch import plain, sdpa_models
from in_torch.sdpa_registry import activated, aten, sdpa

STARTS = [0, 13, 13, 40]
NEEDS_PAGES = pytest.mark.skipif(not sdpa_models.GROUPED, reason="varlen_attn takes no pages before torch 2.13")
WINDOWS = [(-1, -1), (-1, 0), (5, 0), (5, 3), (-1, 4)]


@pytest.fixture(autouse=True)
def active() -> Iterator[None]:
    with activated():
        yield


def rows(*shape: int, heads_kv: int | None = None, length_k: int | None = None) -> list[Any]:
    batch, heads, length, dim = shape
    of_keys = (batch, heads_kv or heads, length_k or length, dim)
    return [torch.randn(*size, dtype=torch.bfloat16, requires_grad=True) for size in (shape, of_keys, of_keys)]


def starts(*numbers: int) -> Any:
    return torch.tensor(numbers or STARTS, dtype=torch.int32)


def bottom_right(q: Any, k: Any, left: int = -1, right: int = 0) -> Callable[..., Any]:
    """The mask of a window, as in the operators of aten."""
    shift = k.shape[2] - q.shape[2]

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        distance = j - (i + shift)
        kept = torch.ones_like(distance, dtype=torch.bool)
        kept = kept & (distance >= -left) if left >= 0 else kept
        return kept & (distance <= right) if right >= 0 else kept

    return mask


@pytest.mark.quick
@pytest.mark.parametrize(("heads_kv", "length_k"), [(4, 40), (2, 40), (1, 57)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_output_and_gradients(is_causal: bool, heads_kv: int, length_k: int) -> None:
    q, k, v = rows(2, 4, 40, 32, heads_kv=heads_kv, length_k=length_k)
    out = sdpa(q, k, v, is_causal=is_causal, scale=0.3)
    wanted, _ = plain.attention(q, k, v, bottom_right(q, k) if is_causal else None, scale=0.3)
    plain.assert_close(out, wanted)
    plain.assert_gradients(out, wanted, (q, k, v))
    assert sdpa_calls() == (1, 1, {})


def _strided(order: str) -> list[Any]:
    if order == "packed":
        return list(torch.randn(2, 40, 3, 4, 32, dtype=torch.bfloat16).permute(2, 0, 3, 1, 4))
    if order == "expanded":
        return [torch.randn(2, 1, 40, 32, dtype=torch.bfloat16).expand(2, 4, 40, 32) for _ in range(3)]
    batches = (1, 2)[order != "one batch"]
    return [torch.randn(batches, 40, 4, 32, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]


@pytest.mark.parametrize("order", ["transposed", "packed", "one batch", "expanded"])
def test_results_are_those_that_torchs_fake_kernels_announce(order: str) -> None:
    """Inductor compiles its code for these shapes, strides and dtypes."""
    q, k, v = _strided(order)
    given = (0.0, True)
    got = aten._scaled_dot_product_flash_attention(q, k, v, *given)
    wanted = aten._scaled_dot_product_flash_attention(*(x.to("meta") for x in (q, k, v)), *given)
    back = (got[0], got[1], None, None, 40, 40, *given, got[6], got[7])
    got += aten._scaled_dot_product_flash_attention_backward(torch.ones_like(got[0]), q, k, v, *back)
    wanted += tuple(torch.empty_like(x) for x in (q, k, v))
    for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
        if not isinstance(one, torch.Tensor):
            assert one == other
            continue
        assert (one.shape, one.dtype) == (other.shape, other.dtype), number
        sizes = zip(one.shape, one.stride(), other.stride(), strict=True)
        assert all(mine == theirs for size, mine, theirs in sizes if size > 1), number


@pytest.mark.parametrize("window", WINDOWS)
def test_windows_of_the_dense_operator(window: tuple[int, int]) -> None:
    q, k, v = rows(2, 4, 24, 32, heads_kv=2, length_k=33)
    is_causal = window == (-1, 0)
    how: dict[str, Any] = {} if is_causal else {"window_size_left": window[0], "window_size_right": window[1]}
    transposed = [x.transpose(1, 2) for x in (q, k, v)]
    out = aten._flash_attention_forward(*transposed, None, None, 24, 33, 0.0, is_causal, False, **how)[0]
    wanted, _ = plain.attention(q, k, v, bottom_right(q, k, *window))
    plain.assert_close(out.transpose(1, 2), wanted)
    plain.assert_gradients(out.transpose(1, 2), wanted, (q, k, v))


@pytest.mark.quick
@pytest.mark.parametrize("window", WINDOWS)
def test_packed_sequences(window: tuple[int, int]) -> None:
    q, k, v = (x.detach()[0].transpose(0, 1).contiguous() for x in rows(1, 4, 40, 32, heads_kv=2))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    others = [x.detach().clone().requires_grad_() for x in inputs]
    out, lse = varlen_attn(
        *inputs, starts(), starts(), 27, 27, window_size=window, **sdpa_models.GROUPED,
        return_aux=torch.nn.attention.varlen.AuxRequest(lse=True),
    )  # fmt: skip
    wanted, wanted_lse = varlen_attention(*others, starts(), starts(), window_size=window, return_lse=True)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    d_out = torch.randn_like(out)
    for one, other in zip(plain.gradients(out, d_out, inputs), plain.gradients(wanted, d_out, others), strict=True):
        torch.testing.assert_close(one, other)
    assert sdpa_calls() == (1, 1, {})


@NEEDS_PAGES
def test_keys_in_use_and_pages() -> None:
    q, k, v = (x.detach()[0].transpose(0, 1).contiguous() for x in rows(1, 4, 40, 32, heads_kv=2))
    used = starts(9, 0, 20)
    out = varlen_attn(q, k, v, starts(), starts(), 27, 27, **sdpa_models.GROUPED, seqused_k=used)
    assert torch.equal(out, varlen_attention(q, k, v, starts(), starts(), seqused_k=used))
    pages = [torch.randn(4, 16, 2, 32, dtype=torch.bfloat16) for _ in range(2)]
    table, where = starts(3, 1, 0, 2, 0, 0).view(3, 2), starts(0, 1, 2, 3)
    paged: dict[str, Any] = {"seqused_k": starts(30, 16, 5), "block_table": table}
    for queries, at in ((q[:3], where), (q[:6], starts(0, 1, 4, 6))):
        out = varlen_attn(queries, *pages, at, None, int(at.diff().max()), 30, **sdpa_models.GROUPED, **paged)
        torch.testing.assert_close(out, varlen_attention(queries, *pages, at, None, **paged))
    assert sdpa_calls() == (3, 0, {})


@NEEDS_PAGES
def test_output_to_given_memory() -> None:
    from torch.nn.attention.varlen import varlen_attn_out

    q, k, v = (x.detach()[0].transpose(0, 1).contiguous() for x in rows(1, 4, 40, 32))
    memory = torch.zeros(40, 8, 32, dtype=torch.bfloat16)
    out = varlen_attn_out(memory[:, ::2], q, k, v, starts(), starts(), 27, 27)
    assert out.data_ptr() == memory.data_ptr() and not memory[:, 1::2].any()
    assert torch.equal(memory[:, ::2], varlen_attention(q, k, v, starts(), starts()))


@pytest.mark.quick
def test_dropout_is_drawn_from_torchs_generator() -> None:
    q, k, v = rows(1, 2, 40, 32)
    torch.manual_seed(7)
    run = partial(aten._scaled_dot_product_flash_attention, q, k, v, 0.25, True)
    first, second = run(), run()
    torch.manual_seed(7)
    again = run()
    state = first[6]
    assert state.dtype == torch.uint64 and state.shape == (2,) and torch.equal(state, again[6])
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], second[0])
    spec = fg.AttentionSpec(32, "bfloat16", mask=fg.causal(), dropout=0.25)
    wanted = attention(spec, q, k, v, seed=int(state[0]))
    assert torch.equal(first[0], wanted)
    d_out = torch.randn_like(wanted)
    pairs = zip(plain.gradients(first[0], d_out, (q, k, v)), plain.gradients(wanted, d_out, (q, k, v)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other)


def _packed(q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_debug: bool = False, **how: Any) -> Any:
    packed = (x[0].transpose(0, 1) for x in (q, k, v))
    at = starts(0, 40)
    return aten._flash_attention_forward(*packed, at, at, 40, 40, dropout_p, False, is_debug, **how)


def _paged(q: Any, **how: Any) -> Any:
    """The queries of the first sequence over one page."""
    pages = torch.zeros(1, 16, 4, 32, dtype=q.dtype)
    given = (q[0].transpose(0, 1), pages, pages, starts(0, 40), None, 40, 16, 0.0, True, False)
    return aten._flash_attention_forward(*given, block_table=starts(0).view(1, 1), **how)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "dtype": (lambda q, k, v: sdpa(q.float(), k.float(), v.float()), "query is float32"),
    "head dim": (lambda q, k, v: sdpa(q[..., :12], k[..., :12], v[..., :12]), "head_dim=12"),
    "debug mask": (
        lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, True), "return_debug_mask"
    ),
    "all dropped": (lambda q, k, v: sdpa(q, k, v, dropout_p=1.0), "dropout_p=1"),
    "nearly no dropout": (lambda q, k, v: sdpa(q, k, v, dropout_p=1e-4), "1/256"),
    "other dtype of k": (lambda q, k, v: sdpa(q, k.half(), v), "k is float16"),
    "slopes": (lambda q, k, v: _packed(q, k, v, alibi_slopes=torch.ones(4)), "alibi_slopes"),
    "splits of pages": (
        lambda q, k, v: _paged(q, seqused_k=starts(9), num_splits=1), "num_splits"
    ),
    "pages without lengths": (lambda q, k, v: _paged(q), "seqused_k"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_calls_go_to_torchs_own_kernel(name: str) -> None:
    run, reason = REFUSED[name]
    q, k, v = (x.detach() for x in rows(2, 4, 40, 32))
    table._WARNED.clear()
    with pytest.warns(fg.errors.FlashgenWarning, match="torch's own kernel"):
        try:
            run(q, k, v)
        except RuntimeError as error:  # of the operators that plain attention does not stand for
            assert "torch's own" in str(error) or "dtype" in str(error)
    forward, backward, refused = sdpa_calls(reset=True)
    assert (forward, backward) == (0, 0)
    ((text, count),) = refused.items()
    assert text.startswith("forward: ") and reason in text and count == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the second time there is no warning
        with suppress(RuntimeError):
            run(q, k, v)
    assert sum(sdpa_calls().torch.values()) == 1


@pytest.mark.filterwarnings("ignore:torch's own kernel")
def test_both_passes_of_a_refused_call_are_torchs() -> None:
    q, k, v = (x.detach().float().requires_grad_() for x in rows(2, 4, 40, 32))
    out = sdpa(q, k, v, is_causal=True)
    wanted, _ = plain.attention(q, k, v, bottom_right(q, k))
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    plain.assert_gradients(out, wanted, (q, k, v))
    passes = {reason.partition(":")[0]: count for reason, count in sdpa_calls().torch.items()}
    assert sdpa_calls()[:2] == (0, 0) and passes == {"forward": 1, "backward": 1}


def test_a_backward_with_dropout_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel would drop other weights than the forward did."""
    q, k, v = rows(1, 2, 40, 32)
    out = sdpa(q, k, v, dropout_p=0.5)

    def refuse(*_given: Any) -> None:
        raise UnsupportedError("this backward")

    monkeypatch.setattr(flash_operators, "run_backward", refuse)
    with pytest.raises(LaunchError, match=r"dropout.*this backward"):
        out.sum().backward()


def test_a_forward_that_only_torch_would_compute_has_no_dropout() -> None:
    """flashgen would compute the backward, because it does not see the argument, and drop other probabilities."""
    q, k, v = rows(1, 2, 40, 32)
    with pytest.raises(LaunchError, match=r"return_debug_mask with dropout_p=0\.5 .*restore_flash_attention_impl"):
        aten._scaled_dot_product_flash_attention(q, k, v, 0.5, False, True)
    q, k, v = (x.mT.contiguous() for x in (q, k, v))
    with pytest.raises(LaunchError, match=r"alibi_slopes with dropout_p=0\.5"):
        aten._flash_attention_forward(
            q, k, v, None, None, 2, 2, 0.5, False, False, scale=1.0, alibi_slopes=torch.ones(40)
        )


@pytest.mark.filterwarnings("ignore:torch's own kernel")
def test_what_both_passes_refuse_with_dropout_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.attention.problem.MAX_HEADS", 1)
    q, k, v = rows(2, 1, 4, 32)
    sdpa(q, k, v, dropout_p=0.5).sum().backward()
    assert [reason.partition(":")[0] for reason in sdpa_calls().torch] == ["forward", "backward"]


def test_torchs_own_kernel_may_call_another_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the operator of scaled_dot_product_attention calls `_flash_attention_forward`."""
    inner: list[str] = []

    def own(*given: Any, **named: Any) -> Any:
        try:
            _packed(*(x.bfloat16() for x in given[:3]))
        except RuntimeError as error:
            inner.append(str(error))
        return given[0].clone(), given[0][..., 0].float(), None, None, 40, 40, None, None, given[0].new_empty(0)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", own, "CPU")
    nested = sdpa_registry.Activation("CPU")
    try:
        sdpa(*(x.detach().float() for x in rows(1, 4, 40, 32)))
    finally:
        nested.remove()
        library._destroy()
    assert inner == ["torch's own _flash_attention_forward"] and sdpa_calls().forward == 0


def test_counts_of_threads(at_once: Callable[..., list[Any]]) -> None:
    q, k, v = (x.detach() for x in rows(1, 2, 40, 32))
    wanted = sdpa(q, k, v)
    outputs = at_once(lambda _: [sdpa(q, k, v) for _ in range(5)])
    assert all(torch.equal(out, wanted) for each in outputs for out in each)
    assert sdpa_calls(reset=True) == (41, 0, {}) and sdpa_calls() == (0, 0, {})


def test_deterministic_gradients_are_asked_for_as_in_torch() -> None:
    """The gradients of a long sequence are sums of many CTAs."""
    q, k, v = rows(1, 2, 300, 32)
    torch.use_deterministic_algorithms(True)
    try:
        found = [plain.gradients(sdpa(q, k, v), torch.ones_like(q), (q, k, v)) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_inputs_changed_in_place_are_detected() -> None:
    q, k, v = rows(1, 2, 40, 32)
    scaled = q * 2
    out = sdpa(scaled, k, v)
    with torch.no_grad():
        scaled.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_one_graph_with_atens_operator() -> None:
    def model(q: Any, k: Any, v: Any) -> Any:
        return sdpa(q * 2, k, v, is_causal=True).sin()

    q, k, v = rows(2, 4, 40, 32)
    recorder = EagerAndRecordGraphs()
    out = torch.compile(model, fullgraph=True, backend=recorder)(q, k, v)
    (graph,) = recorder.graphs
    assert "_scaled_dot_product_flash_attention" in graph.code
    torch.testing.assert_close(out, model(q, k, v))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    wanted = model(q, k, v)
    d_out = torch.randn_like(wanted)
    mine, theirs = (plain.gradients(each, d_out, (q, k, v)) for each in (compiled(q, k, v), wanted))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    assert sdpa_calls().forward == 4


def test_vmap_and_checkpoints() -> None:
    q, k, v = (x.detach() for x in rows(2, 4, 40, 32))
    stacked = [torch.stack([x, 2 * x]) for x in (q, k, v)]
    torch.testing.assert_close(torch.vmap(sdpa)(*stacked)[1], sdpa(*(2 * x for x in (q, k, v))))
    learned = q.clone().requires_grad_()
    torch.manual_seed(3)
    out = torch.utils.checkpoint.checkpoint(partial(sdpa, dropout_p=0.3), learned, k, v, use_reentrant=False)
    out.sum().backward()
    torch.manual_seed(3)
    other = q.clone().requires_grad_()
    sdpa(other, k, v, dropout_p=0.3).sum().backward()
    torch.testing.assert_close(learned.grad, other.grad)


class Registry:
    """torch's registry, with this machine taken for one that has a GPU whose tensors are those of the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sdpa_registry, "_activate", lambda: sdpa_registry.Activation("CPU"))
        from torch.nn.attention import _registry

        monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", dict(_registry._FLASH_ATTENTION_IMPLS))


def test_activating_and_restoring(monkeypatch: pytest.MonkeyPatch) -> None:
    Registry(monkeypatch)
    from torch.nn.attention import (
        activate_flash_attention_impl,
        current_flash_attention_impl,
        list_flash_attention_impls,
        restore_flash_attention_impl,
    )

    q, k, v = (x.detach() for x in rows(1, 2, 40, 32))
    register_sdpa()
    register_sdpa()
    assert list_flash_attention_impls().count("flashgen") == 1 and current_flash_attention_impl() is None
    for _ in range(2):
        activate_flash_attention_impl("flashgen")
    assert current_flash_attention_impl() == "flashgen"
    sdpa(q, k, v)
    assert sdpa_calls().forward == 1
    restore_flash_attention_impl()
    assert current_flash_attention_impl() is None
    sdpa(q, k, v)  # by the activation of this file's fixture
    assert sdpa_calls().forward == 2


def test_restoring_brings_torchs_kernel_back() -> None:
    own = torch.library.Library("aten", "IMPL")
    own.impl("_flash_attention_forward", lambda *given, **named: (given[0].clone(), *[given[0]] * 4), "CPU")
    activation = sdpa_registry.Activation("CPU")
    q, k, v = (x.detach() for x in rows(1, 2, 40, 32))
    assert not torch.equal(_packed(q, k, v)[0], q[0].transpose(0, 1))
    activation.remove()
    assert torch.equal(_packed(q, k, v)[0], q[0].transpose(0, 1))
    own._destroy()


def test_versions_of_torch_without_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(UnsupportedError, match=r"torch 2\.9\.1 has no registry.*install torch 2\.11") as caught:
        register_sdpa()
    assert "flashgen.torch.scaled_dot_product_attention" in str(caught.value)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
def test_torch_without_cuda() -> None:
    register_sdpa()
    with pytest.raises(UnsupportedError, match="built without CUDA"):
        torch.nn.attention.activate_flash_attention_impl("flashgen")
    assert torch.nn.attention.current_flash_attention_impl() is None


@pytest.mark.parametrize("name", ["encoder", "llama", "packed llama"])
def test_training_steps_of_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of torch's functions, whose calls reach the flash operators as they do on a GPU."""
    build: dict[str, Callable[[], torch.nn.Module]] = {
        "encoder": lambda: sdpa_models.Encoder(64, 2),
        "llama": lambda: sdpa_models.Llama(64, 2),
        "packed llama": lambda: sdpa_models.Llama(64, 2, packed=True),
    }
    train = partial(sdpa_models.losses, device="cpu", steps=4, batch=2, length=24)
    theirs = train(build[name.removeprefix("packed ")])
    assert sdpa_calls(reset=True) == (0, 0, {}), "a CPU has no flash operator"
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    ours = train(build[name])
    sdpa_models.assert_equal_within_noise(ours, theirs, theirs)
    assert sdpa_calls() == (8, 8, {})
