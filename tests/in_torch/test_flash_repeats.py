"""Repeated calls of torch's flash operators: they launch what the first call did, unless anything has changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from inspect import signature
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import torch
from torch.autograd import forward_ad
from torch.nn.attention import varlen

import flashgen as fg
from flashgen.torch import direct, flash_operators, registered, sdpa_calls, varlen_operators
from flashgen.torch import table as entries
from in_torch.recorded import Launched, Memory
from in_torch.sdpa_registry import activated

_SCALES = count(2001)
_HOPPER = {"target": "sm_90a"}


@pytest.fixture(autouse=True)
def cuda_tensors(monkeypatch: pytest.MonkeyPatch, launched: Launched) -> None:
    """Lets CPU tensors pass for those of a GPU, with kernels of Hopper."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(registered, "compile", lambda spec, **options: fg.compile(spec, **options | _HOPPER))
    for name in ("_SDPA_FORWARDS", "_FLASH_FORWARDS", "_SDPA_BACKWARDS", "_FLASH_BACKWARDS"):
        repeats = direct.Repeats(backward=name.endswith("BACKWARDS"))
        monkeypatch.setattr(flash_operators, name, repeats)


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The specs that calls have looked up: repeated calls look up none."""
    seen: list[Any] = []
    found = flash_operators._entry_of
    monkeypatch.setattr(flash_operators, "_entry_of", lambda *given: (seen.append(given), found(*given))[1])
    return seen


def _tensors(number: int, *shape: int) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=torch.float16) for _ in range(number)]


def _sdpa(scale: float) -> tuple[Callable[..., Any], Callable[..., Any], list[torch.Tensor]]:
    """Returns both operators of scaled_dot_product_attention, and q, k, v, d_out."""

    def backward(d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *_rest: Any, state: Any = None) -> Any:
        given = (d_out, q, k, v, out, lse, None, None, 96, 96, 0.0, True, state, None)
        return flash_operators.scaled_dot_product_backward(*given, scale=scale)

    forward = partial(flash_operators.scaled_dot_product_forward, dropout_p=0.0, is_causal=True, scale=scale)
    return forward, backward, _tensors(4, 2, 4, 96, 64)


def _packed(scale: float, used: bool = False) -> tuple[Callable[..., Any], Callable[..., Any], list[torch.Tensor]]:
    """Returns both operators of packed sequences, and q, k, v, d_out."""
    at = torch.tensor([0, 40, 96], dtype=torch.int32)
    places, window = (at, at, 56, 56, 0.0, False), {"scale": scale, "window_size_left": 8, "window_size_right": 0}
    more = {"seqused_k": at[:2].clone()} if used else {}

    def backward(d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *_rest: Any) -> Any:
        return flash_operators.flash_backward(d_out, q, k, v, out, lse, *places, None, None, **window)

    def forward(q: Any, k: Any, v: Any) -> Any:
        return flash_operators.flash_forward(q, k, v, *places, False, **window, **more)

    return forward, backward, _tensors(4, 96, 4, 64)


@pytest.mark.parametrize("kind", [_sdpa, _packed, partial(_packed, used=True)], ids=["sdpa", "packed", "seqused_k"])
def test_repeated_calls_launch_the_same(kind: Any, launched: Launched, memory: Memory, lookups: list[Any]) -> None:
    """Byte for byte, with the same results; the spec of a call is looked up until torch recognises its tensors."""
    forward, backward, (q, k, v, d_out) = kind(1 / next(_SCALES))
    seen = []
    for _ in range(4):
        launched.clear()
        lookups.clear()
        memory.again()
        results = forward(q, k, v)
        gradients = backward(d_out, q, k, v, *results[:2])
        seen.append((launched.copy(), results, gradients, len(lookups)))
    assert seen[0][0] and all(launches == seen[0][0] for launches, *_ in seen)
    for _, results, gradients, _ in seen[1:]:
        for one, other in zip((*results[:2], *gradients), (*seen[0][1][:2], *seen[0][2]), strict=True):
            assert one is other
        state, unused, mask = results[-3:]
        assert (state.dtype, state.shape, unused.shape, mask.numel()) == (torch.uint64, (2,), (), 0)
        assert results[2:-3] == seen[0][1][2:-3]
    assert [lookups for *_, lookups in seen] == [2, 2, 0, 0]


def test_state_tensors_are_of_each_call(lookups: list[Any]) -> None:
    """A compiled graph may write to the memory of outputs that it no longer needs."""
    forward, _, (q, k, v, _) = _sdpa(1 / next(_SCALES))
    calls = [forward(q, k, v) for _ in range(5)]
    assert len(lookups) == 2
    assert len({each[index].data_ptr() for each in calls for index in (6, 7)}) == 10


_VARLEN_SCALE = 1 / next(_SCALES)
_STARTS = torch.tensor([0, 40, 96], dtype=torch.int32)


def _varlen_attn(q: Any, k: Any, v: Any, window: tuple[int, int] = (-1, 0), **more: Any) -> Any:
    attend = partial(varlen.varlen_attn, q, k, v, _STARTS, _STARTS, 56, 56)
    return attend(scale=_VARLEN_SCALE, window_size=window, **more)


def test_varlen_attn_repeats_launches_without_its_python_code(
    launched: Launched, memory: Memory, lookups: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both passes; a call with other arguments runs torch's code, which calls the flash operators."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    q, k, v, d_out = (x.requires_grad_() for x in _tensors(4, 96, 4, 64))
    seen = []
    with activated():
        for _ in range(4):
            launched.clear()
            lookups.clear()
            memory.again()
            out = _varlen_attn(q, k, v)
            gradients = torch.autograd.grad(out, (q, k, v), d_out)
            seen.append((launched.copy(), [x.data_ptr() for x in (out, *gradients)], len(lookups)))
        assert sdpa_calls() == (4, 4, {})
        monkeypatch.setattr(flash_operators, "flash_forward", None)
        monkeypatch.delattr(varlen, "log")
        for grouped in (False, True):
            assert _varlen_attn(q, k, v, enable_gqa=grouped).grad_fn is not None
        for call in (
            lambda: _varlen_attn(q, k, v, (8, 0)),
            lambda: _varlen_attn(q, k, v, enable_gqa=True, num_splits=2),
            lambda: _varlen_attn(q[:, :, :32], k[:, :, :32], v),
            lambda: _varlen_attn(q.detach(), k, v, seqused_k=torch.tensor([40, 56], dtype=torch.int32)),
        ):
            with torch.no_grad(), pytest.raises(NameError, match="log"):
                call()
    assert seen[0][0] and all(each[:2] == seen[0][:2] for each in seen)
    assert [each[2] for each in seen] == [2, 2, 0, 0]


def test_operators_with_other_arguments_stay_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*varlen_operators.varlen_operators()] == ["torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward"]

    def schema(flag: str) -> Any:
        taken = [SimpleNamespace(name=name, type="int") for name in signature(forward).parameters if name != "others"]
        more = [SimpleNamespace(name=flag, type="bool"), SimpleNamespace(name="seqused_k", type="Optional[Tensor]")]
        return SimpleNamespace(default=SimpleNamespace(_schema=SimpleNamespace(arguments=[*taken, *more])))

    forward = varlen_operators.repeat_varlen_forward
    for flag, fits in (("enable_gqa", True), ("is_reversed", False)):
        monkeypatch.setattr(torch.ops.torch_attn, "_other", schema(flag), raising=False)
        assert varlen_operators._fits("_other", forward) == fits
        assert not varlen_operators._fits("_other", varlen_operators.repeat_varlen_backward)
    assert not varlen_operators._fits("_absent", forward)


def _repeat(forward: Callable[..., Any], tensors: list[torch.Tensor], lookups: list[Any]) -> None:
    """Calls an operator until it no longer looks up its spec."""
    for _ in range(3):
        lookups.clear()
        forward(*tensors)
    assert not lookups


def test_other_arguments_are_other_calls(launched: Launched, lookups: list[Any]) -> None:
    forward, _, (q, k, v, _) = _sdpa(1 / next(_SCALES))
    _repeat(forward, [q, k, v], lookups)
    (short,) = _tensors(1, 2, 4, 80, 64)
    swapped = k.transpose(1, 2).contiguous().transpose(1, 2)
    calls = [
        partial(forward, q, k, v, is_causal=False),
        partial(forward, q, k, v, scale=1 / next(_SCALES)),
        partial(forward, q, swapped, v),
        partial(forward, short, k, v),
        partial(forward, *(x.bfloat16() for x in (q, k, v))),
    ]
    for number, call in enumerate(calls):
        lookups.clear()
        call()
        assert lookups, number
    lookups.clear()
    forward(q, k, v)
    assert not lookups, "the first call is still remembered"


def test_windows_and_missing_arrays_are_other_calls(lookups: list[Any]) -> None:
    scale = 1 / next(_SCALES)
    forward, _, (q, k, v, _) = _packed(scale)
    _repeat(forward, [q, k, v], lookups)
    at = torch.tensor([0, 40, 96], dtype=torch.int32)
    operator = partial(flash_operators.flash_forward, q, k, v, at, at, 56, 56)
    for flags, window in (((0.0, False, False), (9, 0)), ((0.0, False, False), (8, 1)), ((0.0, True, False), (-1, -1))):
        lookups.clear()
        operator(*flags, scale=scale, window_size_left=window[0], window_size_right=window[1])
        assert lookups, window
    lookups.clear()
    operator(0.0, False, False, scale=scale, window_size_left=8, window_size_right=0, seqused_k=at[:2].clone())
    assert lookups


def test_deterministic_gradients_are_another_call(lookups: list[Any]) -> None:
    forward, backward, (q, k, v, d_out) = _sdpa(1 / next(_SCALES))
    out, lse, *_ = forward(q, k, v)
    _repeat(partial(backward, d_out), [q, k, v, out, lse], lookups)
    torch.use_deterministic_algorithms(True)
    try:
        backward(d_out, q, k, v, out, lse)
    finally:
        torch.use_deterministic_algorithms(False)
    assert lookups


def test_a_cleared_launch_cache_forgets_repeated_calls(lookups: list[Any]) -> None:
    """Tuning clears it."""
    forward, _, (q, k, v, _) = _sdpa(scale := 1 / next(_SCALES))
    _repeat(forward, [q, k, v], lookups)
    entry = flash_operators._entry(64, 64, torch.float16, "bhsd", None, 0.0, -1, 0, scale, False, False)
    assert isinstance(entry, entries.Registered)
    entry.on(0).forward.clear_cache()
    lookups.clear()
    forward(q, k, v)
    assert lookups


def test_misaligned_tensors_and_dual_numbers_are_not_repeated(lookups: list[Any]) -> None:
    forward, _, (q, *_) = _sdpa(1 / next(_SCALES))
    aligned = [torch.zeros(q.numel() + 8, dtype=q.dtype)[8:].view(q.shape) for _ in range(3)]
    _repeat(forward, aligned, lookups)
    moved = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    forward(moved, *aligned[1:])
    assert lookups
    lookups.clear()
    with forward_ad.dual_level():
        forward(*aligned)
    assert lookups


@pytest.mark.filterwarnings("ignore")
def test_calls_with_dropout_read_their_seed(lookups: list[Any]) -> None:
    q, k, v, _ = _tensors(4, 2, 4, 96, 64)
    for _ in range(4):
        lookups.clear()
        flash_operators.scaled_dot_product_forward(q, k, v, 0.5, True, scale=1 / 2000)
        assert lookups


def test_the_last_eight_calls_are_remembered(lookups: list[Any]) -> None:
    forward, _, _ = _sdpa(1 / next(_SCALES))
    for length in range(8, 80, 8):
        _repeat(forward, _tensors(3, 1, 1, length, 64), lookups)
    for length, is_found in ((8, False), (72, True)):
        lookups.clear()
        forward(*_tensors(3, 1, 1, length, 64))
        assert bool(lookups) != is_found
