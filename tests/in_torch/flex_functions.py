"""Mask and score functions as in FlexAttention's documentation and user code, over arrays on a device."""

from __future__ import annotations

from typing import Any

import torch

LENGTH, HEADS, BATCH = 72, 2, 2


def every_function(device: str) -> dict[str, tuple[Any, Any]]:
    """Returns (score_mod or None, mask_mod or None) by name, for LENGTH queries and keys, HEADS heads and BATCH."""
    return masks(device) | scores(device)


def masks(device: str) -> dict[str, tuple[Any, Any]]:
    document_id = torch.repeat_interleave(torch.arange(3), torch.tensor([11, 20, LENGTH - 31])).to(device)
    of_batch = torch.stack([document_id, document_id.flip(0).neg() + 5])
    lengths, offset = torch.tensor([LENGTH, 17], device=device), torch.tensor(3, device=device)
    prefixes = torch.tensor([12, 40], device=device)
    blocks = torch.rand(LENGTH // 8, LENGTH // 8, generator=torch.Generator().manual_seed(0)).lt(0.6).to(device)
    modality = (torch.arange(LENGTH) // 9 % 2 == 0).to(device)

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    def sliding_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return causal(b, h, q_idx, kv_idx) & (q_idx - kv_idx <= 7)

    def prefix_lm(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < prefixes[b]) | (q_idx >= kv_idx)

    def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return causal(b, h, q_idx, kv_idx) & (document_id[q_idx] == document_id[kv_idx])

    def documents_of_a_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return of_batch[b, q_idx] == of_batch[b, kv_idx]

    def padding(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < lengths[b]

    def with_offset(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx + offset >= kv_idx

    def dilated(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = torch.abs(q_idx - kv_idx)
        return (distance <= 24) & (distance % 3 == 0)

    def neighbours(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_x, q_y, kv_x, kv_y = q_idx // 9, q_idx % 9, kv_idx // 9, kv_idx % 9
        return ((q_x - kv_x).abs() <= 1) & ((q_y - kv_y).abs() <= 2)

    def global_tokens(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx < 3) | (kv_idx < 3) | (torch.abs(q_idx - kv_idx) <= 4)

    def block_causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx // 8 >= kv_idx // 8

    def table_of_blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return blocks[q_idx // 8, kv_idx // 8] | (q_idx == kv_idx)

    def transfusion(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same_picture = modality[q_idx] & modality[kv_idx] & (q_idx // 9 == kv_idx // 9)
        return (q_idx >= kv_idx) | same_picture

    def heads_differ(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= 5 * (h + 1))

    def documents_and_windows(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        inner = torch.where(document_id[q_idx] == 1, q_idx - kv_idx <= 4, q_idx - kv_idx <= 9)
        return documents(b, h, q_idx, kv_idx) & inner

    begins = torch.tensor([0, 11, 31], device=device)
    pages = torch.tensor([[3, 0, -1, 1, 2, 4, 5, 6, 7], [1, 0, 2, 3, -1, 4, 5, 6, 7]], device=device)
    seen_by = torch.tensor([[0, 30], [10, 60], [31, 72]], device=device)

    def documents_that_count_from_0(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        own = sliding_window(b, h, q_idx - begins[document_id[q_idx]], kv_idx - begins[document_id[kv_idx]])
        return own & (document_id[q_idx] == document_id[kv_idx])

    def pages_of_keys(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        page = pages[b, kv_idx // 8]
        return torch.where(page >= 0, causal(b, h, q_idx, page * 8 + kv_idx % 8), False)

    def intervals_of_documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        document = document_id[kv_idx]
        return (q_idx >= seen_by[document, 0]) & (q_idx < seen_by[document, 1])

    def along_a_curve(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        def every_second_bit(code: Any) -> Any:
            code = code & 0x55
            code = (code | (code >> 1)) & 0x33
            return (code | (code >> 2)) & 0x0F

        (q_x, q_y), (kv_x, kv_y) = ((every_second_bit(i), every_second_bit(i >> 1)) for i in (q_idx, kv_idx))
        return ((q_x.clamp(1, 6) - kv_x).abs() <= 1) & ((q_y.clamp(1, 6) - kv_y).abs() <= 1) | (q_idx == kv_idx)

    return {name: (None, mask) for name, mask in locals().items() if getattr(mask, "__code__", None) is not None}


def scores(device: str) -> dict[str, tuple[Any, Any]]:
    slopes = torch.exp2(-torch.arange(1, HEADS + 1, dtype=torch.float32, device=device))
    table = torch.linspace(-1, 1, 2 * LENGTH - 1, device=device)
    bias = torch.linspace(-2, 2, HEADS * LENGTH * LENGTH, device=device).view(HEADS, LENGTH, LENGTH)
    temperature = torch.tensor([[1.0, 0.5], [2.0, 1.5]], device=device)
    kept = (torch.arange(LENGTH) % 5 != 2).to(device)

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + (kv_idx - q_idx) * slopes[h]

    def softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.tanh(score / 20) * 20

    def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + (q_idx - kv_idx)

    def relative_table(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[q_idx - kv_idx + LENGTH - 1]

    def dense_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[h, q_idx, kv_idx]

    def temperatures(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * temperature[b, h]

    def mask_in_the_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(kept[kv_idx] & (q_idx >= kv_idx), score, -float("inf"))

    def squared(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * score * 0.1 + torch.sigmoid(score)

    class Capped(torch.autograd.Function):
        """tanh as a custom operator, as in code that selects its instruction."""

        @staticmethod
        def forward(x: Any) -> Any:
            return torch.tanh(x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            (capped,) = ctx.saved_tensors
            return gradient * (1 - capped * capped)

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: Any) -> Any:
            return torch.tanh(x), 0

    def softcap_by_a_function(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 20 * Capped.apply(score / 20)

    def alibi_of_the_head_s_number(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + (kv_idx - q_idx) * torch.exp2(-((h + 1) * 8.0 / HEADS))

    def checkerboard(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = torch.abs(kv_idx - q_idx)
        score = torch.where(distance % 2 == 1, score * 0.5, score)
        return torch.where(distance % 2 == 0, score * 2.0, score)

    found = {name: each for name, each in locals().items() if getattr(each, "__code__", None) is not None}
    del found["causal"]
    return {name: (score, causal if name in ("alibi", "softcap") else None) for name, score in found.items()}
