"""Replayed calls: they launch what an earlier call with the same cache key prepared, and only then."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import torch

import flashgen as fg
from flashgen.attention.call_pass import Pass
from flashgen.errors import ArgumentError
from flashgen.language.spec import AttentionSpec
from flashgen.runtime import gpu
from flashgen.torch import direct
from in_torch.recorded import Launched, Memory

SHAPE = (2, 4, 96, 64)
_SCALES = count(1001)


def _tensors(number: int, *shape: int) -> list[torch.Tensor]:
    return [torch.zeros(*(shape or SHAPE), dtype=torch.float16) for _ in range(number)]


def _compiled(target: str, sharded: bool = False) -> Any:
    """Returns a spec that no other test has, because compiled attentions are cached, here with recorded launches."""
    spec = AttentionSpec(64, "float16", mask=fg.causal(), scale=1 / next(_SCALES))
    return fg.compile(spec.shard() if sharded else spec, target=target)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_replayed_launches_equal_those_of_the_attention(target: str, launched: Launched, memory: Memory) -> None:
    """Byte for byte, forward and backward, with and without the LSE and its gradient."""
    attention, (q, k, v, d_out) = _compiled(target), _tensors(4)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # results have the same structure
    for with_lse in (False, True):
        if not with_lse:
            assert direct.forward(attention, q, k, v, with_lse) is None, "nothing is cached yet"
        memory.again()
        made = attention(q, k, v, return_lse=with_lse)
        memory.again()
        again = direct.forward(attention, q, k, v, with_lse)
        assert len(launched) == 2 and launched[0] == launched[1] and launched[0][2] == 7
        for one, other in zip(*((each if with_lse else [each]) for each in (made, again)), strict=True):
            assert one is other
        launched.clear()
    for d_lse in (None, torch.zeros(SHAPE[:3])):
        given = (d_out, d_lse, q, k, v, *made)
        assert direct.backward(attention, given) is None
        memory.again()
        gradients = attention.backward(d_out, q, k, v, *made, d_lse=d_lse)
        memory.again()
        again = direct.backward(attention, given)
        half = len(launched) // 2
        assert half > 1 and launched[:half] == launched[half:]
        assert again is not None and all(one is other for one, other in zip(gradients, again, strict=True))
        launched.clear()


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_replayed_launches_where_v_is_a_part_of_k(target: str, launched: Launched, memory: Memory) -> None:
    spec = AttentionSpec(64, "float16", value_dim=32, mask=fg.causal(), scale=1 / next(_SCALES), shared_kv=True)
    attention, (q, kv) = fg.compile(spec, target=target), _tensors(2)
    for with_lse in (False, True):
        if not with_lse:
            assert direct.forward_of_shared(attention, q, kv, with_lse) is None, "nothing is cached yet"
        memory.again()
        made = attention(q, kv, return_lse=with_lse)
        memory.again()
        again = direct.forward_of_shared(attention, q, kv, with_lse)
        assert len(launched) == 2 and launched[0] == launched[1]
        assert all(one is other for one, other in zip(*((x if with_lse else [x]) for x in (made, again)), strict=True))
        launched.clear()
    d_out = torch.zeros_like(made[0])
    for d_lse in (None, torch.zeros(SHAPE[:3])):
        given = (attention, d_out, d_lse, q, kv, *made)
        assert direct.backward_of_shared(*given) is None
        memory.again()
        gradients = attention.backward(d_out, q, kv, *made, d_lse=d_lse)
        memory.again()
        again = direct.backward_of_shared(*given)
        half = len(launched) // 2
        assert half > 1 and launched[:half] == launched[half:]
        assert again is not None and all(one is other for one, other in zip(gradients, again, strict=True))
        launched.clear()


def _moved(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Returns a copy that begins `count` elements after a multiple of 16 bytes."""
    buffer = torch.zeros(tensor.numel() + 16, dtype=tensor.dtype)
    first = -buffer.data_ptr() % 16 // buffer.element_size() + count
    return buffer[first : first + tensor.numel()].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_misaligned_tensors_are_not_launched_as_others_that_may_be(target: str, launched: Launched) -> None:
    """An LSE may begin at any multiple of 4 bytes, and q may not."""
    spec = AttentionSpec(64, "float16", mask=fg.causal(), scale=1 / next(_SCALES))
    attention, (q, k, v, d_out) = fg.compile(spec, target=target), (_moved(each, 0) for each in _tensors(4))
    out, lse = attention(q, k, v, return_lse=True)
    out, lse = _moved(out, 0), _moved(lse, 0)
    attention.backward(d_out, q, k, v, out, _moved(lse, 1))
    direct.backward(attention, (d_out, None, q, k, v, out, _moved(lse, 1)))
    launched.clear()
    assert direct.backward(attention, (d_out, None, _moved(q, 2), k, v, out, lse)) is None and not launched


