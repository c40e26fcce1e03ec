"""A FlexAttention program that runs with flashgen: only the import was changed.

    python examples/flex_migration.py             # needs a GPU and torch
    python examples/flex_migration.py --emulate   # on the CPU with flashgen's emulator

The mask is causal within packed documents; the score has ALiBi and a learned bias. All arrays are closed over by the
functions, as is usual with FlexAttention.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import flashgen as fg

try:
    import torch

    # from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention
    from flashgen.torch import and_masks, create_block_mask, emulated, flex_attention
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    raise SystemExit(f"error: this example needs torch ({error}): pip install 'flashgen[torch]'") from None


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def document_mask(document_id: torch.Tensor) -> Any:
    def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return document_id[q_idx] == document_id[kv_idx]

    return same_document


def biased_alibi(slopes: torch.Tensor, bias: torch.Tensor) -> Any:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = q_idx - kv_idx
        return score - slopes[h] * distance + bias[torch.clamp(distance, max=15)]

    return score_mod


def train(device: str, length: int, steps: int) -> list[float]:
    """Learns the bias from the output of a target bias. Returns the loss of each step."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, length, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    document_id = torch.arange(length, device=device) // (length // 3)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    block_mask = create_block_mask(
        and_masks(causal, document_mask(document_id)), B=None, H=None, Q_LEN=length, KV_LEN=length, device=device
    )
    target = flex_attention(q, k, v, biased_alibi(slopes, torch.linspace(1, -1, 16, device=device)), block_mask)
    bias = torch.zeros(16, device=device, requires_grad=True)
    optimizer, losses = torch.optim.Adam([bias], lr=0.1), []
    for _ in range(steps):
        out = flex_attention(q, k, v, score_mod=biased_alibi(slopes, bias), block_mask=block_mask)
        loss = (out - target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulate", action="store_true", help="run on the CPU with flashgen's emulator")
    emulate = parser.parse_args().emulate
    if not emulate and not torch.cuda.is_available():
        raise SystemExit("error: there is no GPU that torch can use; try --emulate")
    with emulated() if emulate else nullcontext():
        losses = train("cpu" if emulate else "cuda", 96 if emulate else 2048, 12 if emulate else 60)
    print(f"the learned bias: loss {losses[0]:.2e} -> {losses[-1]:.2e} in {len(losses)} steps")
    if losses[-1] > losses[0] / 4:
        raise SystemExit("error: nothing was learned")


if __name__ == "__main__":
    try:
        main()
    except fg.errors.FlashgenError as error:
        raise SystemExit(f"error: {error}") from None