def test_a_tensor_with_two_roles_leaves_other_launches_recognised(launched: Launched) -> None:
    spec = AttentionSpec(64, "float16", scale=1 / next(_SCALES))
    attention, (q, k, v) = fg.compile(spec, target="sm_80"), _tensors(3)
    attention(q, k, v)
    direct.forward(attention, q, k, v, False)
    recent = list(attention.forward.recent_launches)
    assert recent and direct.forward(attention, q, q, q, False) is not None, "the launch cache has it"
    assert list(attention.forward.recent_launches) == recent, "torch's guards never accept it"


def test_one_array_for_both_offsets_is_recognised_by_torch(launched: Launched) -> None:
    """Self-attention passes it twice, and torch's guards refuse that."""
    spec = AttentionSpec(64, "float16", layout="thd", scale=1 / next(_SCALES))
    attention, (q, k, v, d_out) = fg.compile(spec, target="sm_80"), _tensors(4, 96, 4, 64)
    at = torch.tensor([0, 40, 96], dtype=torch.int32)
    out, lse = attention(q, k, v, return_lse=True, cu_seqlens_q=at, cu_seqlens_k=at)
    attention.backward(d_out, q, k, v, out, lse, cu_seqlens_q=at, cu_seqlens_k=at)
    for _ in range(3):
        assert direct.forward(attention, q, k, v, True, sequences=[at, at]) is not None
        assert direct.backward(attention, (d_out, None, q, k, v, out, lse), sequences=[at, at]) is not None
    assert len(attention.forward.recent_launches) == len(attention.backward_pass.recent_launches) == 1


@pytest.mark.parametrize("used", [False, True], ids=["all keys", "seqused_k"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_replayed_launches_of_packed_sequences(target: str, used: bool, launched: Launched, memory: Memory) -> None:
    spec = AttentionSpec(64, "float16", layout="thd", mask=fg.causal(), scale=1 / next(_SCALES))
    attention, (q, k, v, d_out) = fg.compile(spec, target=target), _tensors(4, 96, 4, 64)
    at = torch.tensor([0, 40, 96], dtype=torch.int32)
    named = {"cu_seqlens_q": at, "cu_seqlens_k": at.clone(), **({"seqused_k": at[:2].clone()} if used else {})}
    assert direct.forward(attention, q, k, v, True, sequences=[*named.values()]) is None, "nothing is cached yet"
    memory.again()
    made = attention(q, k, v, return_lse=True, **named)
    wanted = launched.copy()
    launched.clear()
    for _ in range(2):  # looked up, then recognised by torch
        memory.again()
        again = direct.forward(attention, q, k, v, True, sequences=[*named.values()])
        assert launched == wanted and all(one is other for one, other in zip(made, again, strict=True))
        launched.clear()
    for d_lse in (None, torch.zeros(4, 96)):
        memory.again()
        gradients = attention.backward(d_out, q, k, v, *made, d_lse=d_lse, **named)
        wanted = launched.copy()
        for _ in range(2):
            launched.clear()
            memory.again()
            again = direct.backward(attention, (d_out, d_lse, q, k, v, *made), sequences=[*named.values()])
            assert launched == wanted and len(wanted) > 1
            assert again is not None and all(one is other for one, other in zip(gradients, again, strict=True))
        launched.clear()
    others = [torch.zeros(4, dtype=torch.int32)[1:], torch.zeros(4, dtype=torch.int32), at.long(), torch.zeros(5).int()]
    for other in others:  # misaligned, more sequences, another dtype
        rest = [other, *named.values()][: len(named)]
        assert direct.forward(attention, q, k, v, True, sequences=rest) is None
    shifted = torch.tensor([0, 0, 0, 40, 96], dtype=torch.int32)[2:]  # by 8 bytes
    offset = torch.zeros(q.numel() + 4, dtype=torch.float16)[4:].view(q.shape)
    attention(q, k, v, return_lse=True, **{**named, "cu_seqlens_q": shifted})
    launched.clear()
    for rows, first in ((q, shifted), (offset, at)):
        rest = [first, *[*named.values()][1:]]
        assert direct.forward(attention, rows, k, v, True, sequences=rest) is None, "the launch of the other"
    assert not launched


@pytest.mark.parametrize(
    ("options", "rows_q", "rows_k"),
    [
        (
            {"mask": fg.full()},
            (1, 8, 512, 64),
            (1, 8, 2048, 64),
        ),  # blocks share the last tiles of keys, with partial results in memory
        ({}, (1, 8, 512, 64), (1, 2, 2048, 64)),  # gradients of few KV heads are accumulators, which start at zero
        ({}, (2, 8, 1, 64), (2, 2, 4096, 64)),  # split keys, which a second kernel merges
        ({"mask": fg.sliding_window(64), "score": fg.softcap(30.0)}, SHAPE, SHAPE),
        ({"value_dim": 96}, SHAPE, SHAPE),
        ({}, SHAPE, (2, 4, 0, 64)),  # without keys gradients are zeros, which are set
    ],
)
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_launches_of_kernels_of_every_kind(
    options: dict[str, Any], rows_q: Any, rows_k: Any, target: str, launched: Launched, memory: Memory
) -> None:
    """By position and by name: workspaces, counters, several kernels; work besides launches is done, too."""
    spec = AttentionSpec(64, "float16", scale=1 / next(_SCALES), **options)
    attention = fg.compile(spec, target=target)
    (q, d_out), (k, v) = _tensors(2, *rows_q), _tensors(2, *rows_k)
    v, d_out = (torch.zeros(*each.shape[:3], spec.value_dim, dtype=each.dtype) for each in (v, d_out))

    def calls(forward: Callable[[], Any], backward: Callable[..., Any]) -> tuple[Any, Launched]:
        memory.again()
        launched.clear()
        made = forward()
        gradients = backward(d_out, q, k, v, *made)
        return (*made, *gradients), launched.copy()

    wanted, of_attention = calls(lambda: attention(q, k, v, return_lse=True), attention.backward)
    for _ in range(2):
        made, again = calls(
            lambda: direct.forward(attention, q, k, v, True),
            lambda d_out, *rest: direct.backward(attention, (d_out, None, *rest)),
        )
        assert again == of_attention and again
        assert all(one is other for one, other in zip(wanted, made, strict=True))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_launches_into_given_memory_with_numbers(target: str, launched: Launched, memory: Memory) -> None:
    """Shards with positions that are numbers, which every call of the same shapes passes anew."""
    attention, (q, k, v, d_out, out, *into) = _compiled(target, sharded=True), _tensors(8)
    lse = torch.zeros(SHAPE[:3])
    places = {"shard_b": 0, "shard_h": 0, "shard_q": 128, "shard_k": 96, "whole_q": 512, "whole_k": 512}
    others = places | {"shard_k": 100}
    numbers, other_numbers = (direct.numbers_of(attention, each) for each in (places, others))
    read = (d_out, None, q, k, v, out, lse)
    assert direct.forward(attention, q, k, v, True, (out, lse), numbers) is None
    assert direct.backward(attention, read, tuple(into), numbers) is None
    attention(q, k, v, return_lse=True, out=(out, lse), **places)
    attention.backward(d_out, q, k, v, out, lse, into=tuple(into), **places)
    wanted = launched.copy()
    launched.clear()
    memory.again()
    assert direct.forward(attention, q, k, v, True, (out, lse), numbers) == (out, lse)
    assert direct.backward(attention, read, tuple(into), numbers) == tuple(into)
    assert launched == wanted and len(wanted) > 2
    assert direct.forward(attention, q, k, v, True, None, numbers) is None
    for _ in range(2):  # looked up, then recognised by torch
        launched.clear()
        assert direct.forward(attention, q, k, v, True, (out, lse), other_numbers) == (out, lse)
        assert launched[0][1] != wanted[0][1]
    outside = direct.numbers_of(attention, places | {"shard_k": 512})
    with pytest.raises(ArgumentError, match="shard_k=512 and whole_k=512"):
        direct.forward(attention, q, k, v, True, (out, lse), outside)
    with pytest.raises(ArgumentError, match="shares memory"):
        direct.backward(attention, read, (out, d_out, into[0]), numbers)


def test_only_calls_with_the_same_key_are_replayed(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other shapes, strides, dtypes, alignments and devices go through the attention itself."""
    attention, (q, k, v) = _compiled("sm_90a"), _tensors(3)
    attention(q, k, v)
    assert direct.forward(attention, *_tensors(3), True) is not None
    swapped = k.transpose(1, 2).contiguous().transpose(1, 2)
    off = torch.zeros(q.numel() + 1, dtype=torch.float16)[1:].view(SHAPE)
    (short,) = _tensors(1, 2, 4, 80, 64)
    launched.clear()
    for other in (swapped, k.bfloat16(), off, short, k.to("meta")):
        for given in ((other, k, v), (q, other, v), (q, k, other)):
            if other.device.type == "cpu":
                assert direct.forward(attention, *given, True) is None
    monkeypatch.setattr(gpu, "current_device", lambda: 1)
    assert direct.forward(attention, q, k, v, True) is None and not launched
    monkeypatch.undo()


def test_a_call_that_raises_is_not_cached(launched: Launched) -> None:
    attention, (q, k, v) = _compiled("sm_90a"), _tensors(3)
    with pytest.raises(ArgumentError, match="k has dtype float32"):
        attention(q, k.float(), v)
    assert direct.forward(attention, q, k.float(), v, True) is None


def test_a_cleared_cache_has_no_launches(launched: Launched) -> None:
    """Tuning clears it, since it may have found another plan."""
    attention, (q, k, v) = _compiled("sm_90a"), _tensors(3)
    attention(q, k, v)
    attention.forward.clear_cache()
    assert direct.forward(attention, q, k, v, True) is None


def test_torch_recognises_recent_launches(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """No property of their tensors is read in Python."""
    attention, (q, k, v, d_out) = _compiled("sm_90a"), _tensors(4)
    out, lse = attention(q, k, v, return_lse=True)
    attention.backward(d_out, q, k, v, out, lse)
    learned, read = q.clone().requires_grad_(), (d_out, None, q, k, v, out, lse)
    for each in (q, learned):
        assert direct.forward(attention, each, k, v, True) is not None
    assert direct.backward(attention, read) is not None
    monkeypatch.delattr(Pass, "lookup")
    for _ in range(2):
        for each in (q, learned):
            assert direct.forward(attention, each, k, v, True) is not None
        assert direct.backward(attention, read) is not None
    assert len(attention.forward.recent_launches) == 2 and len(attention.backward_pass.recent_launches) == 1
    with pytest.raises(AttributeError, match="lookup"):
        direct.forward(attention, *_tensors(3, 2, 4, 80, 64), True)
    attention.backward_pass.clear_cache()
    assert not attention.backward_pass.recent_launches


def test_without_guards_of_torch_calls_are_looked_up(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    attention, (q, k, v) = _compiled("sm_90a"), _tensors(3)
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    attention(q, k, v)
    launched.clear()
    assert direct.forward(attention, q, k, v, True) is not None
    assert len(launched) == 1 and not attention.forward.recent_launches


def test_a_launch_found_before_the_cache_was_cleared_is_not_kept(launched: Launched) -> None:
    attention = _compiled("sm_90a")
    for before, kept in ((0, 1), (-1, 0)):
        attention.forward.remember_launch("an entry", before)
        assert len(attention.forward.recent_launches) == kept
    for number in range(20):
        attention.forward.remember_launch(number, 0)
    assert attention.forward.recent_launches == tuple(range(19, 11, -1)), "the last ones, the newest first"


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Through the operator, alternating: each call uses its own tensors, whatever was cached before."""
    from flashgen.torch import attention

    spec = fg.AttentionSpec(64, "float16", mask=fg.causal())
    compiled = fg.compile(spec)

    def rows(length: int, nested: bool) -> list[torch.Tensor]:
        made = [torch.randn(2, length, 4, 64, device="cuda", dtype=torch.float16) for _ in range(4)]
        return [each.transpose(1, 2) if nested else each.transpose(1, 2).contiguous() for each in made]

    for _ in range(3):
        for length, nested in ((96, False), (96, True), (160, False), (1, True)):
            *inputs, d_out = rows(length, nested)
            wanted, lse = compiled(*inputs, return_lse=True)
            learned = [each.clone().requires_grad_() for each in inputs]
            out, given = attention(spec, *learned, return_lse=True, emulate=False)
            torch.testing.assert_close(out, wanted, rtol=0, atol=0)
            torch.testing.assert_close(given, lse, rtol=0, atol=0)
            gradients = torch.autograd.grad(out, learned, d_out)
            for made, right in zip(gradients, compiled.backward(d_out, *inputs, wanted, lse), strict=True):
                torch.testing.assert_close(made, right, rtol=2e-3, atol=2e-3)
            # The gradient of a sum has strides of 0.
            ones = torch.autograd.grad(attention(spec, *learned, emulate=False).sum(), learned)
            right = compiled.backward(torch.ones_like(wanted), *inputs, wanted, lse)
            for made, each in zip(ones, right, strict=True):
                torch.testing.assert_close(made, each, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
def test_num_splits_after_a_cached_call_on_a_gpu() -> None:
    """A number of splits decides about bits, so a cached call without it does not answer for it."""
    from flashgen.torch import attention

    spec = fg.AttentionSpec(64, "float16")
    q = torch.randn(1, 4, 1, 64, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(1, 4, 8192, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    default = [attention(spec, q, k, v, emulate=False) for _ in range(3)][-1]
    compiled = fg.compile(spec)
    for num_splits in (1, 2, 7):
        wanted = compiled(q, k, v, num_splits=num_splits)
        assert torch.equal(attention(spec, q, k, v, num_splits=num_splits, emulate=False), wanted)
    assert torch.equal(attention(spec, q, k, v, emulate=False), default)
